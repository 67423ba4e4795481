"""Samples of several weight versions: which recipes may have them, what follows by default, and what is said of it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.recipe.algorithm import Correction
from megarl.recipe.check import check_functions
from megarl.recipe.load import load_recipe
from megarl.recipe.sampling_rules import check_beside, staleness_notes
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml
from megarl.serving.client import PauseMode

STALE = "rollout.max_staleness=1"
TWO = "rollout.servers=2"


def loaded(file: Path, *overrides: str) -> Recipe:
    return load_recipe(file, overrides, Recipe).recipe


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.oversample=1.25"], "set rollout.max_staleness to 1 or more (it is 0)"),
        ([STALE, "rollout.oversample=2.5"], "set rollout.max_staleness to 2 or more (it is 1), or rollout.oversample"),
        ([STALE, "rollout.offload=[weights, kv_cache]"], "staleness is carry-over only there. Set rollout.oversample"),
        ([STALE, "rollout.deterministic=true"], "no two runs give the same samples. Set it to 0, or this to false"),
        (["rollout.piece_tokens=8", "rollout.deterministic=true"], "computing them again gives other bits"),
        (["rollout.piece_tokens=64"], "64 tokens are a whole response already"),
        (["rollout.collectors=2"], "2 processes for 1 server: one can ask 32. Set it to at most 1"),
        ([TWO, "rollout.collectors=3"], "3 processes for 2 servers: one can ask 32. Set it to at most 2"),
        (["rollout.top_p=0.9"], "got 0.9: samples would come from a part of the distribution alone"),
        (["rollout.top_k=20"], "got 20: samples would come from a part of the distribution alone"),
        (["rollout.oversample=0.9"], "at least 1"),
        (["rollout.in_flight=drop"], "what a weight sync does to running requests"),
    ],
)
def test_what_cannot_go_together_is_refused_in_a_paragraph(recipe_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(recipe_file, *overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [STALE],
        [STALE, "rollout.in_flight=in_place", "rollout.keep_kv=true"],
        [STALE, "rollout.oversample=2", "rollout.offload=[weights, kv_cache]", "rollout.late=resume"],
        [TWO, "rollout.collectors=2", "rollout.piece_tokens=63"],
        ["rollout.top_p=1.0", "rollout.top_k=-1"],
        ["data.eval=x", "eval.overlap=true"],
    ],
)
def test_what_goes_together_is_taken_and_resolves_to_itself(
    recipe_file: Path, tmp_path: Path, overrides: list[str]
) -> None:
    first = load_recipe(recipe_file, overrides, Recipe)
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(first.resolved))
    assert loaded(again) == first.recipe


def test_an_own_advantage_of_tokens_has_one_collector(recipe_file: Path) -> None:
    own = "algorithm.advantage=tests.support.dry.own"
    two = [TWO, "rollout.collectors=2"]
    with pytest.raises(UserError, match=r"see all of them in one place\. Set it to 1"):
        check_functions(loaded(recipe_file, *two, f"{own}:shapeless_advantages"), {})
    check_functions(loaded(recipe_file, *two, f"{own}:scaled_advantages"), {})
    check_functions(loaded(recipe_file, TWO, f"{own}:shapeless_advantages"), {})


def test_devices_that_turn_out_to_be_the_ranks_are_refused(recipe_file: Path) -> None:
    with pytest.raises(UserError, match="there are not devices enough for ranks and servers: servers that share"):
        check_beside(loaded(recipe_file, STALE), beside=False)
    with pytest.raises(UserError, match=r"eval\.overlap is set, and there are not devices enough"):
        check_beside(loaded(recipe_file, "data.eval=x", "eval.overlap=true"), beside=False)
    for fine in ([], [STALE, "rollout.oversample=1.5"]):
        check_beside(loaded(recipe_file, *fine), beside=False)
    check_beside(loaded(recipe_file, STALE, "data.eval=x", "eval.overlap=true"), beside=True)


@pytest.mark.parametrize(
    ("overrides", "expected", "said"),
    [
        ([], None, ""),
        ([STALE], Correction(), "Decoupled PPO: clipped against the trainer's log-probs at the start of the step"),
        ([STALE, "algorithm.correction.kind=mask"], Correction(kind="mask"), "algorithm.correction: mask, token"),
        (
            [STALE, "algorithm.correction=null"],
            None,
            "algorithm.correction: null: samples of older weights count as if",
        ),
        ([STALE, "algorithm.old_logprobs=rollout"], None, "ratios are to what the servers said"),
        ([STALE, "algorithm.preset=dapo"], Correction(), "Decoupled PPO"),
        (["rollout.max_staleness=0"], None, ""),
    ],
)
def test_samples_of_older_weights_are_weighed_by_default(
    recipe_file: Path, tmp_path: Path, overrides: list[str], expected: Any, said: str
) -> None:
    found = load_recipe(recipe_file, overrides, Recipe)
    assert found.recipe.algorithm.correction == expected
    assert (found.resolved["algorithm"]["correction"] is not None) == (expected is not None)
    assert said in " ".join(staleness_notes(found.recipe)) and bool(staleness_notes(found.recipe)) == bool(said)
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(found.resolved))
    assert loaded(again).algorithm.correction == expected


def test_a_loss_without_advantages_has_nothing_to_weigh(recipe_file: Path) -> None:
    distilled = load_recipe(recipe_file, [STALE, "algorithm.policy_loss=distill", "teacher.path=m"], Recipe)
    assert distilled.recipe.algorithm.correction is None and "correction" not in distilled.resolved["algorithm"]
    # What it says can be done about that, can be done.
    assert "Set algorithm.old_logprobs to rollout" in (said := " ".join(staleness_notes(distilled.recipe)))
    assert "Decoupled" not in said and "correction" not in said
    own = [STALE, "algorithm.policy_loss=distill", "teacher.path=m", "algorithm.old_logprobs=rollout"]
    assert "which weighs samples of older weights" in (said := " ".join(staleness_notes(loaded(recipe_file, *own))))
    assert "Decoupled" not in said


def test_recipe_show_tells_it(recipe_file: Path) -> None:
    told = CliRunner().invoke(app, ["recipe", "show", str(recipe_file), STALE])
    words = " ".join(told.output.split())
    assert told.exit_code == 0, told.output
    assert "kind: truncate" in words and "servers generate while the ranks train" in words and "Decoupled PPO" in words


def test_the_pinned_server_has_every_way_to_pause() -> None:
    """Servers are pinned, so that the recipe's modes are looked up here, once, and not before each run."""
    [folder] = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(folder) / "srt/managers/io_struct.py").read_text())
    [asked] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PauseGenerationReqInput"]
    [mode] = [node for node in asked.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "mode"]
    assert set(get_args(PauseMode)) == {
        node.value for node in ast.walk(mode.annotation) if isinstance(node, ast.Constant)
    }
