"""Run by `alone.py`: where one request of a batch filters or is greedy, SGLang's sampler draws all others by rank, but for those
that ask for it they do not draw by their number otherwise.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megarl.serving.sampling import Sampling

PLAIN = Sampling(1)
OTHERS = (replace(PLAIN, temperature=0.0), replace(PLAIN, top_p=0.7))


def main() -> None:
    """Raises AssertionError where a request draws another token beside others than by itself."""
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    params: Any = importlib.import_module("sglang.srt.sampling.sampling_params")
    sampler.multinomial_with_seed = sampler.multinomial_with_seed.__wrapped__
    probs = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds, positions = torch.arange(30) * 10**15, torch.arange(30) % 7

    def drawn(kinds: list[Sampling]) -> list[int]:
        """As Sampler.forward does it on CUDA in deterministic mode."""
        asked = [params.SamplingParams(**kind.body()) for kind in kinds]
        for each in asked:
            each.normalize(None)
            each.verify(64)
        top_ks, top_ps = torch.tensor([each.top_k for each in asked], dtype=torch.int32), [each.top_p for each in asked]
        is_simple = all(each.top_k == params.TOP_K_ALL and each.top_p == 1.0 for each in asked)
        rows = len(kinds)
        batch = SimpleNamespace(
            top_ks=top_ks,
            top_ps=torch.tensor(top_ps),
            min_ps=torch.zeros(rows),
            need_min_p_sampling=False,
            sampling_seed=seeds[:rows],
            sampling_mask_batch_indices=None,
        )
        backend = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
        with patch.object(sampler, "get_exec", lambda: backend):
            found, _ = sampler.Sampler._sample_from_probs(
                None, probs[:rows].clone(), batch, positions[:rows], is_simple
            )
        tokens: list[int] = found.tolist()
        return tokens

    first = 20
    ranked = replace(PLAIN, by_rank=True)
    for kind, is_same in ((PLAIN, False), (ranked, True)):
        alone, beside = drawn([kind] * first), drawn([kind] * first + [*OTHERS] * 5)
        assert (alone == beside[:first]) is is_same, kind
    assert drawn([ranked, OTHERS[0]])[1] == int(probs[1].argmax()), "a greedy one has the likeliest beside them"
