"""The journal of a run as the driver knows it: whether it is this run's still, and what of it a checkpoint makes needless.

What is in it: megarl/rollout/journal.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.core.checksums import sum_file
from megarl.core.disk import replace_text
from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.types import EvalResult
from megarl.core.versions import installed
from megarl.data.digests import NO_DIGESTS, Digests
from megarl.data.rows import data_files
from megarl.hub.recipe import MODELS
from megarl.models.fingerprint import fingerprint
from megarl.recipe.check import unread_keys
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.save import RECIPE_FILE
from megarl.recipe.schema import Recipe
from megarl.report.history import METRICS_FILE, read_history
from megarl.rollout.journal import JOURNAL, forget
from megarl.run.ending import writing
from megarl.serving.prompt_scores import SAME_MODEL, distance
from megarl.training.run_checkpoints import Committed

MADE_WITH = "made_with.json"  # beside the samples
FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):\w+(?:\.\w+)*")
# Keys that change neither samples nor what is learned from them: a run may go on with others. Whether a teacher
# has servers, teacher.path says.
HARMLESS = (
    "run.dir",
    "run.name",
    "agent.listen",
    "agent.processes",
    "cluster.file",
    "cluster.max_recoveries",
    "cluster.peak_tflops",
    "cluster.spares",
    "data.eval",
    "data.eval_config",
    "data.eval_split",
    "deadlines",
    "eval",
    "placement",
    "report",
    "reward.max_failed_share",
    "reward.workers",
    "rollout.collectors",
    "rollout.concurrency",
    "rollout.kv_tokens",
    "rollout.longest_first",
    "rollout.max_restarts",
    "rollout.max_running_requests",
    "rollout.offload",
    "rollout.piece_tokens",
    "rollout.server_args",
    "rollout.servers",
    "rollout.tp",
    "sync",
    "teacher.servers",
    "train.async_save",
    "train.epochs",
    "train.journal",
    "train.journal_keep",
    "train.keep_best",
    "train.keep_every",
    "train.keep_last",
    "train.max_rewinds",
    "train.save_every",
    "train.steps",
)
# Where a grader is and how it is asked, whatever its name: a server of rewards, and the folder of its tokenizer, may be on
# another machine in every job.
OF_GRADERS = re.compile(
    r"reward\.graders\.[^.]+\.(url|key_env|timeout_s|retries|retry_for_s|concurrency|batch|tokenizer)"
)
# What becomes of a step that is not to be learned from. Steps that were done had none of it, or are made again as this now says:
# whoever mends a run that stopped by `skip` or `rewind` goes on with its samples.
TROUBLE = ("actor.optimizer.on_bad_gradient", "critic.optimizer.on_bad_gradient", "algorithm.on_logprob_diff")
HELD_OUT = ("eval", "eval_config", "eval_split")  # keys of data
TAUGHT = "log-probs that teacher.servers say of a text"
HELD_OUT_ROWS = "files of data.eval"
BEGIN_ANEW = "Begin a journal anew with --discard-journal."
ROWS_PATH, LENGTH = "data.train", "train.steps"
# Which model lies at each path: the key's -> the name of its fingerprint.
FINGERPRINTS = {key: f"{key.removesuffix('.path')}'s fingerprint" for key in MODELS}
OF_ROWS = f" of the rows of {ROWS_PATH}"
SOURCE = "source of "  # before a function's path: which file it is in
PACKAGES = ("torch", "megatron-core")
SHOWN = 5  # differences

Forget = Callable[[int, Sequence[Sequence[int]]], object]


def made_with(recipe: Recipe, digests: Digests = NO_DIGESTS) -> dict[str, Any]:
    """What the samples of a run, and what is learned from them, depend on: plain values by dotted names.

    digests: of what the rows to train on say.
    """
    values = dict(_leaves(recipe.model_dump(mode="json"), ""))
    found = {name: value for name, value in values.items() if not _harmless(name)}
    if any(role.optimizer.follows_length for role in (recipe.actor, recipe.critic) if role is not None):
        found[LENGTH] = recipe.train.steps
    named = (text for name, value in values.items() if name in found for text in _texts(value))
    for text in named:
        if (match := FUNCTION.fullmatch(text)) and (source := _source(match[1])) is not None:
            found[f"{SOURCE}{text}"] = sum_file(source).crc32
    weights = sorted([*recipe.model.path.glob("*.safetensors"), recipe.model.path / "config.json"])
    found["model's files"] = [f"{path.name}: {path.stat().st_size} bytes" for path in weights if path.exists()]
    folders = {key: Path(values[key]) for key in MODELS if values.get(key) is not None}
    for key, folder in folders.items():
        with suppress(OSError):  # what a replay has another of may be gone, or half of it
            found[FINGERPRINTS[key]] = fingerprint(folder)
    found |= {f"{name}{OF_ROWS}": digest for name, digest in digests.items()}
    return found | {package: installed(package) for package in PACKAGES}


def check_journal(recipe: Recipe, digests: Digests, taught: Sequence[float] = ()) -> None:
    """Whether the journal in the run's folder, where there is one, can be gone on with.

    digests: of what the rows to train on say. taught: what a teacher behind an address says of a text. Raises UserError where it
    cannot be, or was written by what would sample or learn otherwise.
    """
    folder = recipe.run.folder / JOURNAL
    if not recipe.train.journal or not (folder / MADE_WITH).exists():
        return
    before = read_object(folder / MADE_WITH, BEGIN_ANEW)
    before.pop(HELD_OUT_ROWS, None)  # they decide no sample
    other_teacher = _other_teacher(before.pop(TAUGHT, []), taught)
    # The journal of an older megarl says nothing of rows.
    known = digests if any(name.endswith(OF_ROWS) for name in before) else NO_DIGESTS
    now: dict[str, Any] = json.loads(json.dumps(made_with(recipe, known)))
    # What rows say and which models they are decide, and not where they are. The journal of an older megarl says less of both.
    others = {
        ROWS_PATH if known else "",
        *(key if name in before and name in now else name for key, name in FINGERPRINTS.items()),
        LENGTH if LENGTH not in before else "",  # a schedule that it counts for now is another, or an older megarl's
        *TROUBLE,
        *_later_keys(recipe, before),
    }
    unread = unread_keys(recipe)  # an older megarl may have had another default for them
    changed = [
        name
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
        and name not in others
        and not OF_GRADERS.fullmatch(name)
        and not among(name, unread)
    ]
    if changed or other_teacher:
        told = [f"  {_difference(name, before, now)}" for name in changed[:SHOWN]]
        told += other_teacher
        more = [f"  and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        raise UserError(
            "\n".join(
                [
                    f"{folder}, which has the samples of its last steps, was written by a run that would not train on "
                    "them as this one does:",
                    *told,
                    *more,
                    "Go on with what it was written with, or sample all after the checkpoint anew by --discard-journal.",
                ]
            )
        )


def _difference(name: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    if name.startswith(SOURCE) and name in before and name in now:
        return f"the file of {name.removeprefix(SOURCE)} was edited"
    return f"{name} was {before.get(name)!r} and is {now.get(name)!r}"


def _other_teacher(before: Sequence[float], now: Sequence[float]) -> list[str]:
    """A line where log-probs of a text are another teacher's: it may be at other addresses in every job."""
    if not before or len(before) != len(now) or (apart := distance(before, now)) <= SAME_MODEL:
        return []
    return [
        f"  teacher.servers serve another teacher: their log-probs of a text are {apart:.2f} from what the run's said of it"
    ]


def other_rows(folder: Path, digests: Digests) -> list[str]:
    """What training rows say otherwise than when the journal in a run's folder was written. digests: of them now."""
    before = read_object(folder / JOURNAL / MADE_WITH, "It is of no run of this version.")
    return [name for name, digest in digests.items() if before.get(f"{name}{OF_ROWS}", digest) != digest]


def begin_journal(recipe: Recipe, digests: Digests, taught: Sequence[float] = (), *, keeps: bool) -> None:
    """Write down what the journal is made with. digests, taught: as of `check_journal`.

    keeps: what there is of one is this run's; else nothing is there afterwards. Raises UserError where it cannot be written.
    """
    folder = recipe.run.folder / JOURNAL
    if not keeps:
        _clear(recipe.run.folder)
    if recipe.train.journal:
        with writing(recipe.run.folder):
            folder.mkdir(parents=True, exist_ok=True)
            made = made_with(recipe, digests) | {HELD_OUT_ROWS: _held_out(recipe)}
            made |= {TAUGHT: list(taught)} if taught else {}
            replace_text(folder / MADE_WITH, json.dumps(made, indent=1))


def _clear(run: Path) -> None:
    """Remove the journal in a run's folder; of a link what is behind it. Raises UserError: what is left would be trained on."""
    folder = run / JOURNAL
    with writing(run):
        for path in folder.glob("*"):
            path.unlink()
        if folder.is_dir() and not folder.is_symlink():
            folder.rmdir()


def changes(folder: Path, before: Recipe, now: Recipe) -> list[str]:
    """For people: what of a recipe differs, and changes what is learned from a journal. folder: of the run that wrote it."""
    written = read_object(folder / JOURNAL / MADE_WITH, "It is of no run of this version.")
    was, new = made_with(before), made_with(now)
    found = {name: (was.get(name), new.get(name)) for name in dict.fromkeys([*was, *new])}
    as_written = (*PACKAGES, *FINGERPRINTS.values())  # at the same path may be another model by now
    found |= {name: (written[name], new[name]) for name in as_written if name in written and name in new}
    return [f"  {name} was {a!r} and is {b!r}" for name, (a, b) in found.items() if a != b]


def evaluations_before(loaded: Loaded[Recipe]) -> dict[int, EvalResult]:
    """Evaluations that the run in this folder has made, by step: a step that is made again need not be evaluated again.

    loaded: with files in the place of names. None where held-out rows or how they are asked were others, or nothing is there;
    nor of a life without a journal, whose steps are not those that are made again. Raises UserError where its recipe is broken.
    """
    recipe, folder = loaded.recipe, loaded.recipe.run.folder
    if not (folder / METRICS_FILE).is_file() or not (folder / RECIPE_FILE).is_file():
        return {}
    written, rows = folder / JOURNAL / MADE_WITH, _held_out(recipe)
    if rows and written.exists() and read_object(written, BEGIN_ANEW).get(HELD_OUT_ROWS, rows) != rows:
        return {}
    try:
        before = load_recipe(folder / RECIPE_FILE, (), Recipe).recipe
    except UserError as error:
        raise UserError(
            f"{error}\nThat file is what the run was made with, of which only evaluations are looked at. It may be removed: "
            "steps that are made again are then evaluated again."
        ) from error
    now = loaded.with_names().data
    if (
        not before.train.journal
        or before.eval != recipe.eval
        or any(getattr(before.data, key) != getattr(now, key) for key in HELD_OUT)
    ):
        return {}
    found = {}
    for row in read_history(folder / METRICS_FILE):
        values = {name: row[name] for name in row if name.startswith("eval/")}
        metrics = {name: math.nan if value is None else float(value) for name, value in values.items()}
        if metrics:
            # How many there were is in no metric, and nobody asks for it again.
            found[row["step"]] = EvalResult(
                0, 0, metrics.get("eval/accuracy", math.nan), metrics.get("eval/reward", math.nan), metrics
            )
    return found


def trim_journal(recipe: Recipe, checkpoints: list[Committed], forget_decisions: Forget) -> None:
    """Forget groups and decisions that no checkpoint needs to go on from, unless all are kept.

    checkpoints: those kept, oldest first. forget_decisions: as of `Samples.forget`; who writes them removes them.
    """
    if checkpoints and recipe.train.journal_keep == "needed":
        oldest = checkpoints[0]
        waiting = [int(step) for _, step, _ in oldest.state.get("data", {}).get("waiting", ())]
        forget(recipe.run.folder / JOURNAL, before=min([oldest.step + 1, *waiting]))
        # Not the oldest's: numbers begin anew behind a life without a journal, whose checkpoints have none.
        states = [each.state.get("data", {}) for each in checkpoints]
        known = [(state["decisions"], state.get("waiting", ())) for state in states if state.get("decisions")]
        if known:
            forget_decisions(*min(known, key=lambda each: int(each[0])))


def _held_out(recipe: Recipe) -> list[str]:
    """Checksums of the files of held-out rows; none where they cannot be read."""
    files = data_files(recipe.data.eval) if recipe.data.eval is not None else []
    try:
        return [sum_file(file).crc32 for file in files if file.is_file()]
    except OSError:
        return []  # whoever reads their rows says so


def _source(module: str) -> Path | None:
    """The file of a module; None where there is none: other texts look like functions too, such as a judge's qwen2.5:7b."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and Path(spec.origin).is_file() else None


def _later_keys(recipe: Recipe, before: Mapping[str, Any]) -> set[str]:
    """Keys that the megarl which wrote the journal did not have, and the recipe leaves at their defaults: all is as without them.

    before: of the journal. A section that it has nothing of was not there, or has been added since, and counts.
    """
    given = dict(_leaves(recipe.model_dump(mode="json", exclude_defaults=True), ""))
    sections = {name.rpartition(".")[0] for name in before}
    return {
        name
        for name, _ in _leaves(recipe.model_dump(mode="json"), "")
        if name not in before and name not in given and name.rpartition(".")[0] in sections
    }


def among(name: str, keys: Iterable[str]) -> bool:
    """Whether it is one of these keys, or within one of them."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _harmless(name: str) -> bool:
    return among(name, HARMLESS) or OF_GRADERS.fullmatch(name) is not None


def _texts(value: Any) -> list[str]:
    """A text, or those of a list: of tools there may be several."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
