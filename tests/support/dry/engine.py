"""What Megatron makes of a role: one rank with a tiny model does the work; and what larger layouts are configured with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file, save_file

from megarl.core.errors import GradientError
from megarl.core.layout import Layout, place, stage_layers
from megarl.core.platform import get_platform
from megarl.core.types import Column, MicroBatch, MiniBatch, Shard
from megarl.models.attention import CoreAttention
from megarl.models.gpt import transformer_config
from megarl.models.hf_config import load_model_config
from megarl.training.gradient_watch import FEWEST
from megarl.training.rank import Rank
from megarl.training.spec import DpoObjective, PolicyObjective, RewardObjective, RoleSpec
from tests.support.dry.learning import column_of, rounded, top_of

UPDATES, LENGTHS = 1, (5, 4, 6, 3)
FEW = 2
COLUMNS = {
    "old_logprobs": "actor",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "values": "critic",
    "returns": "reward_model",
    "advantages": "reward_model",
}


class Engines:
    """One rank for all roles that are looked at, of models cut short; what was seen is remembered.

    folder: for those models, whose layers are FEW: more of them are for layouts that one rank cannot have.
    """

    def __init__(self, folder: Path) -> None:
        self._rank = Rank(0, 1, "cpu", seed=1)
        self._rank.rendezvous("127.0.0.1", self._rank.free_port(), timeout_s=30)
        self._seen: dict[str, Any] = {}
        self._folder, self._short = folder, dict[Path, Path]()

    def close(self) -> None:
        """Leave the process group."""
        self._rank.close()

    def facts(self, specs: dict[str, RoleSpec]) -> dict[str, Any]:
        """What becomes of each role: what one rank makes of it, and how a larger layout is configured."""
        return {
            role: (
                self._seen_of(self._work, role, specs),
                _configured(spec) if spec.layout.world_size > 1 and spec.base_of is None else None,
            )
            for role, spec in specs.items()
        }

    def with_bad_gradients(self, specs: dict[str, RoleSpec]) -> dict[str, list[str]]:
        """What becomes of each role's updates whose gradients are no numbers, or much larger than others."""
        return {
            role: self._seen_of(self._suffer, role, specs) for role, spec in specs.items() if spec.objective is not None
        }

    def _seen_of(self, look: Callable[[str, RoleSpec], Any], role: str, specs: dict[str, RoleSpec]) -> Any:
        """What is seen of the role by itself, on one rank."""
        spec, base = self._alone(specs[role]), specs.get(specs[role].base_of or "")
        key = repr((look.__name__, role, spec, base and self._alone(base)))
        if key not in self._seen:
            if base is not None:
                assert spec.base_of is not None
                self._rank.build(spec.base_of, self._alone(base))
            self._rank.build(role, spec)
            self._seen[key] = look(role, spec)
        return self._seen[key]

    def _alone(self, spec: RoleSpec) -> RoleSpec:
        """The role on one rank, with a short model."""
        if spec.folder not in self._short:
            self._short[spec.folder] = _cut(spec.folder, self._folder / f"short{len(self._short)}")
        return replace(spec, layout=Layout(), folder=self._short[spec.folder])

    def _work(self, role: str, spec: RoleSpec) -> dict[str, Any]:
        """Weights after some updates, or what a frozen model says; what offloaded; how often layers were gone through."""
        shard, columns = _given(spec)
        found: dict[str, Any] = {}
        if spec.objective is not None:
            with _counted() as passes:
                found["updates"] = [rounded(list(self._update(role, shard, columns))) for _ in range(UPDATES)]
            found["passes"] = dict(passes)
            # Each while it is there: what offloaded has no memory once all have been taken.
            for bucket in self._rank.buckets(role, 1 << 20):
                found |= {name: rounded(tensor.double().abs().sum()) for name, tensor in bucket}
        elif spec.head == "score":
            found["says"] = _sums(self._rank.values(role, shard))
        else:
            found["says"] = _sums(self._rank.logprobs(role, shard))
        if spec.base_of is None:
            found["offloaded"] = self._rank.engine(role)._offload.asleep
        return found

    def _suffer(self, role: str, spec: RoleSpec) -> list[str]:
        return [self._bad(role, *_given(spec), norm) for norm in (math.nan, 1e9)]

    def _bad(self, role: str, shard: Shard, columns: dict[str, Column], norm: float) -> str:
        """What becomes of an update whose gradients have this norm, after smaller ones."""
        stepper = self._rank.engine(role)._stepper
        assert stepper is not None
        stepper._watch.load_state({"norms": [1.0] * FEWEST, "skipped": 0})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stepper.optimizer, "get_grad_norm", lambda: norm)
            try:
                metrics = self._rank.update(role, shard, columns)
            except GradientError as error:
                return type(error).__name__
        return str([value for name, value in metrics.items() if name.endswith("/skipped_steps")])

    def _update(self, role: str, shard: Shard, columns: dict[str, Column]) -> Iterator[float]:
        metrics = self._rank.update(role, shard, columns)
        return (value for _, value in sorted(metrics.items()))


def _given(spec: RoleSpec) -> tuple[Shard, dict[str, Column]]:
    """What the role works on, and what the others say of it."""
    shard = _shard(pairs=isinstance(spec.objective, RewardObjective | DpoObjective))
    columns = {name: column_of(source, shard) for name, source in COLUMNS.items()}
    if isinstance(spec.objective, PolicyObjective):
        columns["teacher_top"] = top_of("teacher", shard, spec.objective.algorithm.distill_top_k)
    return shard, columns


def _cut(source: Path, target: Path) -> Path:
    """A copy of a model's folder with its first layers."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = FEW
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:FEW]
    (target / "config.json").write_text(json.dumps(config))
    behind = tuple(f"model.layers.{layer}." for layer in range(FEW, load_model_config(source).num_layers))
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _sums(column: Column | None) -> Any:
    assert column is not None
    return rounded([float(part.sum()) for mini in column for part in mini])


def _configured(spec: RoleSpec) -> dict[str, Any]:
    """Megatron's settings, and who holds what."""
    layout, config = spec.layout, load_model_config(spec.folder)
    settings = transformer_config(
        config.with_score_head() if spec.head == "score" else config,
        layout,
        dtype=torch.float32 if spec.dtype == "float32" else torch.bfloat16,
        platform=get_platform("cpu"),
        recompute=spec.recompute,
        aux_loss_coef=spec.aux_loss_coef,
    )
    plain = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return {
        "settings": {name: str(value) for name, value in plain.items() if not callable(value)},
        "places": [asdict(place(rank, layout)) for rank in range(layout.world_size)],
        "layers": stage_layers(layout, config.num_layers),
        "padding": layout.sequence_multiple,
    }


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Counts the forward passes of layers and of attention, those that backward repeats among them."""
    passes = {"layers": 0, "attention": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("layers", TransformerLayer), ("attention", CoreAttention)):
            patch.setattr(kind, "forward", _counting(kind.forward, passes, name))
        yield passes


def _counting(forward: Any, passes: dict[str, int], name: str) -> Any:
    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        passes[name] += 1
        return forward(self, *arguments, **named)

    return counted


def _shard(pairs: bool) -> Shard:
    """Two mini-batches of two sequences."""
    return Shard(tuple(MiniBatch((_micro(lengths, pairs),)) for lengths in (LENGTHS[:2], LENGTHS[2:])))


def _micro(lengths: tuple[int, ...], pairs: bool) -> MicroBatch:
    total, bounds = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    mask = np.ones(total, np.float32)
    mask[bounds[1:] - 1] = 1.0 if pairs else 0.0
    tokens = np.arange(total) * 5 % 40 + 20
    return MicroBatch(
        tokens=tokens,
        labels=np.roll(tokens, -1),
        cu_seqlens=bounds,
        loss_mask=mask,
        weights=mask / mask.sum(),
        rollout_logprobs=-mask,
        sample_index=np.arange(len(lengths)),
        margins=np.zeros(len(lengths) // 2, np.float32) if pairs else None,
        desirable=np.arange(len(lengths), dtype=np.float32) % 2,
    )
