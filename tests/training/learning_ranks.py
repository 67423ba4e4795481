"""What each rank does for test_learning_layouts: `<rank> <size> <port> <target> <folder>...`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Loaded once, before the ranks are made of one process.
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe  # noqa: F401

from megarl.core.layout import Layout
from megarl.core.types import Shard
from megarl.models.hf_config import load_model_config
from megarl.models.rules import TOWER
from megarl.training.rank import Rank
from tests.support.platforms import chosen
from tests.support.vision import QWEN2_5, QWEN3_MOE
from tests.training.harness import OPTIMIZER, weights
from tests.training.seeing import pictured_shards, seeing_spec, some_pictured

LEARNING = OPTIMIZER.model_copy(update={"freeze_vision_tower": False})
SINGLE = "single"
CASES: dict[str, dict[str, tuple[Layout, dict[str, Any]]]] = {
    QWEN2_5: {
        SINGLE: (Layout(), {}),
        "dp2": (Layout(world_size=2), {"offload": ("params", "grads", "optimizer")}),
        "tp2": (Layout(tp=2, world_size=2), {}),
        "tp2 sp": (Layout(tp=2, sequence_parallel=True, world_size=2), {"recompute": "full"}),
        "pp2 vpp2": (Layout(pp=2, vpp=2, world_size=2), {}),
        "cp2": (Layout(cp=2, world_size=2), {}),
    },
    QWEN3_MOE: {SINGLE: (Layout(), {}), "dp2 ep2": (Layout(ep=2, world_size=2), {})},
}


def steps(folder: Path, dp: int, index: int) -> list[Shard]:
    """Of three updates: of everything, and of text alone; of everything on the first rank; of a part."""
    vision = load_model_config(folder).vision
    assert vision is not None
    made = some_pictured(vision)
    every, text, part = (pictured_shards(each, dp, 2 // dp)[index].mini_batches for each in (made, made[1:2], made[2:]))
    alone = pictured_shards(made, 1, 2)[0].mini_batches if index == 0 else pictured_shards([])[0].mini_batches
    if folder.name == QWEN3_MOE:  # whose ranks take part in each other's passes
        return [Shard(every), Shard(every), Shard(part)]
    return [Shard((*every, *text)), Shard((*alone, *every)), Shard(part)]


def run(
    rank: Rank, folder: Path, layout: Layout, options: dict[str, Any], target: Path, other: Path | None
) -> dict[str, Any]:
    """Three updates, with log-probs between them, and a checkpoint before the third; that one again from both checkpoints."""
    spec = replace(seeing_spec(folder, layout, **options), optimizer=LEARNING, total_steps=6)
    rank.build("actor", spec)
    place = rank.engine("actor").groups.place
    first, second, third = steps(folder, layout.dp, place.dp)
    metrics = []
    for step in (first, second):
        rank.logprobs("actor", first)  # which keeps what the tower says of images
        metrics.append(rank.update("actor", step, {}))
    target.mkdir(exist_ok=True)  # by whichever rank comes first
    rank.save("actor", target, wait=False)
    found: dict[str, Any] = {"saved": weights(rank, "actor")}
    found["metrics"] = [*metrics, rank.update("actor", third, {})]
    rank.finish_save("actor")
    found["trained"] = weights(rank, "actor")
    for name, place_of in {"own": target, "other": other}.items():
        if place_of is not None:
            rank.build("actor", spec)
            rank.logprobs("actor", first)
            rank.load("actor", place_of)
            found[f"{name} loaded"] = weights(rank, "actor")
            rank.update("actor", third, {})
            found[f"{name} trained"] = weights(rank, "actor")
    rank.wake("actor")
    held = rank.engine("actor")._chunks[0].named_parameters()
    found["tower"] = {name: each.detach().cpu().clone() for name, each in held if name.startswith(TOWER)}
    return found


def main() -> None:
    """Go through the cases of this size; each reads the checkpoint of the one before it as well."""
    index, size, port, target = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rank = Rank(index, size, chosen().name, seed=1)
    rank.rendezvous("127.0.0.1", port, timeout_s=60)
    for folder in map(Path, sys.argv[5:]):
        other: Path | None = None
        for case, (layout, options) in CASES[folder.name].items():
            checkpoint = target / f"{folder.name} {case}"
            if layout.world_size == size:
                found = run(rank, folder, layout, options, checkpoint, other)
                torch.save(found, target / f"{folder.name} {case} {index}.pt")
            other = checkpoint
    rank.close()
