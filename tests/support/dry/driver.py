"""`megarl train`, `sft`, `rm` and `dpo` as they are, on the actors beside: the whole driver, in a fraction of a second."""

from __future__ import annotations

import io
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megarl.cluster import (
    collectors,
    coordinator,
    external,
    feeder,
    ranks,
    runtime,
    samples,
    server_start,
    slots,
    waits,
)
from megarl.cluster.healing import Restarts
from megarl.cluster.nodes import Node, Nodes
from megarl.cluster.process import ProcessFacts
from megarl.cluster.slots import Slot
from megarl.core import platform
from megarl.core.errors import MegarlError, UserError
from megarl.core.scratch import Scratch
from megarl.data import pairs, sft, unpaired
from megarl.data.chat import load_tokenizer
from megarl.placement import apply
from megarl.placement.apply import Placed, place
from megarl.placement.cluster import Cluster
from megarl.placement.local import run_cluster
from megarl.placement.placed import PlacementPlan
from megarl.placement.workload import Workload
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.report import writers
from megarl.report.history import METRICS_FILE
from megarl.rewards import check as graders_check
from megarl.rewards import classify, combine
from megarl.rollout import collector, teacher
from megarl.rollout.journal import JOURNAL
from megarl.run import (
    begin,
    epochs,
    model_check,
    preflight,
    rows_check,
    servers_check,
    session,
    supervised,
    teacher_check,
    train,
)
from megarl.run.recovery import Recoveries
from megarl.serving import call_parser
from megarl.serving import external as external_servers
from megarl.serving import teacher as served_teacher
from megarl.serving.client import ServerEndpoint
from megarl.serving.external import ExternalPool, ModelFacts
from tests.support.dry.actors import Book, Collector, Differs, External, Rank, Router, Server
from tests.support.dry.answers import Client, Pool, Poster, Tests
from tests.support.dry.learning import rounded
from tests.support.dry.ray import Loop, Ray

DEVICES = 64  # of the only node
_SECONDS = re.compile(r'("\w+_s"): [-+.\de]+')  # in samples
_PLAIN_TOKENIZERS = cache(load_tokenizer)


def tokenizers(folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """As load_tokenizer; one without options of its template is read once."""
    return load_tokenizer(folder, template_kwargs) if template_kwargs else _PLAIN_TOKENIZERS(folder)


_FITS: dict[tuple[str, str], PlacementPlan] = {}
_check_fits = apply.check_fits
# What a plan reads of a recipe beside its workload: all sections but those of what is learned, and of where it is written.
_UNPLANNED = {"run", "data", "algorithm", "reward", "agent", "eval", "train", "sync", "deadlines", "report"}


def fits(recipe: Recipe, workload: Workload, cluster: Cluster) -> PlacementPlan:
    """As check_fits; what fitted fits again."""
    key = recipe.model_dump_json(exclude=_UNPLANNED), repr((workload, cluster))
    if key not in _FITS:
        _FITS[key] = _check_fits(recipe, workload, cluster)
    return _FITS[key]


class _Writer:
    """In the place of TensorBoard's, wandb's and the user's: that it is there, and what it is called."""

    def __init__(self, book: Book, kind: str, *names: str) -> None:
        book.note("writer", kind, *names)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def close(self, failed: bool = False) -> None:
        return None


class _Silent:
    """In the place of the console of a run."""

    def __init__(self, book: Book, name: str, steps: int, out: Any) -> None:
        book.note("console", name, steps)

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def phase(self, name: str, seconds: float | None = None) -> None:
        return None

    def progress(self, done: Any) -> None:
        return None

    def step(self, step: int, metrics: Mapping[str, float], failure: str = "") -> None:
        return None

    def finish(self, *_: Any, **__: Any) -> None:
        return None


@contextmanager
def stage(book: Book, folder: Path) -> Iterator[None]:
    """Everything outside of this process replaced."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fake = Ray(
            {
                ranks.RankActor: partial(Rank, book),
                server_start.ServerActor: partial(Server, book),
                server_start.RouterActor: partial(Router, book),
                external.ExternalActor: partial(External, book),
                samples.CollectorActor: partial(Collector, book),
                samples.CoordinatorActor: samples.CoordinatorActor,
                feeder.FeederActor: feeder.FeederActor,
            },
            Loop(),
        )
        stack.callback(fake.close)
        patch.setattr(samples.ray, "remote", fake.remote)  # type: ignore[attr-defined]
        patch.setattr(samples.ray, "wait", fake.wait)  # type: ignore[attr-defined]
        patch.setattr(waits.ray, "get", fake.get)  # type: ignore[attr-defined]
        patch.setattr(collectors, "own_address", lambda: "127.0.0.2")
        for module in (collectors, coordinator, feeder):
            patch.setattr(module, "configure_process", lambda spec: ProcessFacts(1, "host"))
        patch.setattr(waits.Waiter, "wait", _method(_waited, book, fake))
        patch.setattr(session.Runtime, "start", partial(_started, book, folder))
        patch.setattr(runtime.Runtime, "close", lambda self: None)
        patch.setattr(slots, "reserve", lambda platform, nodes, count, size=1: _slots(nodes[0], count, size))
        patch.setattr(platform, "cuda_device_count", lambda: DEVICES)
        patch.setattr(collector, "ServerClient", lambda endpoint, **_: Client(book))
        patch.setattr(call_parser, "ServerClient", lambda endpoint, **_: Client(book))
        patch.setattr(teacher, "ServerClient", lambda endpoint: Client(book, endpoint))
        patch.setattr(session, "Restarts", partial(_restarts, book))
        for module in (train, supervised):
            patch.setattr(module, "Recoveries", partial(_recoveries, book))
        patch.setattr(combine, "GraderPool", partial(Pool, book))
        patch.setattr(combine, "JsonClient", partial(Poster, book))
        patch.setattr(combine, "CodeGrader", partial(Tests, book))
        patch.setattr(graders_check, "check_sandbox", lambda settings, key: None)
        patch.setattr(writers, "TensorBoardWriter", lambda folder, step: _Writer(book, "tensorboard", folder.name))
        patch.setattr(
            writers,
            "WandbWriter",
            lambda folder, project, name, config, recovered: _Writer(book, "wandb", project, name),
        )
        patch.setattr(
            writers, "OwnWriter", lambda path, folder, recipe, resumed_step, recovered: _Writer(book, "own", path)
        )
        patch.setattr(Scratch, "open", lambda: nullcontext(_scratch(folder)))
        patch.setattr(train, "place", partial(_placed, book))
        patch.setattr(begin, "RunConsole", partial(_Silent, book))
        for module in (begin, train):
            patch.setattr(module, "Console", lambda: Console(file=io.StringIO()))
        # What takes long and is the same each time: a plan, tokenizers, and waiting for the disk.
        patch.setattr(apply, "check_fits", fits)
        for module in (
            preflight,
            epochs,
            servers_check,
            teacher_check,
            rows_check,
            model_check,
            collector,
            classify,
            pairs,
            sft,
            unpaired,
        ):
            patch.setattr(module, "load_tokenizer", tokenizers)
        # SGLang's parser is asked in a process of its own, for seconds.
        patch.setattr(servers_check, "check_server_args", lambda words, platform: None)
        patch.setattr(external_servers, "check_external", partial(_asked, book))
        patch.setattr(
            served_teacher, "check_teachers", lambda urls, key, wanted: book.note("teachers", urls, key, wanted)
        )
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(sqlite3, "connect", partial(_unsynced, sqlite3.connect))
        # What a run says of itself is no effect of its recipe.
        patch.setattr(begin, "save_recipe", lambda loaded, folder: folder.mkdir(parents=True, exist_ok=True))
        patch.setattr(begin, "draw_curve", lambda source, target: None)
        patch.setattr(train, "advice", lambda folder: None)
        yield


class _Unsynced(sqlite3.Connection):
    """One that waits for no disk, also where it is told to: a process that dies loses nothing."""

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        return super().execute("pragma synchronous = off" if sql.startswith("pragma synchronous") else sql, parameters)


def _unsynced(connect: Callable[..., sqlite3.Connection], *where: Any, **named: Any) -> sqlite3.Connection:
    file = connect(*where, **named, factory=_Unsynced)
    file.execute("pragma synchronous = off")
    return file


def _method(function: Callable[..., Any], *first: Any) -> Any:
    """A method that is given these behind its object."""
    return lambda self, *arguments, **named: function(self, *first, *arguments, **named)


def _waited(
    waiter: Any, book: Book, fake: Ray, calls: Sequence[Any], *, phase: str, role: str, deadline_s: float
) -> list[Any]:
    book.note("wait", phase, role, deadline_s)
    results = fake.results([call.result for call in calls], waiter.followed, waiter._followed)
    book.compare()
    return results


def _restarts(book: Book, most: int) -> Restarts:
    book.note("restarts", most)
    return Restarts(most)


def _recoveries(book: Book, most: int, history: Path) -> Recoveries:
    book.note("recoveries", most)
    return Recoveries(most, history)


def _placed(book: Book, recipe: Recipe) -> Placed:
    book.note("placed on", run_cluster(recipe))
    return place(recipe)


def _asked(book: Book, urls: Sequence[str], key: str, expected: ModelFacts) -> ExternalPool:
    book.note("asked", key, expected.context, expected.routing)
    return ExternalPool(
        tuple(ServerEndpoint(f"external server {index}", url, key) for index, url in enumerate(urls)), expected
    )


def _slots(node: Node, count: int, size: int) -> tuple[Slot, ...]:
    return tuple(Slot(node, tuple(str(index * size + each) for each in range(size)), {}) for index in range(count))


def _started(
    book: Book,
    temp: Path,
    kind: platform.Platform,
    folder: Path,
    num_devices: int,
    reads: Sequence[Path] = (),
    scratch: Scratch | None = None,
    reached_from: Sequence[str] = (),
    spares: int = 0,
) -> runtime.Runtime:
    book.note("runtime", kind.name, num_devices, reached_from, spares)
    node = Node("node", "127.0.0.1", "0" * 56, temp, DEVICES)
    return runtime.Runtime(
        kind, folder.resolve(), "key", _scratch(temp), False, Nodes((node,)), _slots(node, num_devices, 1)
    )


def _scratch(folder: Path) -> Scratch:
    nobody: Any = SimpleNamespace(pid=0)
    return Scratch("run", folder, nobody, None)


@contextmanager
def _noting_faults(book: Book) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except MegarlError as error:
        book.note("stopped", str(error))


def run(
    kind: type[AnyRecipe],
    recipe: Path,
    overrides: Sequence[str],
    temp: Path,
    *,
    resume: bool = False,
    go_on: bool = False,
    unlike: Sequence[tuple[Any, ...]] | None = None,
) -> Book:
    """Run the recipe, and say what it did, also where it stops early. Raises UserError where it is refused.

    unlike: what another run did; this one ends as soon as the two are seen to differ.
    """
    book = Book(unlike)
    with suppress(Differs), stage(book, temp), _noting_faults(book):
        if kind is Recipe:
            train.run_train(recipe, list(overrides), resume=resume, go_on=go_on)
        else:
            each: Any = kind
            supervised.run_supervised(each, recipe, list(overrides), resume=resume, go_on=go_on)
    return book


def left(folder: Path) -> list[tuple[str, ...]]:
    """What a run leaves: files, metrics and samples. Times and bytes are only said to be there."""
    found: list[tuple[str, ...]] = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == METRICS_FILE:
            found += [(name, str(_plain(json.loads(line)))) for line in path.read_text().splitlines()]
        elif path.parent.name == "samples":
            found.append((name, _SECONDS.sub(r"\1: measured", path.read_text())))
        elif path.parent.name == JOURNAL:
            found.append((name.partition("-")[0],))  # each process writes files of its own
        elif path.is_dir():
            found.append((name,))
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    exact = ("perf/train_flops",)
    measured = ("perf/", "memory/")
    return {
        name: "measured" if (name.startswith(measured) or name.endswith("_s")) and name not in exact else rounded(value)
        for name, value in row.items()
    }
