"""Which models servers are asked about, and what fails."""

from __future__ import annotations

from bench.served_models import FAMILIES, cases, failed
from tests.support.tiny import CONFIGS, tiny_config

ON_CUDA = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)  # whose attention SGLang has there alone


def test_every_family_that_is_served_here_is_among_them_with_both_heads() -> None:
    assert sorted([*FAMILIES, *ON_CUDA]) == sorted(CONFIGS)
    for family, told, overrides in cases():
        tied = tiny_config(family, **overrides).tie_word_embeddings
        assert told not in ("tied", "head of its own") or tied == (told == "tied")


def test_what_is_served_otherwise_than_transformers_computes_it_fails_and_nothing_else() -> None:
    rows = [
        {"config": config, "refused": refused, "difference": difference}
        for config, refused, difference in [
            ("good", "", 1e-6),
            ("bad", "", 1e-3),
            ("broken", "", None),
            ("refused", "no head", 0.5),
            ("refused and broken", "no head", None),
            ("refused for nothing", "no head", 0.0),
        ]
    ]
    assert [row["config"] for row in failed(rows)] == ["bad", "broken"]
