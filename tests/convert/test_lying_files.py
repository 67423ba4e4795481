"""megarl's own files with values that cannot be: what reads them says so in one paragraph, or is not misled."""

import copy
import json

import pytest

from megarl.convert.inspection import inspect
from megarl.convert.source import find_source
from megarl.core.errors import UserError
from megarl.training.manifest import HF_FOLDER, MANIFEST, Manifest, read_manifest
from megarl.training.run_checkpoints import MARKER, STATE, Checkpoints
from tests.convert.conftest import write_checkpoint

WRONG = (None, True, -1, 1.5, "", "x", [], ["x"], {}, {"x": 1}, {"x": {}}, 10**30, [[]])
JUNK = ("", "{", "[]", "null", "3", "[" * 100_000, "\x00")


def told(call):
    """True where it was refused; anything but one paragraph comes through."""
    try:
        call()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500, error
        return True
    return False


def paths(raw):
    """Every key of an object, and those of the objects in it."""
    for key, value in raw.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths(value))


def mutations(raw):
    for path in paths(raw):
        for value in WRONG:
            changed = copy.deepcopy(raw)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            yield json.dumps(changed)


def test_a_manifest_of_wrong_types_is_refused(tmp_path, hf):
    folder = write_checkpoint(tmp_path / "x", hf, stored={"model.norm.weight": "float16"})
    file = folder / MANIFEST
    raw = json.loads(file.read_text())
    refused = 0
    for text in (*JUNK, *mutations(raw)):
        file.write_text(text)
        refused += told(lambda: inspect(folder))
        if not told(lambda: read_manifest(folder)):
            assert isinstance(read_manifest(folder), Manifest)
    assert refused > 200


@pytest.mark.parametrize("name", [MARKER, STATE])
def test_a_step_whose_marker_or_state_is_wrong_is_passed_over(run, name):
    """The one before it is taken, and nothing but UserError is raised where it is asked for by name."""
    step = run / "checkpoints" / "step_000006"
    raw = json.loads((step / name).read_text())
    for text in (*JUNK, *mutations(raw)):
        (step / name).write_text(text)
        checkpoints = Checkpoints(run / "checkpoints", keep_last=2)
        assert checkpoints.latest().step in (3, 6)
        assert {each.step for each in checkpoints.committed()} >= {3}
        told(lambda: inspect(step))
        told(lambda: find_source(run))


def test_a_config_beside_a_checkpoint_that_is_broken(tmp_path, hf):
    folder = write_checkpoint(tmp_path / "x", hf)
    for text in JUNK:
        (folder / HF_FOLDER / "config.json").write_text(text)
        assert told(lambda: inspect(folder))


@pytest.mark.parametrize("text", ["", "[]", "run: 3", "run: {name: [1]}", "a: [", "\x00"])
def test_a_run_whose_recipe_cannot_be_read_is_inspected(run, text):
    (run / "recipe.yaml").write_text(text)
    assert inspect(run).run_step == 6
