"""How a response is asked for. Not for what comes back (client.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.types import TokenArray

# Of SGLang's 2**30 for all tokens: it leaves none out, and counts as a filter.
LEAVES_NONE_OUT = 2**30 - 1


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled. temperature 0 is greedy; top_k -1 and top_p 1 are off; max_tokens bounds it.

    seed: of its random numbers, of 63 bits; a server outside of its deterministic mode has its own. alone: share cached
    prefixes with requests of the same tokens only: others' were computed in other shapes, and so were those of an episode's
    turn before, token by token, which a server may have or not. routing: also ask which experts were chosen. by_rank: draw as
    where tokens are left out, though none is (see `Platform.draws_by_rank`).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    routing: bool = False
    seed: int | None = None
    alone: bool = False
    by_rank: bool = False

    def body(self) -> dict[str, Any]:
        """SGLang's sampling_params."""
        body: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": LEAVES_NONE_OUT if self.by_rank and self.top_k < 1 else self.top_k,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.seed is not None:
            body["sampling_seed"] = self.seed
        return body


def prompt_key(token_ids: Sequence[int] | TokenArray, images: Sequence[bytes] = ()) -> str:
    """What requests of one prompt have in common, and no others: a digest of its tokens and its images."""
    digest = hashlib.sha256(np.asarray(token_ids, "<i8").tobytes())
    for image in images:
        digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()
