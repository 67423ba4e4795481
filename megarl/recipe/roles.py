"""Sections of the models that Megatron holds: layouts, optimizers, and what each role does with them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megarl.recipe.section import (
    AuxLossCoef,
    Decay,
    Fraction,
    FrozenOffload,
    Offload,
    PositiveFloat,
    PositiveInt,
    Recompute,
    RecomputeNumLayers,
    Section,
    UserPath,
)
from megarl.recipe.servers import TeacherServers


class Parallel(Section):
    """Layout of one role; data parallel is what is left of the devices."""

    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    cp: PositiveInt = Field(1, description="context parallel size: each sequence is cut over so many ranks")
    ep: PositiveInt = Field(1, description="expert parallel size: experts are assigned to so many ranks")
    etp: PositiveInt = Field(1, description="tensor parallel size within an expert")
    vpp: PositiveInt = Field(1, description="stages of each pipeline rank, interleaved; needs pp")
    sequence_parallel: bool = Field(True, description="with tp: cut the activations between its regions too")
    first_stage_layers: PositiveInt | None = Field(None, description="layers of the first pipeline rank; default: even")
    last_stage_layers: PositiveInt | None = Field(None, description="layers of the last pipeline rank; default: even")


class Optimizer(Section):
    """Adam or SGD, as Megatron runs it."""

    name: Literal["adam", "sgd"] = Field(
        "adam", description="adam: Apex or Transformer Engine's fused one where present, torch's otherwise"
    )
    lr: PositiveFloat = Field(1e-6, description="peak learning rate")
    beta1: Decay = Field(0.9, description="Adam's first moment")
    beta2: Decay = Field(0.95, description="Adam's second moment")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="of weights, not of norms and biases: decoupled under Adam; under SGD a part of the gradient, and so of the "
        "momentum",
    )
    clip_grad: PositiveFloat = Field(1.0, description="largest global gradient norm")
    spike_factor: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="a gradient whose norm, before clipping, is so many times the median of the last 32 is as bad as one that is "
        "not finite; default: no norm is too large",
    )
    on_bad_gradient: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="an optimizer step whose gradient is not finite, or a spike. stop: ends the run, weights unchanged; "
        "skip: leaves this step out, and counts it; rewind: back to the last checkpoint, and on with other data",
    )
    momentum: Fraction = Field(0.0, description="SGD's momentum")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="after warm-up, down to min_lr at the last optimizer step that the run can make; where groups are dropped, a "
        "step may make fewer, and the rate ends above",
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="optimizer steps of linear warm-up")
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="the same as a share of all optimizer steps of the run, rounded up"
    )
    min_lr: Annotated[float, Field(ge=0)] = Field(
        0.0, description="learning rate at the end of a linear or cosine schedule"
    )
    freeze_router: bool = Field(False, description="routers of a mixture of experts stay as they are")
    freeze_vision_tower: bool = Field(True, description="the vision tower of a model that sees images stays as it is")

    def warmup_of(self, total_steps: int) -> int:
        """Steps of warm-up among so many."""
        return self.warmup_steps or math.ceil(self.warmup_share * total_steps)

    @property
    def follows_length(self) -> bool:
        """Whether learning rates of first steps are others in a longer run."""
        return self.schedule != "constant" or (self.warmup_share > 0 and not self.warmup_steps)


ALL_LINEARS = ("all",)


def _all_or_named(targets: object) -> object:
    return ALL_LINEARS if targets == ALL_LINEARS[0] else targets


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685): the model itself stays as it is, and is its own reference."""

    rank: PositiveInt = Field(32, description="width of an adapter")
    alpha: PositiveFloat = Field(32.0, description="an adapter's output is multiplied by alpha / rank")
    targets: Annotated[tuple[str, ...], BeforeValidator(_all_or_named)] = Field(
        ("linear_qkv", "linear_proj"),
        strict=False,
        description="linears that get adapters: also linear_fc1 (gate_proj and up_proj), linear_fc2 (down_proj); "
        "experts.linear_fc1, experts.linear_fc2, those of every routed expert; those of latent attention; linear_in, Gated "
        "DeltaNet's; all: every linear of the model's layers but those of routed experts",
    )


Adapters = Annotated[Lora | None, Field(description="train low-rank adapters alone; default: the whole model")]
OwnParallel = Annotated[Parallel | None, Field(description="its own layout; default: the actor's")]
ServerPart = Literal["weights", "kv_cache"]  # as SGLang calls them


class Actor(Section):
    """The policy on Megatron."""

    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    mini_batch_samples: PositiveInt | None = Field(
        None, description="samples of one optimizer step; default: all of the step's"
    )
    micro_batch_tokens: PositiveInt = Field(
        16384,
        description="most tokens of one forward pass, on one data-parallel rank; beyond it each sequence is padded to a multiple "
        "of 2 cp where cp is above 1, times tp with sequence_parallel; on cpu 2048 or a multiple, as samples need",
    )
    epochs: PositiveInt = Field(1, description="times that a step's samples are gone through")
    recompute: Recompute = "none"
    recompute_num_layers: RecomputeNumLayers = None
    aux_loss_coef: AuxLossCoef = 0.0
    routing_replay: bool = Field(
        False, description="train a mixture of experts on the routing that the rollout used (R3, arXiv 2510.11370)"
    )
    lora: Adapters = None
    offload: Offload = ()


class Reference(Section):
    """The frozen policy that the KL is measured to."""

    parallel: OwnParallel = None
    offload: FrozenOffload = ()
    refresh_every: PositiveInt | None = Field(
        None, description="steps after which it becomes the actor as it is then; default: it stays what it was"
    )


class Critic(Section):
    """The value model of PPO on Megatron: the model with a head of one number a token."""

    path: UserPath | None = Field(
        None,
        strict=False,
        description="HF folder or name on the hub to begin with: a policy's, or a reward model's with its head; default: "
        "model.path",
    )
    parallel: OwnParallel = None
    optimizer: Optimizer = Optimizer()
    epochs: PositiveInt = Field(1, description="times that it goes through a step's samples")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="first steps in which it alone learns, and the actor stands still"
    )
    value_clip: PositiveFloat | None = Field(
        0.2, description="a value may move so far from the one before the update; null: no clip"
    )
    recompute: Recompute = "none"
    recompute_num_layers: RecomputeNumLayers = None
    offload: Offload = ()


class RewardModel(Section):
    """A model with a score head on Megatron, with the policy's tokenizer: its score joins what the graders say."""

    path: UserPath = Field(
        strict=False, description="HF folder with a score head, as `megarl rm` writes it, or its name on the hub"
    )
    weight: float = Field(1.0, description="what its score counts for, beside the graders' rewards")
    level: Literal["sequence", "token"] = Field(
        "sequence", description="sequence: the score after the last token; token: a reward after each token"
    )
    parallel: OwnParallel = None
    offload: FrozenOffload = ()


class Teacher(Section):
    """A frozen policy with the same tokenizer, to distill from: algorithm.policy_loss distill_top or distill."""

    path: UserPath | None = Field(
        None,
        strict=False,
        description="HF folder (config.json, safetensors), or name on the hub; default: it is served, at teacher.servers",
    )
    servers: TeacherServers | None = Field(
        None,
        description="servers of it that somebody else started, in the place of path: no rank holds it, and they are asked for "
        "log-probs of each sample; default: the run's ranks hold it",
    )
    parallel: OwnParallel = None
    offload: FrozenOffload = ()
