"""Everything about a run that can be refused before a device is taken: one call that composes the rooms' own checks.

The cheap checks come first; reading and tokenising every row comes late, because it loads the tokenizer's library. Last of all
the checkpoint is read that a run goes on from: a large one takes minutes.
It starts nothing (but SGLang's own parser, where rollout.server_args has something for it), asks servers that somebody
else started, and leaves nothing behind.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megarl.agents.check import check_agent
from megarl.core.errors import UserError
from megarl.core.platform import Platform
from megarl.core.types import Prompt
from megarl.core.words import shortened
from megarl.data import supervised
from megarl.data.chat import load_tokenizer
from megarl.data.mix import rows_by_set, with_sets
from megarl.data.prompts import check_rows, digests_of
from megarl.data.supervised import check_supervised, demonstrations_of, load_supervised
from megarl.models.config import ModelConfig
from megarl.models.context import check_context
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.layout_check import check_server_layout
from megarl.models.recipe_vision import sight_of
from megarl.models.role_check import check_roles
from megarl.models.rules import expected_tensors
from megarl.recipe.algorithm_rules import learning_notes
from megarl.recipe.batch import BatchPlan, plan_batches
from megarl.recipe.check import check_functions
from megarl.recipe.keep_rules import keep_notes
from megarl.recipe.rollout_rules import longest_served, served_parts
from megarl.recipe.sampling_rules import staleness_notes
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import SupervisedRecipe
from megarl.recipe.writer import writer_class
from megarl.rewards.check import check_graders, taken_back_notes
from megarl.run.devices import check_devices, check_room_beside
from megarl.run.ending import full_disks
from megarl.run.exported import EXPORT, exported_step
from megarl.run.model_check import check_experts, check_head, check_lora, template_notes
from megarl.run.resume_check import check_resumed
from megarl.run.rows_check import (
    check_best,
    check_best_label,
    check_graded,
    check_margins,
    check_sets,
    check_tokens,
    check_tower_sees,
    checked_prompts,
    label_notes,
    row_notes,
)
from megarl.run.servers_check import check_servers
from megarl.run.teacher_check import check_teacher
from megarl.training.run_checkpoints import Checkpoints, Committed

if TYPE_CHECKING:
    from megarl.serving.external import ExternalPool

CHECKPOINTS = "checkpoints"
# What a run leaves once it has done something; logs of a start that failed are not worth keeping a name for.
RESULTS = ("metrics.jsonl", CHECKPOINTS, EXPORT)
Start = tuple[BatchPlan, Platform, Committed | None]


@dataclass(frozen=True)
class Preflight:
    """What is known of a run before it starts.

    rows: training rows within the length limit (0 for an evaluation). dropped: rows over it. eval_rows: held-out rows.
    notes: keys without effect on this platform, which has them so that one recipe runs on all; rows that no response is
    right by; steps with more rows than there are. external: servers that somebody else started. digests: of what the rows say.
    committed: the checkpoint that the run goes on from. taught: what a teacher behind an address says of a text.
    """

    plan: BatchPlan
    platform: Platform
    model: ModelConfig
    rows: int
    dropped: int
    eval_rows: int
    notes: tuple[str, ...] = ()
    external: ExternalPool | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    committed: Committed | None = None
    taught: tuple[float, ...] = ()

    def lines(self) -> list[str]:
        """What a user wants to see before waiting for the start."""
        dropped = f", {self.dropped} over the length limit dropped" if self.dropped else ""
        epochs = f", {self.plan.steps * self.plan.prompts / self.rows:.3g} epochs" if self.rows else ""
        held_out = f"; {self.eval_rows} held-out rows" if self.eval_rows else ""
        return [
            self.plan.describe(),
            f"{self.model.family} of {self.model.num_layers} layers on {self.platform.name}; "
            f"{self.rows} rows{dropped}{epochs}{held_out}",
            *self.notes,
        ]


def check_start(recipe: AnyRecipe, *, resume: bool = False, forgets: bool = False, here: bool = True) -> Start:
    """What needs neither model nor data: batch sizes, the run's folder, devices. Raises UserError.

    The last is the checkpoint that a run would go on from. forgets: what an earlier start left that came to none is no run.
    """
    plan = plan_batches(recipe)
    committed = check_run_folder(recipe.run.folder, recipe.train.steps, resume=resume, forgets=forgets)
    _check_report(recipe)
    return plan, check_devices(recipe, here=here), committed


def preflight(
    recipe: Recipe,
    *,
    sources: Mapping[str, str] = MappingProxyType({}),
    resume: bool = False,
    forgets: bool = False,
    here: bool = True,
    replays: bool = False,
) -> Preflight:
    """Check a run of `megarl train`. Raises UserError for the first thing that cannot work.

    sources: where its values were given (`Loaded.sources`). here: the run's devices are this machine's. replays: its samples are
    a journal's, so that no server, grader or tool is asked, and its recipe one that a run has written.
    """
    with reading():
        start = check_start(recipe, resume=resume, forgets=forgets, here=here)
        return _preflight(recipe, sources, start, here, replays)


def _preflight(recipe: Recipe, sources: Mapping[str, str], start: Start, here: bool, replays: bool) -> Preflight:
    plan, platform, committed = start
    check_room_beside(recipe, platform, here=here)
    for file in filter(None, (recipe.data.train, recipe.data.eval)):
        check_rows(file, recipe.data, answered=recipe.agent is None)
    model, tool_tokens = (_check_model(recipe), 0) if replays else _check_generation(recipe, platform)
    _check_sync(recipe, model)
    check_roles(recipe, model)
    check_experts(recipe, model, platform)
    check_lora(recipe, model)
    # Data sets are files by now; the keys that name them were checked when the recipe was read.
    check_functions(recipe, {key: at for key, at in sources.items() if not key.startswith("data.")}, recorded=replays)
    prompts = checked_prompts(recipe, recipe.data.train, model)
    sets = rows_by_set(prompts.prompts, recipe.data)
    rows = sum(map(len, sets.values())) or len(prompts)  # those that are trained on
    if rows < recipe.rollout.prompts_per_step:
        raise UserError(
            f"{recipe.data.train} has {rows} usable rows, fewer than the rollout.prompts_per_step "
            f"{recipe.rollout.prompts_per_step} different prompts of one step. Set it to at most {rows}, or give more rows."
        )
    digests = digests_of(prompts.prompts, recipe.data)
    held_out, notes = _eval_rows(recipe, model, tool_tokens)
    check_best(recipe, held_out)
    if not replays:
        check_graded(recipe, prompts.prompts, held_out, sets)
    notes = (
        *staleness_notes(recipe),
        *learning_notes(recipe),
        *keep_notes(recipe),
        *taken_back_notes(recipe.reward, sources),
        *_without_effect(recipe, platform),
        *template_notes(recipe, model),
        *row_notes(recipe, model, recipe.data.train, prompts, tool_tokens),
        *notes,
    )
    external = None if replays else check_servers(recipe, model, platform, here=here)
    taught = () if replays else check_teacher(recipe, model, here=here)
    committed = _read_whole(recipe, committed, rows, with_sets(digests, sets))
    return Preflight(
        plan, platform, model, rows, prompts.num_dropped, len(held_out), notes, external, digests, committed, taught
    )


def preflight_eval(recipe: Recipe) -> Preflight:
    """Check an evaluation, `megarl eval`: no training data is read, and the run's folder is not gone into. Raises UserError."""
    if recipe.data.eval is None:
        raise UserError("There is nothing to evaluate on: set data.eval to a file of held-out rows.")
    with reading():
        plan = plan_batches(recipe)
        _check_writable(recipe.run.folder)
        platform = check_devices(recipe)
        check_rows(recipe.data.eval, recipe.data, answered=recipe.agent is None)
        model, tool_tokens = _check_generation(recipe, platform)
        if not platform.serves_fp8:
            _refuse_fp8(recipe, model, f"SGLang on {platform.name} cannot serve them")
        held_out, notes = _eval_rows(recipe, model, tool_tokens)
        check_graded(recipe, (), held_out)
        external = check_servers(recipe, model, platform, own_weights=True)
        notes = (*template_notes(recipe, model), *notes)
    return Preflight(plan, platform, model, 0, 0, len(held_out), notes, external)


def preflight_supervised(
    recipe: SupervisedRecipe, *, resume: bool = False, forgets: bool = False, here: bool = True
) -> Preflight:
    """Check a supervised run, as `preflight` does a run of `megarl train`. Raises UserError for the first thing that is wrong."""
    with reading():
        return _preflight_supervised(recipe, check_start(recipe, resume=resume, forgets=forgets, here=here))


def _preflight_supervised(recipe: SupervisedRecipe, start: Start) -> Preflight:
    plan, platform, committed = start
    files = [file for file in (recipe.data.train, recipe.data.eval) if file is not None]
    for file in files:
        check_supervised(file, recipe.data)
    model = check_model_folder(recipe.model.path)
    check_head(recipe, model)
    check_context(model, recipe.data.max_tokens, "data.max_tokens")
    check_roles(recipe, model)
    check_experts(recipe, model, platform)
    check_lora(recipe, model)
    sight = sight_of(model, recipe.data)
    rows, *held_out = (load_supervised(file, recipe.model.path, recipe.data, sight) for file in files)
    for file, loaded in zip(files, (rows, *held_out), strict=True):
        texts = (text for row in loaded.rows for text in demonstrations_of(row))
        check_tokens(file, ((text.id, text.token_ids) for text in texts), model, recipe.model.path)
        check_margins(recipe, file, loaded)
        check_tower_sees(recipe, file, some=any(text.images for row in loaded.rows for text in demonstrations_of(row)))
    check_best_label(recipe, held_out)
    sets = supervised.rows_by_set(rows, recipe.data)
    trained = sum(map(len, sets.values())) or len(rows)
    notes = (*label_notes(recipe, rows, sets), *keep_notes(recipe), *template_notes(recipe, model))
    notes = (*_rows_again(recipe, trained), *notes)
    committed = _read_whole(recipe, committed, trained, with_sets(rows.digests, sets))
    return Preflight(
        plan, platform, model, trained, rows.num_dropped, sum(map(len, held_out)), notes, committed=committed
    )


def _read_whole(recipe: AnyRecipe, found: Committed | None, rows: int, digests: Mapping[str, str]) -> Committed | None:
    """The newest whole checkpoint, every byte of it, where there is one to go on from; and whether the recipe can.

    Last of all checks: of a large one it takes minutes. Raises UserError.
    """
    if found is None:
        return None
    committed = Checkpoints(recipe.run.folder / CHECKPOINTS, keep_last=1).latest()
    check_resumed(recipe, committed, rows, digests)
    return committed


def _rows_again(recipe: SupervisedRecipe, rows: int) -> tuple[str, ...]:
    """A line for a step that is longer than the data: nothing fails, but an epoch is less than a step."""
    size = recipe.train.batch_samples
    if size <= rows:
        return ()
    return (f"train.batch_samples {size} is more than the {rows} usable rows: every step has some rows more than once",)


def check_run_folder(folder: Path, steps: int, *, resume: bool, forgets: bool = False) -> Committed | None:
    """A new run needs a folder without results, a resumed one a checkpoint, which is returned, and steps left.

    steps: of the run; 0 is not known yet. forgets: only an exported model is a result. Of the checkpoint's files only sizes are
    looked at. Raises UserError.
    """
    if resume:
        checkpoints = Checkpoints(folder / CHECKPOINTS, keep_last=1)
        whole = checkpoints.committed()
        committed = whole[-1] if whole else checkpoints.latest()
        done = committed.step
        if 0 < steps <= done and exported_step(folder, done) == done:
            raise UserError(
                f"{folder} has already done {done} steps, and train.steps is {steps}: nothing is left to do. "
                f"Raise train.steps, or train.epochs, to go on; to have its models written anew, remove {folder / EXPORT}."
            )
        _check_writable(folder)
        _check_writable(folder / CHECKPOINTS)  # it may be a link, or a file system of its own
        return committed
    found = [name for name in ((EXPORT,) if forgets else RESULTS) if (folder / name).exists()]
    if found:
        raise UserError(
            f"{folder} already holds a run ({', '.join(found)}). Go on with it by --resume, or by --continue where "
            "it has no checkpoint yet, choose another name by run.name=..., or delete the folder."
        )
    _check_writable(folder)
    return None


def _check_writable(folder: Path) -> None:
    """Whether the folder can be made, or written to where it is there. Raises UserError."""
    above = folder.absolute()
    existing = next(parent for parent in (above, *above.parents) if os.path.lexists(parent))
    missing = above.parts[len(existing.parts) :]
    try:
        longest = os.pathconf(existing, "PC_NAME_MAX") if existing.is_dir() else 0
        # Permissions do not tell all: the kernel's own file systems take nobody's folders.
        with tempfile.TemporaryDirectory(prefix=".megarl-", dir=existing):
            too_long = any(len(os.fsencode(name)) > longest for name in missing)
            problem = f"takes no names of more than {longest} bytes" if too_long else ""
            if full := full_disks([existing.resolve()]):
                problem = f"is on a disk that is full ({full[0]})"
    except NotADirectoryError:
        problem = "is not a folder"
    except FileNotFoundError as error:
        problem = "is a link that leads nowhere" if existing.is_symlink() else f"takes no new folder ({error.strerror})"
    except OSError as error:
        problem = f"takes no new folder ({error.strerror})"
    if problem:
        raise UserError(
            f"The run's folder {folder} cannot be made: {existing} {problem}. Set run.dir to another folder."
        )


@contextmanager
def reading() -> Iterator[None]:
    """What the system refuses while a run's inputs are looked at is the user's to mend. Raises UserError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        shown = f"{shortened(str(error.filename), 200)} cannot be used: {error.strerror}."
        raise UserError(f"{shown} Correct the path in the recipe, or the permissions there.") from error


def _check_report(recipe: AnyRecipe) -> None:
    """Raises UserError where a writer is missing that the recipe asks for, or one of the user's is none."""
    if recipe.report.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "report.wandb is set, but wandb is not installed. Install it (pip install wandb), or leave report.wandb out."
        )
    if recipe.report.writer is not None:
        writer_class(recipe.report.writer)


def _check_generation(recipe: Recipe, platform: Platform) -> tuple[ModelConfig, int]:
    """The model, the servers' layout, the graders, and the agent, with what its tools take of prompts."""
    model = _check_model(recipe)
    check_server_layout(model, recipe.rollout.tp, pads=platform.pads_weights)
    check_graders(recipe.reward)
    if recipe.agent is None:
        return model, 0
    return model, check_agent(recipe, load_tokenizer(recipe.model.path, recipe.data.chat_template_kwargs))


def _check_model(recipe: Recipe) -> ModelConfig:
    """The model's folder, and its context length."""
    model = check_model_folder(recipe.model.path)
    if model.head == "score":
        raise UserError(
            f"model.path {recipe.model.path} is a reward model: it has one score a token in the place of a vocabulary, and "
            "generates nothing. Name a language model; this one may be reward_model.path or critic.path."
        )
    check_context(model, longest_served(recipe), served_parts(recipe))
    return model


def _check_sync(recipe: Recipe, model: ModelConfig) -> None:
    """Servers begin with the folder's own weights, and take the trainer's from then on: the two have to be alike."""
    _refuse_fp8(recipe, model, "the servers would begin with another model than the trainer, which dequantises them")
    if recipe.sync.folder is not None:
        _check_writable(recipe.sync.folder)


def _refuse_fp8(recipe: Recipe, model: ModelConfig, reason: str) -> None:
    if model.quantised is not None:
        path = recipe.model.path
        raise UserError(
            f"model.path {path} has {model.quantised} weights, and {reason}. Write an unquantised folder once, by `megarl "
            f"convert hf-to-mcore {path} CHECKPOINT` and `megarl convert mcore-to-hf CHECKPOINT FOLDER`, and set model.path to "
            "it."
        )


def check_model_folder(folder: Path) -> ModelConfig:
    """What a folder says of its model, whose weights are all there. Raises UserError."""
    model = load_model_config(folder)
    check_weights(expected_tensors(model), folder, model)
    return model


def _without_effect(recipe: Recipe, platform: Platform) -> tuple[str, ...]:
    """A line for what this platform goes through in vain. To refuse it would keep the recipe from running on others."""
    if recipe.rollout.offload and not platform.frees_servers:
        return (f"rollout.offload has no effect on {platform.name}: SGLang gives no memory back there",)
    return ()


def _eval_rows(recipe: Recipe, model: ModelConfig, tool_tokens: int) -> tuple[Sequence[Prompt], tuple[str, ...]]:
    """The held-out rows that are asked, and notes on them."""
    if recipe.data.eval is None:
        return (), ()
    prompts = checked_prompts(recipe, recipe.data.eval, model)
    asked = recipe.eval.asked(prompts.prompts)
    check_sets(recipe, recipe.data.eval, prompts.prompts, asked)
    return asked, row_notes(recipe, model, recipe.data.eval, prompts, tool_tokens)
