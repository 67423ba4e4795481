import pytest

from megarl.convert import source
from megarl.convert.inspection import inspect
from megarl.convert.source import find_source, require
from megarl.core.errors import UserError
from megarl.run.serve import servable
from megarl.training import run_checkpoints
from tests.convert.conftest import flip, write_checkpoint


def test_a_run_a_step_and_the_actor_in_it_are_the_same_checkpoint(run):
    step = run / "checkpoints" / "step_000006"
    found = find_source(run)
    assert (found.kind, found.folder, found.step, found.recipe) == ("mcore", step / "actor", step, run / "recipe.yaml")
    assert find_source(step) == find_source(step / "actor") == found
    assert found.hf == step / "actor" / "hf"


def test_a_checkpoint_by_itself_and_an_hf_folder(tmp_path, hf):
    alone = write_checkpoint(tmp_path / "alone", hf)
    assert (find_source(alone).folder, find_source(alone).step) == (alone, None)
    assert (find_source(hf).kind, find_source(hf).hf) == ("hf", hf)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file, not a folder"),
        (lambda path: path.mkdir(), "holds no model: an HF folder has a config.json"),
        (lambda path: (path.mkdir(), (path / "metadata.json").touch()), "no megarl.json: it was not finished"),
    ],
    ids=["missing", "file", "empty", "megatron's own"],
)
def test_what_is_no_model_is_said_to_be_none(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(UserError, match=message):
        find_source(tmp_path / "x")


def test_the_other_kind_is_refused_with_what_to_call(tmp_path, hf):
    with pytest.raises(UserError, match=r"is an HF folder, and a Megatron checkpoint is needed here\. Call that"):
        require(hf, "mcore", "Call that.")


def test_a_damaged_checkpoint_is_refused(tmp_path, hf):
    flip(write_checkpoint(tmp_path / "x", hf) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"is damaged: __0_0.distcp has other content .*nothing was written"):
        require(tmp_path / "x", "mcore", "")


def test_a_run_is_read_once_and_not_at_all_where_sizes_are_enough(run, monkeypatch):
    reads, look = [], run_checkpoints.step_damage

    def looked(folder, *, read):
        reads.append(read)
        return look(folder, read=read)

    for module in (run_checkpoints, source):
        monkeypatch.setattr(module, "step_damage", looked)
    for call, count in ((lambda: require(run, "mcore", ""), 1), (lambda: inspect(run, read=False), 0)):
        reads.clear()
        call()
        assert reads.count(True) == count
    with pytest.raises(UserError, match="has a Megatron checkpoint and no hf/"):
        servable(run)
    assert not any(reads)


def test_a_run_falls_back_to_its_newest_whole_checkpoint(run, caplog):
    flip(run / "checkpoints" / "step_000006" / "actor" / "__0_0.distcp")
    assert find_source(run).step.name == "step_000003"
    assert "step_000006 is damaged" in caplog.text


def test_a_run_without_a_whole_checkpoint_is_no_run_to_go_on_with(run):
    """Nothing is said of options that only `megarl train` has."""
    for step in ("step_000003", "step_000006"):
        flip(run / "checkpoints" / step / "actor" / "__0_0.distcp")
    with pytest.raises(
        UserError, match=r"holds no committed checkpoint\. Damaged: step_000006: .*\. Name another"
    ) as error:
        find_source(run)
    assert "--continue" not in str(error.value)
