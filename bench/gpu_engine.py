"""What a device gives the training engine: MFU, memory beside the plan's, log-probs, and the way to the host and back.

    python -m bench.gpu_engine --platform cuda --minutes 9
    python -m bench.gpu_engine --platform cpu --shapes tiny        # everything but the device

THIS WAS NEVER RUN ON CUDA: no GPU was at hand. On a CPU with tiny shapes it runs, and its figures there say nothing.

Shapes of Qwen3 with random weights made on the device, one rank, bfloat16, packed micro-batches; with Transformer Engine's layers
where it is installed, and with ours on torch's SDPA. A model whose state and activations the plan does not fit into the device
loses layers until it does, then recomputes everything: the line says how many are left, and its FLOPs are theirs.

Updates of a few and of more micro-batches are timed: what a micro-batch adds (`micro_batch_s`) is what MFU is of, over the best
product that this device was measured to reach; what is left is the step's own (`step_s`). `first_update_s` is of the very first
update; in the cell that is `mixed` every sequence has a length of its own, as in a run.

Each cell is a process, so that one that runs out of memory, or hangs, costs only itself; its line is written as it ends (JSON,
bench/results/gpu_engine.jsonl), the most telling first, until the minutes are over. What did not come to its end has a `problem`,
beside the figures that it came to. With --go-on the lines that are there stay, and what has none without a problem is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.support.engine_cell import Cell, device_bytes, run_engine
from bench.support.measure import RESULTS
from megarl.core.json_file import whole_lines
from megarl.core.platform import Platform, finish_copies, get_platform, return_free_memory
from megarl.core.versions import installed

REPEATS = 10
GIB = 2**30
LAST_S = 20.0  # of the budget that no cell is begun in
CELL_S = 150.0  # most of one cell
MFU = {
    "mfu": "update_flops_s",
    "hfu": "update_flops_s_with_recompute",
    "logprobs_mfu": "logprobs_flops_s",
}
FIGURES = "figures: "  # how a cell's process begins a line that its parent reads


@dataclass(frozen=True)
class Shapes:
    """What is measured. models: the most telling first. packed: tokens and sequences of a micro-batch. copied: bytes."""

    models: tuple[str, ...]
    packed: tuple[tuple[int, int], ...]
    product: int
    copied: int


SHAPES = {
    "real": Shapes(("4B", "8B", "1.7B", "0.6B"), ((4096, 4), (32768, 8)), 8192, GIB),
    "tiny": Shapes(("tiny",), ((64, 2), (128, 4)), 128, 2**20),
}


def cells(shapes: Shapes, *, fused: bool) -> list[Cell]:
    """The most telling first: large models before small ones, the kernels that a run would take before the others."""
    large, small = shapes.models[:2], shapes.models[2:]
    kinds = (True, False) if fused else (False,)
    found = [Cell("peak")]
    for models in (large, small):
        for kind in kinds:
            found += [Cell("engine", name, *packed, fused=kind) for packed in shapes.packed for name in models]
    found.insert(2, Cell("engine", shapes.models[0], *shapes.packed[0], fused=fused, mixed=True))
    return found


def seconds(work: Callable[[], object], platform: Platform, repeats: int = REPEATS) -> float:
    """The fastest of several calls, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        finish_copies(platform)
        began = time.perf_counter()
        work()
        finish_copies(platform)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def peaks(shapes: Shapes, platform: Platform) -> dict[str, float]:
    """FLOP/s of the largest product; bytes/s within the device, and to and from locked memory of the host."""
    import torch

    width = shapes.product
    left, right, out = (torch.randn(width, width, dtype=torch.bfloat16, device=platform.device) for _ in range(3))
    block = torch.zeros(shapes.copied, dtype=torch.uint8, device=platform.device)
    beside = torch.empty_like(block)
    host = torch.zeros(shapes.copied, dtype=torch.uint8, pin_memory=platform.has_device_memory)
    product = seconds(lambda: torch.matmul(left, right, out=out), platform)
    within = seconds(lambda: beside.copy_(block), platform)
    down = seconds(lambda: host.copy_(block, non_blocking=True), platform)
    up = seconds(lambda: block.copy_(host, non_blocking=True), platform)
    return {
        "matmul_flops_s": 2.0 * width**3 / product,
        "memory_bytes_s": 2 * shapes.copied / within,  # read and written
        "to_host_bytes_s": shapes.copied / down,
        "from_host_bytes_s": shapes.copied / up,
        "device_bytes": float(device_bytes(platform)),
    }


def device_name(platform: Platform) -> str:
    """As torch has it."""
    import torch

    return torch.cuda.get_device_name() if platform.has_device_memory else platform.name


def machine(platform: Platform) -> dict[str, Any]:
    """What figures depend on besides the device."""
    import torch

    driver = Path("/proc/driver/nvidia/version")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if platform.has_device_memory else None,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "transformer_engine": installed("transformer-engine"),
    }


def run_cell(cell: Cell, shapes: Shapes, platform: Platform) -> Iterator[dict[str, Any]]:
    """In this process: figures as they are known. Memory that runs out is one."""
    import torch

    try:
        yield {"device": device_name(platform), "kernels": "Transformer Engine" if cell.fused else "torch"}
        if cell.kind == "peak":
            yield machine(platform)
            yield peaks(shapes, platform)
        else:
            yield from run_engine(cell, platform)
    except (torch.OutOfMemoryError, MemoryError) as error:
        yield {"problem": f"out of memory: {str(error)[:300]}"}
    finally:
        return_free_memory(platform)


def in_a_process(cell: Cell, words: list[str], timeout_s: float) -> dict[str, Any]:
    """What a process of its own says of the cell, and why it did not say all."""
    command = [sys.executable, "-m", "bench.gpu_engine", *words, "--cell", json.dumps(asdict(cell))]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        return said(error.stdout or b"") | {"problem": f"not done within {timeout_s:.0f} s"}
    found = said(done.stdout)
    if done.returncode:
        found["problem"] = f"exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()[-1500:]}"
    return found


def said(output: bytes) -> dict[str, Any]:
    """All figures of a cell's process, which may have been ended amid its last line."""
    found: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines(keepends=True):
        if line.startswith(FIGURES) and line.endswith("\n"):
            found |= json.loads(line.removeprefix(FIGURES))
    return found


def measured(todo: list[Cell], words: list[str], minutes: float, best: float | None = None) -> Iterator[dict[str, Any]]:
    """A line for each cell, as it is done; MFU once the best product is known. best: FLOP/s of an earlier call's."""
    end = time.monotonic() + 60 * minutes
    for cell in todo:
        left = end - time.monotonic()
        if left < LAST_S:
            yield {"cell": asdict(cell), "problem": "not begun: the minutes were over"}
            continue
        found = in_a_process(cell, words, min(left, CELL_S))
        best = found.get("matmul_flops_s", best)
        for name, flops in MFU.items():
            if best is not None and flops in found:
                found[name] = found[flops] / best
        yield {"cell": asdict(cell), **found}


def known(found: Iterable[dict[str, Any]]) -> tuple[list[Cell], float | None]:
    """The cells of an earlier call that came to their end, and its best product. found: its lines."""
    found = list(found)
    products = [line["matmul_flops_s"] for line in found if "matmul_flops_s" in line]
    return [Cell(**line["cell"]) for line in found if "problem" not in line], products[-1] if products else None


def of_another(kept: Iterable[dict[str, Any]], shapes: Shapes, platform: Platform) -> bool:
    """Whether lines of an earlier call are of other shapes or of another platform: their best product is none of this one's."""
    return any(
        line["cell"]["model"] not in ("", *shapes.models)
        or ("cudnn" in line and (line["cudnn"] is None) == platform.has_device_memory)
        for line in kept
    )


def main(
    *,
    platform: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where a device is.")] = "auto",
    shapes: Annotated[str, typer.Option(help="real, or tiny: proves nothing, and runs anywhere.")] = "real",
    minutes: Annotated[float, typer.Option(help="No cell is begun once these are over, and none goes on.")] = 9.0,
    out: Annotated[
        Path | None, typer.Option(help="Lines of JSON; bench/results/gpu_engine.jsonl if not given.")
    ] = None,
    go_on: Annotated[bool, typer.Option("--go-on", help="Keep the lines that are there; try what is left.")] = False,
    cell: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the training engine on one device."""
    if platform not in ("cpu", "cuda", "auto") or shapes not in SHAPES:
        sys.exit(f"--platform is cpu, cuda or auto, and --shapes one of {', '.join(SHAPES)}.")
    chosen = get_platform(platform)  # type: ignore[arg-type]
    if cell is not None:
        os.environ.update(chosen.env)  # a rank's; CUDA and torch are not loaded yet
        for figures in run_cell(Cell(**json.loads(cell)), SHAPES[shapes], chosen):
            print(f"\n{FIGURES}{json.dumps(figures)}", flush=True)
        return
    file, failed = out or RESULTS / "gpu_engine.jsonl", 0
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = whole_lines(file) if go_on else []
    if of_another(kept, SHAPES[shapes], chosen):
        sys.exit(f"{file} is of another --platform or other --shapes, and --go-on keeps it: give another --out.")
    devices = {line["device"] for line in kept if "device" in line}
    done, best = known(kept)
    todo = [each for each in cells(SHAPES[shapes], fused=chosen.has_transformer_engine) if each not in done]
    with file.open("w") as lines:
        lines.writelines(f"{json.dumps(line)}\n" for line in kept)
        for line in measured(todo, ["--platform", chosen.name, "--shapes", shapes], minutes, best):
            # Which device this is only a cell's own process knows.
            if "device" in line and devices - {line["device"]}:
                sys.exit(
                    f"{file} is of {' and '.join(sorted(devices))}, and this is {line['device']}: give another --out."
                )
            text = json.dumps(line)
            print(text, flush=True)
            lines.write(text + "\n")
            lines.flush()
            failed += "problem" in line
    if failed:
        sys.exit(f"{failed} of {len(todo)} cells have not all figures: their lines say why.")


if __name__ == "__main__":
    typer.run(main)
