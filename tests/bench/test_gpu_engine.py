"""bench/gpu_engine on a CPU: everything of it but the device."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_engine
from bench.gpu_engine import SHAPES, SIZES, Cell, cells, fitted, measured, run_cell, write_config
from megarl.core.platform import get_platform
from megarl.models.known_configs import FOLDER
from megarl.placement.workload import read_model

GIB = 2**30
CUDA = get_platform("cuda")


@pytest.fixture
def engines_as_copies(loaded: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of the engine in copies of a process that has loaded it; the other has a process of its own."""
    start = gpu_engine.in_a_process

    def run(cell: Cell, words: list[str], timeout_s: float) -> dict[str, Any]:
        if cell.kind != "engine":
            return start(cell, words, timeout_s)
        with ProcessPoolExecutor(1, mp_context=loaded) as pool:
            return pool.submit(run_cell, cell, SHAPES["tiny"], get_platform("cpu")).result(timeout_s)

    monkeypatch.setattr(gpu_engine, "in_a_process", run)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_as_copies")
def test_every_cell_has_its_line(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    gpu_engine.main(platform="cpu", shapes="tiny", minutes=5, out=out)  # exits where one has no figures
    first, *rest = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["cell"]["kind"] == "peak" and first["matmul_flops_s"] > 0 and first["to_host_bytes_s"] > 0
    assert [line["cell"]["tokens"] for line in rest] == [64, 128]
    for line in rest:
        assert line["mfu"] == pytest.approx(line["update_flops_s"] / first["matmul_flops_s"])
        assert (line["layers"], line["of"], line["recompute"]) == (3, 3, "none")
        assert set(line["bytes"]) == {"state", "update peak", "log-prob peak"}
        assert all(pair["planned"] > 0 and pair["measured"] > 0 for pair in line["bytes"].values())
        assert line["offload"]["bytes"] > 0 and line["logprobs_flops_s"] > 0


def test_a_cell_that_fails_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"matmul_flops_s": 4.0}, {"problem": "out of memory: all of it"}]
    update = {"update_flops_s": 2.0, "update_flops_s_with_recompute": 3.0, "update_s": 1.0, "logprobs_flops_s": 1.0}
    monkeypatch.setattr(gpu_engine, "in_a_process", lambda *_: [*answers, update][len(seen)])
    seen: list[object] = []
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
    assert found[0].kind == "peak" and len(found) == 1 + 4 * 2 * 2 and len(set(found)) == len(found)
    assert [(each.model, each.tokens, each.fused) for each in found[1:5]] == [
        ("4B", 4096, True),
        ("8B", 4096, True),
        ("4B", 32768, True),
        ("8B", 32768, True),
    ]
    assert not any(each.fused for each in cells(SHAPES["real"], fused=False))


@pytest.mark.parametrize("name", ["4B", "8B"])
def test_shapes_are_the_published_models(name: str, tmp_path: Path) -> None:
    published, made = read_model(FOLDER / f"Qwen/Qwen3-{name}"), write_config(tmp_path, Cell("engine", name))
    assert made == replace(published, max_positions=made.max_positions)
    assert set(SIZES) == {*SHAPES["real"].models, "tiny"}


def test_a_model_loses_layers_until_the_plan_fits_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = Cell("engine", "8B", 4096, 4, fused=True)
    config = write_config(tmp_path, cell)
    kept = {}
    for size in (24, 80, 1000):
        monkeypatch.setattr(gpu_engine, "device_bytes", lambda platform, size=size: size * GIB)
        cut, recompute = fitted(config, cell, CUDA)
        kept[size] = cut.num_layers, recompute
        held = gpu_engine.planned(cut, cell, recompute, CUDA, trained=True)
        assert size == 24 or held.state[0] + held.working[0] <= gpu_engine.SHARE * size * GIB
    assert kept[1000] == (36, "none")
    assert 1 <= kept[24][0] < kept[80][0] < 36
