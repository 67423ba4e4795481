"""The seed of every request: the same sample of the same run draws the same random numbers, whenever and wherever it runs.

A server honours it in its deterministic mode (`rollout.deterministic`) and ignores it otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Literal

# What a sample is for: an evaluation after step 5 is not to draw the numbers of step 5's own samples.
Purpose = Literal["train", "greedy", "eval"]


def request_seed(run_seed: int, purpose: Purpose, step: int, prompt_id: str, index: int) -> int:
    """The first 63 bits of SHA-256 of `run_seed/purpose/step/index/prompt_id`, as a number of at least 0.

    It depends on nothing else: not on the order of requests, the number of servers, or where a run was resumed. index:
    of the sample in its group.
    """
    text = f"{run_seed}/{purpose}/{step}/{index}/{prompt_id}"  # the id last: it may hold a slash itself
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> 1
