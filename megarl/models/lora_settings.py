"""What a user says about low-rank adapters. Without torch: a driver can read and refuse it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.rules import Rule, rules

TARGETS = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    # Latent attention has these in the place of linear_qkv.
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    # Gated DeltaNet has this one.
    "linear_in",
    # Of every routed expert.
    "experts.linear_fc1",
    "experts.linear_fc2",
)


@dataclass(frozen=True)
class LoraSettings:
    """Which linears get adapters, and how large. linear_fc1 and linear_fc2 are those of dense layers and shared experts;
    of routed experts each has adapters of its own.

    rank: width of A's output. alpha: the adapters' output is multiplied by alpha / rank. targets: names in TARGETS.
    Raises UserError for what cannot be.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise UserError(f"LoRA needs a rank of at least 1 and an alpha above 0; got {self.rank} and {self.alpha}.")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            given = f"{', '.join(unknown)} cannot have LoRA adapters" if unknown else "LoRA needs targets"
            raise UserError(
                f"{given}: choose among {', '.join(TARGETS)}, or set all, which is those of the model but routed experts'."
            )

    @property
    def scale(self) -> float:
        """What multiplies B @ A."""
        return self.alpha / self.rank


def is_routed(name: str) -> bool:
    """Whether a module, a parameter or a rule, by its Megatron name, is of routed experts."""
    return ".mlp.experts." in name


def target_of(linear: str) -> str:
    """The target that a linear is, by its Megatron name, if it is one at all."""
    last = linear.rpartition(".")[2]
    return f"experts.{last}" if is_routed(linear) else last


def linear_of(weight: Rule) -> str:
    """The Megatron name of the linear that a rule's weight belongs to; empty where the rule is of something else."""
    linear, _, kind = weight.megatron.rpartition(".")
    each = "" if weight.expert is None else str(weight.expert)  # Transformer Engine has all experts in one linear
    return linear if kind in ("weight", f"weight{each}") else ""


def adaptable(config: ModelConfig) -> list[str]:
    """Those of TARGETS that a model has."""
    linears = {target_of(linear_of(rule)) for rule in rules(config, "torch")}
    return [target for target in TARGETS if target in linears]


def all_linears(config: ModelConfig) -> list[str]:
    """What `all` stands for: those of TARGETS that a model has outside of its routed experts."""
    return [target for target in adaptable(config) if not target.startswith("experts.")]
