"""What each rank does for test_image_features: `<rank> <size> <port> <target> <folder>...`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Loaded once, before the ranks are made of one process.
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
import transformers.models.qwen2_vl.modeling_qwen2_vl
import transformers.models.qwen3_5.modeling_qwen3_5
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe  # noqa: F401

from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.training.rank import Rank
from megarl.training.spec import DpoObjective, ValueObjective
from tests.support.platforms import chosen
from tests.support.vision import QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE
from tests.training.seeing import PREFERENCE, paired_shards, pictured_shards, seeing_spec, some_pictured

MICRO_BATCHES = 2
# Of two micro-batches one may be text alone. Layers behind which features are added are on both stages of a pipeline.
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (Layout(tp=2, world_size=2), {}),
    "tp2 sp, recompute": (Layout(tp=2, sequence_parallel=True, world_size=2), {"recompute": "full"}),
    "pp2": (Layout(pp=2, world_size=2), {}),
    "pp2, recompute": (Layout(pp=2, world_size=2), {"recompute": "full"}),
    "cp2": (Layout(cp=2, world_size=2), {"recompute": "selective"}),
    "dp2": (Layout(world_size=2), {}),
    "tp2 sp cp2": (Layout(tp=2, sequence_parallel=True, cp=2, world_size=4), {}),
    "pp2 cp2": (Layout(pp=2, cp=2, world_size=4), {"recompute": "full"}),
}
# Where the two of a pair are compared over ranks as well.
PAIRED = ("tp2 sp cp2", "pp2 cp2")


DEEPSTACK = (QWEN3, QWEN3_MOE)
OF_EXPERTS = {
    "dp2 ep2": (Layout(ep=2, world_size=2), {}),
    "tp2 sp pp2 ep2": (Layout(tp=2, sequence_parallel=True, pp=2, ep=2, world_size=4), {"recompute": "full"}),
}
# Of models that are refused some, or share them with others: tp without sp is not for experts, and cp not for Gated DeltaNet.
FEWER = {
    QWEN2: ("tp2",),  # which differs from Qwen2.5-VL in its tower alone
    QWEN3_MOE: ("tp2 sp, recompute", "pp2", "cp2", *OF_EXPERTS),
    QWEN3_5: ("tp2", "tp2 sp, recompute", "pp2", "dp2"),
    QWEN3_5_MOE: ("pp2, recompute", *OF_EXPERTS),
}


def cases_of(architecture: str) -> dict[str, tuple[Layout, dict[str, Any]]]:
    """The layouts that are tried of a model."""
    return {name: (CASES | OF_EXPERTS)[name] for name in FEWER.get(architecture, CASES)}


def trains_tower(architecture: str, case: str) -> bool:
    """Whether the tower learns too: layers that it gives features to are on a pipeline's first stage there."""
    return cases_of(architecture)[case][0].pp == 1 or architecture not in DEEPSTACK


def measured(rank: Rank, folder: Path, case: str) -> dict[str, Any]:
    """Log-probs of each shard, and the whole gradients at rank 0."""
    layout, options = cases_of(folder.name)[case]
    options = {**options, "tower": trains_tower(folder.name, case)}
    vision = load_model_config(folder).vision
    assert vision is not None
    rank.build("actor", seeing_spec(folder, layout, **options))
    place = rank.engine("actor").groups.place
    shard = pictured_shards(some_pictured(vision), layout.dp, MICRO_BATCHES)[place.dp]
    answers: list[Any] = [None] * rank.world_size
    dist.all_gather_object(answers, (place.dp, rank.logprobs("actor", shard)))
    rank.update("actor", shard, {})
    leads = {index: column for index, column in answers if column is not None}
    found = {"logprobs": [leads[index] for index in range(layout.dp)], "gradients": gradients(rank, "actor")}
    if case in PAIRED:
        shards, columns = paired_shards(some_pictured(vision), layout.dp, MICRO_BATCHES // layout.dp)
        spec = replace(seeing_spec(folder, layout, **options), objective=DpoObjective(PREFERENCE))
        rank.build("paired", spec)
        rank.update("paired", shards[place.dp], columns[place.dp])
        found["paired"] = gradients(rank, "paired")
        spec = replace(spec, folder=folder / "scored", objective=ValueObjective(), head="score")
        rank.build("critic", spec)
        rank.update("critic", shards[place.dp], dict.fromkeys(("values", "returns"), columns[place.dp]["ref_logprobs"]))
        found["critic"] = gradients(rank, "critic")
    return found


def gradients(rank: Rank, role: str) -> dict[str, torch.Tensor]:
    buckets = rank.engine(role).gradients(1 << 16)
    return {name: tensor.cpu().clone() for bucket in buckets for name, tensor in bucket}


def main() -> None:
    """Go through the cases of this size."""
    index, size, port, target = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rank = Rank(index, size, chosen().name, seed=1)
    rank.rendezvous("127.0.0.1", port, timeout_s=60)
    for folder in map(Path, sys.argv[5:]):
        for case, (layout, _) in cases_of(folder.name).items():
            if layout.world_size == size:
                found = measured(rank, folder, case)
                if index == 0:
                    torch.save(found, target / f"{folder.name} {case}.pt")
    rank.close()
