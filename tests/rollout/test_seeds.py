"""Seeds of requests: of what they are made, and that nothing else makes a difference."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np

from megarl.rollout.seeds import environment_seed, request_seed
from megarl.serving.sampling import prompt_key


def test_a_seed_is_the_documented_hash() -> None:
    digest = hashlib.sha256(b"7/train/3/1/row/9").hexdigest()
    assert request_seed(7, "train", 3, "row/9", 1) == int(digest[:16], 16) // 2


def test_every_part_makes_another_seed_that_sglang_takes() -> None:
    seeds = [
        request_seed(*parts)
        for parts in product(
            (0, 1), ("train", "greedy", "eval"), (0, 1, 11), ("", "1", "1/1", "\ud800"), (0, 1, 11), (0, 1, 11)
        )
    ]
    seeds += [environment_seed(run, "train", step, "1/1") for run in (0, 1) for step in (0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_all_attempts_of_a_group_find_the_same_environment() -> None:
    assert environment_seed(1, "train", 3, "row") == environment_seed(1, "greedy", 3, "row")
    assert environment_seed(1, "train", 3, "row") != environment_seed(1, "eval", 3, "row")
    assert environment_seed(1, "train", 3, "row") != environment_seed(1, "train", 4, "row")
    assert environment_seed(1, "eval", 3, "row") == environment_seed(1, "eval", 4, "row")


def test_a_key_is_of_the_tokens_alone() -> None:
    assert prompt_key([1, 2, 3]) == prompt_key(np.array([1, 2, 3], np.int32)) == prompt_key(np.array([1, 2, 3]))
    assert len({prompt_key(tokens) for tokens in ([1, 2, 3], [1, 2], [1, 23], [3, 2, 1])}) == 4
