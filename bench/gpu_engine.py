"""What a device gives the training engine: MFU, memory beside the plan's, log-probs, and the way to the host and back.

    python -m bench.gpu_engine --platform cuda --minutes 20
    python -m bench.gpu_engine --platform cpu --shapes tiny        # everything but the device

THIS WAS NEVER RUN ON CUDA: no GPU was at hand. On a CPU with tiny shapes it runs, and its figures there say nothing.

Shapes of Qwen3 with random weights made on the device, one rank, bfloat16, packed micro-batches; with Transformer Engine's layers
where it is installed, and with ours on torch's SDPA. A model whose state and activations the plan does not fit into the device
loses layers until it does, then recomputes everything: the line says how many are left, and its FLOPs are theirs. MFU is over the
best product that this device was measured to reach. Each cell is a process, so that one that runs out of memory, or hangs, costs
only itself; its line is written as it ends (JSON, bench/results/gpu_engine.jsonl), the most telling first, until the minutes
are over. A cell without figures has a `problem` instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.support.measure import RESULTS
from megarl.core.layout import Layout
from megarl.core.platform import Platform, finish_copies, get_platform, held_bytes, return_free_memory
from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops, recompute_flops, train_flops
from megarl.models.known_configs import FOLDER
from megarl.placement.devices import Kernels
from megarl.placement.memory import Role, RoleBytes, role_bytes
from megarl.placement.space import one_layout
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.recipe.section import Recompute
from megarl.training.manifest import read_model_config
from megarl.training.rank import Rank
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.training.samples import examples, shards

ROLE = "engine"
SHARE = 0.9  # of the device, which a plan may fill: the rest is CUDA's, its libraries' and fragments
MICRO_BATCHES = 4  # of an update, so that the optimizer's step weighs as in a run
REPEATS = 3
GIB = 2**30
LAST_S = 20.0  # of the budget that no cell is begun in
# What differs from Qwen3-4B's config.json.
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    },
}


@dataclass(frozen=True)
class Cell:
    """One process. kind: peak (of products and copies) or engine. fused: Transformer Engine's layers."""

    kind: str
    model: str = ""
    tokens: int = 0
    sequences: int = 1
    fused: bool = False


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
    product = seconds(lambda: torch.matmul(left, right, out=out), platform, 10)
    within = seconds(lambda: beside.copy_(block), platform, 10)
    down = seconds(lambda: host.copy_(block, non_blocking=True), platform, 10)
    up = seconds(lambda: block.copy_(host, non_blocking=True), platform, 10)
    return {
        "matmul_flops_s": 2.0 * width**3 / product,
        "memory_bytes_s": 2 * shapes.copied / within,  # read and written
        "to_host_bytes_s": shapes.copied / down,
        "from_host_bytes_s": shapes.copied / up,
        "device_bytes": float(device_bytes(platform)),
    }


def device_bytes(platform: Platform) -> int:
    """Of the whole device; of a CPU what its machine has."""
    if platform.has_device_memory:
        import torch

        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def planned(config: ModelConfig, cell: Cell, recompute: Recompute, platform: Platform, *, trained: bool) -> RoleBytes:
    """What the planner says that the role holds."""
    kernels = Kernels(
        fused=cell.fused, chunk_elements=platform.chunk_elements, sums_in_copies=platform.backend == "gloo"
    )
    role = Role(trained=trained, head=True, sequence=cell.tokens // cell.sequences)
    return role_bytes(config, one_layout(Layout(), cell.tokens, recompute), 2, role, kernels)


def fitted(config: ModelConfig, cell: Cell, platform: Platform) -> tuple[ModelConfig, Recompute]:
    """As many layers as the plan fits into the device, without recompute where at least half of them stay; else with it."""
    room = SHARE * device_bytes(platform)
    modes: tuple[tuple[Recompute, int], ...] = (("none", config.num_layers // 2), ("full", 1))
    for recompute, fewest in modes:
        for layers in range(config.num_layers, fewest - 1, -1):
            cut = replace(config, num_layers=layers)
            held = planned(cut, cell, recompute, platform, trained=True)
            if held.state[0] + held.working[0] <= room:
                return cut, recompute
    return replace(config, num_layers=1), "full"


def write_config(folder: Path, cell: Cell, layers: int | None = None) -> ModelConfig:
    """A folder with the config.json alone."""
    settings = json.loads((FOLDER / "Qwen/Qwen3-4B/config.json").read_text()) | SIZES[cell.model]
    if layers is not None:
        settings["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(settings))
    return read_model_config(folder)


def run_engine(cell: Cell, platform: Platform) -> dict[str, Any]:
    """Updates, log-probs, and the way to the host and back, with bytes by phase beside what the plan says."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = write_config(folder, cell)
        cut, recompute = fitted(whole, cell, platform)
        config = write_config(folder, cell, cut.num_layers)
        rank = Rank(0, 1, platform.name, seed=1)
        rank.platform = replace(rank.platform, has_transformer_engine=cell.fused)
        rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=60)
        try:
            before = held_bytes(platform)
            spec = RoleSpec(
                folder,
                "bfloat16",
                optimizer=Optimizer(lr=1e-6),
                total_steps=100,
                objective=PolicyObjective(Algorithm()),
                recompute=recompute,
                load_weights=False,
            )
            rank.build(ROLE, spec)
            _fill(rank)
            found = {"layers": config.num_layers, "of": whole.num_layers, "recompute": recompute}
            return found | _measure(rank, config, cell, recompute, platform, before)
        finally:
            rank.close()


def _fill(rank: Rank) -> None:
    """Random weights, made where they lie."""
    import torch

    engine: Any = rank.engine(ROLE)
    torch.manual_seed(1)
    with torch.no_grad():
        for chunk in engine._chunks:
            for parameter in chunk.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    engine._stepper.optimizer.reload_model_params()


def _measure(
    rank: Rank, config: ModelConfig, cell: Cell, recompute: Recompute, platform: Platform, before: int
) -> dict[str, Any]:
    lengths = [cell.tokens // cell.sequences] * cell.sequences * MICRO_BATCHES
    [shard], [columns] = shards([examples(lengths, config.vocab_size)], 1, MICRO_BATCHES)
    rank.take_peaks()
    update_s = seconds(lambda: rank.update(ROLE, shard, columns), platform)
    state = held_bytes(platform) - before
    update_peak = rank.take_peaks()[f"{ROLE}/update"] - before
    logprobs_s = seconds(lambda: rank.logprobs(ROLE, shard), platform)
    logprobs_peak = rank.take_peaks()[f"{ROLE}/logprobs"] - before
    training, scoring = (planned(config, cell, recompute, platform, trained=trained) for trained in (True, False))
    model_flops, again = train_flops(config, lengths), recompute_flops(config, lengths, recompute)
    return {
        "tokens_of_update": sum(lengths),
        "update_s": update_s,
        "update_flops_s": model_flops / update_s,
        "update_flops_s_with_recompute": (model_flops + again) / update_s,
        "logprobs_s": logprobs_s,
        "logprobs_flops_s": forward_flops(config, lengths).total / logprobs_s,
        "bytes": {
            "state": _pair(state, training.state),
            "update peak": _pair(update_peak, training.state + training.working),
            # The trained role's state stays while it scores.
            "log-prob peak": _pair(logprobs_peak, training.state + scoring.working),
        },
        **_offload(rank, platform),
    }


def _pair(measured: float, said: Any) -> dict[str, float]:
    return {"measured": float(measured), "planned": float(said[0]), "error": float(said[0]) / max(measured, 1) - 1}


def _offload(rank: Rank, platform: Platform) -> dict[str, Any]:
    """Everything of the role to the host and back; the second time counts, when its memory there has been taken."""
    for _ in range(2):
        finish_copies(platform)
        began = time.perf_counter()
        freed = rank.sleep(ROLE, ("params", "optimizer"))
        finish_copies(platform)
        slept = time.perf_counter()
        left = held_bytes(platform)
        taken = rank.wake(ROLE, ("params", "optimizer"))
        finish_copies(platform)
        woken = time.perf_counter()
    return {
        "offload": {
            "bytes": freed,
            "to_host_bytes_s": freed / (slept - began),
            "from_host_bytes_s": taken / (woken - slept),
            "left_bytes": left,
        }
    }


def run_cell(cell: Cell, shapes: Shapes, platform: Platform) -> dict[str, Any]:
    """In this process. Memory that runs out is a result."""
    import torch

    try:
        return peaks(shapes, platform) if cell.kind == "peak" else run_engine(cell, platform)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"problem": f"out of memory: {str(error)[:300]}"}
    finally:
        return_free_memory(platform)


def in_a_process(cell: Cell, words: list[str], timeout_s: float) -> dict[str, Any]:
    """What a process of its own says of the cell, or why it said nothing."""
    command = [sys.executable, "-m", "bench.gpu_engine", *words, "--cell", json.dumps(asdict(cell))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done within the {timeout_s:.0f} s that were left"}
    if done.returncode:
        return {"problem": f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(todo: list[Cell], words: list[str], minutes: float) -> Iterator[dict[str, Any]]:
    """A line for each cell, as it is done; MFU once the best product is known."""
    end, best = time.monotonic() + 60 * minutes, None
    for cell in todo:
        left = end - time.monotonic()
        if left < LAST_S:
            yield {"cell": asdict(cell), "problem": "not begun: the minutes were over"}
            continue
        found = in_a_process(cell, words, left)
        best = found.get("matmul_flops_s", best)
        if best is not None and "update_s" in found:
            found |= {
                "mfu": found["update_flops_s"] / best,
                "hfu": found["update_flops_s_with_recompute"] / best,
                "logprobs_mfu": found["logprobs_flops_s"] / best,
            }
        yield {"cell": asdict(cell), **found}


def main(
    *,
    platform: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where a device is.")] = "auto",
    shapes: Annotated[str, typer.Option(help="real, or tiny: proves nothing, and runs anywhere.")] = "real",
    minutes: Annotated[float, typer.Option(help="No cell is begun once these are over, and none goes on.")] = 20.0,
    out: Annotated[
        Path | None, typer.Option(help="Lines of JSON; bench/results/gpu_engine.jsonl if not given.")
    ] = None,
    cell: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the training engine on one device."""
    if platform not in ("cpu", "cuda", "auto") or shapes not in SHAPES:
        sys.exit(f"--platform is cpu, cuda or auto, and --shapes one of {', '.join(SHAPES)}.")
    chosen = get_platform(platform)  # type: ignore[arg-type]
    if cell is not None:
        print()
        print(json.dumps(run_cell(Cell(**json.loads(cell)), SHAPES[shapes], chosen)))
        return
    file, failed = out or RESULTS / "gpu_engine.jsonl", 0
    file.parent.mkdir(parents=True, exist_ok=True)
    todo = cells(SHAPES[shapes], fused=chosen.has_transformer_engine)
    with file.open("w") as lines:
        for line in measured(todo, ["--platform", chosen.name, "--shapes", shapes], minutes):
            text = json.dumps(line)
            print(text, flush=True)
            lines.write(text + "\n")
            lines.flush()
            failed += "problem" in line
    if failed:
        sys.exit(f"{failed} of {len(todo)} cells have no figures: their lines say why.")


if __name__ == "__main__":
    typer.run(main)
