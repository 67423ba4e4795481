"""The recipe of a replay is the run's, less what needs servers. Replays themselves: tests/end_to_end/test_journal.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.check import check_recipe
from megarl.recipe.roles import Actor, Optimizer
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from megarl.run.replay import _own, run_replay


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"actor": Actor(optimizer=Optimizer(on_bad_gradient="rewind"))},
        {"algorithm": Algorithm(max_logprob_diff=0.1, on_logprob_diff="rewind")},
    ],
    ids=["plain", "bad gradients", "drift"],
)
def test_it_is_accepted_as_the_run_s_was(tmp_path: Path, sections: dict[str, Any]) -> None:
    recipe = Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t"), eval=Path("e")),
        rollout=Rollout(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8),
        train=Train(steps=3),
        **sections,
    )
    own = _own(recipe, tmp_path / "replay-1")
    assert check_recipe(own, {}) == check_recipe(recipe, {}) == []
    assert own.run.folder == tmp_path / "replay-1" and own.data.eval is None


def test_a_folder_with_a_run_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"--out .* already holds a run \(metrics\.jsonl\)\. Name another folder"):
        run_replay(tmp_path, [], None, None, tmp_path)
