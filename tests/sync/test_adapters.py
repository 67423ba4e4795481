"""LoRA adapters alone, on real servers: they answer what transformers computes with merged weights, version by version."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.lora_served import ADAPTER, FAMILIES, served_lora
from megarl.models.lora_settings import LoraSettings
from megarl.models.rules import expected_tensors
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError
from megarl.serving.process import start_all
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.sampling import Sampling
from megarl.serving.server import ProcessPlace, ServerSpec
from megarl.sync.adapters import AdapterSender
from megarl.sync.verify import probe_servers, verify
from tests.support.forked_servers import Copies
from tests.support.platforms import chosen
from tests.support.served import KEY, NEEDS, ON_DEVICES, START_S, HfModel
from tests.support.tiny import write_tiny_model
from tests.sync.receiver import Receiver
from tests.sync.test_broadcast import serving

SETTINGS = LoraSettings(4, 8.0, ("linear_qkv", "linear_proj"))
PROBE = [[5, 6, 7, 8, 9, 10], [40, 30, 20], [60, 61, 60, 61, 62, 63, 64]]


class Adapters:
    """Random adapters of a model on attention's linears: what a rank would write, and the merged model."""

    def __init__(self, model: Path, seed: int, settings: LoraSettings = SETTINGS) -> None:
        self._model, self._settings = model, settings
        self.modules = served_lora(load_model_config(model), settings).modules
        generator = torch.Generator().manual_seed(seed)
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, shape in expected_tensors(load_model_config(model)).items():
            if name.endswith(tuple(f".{module}.weight" for module in self.modules)):
                a = torch.randn(settings.rank, shape[1], generator=generator) * 0.2
                self.pairs[name] = a, torch.randn(shape[0], settings.rank, generator=generator) * 0.2

    def export_adapters(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        tensors = {}
        for name, factors in self.pairs.items():
            for factor, tensor in zip("AB", factors, strict=True):
                tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{factor}.weight"] = tensor
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._model),
            "r": self._settings.rank,
            "lora_alpha": self._settings.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.modules),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def merged(self) -> HfModel:
        found = HfModel(self._model)
        parameters = dict(found.model.named_parameters())
        with torch.no_grad():
            for name, (a, b) in self.pairs.items():
                parameters[name].add_(self._settings.alpha / self._settings.rank * b @ a)
        return found


@contextmanager
def pool(
    copies: Copies, folder: Path, family: str, tp: int = 1
) -> Iterator[tuple[Path, ServerEndpoint, ServerEndpoint]]:
    """The model, a server that takes adapters, and the router before it."""
    experts = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    model = write_tiny_model(folder / "model", family, **experts)
    place, lora = ProcessPlace(folder / "logs", KEY), served_lora(load_model_config(model), SETTINGS)
    spec = ServerSpec(
        model, "float32", tp=tp, kv_tokens=4096, lora=lora, extra=ON_DEVICES if chosen().has_device_memory else ()
    )
    server = copies.server("server 0", spec, chosen(), place)
    router = RouterProcess(RouterSpec(adapter=ADAPTER), place)
    try:
        start_all([router, server], START_S)
        router.add(server.endpoint)
        yield model, server.endpoint, router.endpoint
    finally:
        server.stop()
        router.stop()


def difference(server: ServerEndpoint, trainer: HfModel, version: int) -> float:
    answers = asyncio.run(probe_servers([server], PROBE, 60.0))
    assert answers.failed == {}
    return verify([trainer.logprobs(row) for row in PROBE], answers.logprobs, 1e9, version)


@pytest.mark.slow
@pytest.mark.needs(*NEEDS)
@pytest.mark.parametrize(("family", "tp"), [(family, 2 if family == "qwen3" else 1) for family in FAMILIES])
def test_servers_answer_with_the_adapters_of_the_newest_version_alone(
    family: str, tp: int, copies: Copies, tmp_path: Path
) -> None:
    with pool(copies, tmp_path, family, tp) as (model, server, router):
        sender = AdapterSender(rank=0, folder=tmp_path / "adapters", timeout_s=60.0)

        async def generate() -> float:
            async with ServerClient(router) as client:
                found = await client.generate([90, 91, 92, 93] * 5, Sampling(16))
                assert [span.version for span in found.versions] == [version] and found.cached_tokens == 0
                again = await client.generate([90, 91, 92, 93] * 5, Sampling(1))
                assert again.cached_tokens == 19  # what these adapters computed, which the next will not find
                wanted = trainer.logprobs([*[90, 91, 92, 93] * 5, *found.token_ids.tolist()])[19:]
                return float(np.abs(wanted - found.logprobs).max())

        async def before() -> None:
            async with ServerClient(router, attempts=1) as client:
                await client.generate([5, 6], Sampling(1))

        with pytest.raises(ServerError):  # never the model without adapters
            asyncio.run(before())
        base = difference(replace(server, adapter=""), HfModel(model), 0)
        for version in (1, 2, 3):
            adapters = Adapters(model, seed=version)
            report = sender.send(adapters, version, [server])
            assert report is not None and (report.ok, report.failed) == (("server 0",), {})
            pairs = [factor for pair in adapters.pairs.values() for factor in pair]
            assert sum(each.nbytes for each in pairs) <= report.num_bytes < sum(each.nbytes for each in pairs) + 20_000
            trainer = adapters.merged()
            # SGLang's own numbers are as far from transformers' without adapters, where there are many experts.
            bound = max(1e-5, 3 * base)
            assert difference(server, trainer, version) < bound < 1e-3 < difference(server, HfModel(model), version)
            assert asyncio.run(generate()) < bound
            assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [f"version-{version}"]


def test_a_server_that_refuses_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    well, ill, new = Receiver("server 0"), Receiver("server 1"), Receiver("server 2")
    ill.refuse["/load_lora_adapter"] = 400, "out of memory"
    new.refuse["/unload_lora_adapter"] = 400, "LoRA with name policy does not exist"
    with serving(well, ill, new):
        sender = AdapterSender(rank=0, folder=tmp_path / "adapters", timeout_s=20.0)
        report = sender.send(Adapters(model, 1), 1, [well.endpoint, ill.endpoint, new.endpoint])
        other = AdapterSender(rank=1, folder=tmp_path / "of rank 1", timeout_s=20.0)
        assert other.send(Adapters(model, 1), 1, [well.endpoint]) is None
    assert report is not None and report.ok == ("server 0", "server 2")
    assert list(report.failed) == ["server 1"] and "out of memory" in report.failed["server 1"]
    assert (well.version, ill.version, new.version) == ("1", None, "1")
    loaded = {"lora_name": ADAPTER, "lora_path": str(tmp_path / "adapters" / "version-1")}
    assert well.bodies("/load_lora_adapter") == [loaded]


def test_servers_are_not_to_blame_for_the_time_that_ranks_take_to_write(tmp_path: Path) -> None:
    class Slow(Adapters):
        def export_adapters(self, folder: Path) -> None:
            time.sleep(1.1)
            super().export_adapters(folder)

    model, one = write_tiny_model(tmp_path / "model"), Receiver("server 0")
    with serving(one):
        sender = AdapterSender(rank=0, folder=tmp_path / "adapters", timeout_s=1.0)
        report = sender.send(Slow(model, 1), 1, [one.endpoint])
    assert report is not None and report.failed == {}


def test_what_cannot_be_removed_of_former_adapters_ends_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: a file that a server has open becomes another name in its folder until it is closed."""
    model, one, is_open = write_tiny_model(tmp_path / "model"), Receiver("server 0"), [True]

    def rmdir(path: str, *given: Any, **more: Any) -> None:
        if is_open[0]:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        removes(path, *given, **more)

    removes = os.rmdir
    monkeypatch.setattr(os, "rmdir", rmdir)
    with serving(one):
        sender = AdapterSender(rank=0, folder=tmp_path / "adapters", timeout_s=20.0)
        for version in (1, 2, 3):
            is_open[0] = version < 3
            report = sender.send(Adapters(model, 1), version, [one.endpoint])
            assert report is not None and report.ok == ("server 0",)
    assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == ["version-3"]


def test_models_and_targets_that_servers_do_not_take_are_refused(tmp_path: Path) -> None:
    latent, gemma, experts = (
        load_model_config(write_tiny_model(tmp_path / family, family, **more))
        for family, more in (("deepseek_v3", {}), ("gemma3", {}), ("qwen3_moe", {"mlp_only_layers": []}))
    )
    for config in (latent, gemma):
        with pytest.raises(UserError, match=r"`sync.lora`: .* Set it to merged"):
            served_lora(config, SETTINGS)
    with pytest.raises(UserError, match="targets has linear_fc1"):
        served_lora(experts, LoraSettings(4, 8.0, ("linear_qkv", "linear_fc1")))
    with pytest.raises(UserError, match=r"has experts\.linear_fc2\. Set it to merged"):
        served_lora(experts, LoraSettings(4, 8.0, ("linear_qkv", "experts.linear_fc2")))
    assert served_lora(experts, SETTINGS).modules == ("k_proj", "o_proj", "q_proj", "v_proj")
    dense = load_model_config(write_tiny_model(tmp_path / "dense", "qwen3"))
    everything = LoraSettings(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    assert len(served_lora(dense, everything).modules) == 7
