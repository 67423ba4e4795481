"""The seed of every request: the same sample of the same run draws the same random numbers, whenever and wherever it runs.

A server honours it in its deterministic mode (`rollout.deterministic`) and ignores it otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Literal

# What a sample is for: an evaluation after step 5 is not to draw the numbers of step 5's own samples.
Purpose = Literal["train", "greedy", "eval"]


def request_seed(
    run_seed: int, purpose: Purpose, step: int, prompt_id: str, index: int, turn: int = 0, choice: int = 0
) -> int:
    """The first 63 bits of SHA-256 of `run_seed/purpose/step/index/prompt_id`, as a number of at least 0.

    It depends on nothing else: not on the order of requests, the number of servers, or where a run was resumed. index:
    of the sample in its group. turn: of an episode; `turn N/` stands before it for those after the first. choice: of a turn
    that is asked for several times, likewise.
    """
    before = (f"choice {choice}/" if choice else "") + (f"turn {turn}/" if turn else "")
    return _hashed(
        f"{before}{run_seed}/{purpose}/{step}/{index}/{prompt_id}"
    )  # the id last: it may hold a slash itself


def environment_seed(run_seed: int, purpose: Purpose, step: int, prompt_id: str) -> int:
    """What chance in an environment is made of: the same for all episodes of a group, the greedy one too. 63 bits.

    Held-out rows have one for all steps: figures of one evaluation are compared with those of the next.
    """
    when = "eval" if purpose == "eval" else f"train/{step}"
    return _hashed(f"environment/{run_seed}/{when}/{prompt_id}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> 1
