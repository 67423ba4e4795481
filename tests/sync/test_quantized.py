"""Weights that travel in FP8: what a receiver reads is, bit for bit, what a loop over blocks makes of the trainer's weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.ports import free_port
from megarl.models.config import ModelConfig
from megarl.models.fp8_weights import quantised
from megarl.models.hf_config import load_model_config
from megarl.models.hf_fp8 import scale_name
from megarl.models.rules import expected_tensors
from megarl.sync.quantized import QuantizedWeights
from tests.support.forked_ranks import Ranks
from tests.support.fp8 import quantised as by_loop
from tests.support.fp8_models import write_wide
from tests.sync.given import BroadcastBuckets, Given
from tests.sync.quantized_ranks import Job
from tests.sync.receiver import Receiver
from tests.sync.test_broadcast import serving

BLOCK = (128, 128)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    return found.dtype == expected.dtype and torch.equal(
        found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )


def weights_of(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """As the trainer holds them."""
    found = load_file(folder / "model.safetensors")
    return {
        name: found[name] if name.endswith("correction_bias") else found[name].bfloat16()
        for name in expected_tensors(config)
    }


def check(received: dict[str, Tensor], weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Every tensor, and how far the dequantised ones are from the trainer's."""
    scales = quantised(config)
    assert set(received) == {*weights, *map(scale_name, scales)}
    for name, tensor in weights.items():
        if name not in scales:
            assert same(received[name], tensor), name
            continue
        values, factors = by_loop(tensor.float(), BLOCK)
        assert same(received[name], values) and same(received[scale_name(name)], factors), name
        wide = received[scale_name(name)].repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: tensor.shape[0], : tensor.shape[1]]
        moved = (received[name].float() * wide - tensor.float()).abs()
        # Half a step of three bits of mantissa, or of the smallest numbers.
        assert (moved <= torch.maximum(tensor.float().abs() / 16, wide * 2.0**-10) * 1.0001).all(), name


def test_a_bucket_is_announced_as_it_travels(tmp_path: Path) -> None:
    config = load_model_config(write_wide(tmp_path, "qwen3", num_hidden_layers=1))
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"
    bucket = [(q, torch.ones(256, 256).bfloat16()), (norm, torch.ones(256).bfloat16())]
    outgoing = QuantizedWeights(Given([bucket, bucket[1:]], senders=[0, 1]), config)
    first, second = outgoing.parcels
    assert first.names == (q, scale_name(q), norm) and second.names == (norm,)
    assert first.dtypes == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    assert first.shapes == ((256, 256), (2, 2), (256,))
    assert first.nbytes == 256 * 256 + 4 * 4 + 512 and first.is_flattened
    values, scales, kept = outgoing.gather(0)
    assert values.float().eq(448).all() and scales.eq(1 / torch.tensor(448.0)).all() and kept is bucket[1][1]
    assert outgoing.gather(1) == []  # another rank's


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_receiver_reads_what_the_loop_makes(family: str, tmp_path: Path) -> None:
    config = load_model_config(write_wide(tmp_path, family))
    weights, receiver, sender = weights_of(tmp_path, config), Receiver("server 0"), BroadcastBuckets()
    items = list(weights.items())
    given = Given([items[start : start + 20] for start in range(0, len(items), 20)])
    with serving(receiver):
        report = sender.sender.send(QuantizedWeights(given, config), 1, [receiver.endpoint])
        sender.close()
    assert report is not None and report.ok == ("server 0",)
    check(receiver.weights, weights, config)
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert report.num_bytes == sum(tensor.nbytes for tensor in receiver.weights.values()) < 0.6 * whole


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tp": 2, "sequence_parallel": True, "world_size": 2}),
        ("qwen3", {"pp": 2, "world_size": 2}),
        ("qwen3_moe", {"ep": 2, "etp": 2, "world_size": 4}),
    ],
)
def test_ranks_of_every_layout_send_the_same_bits(
    family: str, layout: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    folder = write_wide(tmp_path / "model", family)
    config, receiver = load_model_config(folder), Receiver("server 0")
    job, log = tmp_path / "job.json", tmp_path / "ranks.log"
    with serving(receiver):
        servers = [(receiver.name, receiver.endpoint.url)]
        given = Job(free_port(), layout, str(folder), servers, str(tmp_path / "registry"), 1 << 18)
        job.write_text(json.dumps(asdict(given)))
        assert ranks.run("tests.sync.quantized_ranks", layout["world_size"], job, log=log, deadline_s=120) == ""
    check(receiver.weights, weights_of(folder, config), config)
    assert json.loads(log.read_text().splitlines()[-1])["num_bytes"] == sum(
        tensor.nbytes for tensor in receiver.weights.values()
    )
