"""One training, measured at many layouts, and how far each is from one rank. Used by the tests and by the benchmark.

A difference is relative: of a tensor, max|a - b| / max|a| over its elements, a being one rank's; of a number, |a - b| / |a|.
What is reported is the largest over all tensors, with its name. Everything is compared to one rank that takes each mini-batch
as one micro-batch, so that the cut into micro-batches is under test as well.

The ranks are processes of `invariance_ranks`: one world of each size goes through all layouts of that size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megarl.core.layout import Layout
from megarl.core.ports import free_port
from tests.support.forked_ranks import Ranks
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, write_tiny_model
from tests.support.tolerances import tolerance
from tests.training.harness import VOCAB

RANKS = "tests.training.invariance_ranks"
BOUND = tolerance(chosen()).loss
MICRO_BATCHES = (1, 4)
WORLD_SIZES = (1, 2, 4)
DEADLINE_S = 900.0  # of one world; a quiet machine needs a tenth

Recompute = Literal["none", "selective", "full"]
Kind = Literal["alone", "together", "balance", "control"]
Tensors = dict[str, Tensor]

# Layers enough for four pipeline ranks, or for two with two virtual stages each; `deep`: for stages of different sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"num_hidden_layers": 4}),
    "tied": ("qwen2", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "deep": ("llama", {"num_hidden_layers": 6}),
    "local": ("gemma3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "moe": (
        "qwen3_moe",
        {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []},
    ),
    "gated": (
        "qwen2_moe",
        {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []},
    ),
    "mla": ("deepseek_v3", {"num_hidden_layers": 4}),
    "gate in one": ("glm4", {"num_hidden_layers": 2}),
    "qkv in one": ("phi3", {"num_hidden_layers": 2}),
    "growing queries": ("ministral3", {"num_hidden_layers": 2}),
    "partly rotated": ("glm4_moe", {"num_hidden_layers": 2}),
    "scaled": ("granite", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "scaled, experts": ("granitemoe", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "norms behind": ("olmo3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "no positions": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]}),
    "whole norms, experts": ("olmoe", {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}),
    "bias behind attention": ("seed_oss", {"num_hidden_layers": 2}),
    "whole norms, partly rotated": (
        "minimax_m2",
        {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "learned activation": ("apertus", {"num_hidden_layers": 2}),
    "neighbours": ("ernie4_5", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "biased softmax": ("ernie4_5_moe", {"num_hidden_layers": 2, "moe_num_experts": 4, "moe_k": 2}),
    "norms behind rotation": ("hunyuan_v1_dense", {"num_hidden_layers": 2}),
    "norms behind rotation, experts": ("hunyuan_v1_moe", {"num_hidden_layers": 2, "num_experts": 4, "moe_topk": 2}),
    "mla, softmax": ("deepseek_v2", {"num_hidden_layers": 2, "q_lora_rank": None}),
    "linear": ("qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "linear, experts": (
        "qwen3_5_moe",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "layered heads": ("gemma4", {"num_hidden_layers": 2}),
    "layered heads, experts": (
        "gemma4",
        GEMMA4_EXPERTS | {"num_hidden_layers": 2, "num_experts": 4, "top_k_experts": 2},
    ),
    "sinks": ("gpt_oss", {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "critic": ("qwen3", {"num_hidden_layers": 4}),
    "reward": ("qwen3", {"num_hidden_layers": 4}),
    "preference": ("qwen3", {"num_hidden_layers": 4}),
    "labelled": ("qwen3", {"num_hidden_layers": 4}),
    "distilled": ("qwen3", {"num_hidden_layers": 4}),
}
# Have a score head in the vocabulary's place: what is read of them are values, in the place of log-probs.
CRITIC, REWARD = "critic", "reward"
# Learns from pairs, as the reward model does.
PREFERENCE = "preference"
# Learns from answers that are labelled one by one, beside a KL that is estimated at the same layout.
LABELLED = "labelled"
# Learns from a teacher's likeliest tokens, and is read at its own.
DISTILLED = "distilled"
# A copy of another model of which one tensor is a little larger.
PERTURBED, PERTURBED_FROM = "perturbed", "dense"
PERTURBED_TENSOR, PERTURBATION = "model.layers.2.self_attn.o_proj.weight", 1e-4


@dataclass(frozen=True)
class Case:
    """A model at a layout."""

    model: str
    layout: Layout
    recompute: Recompute = "none"

    @property
    def label(self) -> str:
        """The layout, and what else is set."""
        return str(self.layout) + ("" if self.recompute == "none" else f", recompute {self.recompute}")

    def __str__(self) -> str:
        return f"{self.model} at {self.label}"


@dataclass(frozen=True)
class Result:
    """What a layout gave; whole tensors, under HF names, are at rank 0 alone. Empty is what was not asked for.

    logprobs: of each shard, one array for each micro-batch that was scored. gradients: of the first step, not clipped.
    steps: the metrics of each step. weights: after the last.
    """

    logprobs: list[list[np.ndarray]] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How far a case, with so many micro-batches a mini-batch, is from one rank with one.

    All measures are relative; None where nothing was asked for.
    """

    kind: Kind
    case: str
    model: str
    layout: str
    ranks: int
    micro_batches: int
    logprobs: float | None
    losses: float | None  # the loss, its parts, and the entropy, of every step
    grad_norms: float | None  # of every step
    gradients: float | None
    worst_gradient: str
    weights: float | None
    worst_weight: str

    @property
    def largest(self) -> float:
        """Of all measures."""
        measures = (self.logprobs, self.losses, self.grad_norms, self.gradients, self.weights)
        return max(value for value in measures if value is not None)


def difference(kind: Kind, name: str, case: Case, micro_batches: int, found: Result, expected: Result) -> Difference:
    """Compare a case with its reference."""
    gradients, worst_gradient = furthest(found.gradients, expected.gradients)
    weights, worst_weight = furthest(found.weights, expected.weights)
    pairs = [pair for shard in found.logprobs for pair in zip(shard, expected.logprobs[0], strict=True)]
    return Difference(
        kind=kind,
        case=name,
        model=case.model,
        layout=case.label,
        ranks=case.layout.world_size,
        micro_batches=micro_batches,
        logprobs=max((relative(*pair) for pair in pairs), default=None),
        losses=_furthest_metric(found, expected, ("loss", "entropy", "kl")),
        grad_norms=_furthest_metric(found, expected, ("grad_norm",)),
        gradients=gradients,
        worst_gradient=worst_gradient,
        weights=weights,
        worst_weight=worst_weight,
    )


def relative(found: Any, expected: Any) -> float:
    """max|found - expected| / max|expected|; inf where only `expected` is zero, and where something is not a number."""
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if torch.equal(found, expected):
        return 0.0
    apart, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    return apart / scale if scale > 0 and not math.isnan(apart) else math.inf


def furthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float | None, str]:
    """The largest relative difference over all tensors, and that tensor's name; nothing where nothing was found."""
    if not found:
        return None, ""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max((relative(found[name], tensor), name) for name, tensor in expected.items())


def _furthest_metric(found: Result, expected: Result, kinds: tuple[str, ...]) -> float | None:
    if not found.steps:
        return None
    steps = list(zip(found.steps, expected.steps, strict=True))
    assert all(step.keys() == reference.keys() for step, reference in steps)
    return max(
        relative(step[name], value)
        for step, reference in steps
        for name, value in reference.items()
        if any(kind in name for kind in kinds)
    )


def write_models(root: Path) -> None:
    """Write an HF folder for each model, and the perturbed one."""
    from safetensors.torch import load_file, save_file

    for name, (family, overrides) in (MODELS | {PERTURBED: MODELS[PERTURBED_FROM]}).items():
        write_tiny_model(root / name, family, vocab_size=VOCAB, **overrides)
    for name in (CRITIC, REWARD):
        _give_score_head(root / name)
    [file] = (root / PERTURBED).glob("*.safetensors")
    tensors = load_file(file)
    tensors[PERTURBED_TENSOR] *= 1 + PERTURBATION
    save_file(tensors, file, metadata={"format": "pt"})


def _give_score_head(folder: Path) -> None:
    """Make a language model's folder one of the same model for sequence classification, with one random score."""
    from safetensors.torch import load_file, save_file

    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    hidden = tensors.pop("lm_head.weight").shape[1]
    tensors["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(8)) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    config |= {"architectures": names, "id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}
    (folder / "config.json").write_text(json.dumps(config))


def measure(root: Path, ranks: Ranks, *, thorough: bool = False) -> tuple[list[Difference], str]:
    """Run the cases in an empty folder; what was measured, and what the ranks of a world said that did not end well.

    thorough: all cases, not only those of the tests.

    A world ends at the first case that fails: then the cases behind it are missing.
    """
    write_models(root)
    found, errors = [], ""
    for world_size in WORLD_SIZES:
        path = root / f"world{world_size}.jsonl"
        path.touch()
        words = (world_size, free_port(), root, "thorough" if thorough else "tests")
        errors += ranks.run(RANKS, world_size, *words, log=path.with_suffix(".log"), deadline_s=DEADLINE_S)
        found += [Difference(**json.loads(line)) for line in path.read_text().splitlines()]
    return found, errors


def append(path: Path, item: Difference) -> None:
    """Write one line at once: it is there even if the next case ends the process."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(item)) + "\n")
