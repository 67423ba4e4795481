"""bench/gpu_engine on a CPU: everything of it but the device."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_engine
from bench.gpu_engine import SHAPES, cells, known, measured, run_cell
from bench.support import engine_cell
from bench.support.engine_cell import SIZES, Cell, Phases, fitted, lengths, write_config
from megarl.core.platform import get_platform
from megarl.core.types import Column, Shard
from megarl.models.known_configs import FOLDER
from megarl.placement.workload import read_model
from tests.training import samples

GIB = 2**30
CPU, CUDA = get_platform("cpu"), get_platform("cuda")


def figures(cell: Cell) -> dict[str, Any]:
    """All that a cell with tiny shapes says."""
    found: dict[str, Any] = {}
    for part in run_cell(cell, SHAPES["tiny"], CPU):
        found |= part
    return found


@pytest.fixture
def engines_as_copies(loaded: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of the engine in copies of a process that has loaded it; the other has a process of its own."""
    start = gpu_engine.in_a_process

    def run(cell: Cell, words: list[str], timeout_s: float) -> dict[str, Any]:
        if cell.kind != "engine":
            return start(cell, words, timeout_s)
        with ProcessPoolExecutor(1, mp_context=loaded) as pool:
            return pool.submit(figures, cell).result(timeout_s)

    monkeypatch.setattr(gpu_engine, "in_a_process", run)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_as_copies")
def test_every_cell_has_its_line(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    gpu_engine.main(platform="cpu", shapes="tiny", minutes=5, out=out)  # exits where one has no figures
    first, *rest = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["cell"]["kind"] == "peak" and first["matmul_flops_s"] > 0 and first["to_host_bytes_s"] > 0
    assert first["torch"] == torch.__version__ and first.keys() >= {"cuda", "cudnn", "driver", "transformer_engine"}
    assert [(line["cell"]["tokens"], line["cell"]["mixed"]) for line in rest] == [(64, False), (64, True), (128, False)]
    assert {(line["device"], line["kernels"]) for line in (first, *rest)} == {("cpu", "torch")}
    for line in rest:
        assert line["logprobs_mfu"] == pytest.approx(line["logprobs_flops_s"] / first["matmul_flops_s"])
        assert line["first_update_s"] > 0 and line["update_s"] > 0
        assert line["step_s"] + 4 * line["micro_batch_s"] == pytest.approx(line["update_s"])
        assert (line["layers"], line["of"], line["recompute"]) == (3, 3, "none")
        assert set(line["bytes"]) == {"state", "update peak", "log-prob peak"}
        assert all(pair["planned"] > 0 and pair["measured"] > 0 for pair in line["bytes"].values())
        assert line["logprobs_flops_s"] > 0
        assert line["offload"]["bytes"] > 0 if not line["cell"]["mixed"] else "offload" not in line
    before = out.read_text()
    gpu_engine.main(platform="cpu", shapes="tiny", minutes=5, out=out, go_on=True)
    assert out.read_text() == before, "nothing was left"


class Clock:
    """Time that passes only where a rank computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedRank:
    """An update takes `step_s`, and 2 s a micro-batch; the very first 100 s more. Scoring takes 0.5 s a micro-batch."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock, self._step_s, self.updates = clock, step_s, 0

    def update(self, role: str, shard: Shard, columns: dict[str, Column]) -> dict[str, float]:
        self._clock.now += self._step_s + 2.0 * len(shard.mini_batches[0].micro_batches) + 100 * (not self.updates)
        self.updates += 1
        return {}

    def logprobs(self, role: str, shard: Shard) -> None:
        self._clock.now += 0.5 * len(shard.mini_batches[0].micro_batches)

    def take_peaks(self) -> dict[str, int]:
        return dict.fromkeys(("engine/update", "engine/logprobs"), 2**40)


def phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: Cell, step_s: float) -> Phases:
    clock = Clock()
    monkeypatch.setattr(engine_cell, "time", clock)
    rank: Any = TimedRank(clock, step_s)
    return Phases(rank, write_config(tmp_path, cell), cell, "full", CPU, 0)


@pytest.mark.parametrize("step_s", [0.0, 7.0])
def test_mfu_is_of_micro_batches_whatever_a_step_takes(
    step_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tiny model's FLOPs by hand, 2 sequences of 32 tokens; an update of 4 takes step_s + 8 s."""
    monkeypatch.setattr(engine_cell, "_offload", lambda *_: {"offload": {}})
    cell = Cell("engine", "tiny", 64, 2)
    found: dict[str, Any] = {}
    for part in phases(monkeypatch, tmp_path, cell, step_s).run():
        found |= part
    assert (found["first_update_s"], found["update_s"], found["larger_update_s"]) == (
        108 + step_s,
        8 + step_s,
        16 + step_s,
    )
    assert (found["micro_batch_s"], found["step_s"], found["logprobs_s"]) == (2.0, step_s, 2.0)
    projections, mlp = 64 * (4 * 16 + 2 * 2 * 16) + 4 * 16 * 64, 3 * 64 * 128
    pairs = 2 * 32 * 33 // 2
    layers = 3 * (2 * 64 * (projections + mlp) + 2 * pairs * 2 * 4 * 16)
    logits = 2 * 64 * 64 * 256
    assert found["update_flops_s"] == 3 * (layers + logits) / 2
    assert found["update_flops_s_with_recompute"] == (4 * layers + 3 * logits) / 2
    assert found["logprobs_flops_s"] == 4 * (layers + logits) / 2


def test_samples_of_a_cell_take_no_longer_where_its_vocabulary_is_a_real_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a teacher says of each token is sorted over the vocabulary: minutes of the host, of the 150 s of a cell."""

    def never(*_: Any) -> Any:
        raise AssertionError("a number for each entry of the vocabulary")

    monkeypatch.setattr(engine_cell, "_offload", lambda *_: {"offload": {}})
    monkeypatch.setattr(samples, "likeliest", never)
    figures = list(phases(monkeypatch, tmp_path, Cell("engine", "tiny", 64, 2), 1.0).run())
    assert figures and not [
        example for example in samples.examples([5], 97, taught=False) if "teacher_top" in example.columns
    ]


def test_each_state_goes_to_the_host_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Locking its memory takes longest of all, and long and mixed cells have the state of others."""
    monkeypatch.setattr(engine_cell, "_offload", lambda *_: {"offload": {}})
    tiny = Cell("engine", "tiny", 64, 2)
    monkeypatch.setattr(engine_cell, "LONG", 128)
    for cell, goes in ((tiny, True), (replace(tiny, mixed=True), False), (replace(tiny, tokens=128), False)):
        found = [name for part in phases(monkeypatch, tmp_path, cell, 1.0).run() for name in part]
        assert ("offload" in found) == goes, cell


def test_what_a_device_holds_beside_torch_and_what_torch_takes_for_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"mem_get_info": (10 * GIB, 80 * GIB), "memory_reserved": 68 * GIB, "max_memory_reserved": 75 * GIB}
    for name, value in (found | {"max_memory_allocated": 60 * GIB, "memory_stats": {"num_alloc_retries": 3}}).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert engine_cell.allocator(CUDA) == {
        "allocator": {
            **{"beside_torch_bytes": 2 * GIB, "taken_bytes": 75 * GIB, "asked_bytes": 60 * GIB},
            **{"fragmentation": pytest.approx(0.2), "retries": 3},
        }
    }
    assert engine_cell.allocator(CPU) == {}


def test_what_a_cell_has_measured_stays_where_it_ends_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError("all of it")

    cell = Cell("engine", "tiny", 64, 2)
    monkeypatch.setattr(engine_cell, "_offload", full)
    monkeypatch.setattr(gpu_engine, "run_engine", lambda *_: phases(monkeypatch, tmp_path, cell, 1.0).run())
    found = figures(cell)
    assert found["update_s"] == 9.0 and found["logprobs_s"] == 2.0
    assert set(found["bytes"]) == {"state", "update peak", "log-prob peak"}
    assert found["problem"] == "out of memory: all of it"


@pytest.mark.parametrize(
    ("end", "problem"), [("sys.exit('why')", "exit code 1: why"), ("time.sleep(60)", "not done within 3 s")]
)
def test_what_a_process_said_before_it_ended_is_kept(end: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys, time; print('figures: {{\"update_s\": 2.0}}\\nnoise\\nfigures: {{\"up', flush=True, end=''); {end}"
    start = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **how: start([sys.executable, "-c", code], **how))
    assert gpu_engine.in_a_process(Cell("peak"), [], 3.0) == {"update_s": 2.0, "problem": problem}


def test_no_cell_has_more_than_its_share_of_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(gpu_engine, "in_a_process", lambda cell, words, timeout_s: given.append(timeout_s) or {})
    list(measured([Cell("peak")], [], 9.0))
    list(measured([Cell("peak")], [], 2.0))
    assert given[0] == gpu_engine.CELL_S and 119 < given[1] <= 120


def test_a_second_call_leaves_out_what_came_to_its_end() -> None:
    peak, done, failed = Cell("peak"), Cell("engine", "4B", 4096, 4), Cell("engine", "8B", 4096, 4)
    lines: list[dict[str, Any]] = [
        {"cell": asdict(peak), "matmul_flops_s": 4.0},
        {"cell": asdict(failed), "update_s": 1.0, "problem": "out of memory"},
        {"cell": asdict(done), "update_s": 1.0},
    ]
    assert known(lines) == ([peak, done], 4.0)
    assert known([]) == ([], None)


@pytest.mark.parametrize(
    "line",
    [{"cell": asdict(Cell("peak")), "cudnn": 91002, "matmul_flops_s": 8e14}, {"cell": asdict(Cell("engine", "4B"))}],
    ids=["of a device", "of real shapes"],
)
def test_lines_of_another_platform_or_of_other_shapes_are_not_gone_on_with(
    line: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "lines.jsonl"
    out.write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match=r"another --platform or other --shapes.* give another --out"):
        gpu_engine.main(platform="cpu", shapes="tiny", out=out, go_on=True)
    assert json.loads(out.read_text()) == line


def test_lines_of_another_device_of_the_platform_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MFU would be over the product that the other one was measured to reach."""
    out, line = (
        tmp_path / "lines.jsonl",
        {"cell": asdict(Cell("peak")), "device": "a slower one", "matmul_flops_s": 8e14},
    )
    out.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(gpu_engine, "in_a_process", lambda *_: {"device": "cpu", "update_flops_s": 1e9})
    with pytest.raises(SystemExit, match=r"lines\.jsonl is of a slower one, and this is cpu: give another --out"):
        gpu_engine.main(platform="cpu", shapes="tiny", out=out, go_on=True)
    assert json.loads(out.read_text()) == line


def test_sequences_of_a_mixed_cell_all_differ_and_fill_each_micro_batch() -> None:
    cell = Cell("engine", "4B", 4096, 4, mixed=True)
    # As `shards` deals them: the first sequences of both micro-batches, the second ones, ...
    assert lengths(cell, range(2)) == [1025, 1027, 1023, 1021, 1026, 1028, 1022, 1020]
    all_passes = [length for first in range(0, 40, 4) for length in lengths(cell, range(first, first + 4))]
    assert len(set(all_passes)) == len(all_passes) == 160
    assert lengths(Cell("engine", "4B", 4096, 4), range(5, 7)) == [1024] * 8


def test_a_cell_that_fails_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    answers = [{"matmul_flops_s": 4.0}, {"problem": "out of memory: all of it"}]
    update = {"update_flops_s": 2.0, "update_flops_s_with_recompute": 3.0, "update_s": 1.0, "logprobs_flops_s": 1.0}
    monkeypatch.setattr(gpu_engine, "in_a_process", lambda *_: [*answers, update][len(seen)])
    for line in measured([Cell("peak"), Cell("engine", "8B"), Cell("engine", "4B")], [], 5.0):
        seen.append(line)
    assert seen[1] == {"cell": {**seen[1]["cell"]}, "problem": "out of memory: all of it"}  # type: ignore[index]
    assert seen[2]["mfu"] == 0.5 and seen[2]["hfu"] == 0.75  # type: ignore[index]


def test_no_cell_is_begun_when_the_minutes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "in_a_process", None)
    [line] = measured([Cell("peak")], [], 0.1)
    assert line["problem"] == "not begun: the minutes were over"


def test_large_models_come_first_and_both_kernels_where_there_are_two() -> None:
    found = cells(SHAPES["real"], fused=True)
    assert found[0].kind == "peak" and len(found) == 2 + 4 * 2 * 2 and len(set(found)) == len(found)
    assert [(each.model, each.tokens, each.fused) for each in found[1:6]] == [
        ("4B", 4096, True),
        ("4B", 4096, True),
        ("8B", 4096, True),
        ("4B", 32768, True),
        ("8B", 32768, True),
    ]
    assert [each for each in found if each.mixed] == [found[2]]
    assert not any(each.fused for each in cells(SHAPES["real"], fused=False))


@pytest.mark.parametrize("name", ["4B", "8B"])
def test_shapes_are_the_published_models(name: str, tmp_path: Path) -> None:
    published, made = read_model(FOLDER / f"Qwen/Qwen3-{name}"), write_config(tmp_path, Cell("engine", name))
    assert made == replace(published, max_positions=made.max_positions)
    assert set(SIZES) == {*SHAPES["real"].models, "tiny"}


@pytest.mark.parametrize(("model", "tokens", "sequences"), [("8B", 4096, 4), ("4B", 32768, 8)])
def test_a_model_loses_layers_until_the_plan_fits_it(
    model: str, tokens: int, sequences: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training and scoring both: of 32k tokens the latter needs more, where everything is recomputed."""
    cell = Cell("engine", model, tokens, sequences, fused=True)
    config = write_config(tmp_path, cell)
    kept = {}
    for size in (24, 80, 1000):
        monkeypatch.setattr(engine_cell, "device_bytes", lambda platform, size=size: size * GIB)
        cut, recompute = fitted(config, cell, CUDA)
        kept[size] = cut.num_layers, recompute
        training, scoring = (engine_cell.planned(cut, cell, recompute, CUDA, trained=each) for each in (True, False))
        most = training.state[0] + max(training.working[0], scoring.working[0])
        assert size == 24 or most <= engine_cell.SHARE * size * GIB
    assert kept[1000] == (36, "none")
    assert 1 <= kept[24][0] < kept[80][0] < 36
