"""Builds one role's part on one rank: model, adapters, data parallel, optimizer. What is done with it is engine.py's.

Import only after `models.bootstrap.prepare_megatron`; call with the layout's groups active.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megarl.core.platform import Platform
from megarl.models.config import ModelConfig
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import wide_parameters
from megarl.models.hf_weights import exact_buffers, global_tensors, hold_in_float32, layer_spec, load_hf_weights
from megarl.models.lora import add_adapters
from megarl.models.lora_settings import LoraSettings
from megarl.models.replay import Replays
from megarl.models.seen import add_tower
from megarl.training.grad_share import GradShares
from megarl.training.image_features import ImageFeatures, make_image_features
from megarl.training.optimizer import Stepper, freeze_routers, is_distributed, mark_copies, mark_experts
from megarl.training.parallel import Groups
from megarl.training.schedule import AuxiliaryScale, finalize_without_scaling
from megarl.training.spec import RoleSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """A role's part on this rank.

    chunks: one model a virtual stage. wrapped: the same as Megatron's schedules want them: cast, and in training in
    DistributedDataParallel. stepper: None where the role is frozen. auxiliary: the share of the experts' own loss.
    replays: the routers, where the rollout's routing is replayed. images: None for a model of text.
    shares: of the parameters in its gradients.
    """

    chunks: list[GPTModel]
    wrapped: list[Any]
    stepper: Stepper | None
    auxiliary: AuxiliaryScale | None
    replays: Replays | None
    images: ImageFeatures | None
    shares: GradShares | None = None

    @property
    def towers(self) -> list[torch.nn.Module]:
        """Frozen vision towers, whose parameters are on the device as well."""
        return [] if self.images is None else self.images.frozen


def build_role(config: ModelConfig, spec: RoleSpec, groups: Groups, platform: Platform, seed: int) -> Built:
    """Build, and load the weights of the HF folder. seed: of new weights. Collective over the pool."""
    dtype = DTYPES[spec.dtype]
    chunks = build_gpt(
        config,
        groups.layout,
        groups.collection,
        dtype=dtype,
        platform=platform,
        recompute=spec.recompute,
        recompute_num_layers=spec.recompute_num_layers,
        aux_loss_coef=spec.aux_loss_coef,
    )
    if config.vision is not None and config.vision.tower:
        add_tower(chunks, spec.folder, dtype, platform.device, recomputed=spec.recompute == "full")
    if wide := wide_parameters(config, layer_spec(chunks), spec.dtype, spec.stored):
        hold_in_float32(chunks, wide, groups.layout, groups.rank)
    if spec.load_weights:
        load_hf_weights(chunks, config, spec.folder, groups.layout, groups.rank, stored=_stored(config, spec.folder))
    images = make_image_features(chunks, config, spec, groups, dtype, platform.device)
    if spec.lora is not None:
        settings = LoraSettings(spec.lora.rank, spec.lora.alpha, spec.lora.targets)
        add_adapters(chunks, settings, groups.collection, seed)
    recomputed = (spec.recompute_num_layers or config.num_layers) if spec.recompute == "full" else 0
    replays = Replays(chunks, recomputed=recomputed) if spec.routing_replay else None
    if spec.optimizer is not None and spec.optimizer.freeze_router:
        freeze_routers(chunks)
    with exact_buffers(chunks):
        wrapped: list[Any] = [Float16Module(c.config, c) if dtype == torch.bfloat16 and not wide else c for c in chunks]
    if spec.optimizer is None:
        for chunk in wrapped:
            chunk.requires_grad_(False)
        return Built(chunks, wrapped, None, None, replays, images)
    auxiliary = AuxiliaryScale() if config.moe is not None and spec.aux_loss_coef > 0 else None
    wrapped = _data_parallel(chunks, wrapped, groups, auxiliary, images, is_distributed(spec.optimizer))
    stepper = Stepper(spec.optimizer, wrapped, dtype, spec.total_steps)
    parameters = global_tensors(chunks, groups.layout, groups.rank)
    shares = GradShares(stepper.optimizer, parameters, groups.place, scores=config.head == "score")
    return Built(chunks, wrapped, stepper, auxiliary, replays, images, shares)


def _stored(config: ModelConfig, folder: Path) -> ModelConfig:
    """What the folder holds: its own head, and a tower as the model has it."""
    return replace(load_model_config(folder), vision=config.vision)


def _data_parallel(
    chunks: list[GPTModel],
    wrapped: list[Any],
    groups: Groups,
    auxiliary: AuxiliaryScale | None,
    images: ImageFeatures | None,
    distributed_optimizer: bool,
) -> list[Any]:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, average_in_collective=False
    )
    config = chunks[0].config
    # The loss carries its denominator, so gradients are summed over data parallel and never rescaled.
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = partial(_finalize, images)
    config.grad_scale_func = auxiliary
    for chunk in chunks:
        mark_experts(chunk)
        mark_copies(chunk)
    return [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0, pg_collection=groups.collection)
        for index, chunk in enumerate(wrapped)
    ]


def _finalize(images: ImageFeatures | None, model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Behind a mini-batch's passes: what is asked of images, then all gradients are summed over the ranks."""
    if images is not None:
        images.learn()
    finalize_without_scaling(model, num_tokens, **groups)
