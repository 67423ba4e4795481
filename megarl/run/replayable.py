"""What of a run can be trained on again from its journal, and from where; keys that mean nothing then. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.checksums import sum_file
from megarl.core.errors import UserError
from megarl.data.digests import Digests
from megarl.models.hf_config import load_model_config
from megarl.recipe.functions import asked
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rollout.decisions import Decision, read_decisions, standing
from megarl.rollout.journal import JOURNAL, steps_of
from megarl.run.journal import MADE_WITH, among, other_rows
from megarl.run.preflight import CHECKPOINTS
from megarl.run.resume_check import check_resumed
from megarl.training.run_checkpoints import Checkpoints, Committed, step_damage

# Sections and keys that decided what is in the journal, and decide nothing any more.
DECIDED = (
    "run",
    "data",
    "rollout",
    "agent",
    "reward",
    "sync",
    "eval",
    "actor.routing_replay",
    "algorithm.refill_rounds",
    "train.journal",
    "train.journal_keep",
)
TOKENIZER = "tokenizer.json"
GREEDY = "greedy_rewards"  # what an advantage asks for


@dataclass(frozen=True)
class Replay:
    """Steps of a run, from the one after `start` to `last`. start: the checkpoint to begin with; None: the base model.

    first: the first step that was asked for; those before it, after `start`, lead there.
    """

    folder: Path
    start: Committed | None
    first: int
    last: int

    @property
    def journal(self) -> Path:
        """Where the samples are."""
        return (self.folder / JOURNAL).resolve()

    def told(self) -> str:
        """For people."""
        begun = 1 if self.start is None else self.start.step + 1
        whence = "the base model" if self.start is None else f"the checkpoint of step {self.start.step}"
        lead = f" (steps {begun} to {self.first - 1} lead there)" if begun < self.first else ""
        return f"Steps {self.first} to {self.last} of {self.folder} are trained on again, from {whence}{lead}."


def find_replay(folder: Path, from_step: int | None, to_step: int | None) -> Replay:
    """Which steps can be made again; from_step, to_step: those that are wanted. Raises UserError, with those that can."""
    journal = folder / JOURNAL
    if not (journal / MADE_WITH).exists():
        raise UserError(
            f"{folder} has no journal to replay. It is the folder of a run of `megarl train`, with train.journal: true; "
            "train.journal_keep: all keeps the samples of every step."
        )
    starts: list[Committed | None] = [None, *Checkpoints(folder / CHECKPOINTS, keep_last=1).committed()]
    ranges = [(start, _last_after(journal, start)) for start in starts]
    usable = [(start, last) for start, last in ranges if last > _step(start)]
    wanted = [
        (start, last)
        for start, last in usable
        if _step(start) < (from_step or _step(start) + 1) <= last and last >= (to_step or 0)
    ]
    if not wanted:
        raise UserError(_nothing(folder, usable, from_step, to_step))
    # All that there is, or as little as leads to what is wanted.
    start, last = wanted[0] if from_step is None else wanted[-1]
    first = _step(start) + 1 if from_step is None else from_step
    if to_step is not None and to_step < first:
        raise UserError(f"--to-step {to_step} is before the first step to replay, {first}.")
    if start is not None and (damage := step_damage(start.folder, read=True)):
        raise UserError(
            f"The checkpoint {start.folder}, which the replay would begin with, is damaged: {'; '.join(damage)}."
        )
    return Replay(folder, start, first, last if to_step is None else to_step)


def _nothing(folder: Path, usable: Sequence[tuple[Committed | None, int]], first: int | None, last: int | None) -> str:
    what = " ".join([*([f"--from-step {first}"] if first else []), *([f"--to-step {last}"] if last else [])])
    lines = [
        f"steps {_step(start) + 1} to {last}, from {'the base model' if start is None else start.folder.name}"
        for start, last in usable
    ]
    return (
        f"{folder} cannot be replayed{f' with {what}' if what else ''}: a replay begins at a checkpoint, or at the base model, "
        f"and needs the samples of every step after it. There are: {'; '.join(lines) or 'none'}. Samples that no kept checkpoint "
        "needs are removed where train.journal_keep is needed; set it to all to replay a whole run."
    )


def _step(start: Committed | None) -> int:
    return 0 if start is None else start.step


def _last_after(journal: Path, start: Committed | None) -> int:
    """The last step that can be made again from here on, without a gap; that of the start where none can."""
    number = 0 if start is None else start.state.get("data", {}).get("decisions")
    if number is None:
        return _step(start)
    taken = {each.step: each for each in standing(read_decisions(journal, number)) if each.kind == "taken"}
    there, last = set(steps_of(journal)), _step(start)
    while last + 1 in taken and _has(taken[last + 1], there):
        last += 1
    return last


def _has(taken: Decision, there: set[int]) -> bool:
    return all(step in there for _, step, _ in taken.groups)


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse keys that have decided already what is in the journal. Raises UserError."""
    names = [text.partition("=")[0] for text in overrides]
    wrong = [name for name in names if among(name, DECIDED)]
    if wrong:
        raise UserError(
            f"{', '.join(wrong)}: a replay trains on samples as they were generated and graded, and asks no server. What can be "
            "changed is what is learned from them, and how: actor, critic, reference, reward_model, teacher, algorithm, model, "
            "train, cluster and placement. The folder that it writes into is named by --out."
        )


def check_inputs(replay: Replay, recipe: Recipe, rows: int, digests: Digests) -> None:
    """Raise UserError where the rows are others than the run's, or the checkpoint was made with what the recipe has no more.

    rows: training rows within the length limit; digests: of what they say.
    """
    if others := other_rows(replay.folder, digests):
        raise UserError(
            f"{' and '.join(others)} of the rows of {recipe.data.train} (data.train) are others than those that {replay.folder} "
            "was trained on: a replay needs the same. Put the file back that the run had."
        )
    if replay.start is not None:
        check_resumed(recipe, replay.start, rows, digests)


def check_greedy(recorded: Recipe, recipe: Recipe) -> None:
    """An advantage that compares with greedy answers needs a run that had them. Raises UserError."""
    was, needs = (GREEDY in asked(each.algorithm, "look").advantage for each in (recorded, recipe))
    if needs and not was:
        raise UserError(
            f"algorithm.advantage: {recipe.algorithm.advantage} compares each sample with a greedy answer to its prompt, and the "
            f"run, of {recorded.algorithm.advantage}, asked for none. Replay it with another advantage."
        )


def check_served(recorded: Recipe, recipe: Recipe) -> None:
    """What a teacher behind an address said of the samples is in the journal, or nowhere. Raises UserError."""
    was, needs = served_columns(recorded), served_columns(recipe)
    if missing := [name for name, shape in needs.items() if was.get(name) != shape]:
        raise UserError(
            f"teacher.servers: a replay asks no server, and the journal has no {', '.join(missing)} as this recipe learns from "
            f"them; it has {', '.join(was) or 'nothing of a teacher'}. Replay it with the loss of the run and its "
            "algorithm.distill_top_k, or have the teacher on ranks: teacher.servers=null and teacher.path=FOLDER."
        )


def check_model(recorded: Recipe, recipe: Recipe, start: Committed | None) -> None:
    """Another model learns from the same tokens where these mean the same to it. Raises UserError."""
    was, new = recorded.model.path, recipe.model.path
    if was == new:
        return
    if start is not None:
        raise UserError(
            f"model.path is {new}, and the replay begins with {start.folder}, which is of {was}. Another model begins with step "
            "1, which needs train.journal_keep: all in the run."
        )
    sizes = [load_model_config(path).vocab_size for path in (was, new)]
    sums = [sum_file(path / TOKENIZER).crc32 if (path / TOKENIZER).exists() else None for path in (was, new)]
    if sizes[0] != sizes[1] or sums[0] != sums[1]:
        raise UserError(
            f"model.path {new} has another vocabulary than {was} ({sizes[1]} tokens and {sizes[0]}, or another {TOKENIZER}): the "
            "journal's token ids mean something else to it."
        )
