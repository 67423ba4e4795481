"""Megatron's optimizer and learning-rate schedule for one model, and one step of both.

Adam runs as Megatron's distributed optimizer: its state is split over the data-parallel ranks. That accepts nothing
else, so SGD keeps its state, if it has any, whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.core.errors import GradientError, RewindError, UserError
from megarl.core.log import get_logger
from megarl.recipe.roles import Optimizer
from megarl.training.gradient_watch import GradientWatch

log = get_logger(__name__)

WATCH = "gradient_watch"  # beside the schedule's own


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. taken: off where it was left out, for its gradient."""

    grad_norm: float  # before clipping, over all parameters of all ranks
    lr: float
    taken: bool = True


def is_distributed(section: Optimizer) -> bool:
    """Whether the optimizer's state is split over the data-parallel ranks."""
    return section.name == "adam"


def mark_experts(chunk: torch.nn.Module) -> None:
    """Let the gradients of experts be summed over the ranks that hold the same experts.

    Megatron marks experts only where expert parallel is above 1. Unmarked, they are summed over the ranks that hold the
    same dense weights, which are others wherever expert-tensor parallel is not tensor parallel: at tp 2 with whole
    experts, each rank would keep the gradients of its half of the tokens. It also makes the optimizers' chain, and so
    their checkpoints, the same at every expert-parallel size.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010


def freeze_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """Let no optimizer have the routers' weights. What comes before them learns through them as ever."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.router." in name:
                parameter.requires_grad_(False)


def mark_copies(chunk: torch.nn.Module) -> None:
    """Let weights that every tensor-parallel rank holds whole count once in the gradient's norm.

    Transformer Engine says of each weight of its linears that it is a part of a tensor, also of those that Megatron has whole on
    every rank, as the down-projections of latent attention.
    """
    for name, module in chunk.named_modules():
        if getattr(module, "parallel_mode", "none of its") is None and ".experts" not in name:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, "tensor_model_parallel", False)  # noqa: B010


class Stepper:
    """The optimizer of one model with its schedule; counts its steps from 1."""

    def __init__(
        self, section: Optimizer, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype, total_steps: int
    ) -> None:
        if section.warmup_of(total_steps) >= total_steps:
            raise UserError(
                f"optimizer.warmup_steps is {section.warmup_steps}, but the role makes only {total_steps} "
                f"optimizer steps. Set it to at most {total_steps - 1}, or train for more steps."
            )
        if section.min_lr > section.lr:
            raise UserError(f"optimizer.min_lr is {section.min_lr}, above the peak lr of {section.lr}.")
        self._clip_grad = section.clip_grad
        self._watch, self._on_bad = GradientWatch(section.spike_factor), section.on_bad_gradient
        self._chunks = list(chunks)
        self.optimizer = get_megatron_optimizer(_optimizer_config(section, dtype), self._chunks)
        if section.name == "sgd":
            for member in self.optimizer.chained_optimizers:
                # Megatron leaves this empty for SGD, and calls it to load a checkpoint.
                member.init_state_fn = _init_momentum
        for member in self.optimizer.chained_optimizers:
            _spare_memory(member.optimizer)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=section.lr,
            min_lr=section.min_lr,
            lr_warmup_steps=section.warmup_of(total_steps),
            lr_decay_steps=total_steps,
            lr_decay_style=section.schedule,
            start_wd=section.weight_decay,
            end_wd=section.weight_decay,
            wd_incr_steps=total_steps,
            wd_incr_style="constant",
            # A resumed run may be longer than the one that it goes on from: its recipe decides.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps done, over all runs that led here."""
        return int(self.scheduler.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """The schedule, and what later gradients are measured by; the optimizer's own state is its own to save."""
        return {**self.scheduler.state_dict(), WATCH: self._watch.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        schedule = dict(state)
        if (watched := schedule.pop(WATCH, None)) is not None:  # a checkpoint of an earlier version has none
            self._watch.load_state(watched)
        self.scheduler.load_state_dict(schedule)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, rank: int, look: Callable[[float], None] | None = None) -> StepResult:
        """Clip the gradients and apply them. They are summed over all ranks already.

        look: called with their norm before they are clipped.

        Where the gradient is not finite, or a spike, no weight changes: it raises GradientError or RewindError, or leaves the
        step out, as the recipe says. The schedule goes on: it is one of steps, whatever they do.
        """
        found_inf = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if trouble := self._watch.trouble(math.inf if found_inf else grad_norm):
            self._leave_out(trouble, math.inf if found_inf else grad_norm, rank)
            return StepResult(grad_norm, float(self.optimizer.param_groups[0]["lr"]), taken=False)
        self._watch.took(grad_norm)
        if look is not None:
            look(grad_norm)
        # Before the step: the first step of a warm-up has a rate above zero, and the last of a decay has min_lr.
        self.scheduler.step(1)
        for member in self.optimizer.chained_optimizers:
            parameters = member.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()
        return StepResult(grad_norm, float(self.optimizer.param_groups[0]["lr"]))

    def _leave_out(self, trouble: str, grad_norm: float, rank: int) -> None:
        """Go on without this step. trouble: of its gradient.

        Raises GradientError, or RewindError, where the recipe, or reason, forbids it.
        """
        step = self.num_steps + 1
        if self._on_bad != "skip":
            error = GradientError(
                f"The gradient of optimizer step {step} {trouble}, seen by rank {rank}; the weights were left as "
                "they were. Look at the loss and the log-prob differences of the last steps: a lower learning rate, or float32, "
                "usually mends it; on_bad_gradient: skip, in the optimizer's section, leaves such steps out."
            )
            raise RewindError(str(error)) if self._on_bad == "rewind" else error
        if not self._watch.skip(grad_norm):
            raise GradientError(
                f"The gradient of optimizer step {step} {trouble}, and the last {self._watch.skipped} in a row were left out for "
                "theirs (on_bad_gradient: skip): nothing is learned any more. Go on from a checkpoint before them, with a lower "
                "learning rate or in float32."
            )
        log.warning("The gradient of optimizer step %d %s: the step is left out", step, trouble)
        self.scheduler.step(1)


def _optimizer_config(section: Optimizer, dtype: torch.dtype) -> Any:
    return OptimizerConfig(
        optimizer=section.name,
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        sgd_momentum=section.momentum,
        clip_grad=section.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=is_distributed(section),
    )


def _spare_memory(optimizer: torch.optim.Optimizer | None) -> None:
    """Let torch's own optimizers, where there is no fused one, take one parameter after another.

    On a device they would take all at once, with a temporary as large as all of a moment.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        if "foreach" in group:
            group["foreach"] = False


def _init_momentum(optimizer: torch.optim.SGD, config: Any = None) -> None:
    """Make the state that SGD would make in its first step: a buffer of zeros gives the same first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else []:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
