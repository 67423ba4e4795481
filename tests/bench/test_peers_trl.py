"""What decides in the comparison with TRL, with numbers by hand; its model, which ends responses by chance."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.peers_trl import no_slower, ratios
from bench.support.peers import Size, make_model
from tools.make_tiny_model import END, make_tokenizer


def test_the_fastest_form_of_the_same_dtype_counts():
    rates = {
        "TRL, float32": [100.0],
        "TRL, float32, continuous batching": [80.0, 200.0, 130.0],
        "TRL, bf16, continuous batching": [150.0],
        "megarl, float32": [390.0],
        "megarl, bfloat16": [300.0],
    }
    found = {form: [{"tokens_per_s": rate} for rate in some] for form, some in rates.items()}
    assert ratios(found) == {"megarl, float32": 3.0, "megarl, bfloat16": 2.0}


@pytest.mark.parametrize(
    ("start_s", "seconds", "accuracy", "apart", "whole"),
    [
        (5, 8, 0.95, True, True),
        (20, 8, 0.95, True, False),
        (1, 11, 0.95, False, True),
        (5, 8, 0.85, False, False),
    ],
)
def test_no_slower_with_the_start_and_without_by_the_medians_of_turns(start_s, seconds, accuracy, apart, whole):
    mine = {"start_s": start_s, "seconds": seconds, "accuracy": {0: 0.0, 5: accuracy}}
    slow, other = mine | {"start_s": 100, "seconds": 100}, {"start_s": 4, "seconds": 10, "accuracy": {5: 1.0}}
    found = {"megarl": [mine, slow, mine], "TRL": [other, other, other | {"start_s": 0, "seconds": 1}]}
    assert no_slower(found) == {"apart": apart, "with the start": whole}


def test_the_model_ends_a_response_with_the_same_chance_everywhere(tmp_path):
    size = Size(hidden=64, layers=2, heads=2, kv_heads=1, mean=50, longest=200)
    make_model(tmp_path, size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 256, (16, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        chance = model(input_ids=tokens).logits.softmax(-1)[..., make_tokenizer().convert_tokens_to_ids(END)]
    assert chance.mean().item() == pytest.approx(1 / 50, rel=0.1)
    assert chance.std().item() < 0.5 * chance.mean().item()
