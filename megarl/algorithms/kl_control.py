"""Controllers of the KL's weight: what it is now, and what it becomes after a step. Without torch: the driver holds one."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Ziegler et al. bound the error of one step, so that an outlier cannot throw the coefficient about.
MAX_ERROR = 0.2


@dataclass(frozen=True)
class FixedKl:
    """A coefficient that stays."""

    coef: float

    def updated(self, kl: float, num_samples: int) -> FixedKl:
        """Itself, whatever was measured."""
        return self


@dataclass(frozen=True)
class AdaptiveKl:
    """coef <- coef (1 + e n / horizon), with e = clip(KL / target - 1, -0.2, 0.2), after n samples.

    arXiv 1909.08593, section 2.2. coef: now. target: KL that is aimed at, nats, as it is measured (a sample's sum in the
    paper). horizon: samples after which a lasting error of 0.2 has changed the coefficient by about a fifth.

    Raises ValueError where one is not above 0: a coefficient of 0 would stay 0.
    """

    coef: float
    target: float
    horizon: float = 10_000

    def __post_init__(self) -> None:
        if min(self.coef, self.target, self.horizon) <= 0:
            raise ValueError(f"coef, target and horizon must be above 0; got {self}")

    def updated(self, kl: float, num_samples: int) -> AdaptiveKl:
        """The controller of the next step. kl: measured in this one, nats. num_samples: of this step.

        Never below a thousandth of what it was: more samples than the horizon must not turn its sign.
        """
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=self.coef * max(1 + error * num_samples / self.horizon, 1e-3))


KlController = FixedKl | AdaptiveKl
