"""What each of two processes does for test_lora: `<rank> <port> <root>`.

`observe` is what they, and one rank alone, see of an adapted model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.core.types import MicroBatch
from megarl.models.bootstrap import prepare_megatron
from megarl.models.hf_config import load_model_config
from megarl.models.lora_settings import LoraSettings
from megarl.recipe.roles import Optimizer
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, longrope
from tests.training.samples import examples, shards

PLATFORM = chosen()
SEED = 11
VOCAB = 97  # padded under tensor parallel
DENSE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", *DENSE[1:])
LINEAR = ("linear_in", *DENSE)
EXPERTS = ("experts.linear_fc1", "experts.linear_fc2")
SETTINGS = LoraSettings(rank=4, alpha=6, targets=DENSE)
OPTIMIZER = Optimizer(name="sgd", lr=0.5, weight_decay=0.1, clip_grad=0.05)
# One key-value head is fewer than the tensor-parallel ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"vocab_size": VOCAB, "num_key_value_heads": 1, "num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"vocab_size": VOCAB, "tie_word_embeddings": True, "num_hidden_layers": 2}),
    "deepseek": ("deepseek_v3", {"vocab_size": VOCAB, "num_hidden_layers": 2}),
    "gemma": ("gemma3", {"vocab_size": VOCAB}),
    "phi": ("phi3", longrope(0.75) | {"vocab_size": VOCAB}),
    "glm": ("glm4", {"vocab_size": VOCAB}),
    "olmo": ("olmo3", {"vocab_size": VOCAB}),
    "seed": ("seed_oss", {"vocab_size": VOCAB, "num_hidden_layers": 2}),
    "apertus": ("apertus", {"vocab_size": VOCAB, "num_hidden_layers": 2}),
    "ernie": (
        "ernie4_5_moe",
        {"vocab_size": VOCAB, "num_hidden_layers": 2, "moe_num_experts": 4, "tie_word_embeddings": True},
    ),
    "hunyuan": ("hunyuan_v1_moe", {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_experts": 4}),
    "minimax": ("minimax_m2", {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_local_experts": 4}),
    # With a small epsilon the gated norm would blow up the rounding of whatever is near zero before it.
    "linear": ("qwen3_5", {"vocab_size": VOCAB, "rms_norm_eps": 1e-4}),
    "linear in two": ("qwen3_next", {"vocab_size": VOCAB, "rms_norm_eps": 1e-4, "num_experts": 4}),
    "granite": (
        "granitemoe",
        {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_local_experts": 4, "logits_scaling": 1.0},
    ),
    "oss": ("gpt_oss", {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_local_experts": 4}),
    "layered": ("gemma4", GEMMA4_EXPERTS | {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_experts": 4}),
}
# Whose checkpoint a case loads, after the other has written it.
RELOADED = {"pp full": "sp", "tp": "pp full"}


def is_adapter(name: str) -> bool:
    """Whether a parameter, or an entry of a state dict, is an adapter's, by its name."""
    return name.endswith((".lora_a", ".lora_b"))


def settings_of(model: str) -> LoraSettings:
    """The adapters of a model: on everything that can have some."""
    own = {
        **{
            "deepseek": (*LATENT, *EXPERTS),
            "linear": LINEAR,
            "linear in two": LINEAR,
        },  # the latter's experts have none
        "layered": (*DENSE, *EXPERTS),
        **{"oss": (*DENSE[:2], *EXPERTS), "minimax": (*DENSE[:2], *EXPERTS), "granite": EXPERTS},
    }
    return LoraSettings(rank=4, alpha=6, targets=own[model]) if model in own else SETTINGS


@dataclass(frozen=True)
class Case:
    """A model under a layout."""

    model: str
    layout: Layout
    recompute: Any = "none"


CASES = {
    "sp": Case("qwen3", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "pp full": Case("qwen3", Layout(pp=2, world_size=2), "full"),
    "vpp": Case("qwen3", Layout(pp=2, vpp=2, world_size=2)),
    "tp": Case("qwen3", Layout(tp=2, world_size=2)),
    "dp": Case("qwen3", Layout(world_size=2)),
    "cp": Case("qwen3", Layout(cp=2, world_size=2)),
    "tp bias tied": Case("qwen2", Layout(tp=2, world_size=2)),
    "pp tied": Case("qwen2", Layout(pp=2, world_size=2)),
    "latent sp": Case("deepseek", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "latent pp": Case("deepseek", Layout(pp=2, world_size=2)),
    "latent ep": Case("deepseek", Layout(ep=2, world_size=2)),
    "qkv in one tp": Case("phi", Layout(tp=2, world_size=2)),
    "in one sp": Case("glm", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "biases sp": Case("oss", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2)),
    "bias behind sp": Case("seed", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "no gate sp": Case("apertus", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "biased experts ep": Case("ernie", Layout(ep=2, world_size=2)),
    "norms behind rotation sp": Case("hunyuan", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2)),
    "experts etp": Case("minimax", Layout(tp=2, etp=2, sequence_parallel=True, world_size=2)),
    "experts etp alone": Case("granite", Layout(etp=2, world_size=2)),
    "experts dp": Case("minimax", Layout(world_size=2)),
    "stacked experts ep": Case("granite", Layout(ep=2, world_size=2)),
    "experts, whole norms sp": Case("minimax", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2)),
    "whole norms sp": Case("olmo", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "linear attention sp": Case("linear", Layout(tp=2, sequence_parallel=True, world_size=2)),
    "linear attention in two sp": Case("linear in two", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2)),
    "layered heads sp": Case("layered", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2)),
    "sandwich sp": Case("gemma", Layout(tp=2, sequence_parallel=True, world_size=2)),
}


def micro_batches(dp: int = 1) -> list[tuple[MicroBatch, ...]]:
    """For each data-parallel rank two packs of uneven sequences; the same samples, whatever the rank count."""
    parts, _ = shards([examples([9, 17, 30, 12], VOCAB)], dp=dp, micro_batches=2)
    return [part.mini_batches[0].micro_batches for part in parts]


def adapted(case: Case, folder: Path, groups: Any, settings: LoraSettings | None = None) -> list[Any]:
    """This rank's chunks, adapted, B still zero. Within `groups.active()`. settings: those of the model by default."""
    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import load_hf_weights
    from megarl.models.lora import add_adapters

    config = load_model_config(folder)
    chunks = build_gpt(
        config, case.layout, groups.collection, dtype=torch.float32, platform=PLATFORM, recompute=case.recompute
    )
    load_hf_weights(chunks, config, folder, case.layout, groups.rank)
    add_adapters(chunks, settings or settings_of(case.model), groups.collection, SEED)
    return chunks


def fill_b(chunks: Sequence[Any], folder: Path, groups: Any, settings: LoraSettings) -> None:
    """Give B random numbers that every layout agrees on: drawn for each HF tensor, then cut as the rules say."""
    from megarl.models.hf_weights import global_tensors, layer_spec
    from megarl.models.peft import adapted_rules, factor_rules
    from tests.support.whole_tensors import merge

    held = global_tensors(chunks, groups.layout, groups.rank)
    for weight in adapted_rules(load_model_config(folder), settings, layer_spec(chunks)):
        _, rule = factor_rules(weight, settings.rank)
        if rule.megatron in held:
            tensors = [_random(source.name, source.stored) for source in rule.sources]
            dense, routed = (groups.place.tp, groups.layout.tp), (groups.place.etp, groups.layout.etp)
            mine = (0, 1) if rule.cut == "whole" else dense if rule.expert is None else routed
            part = merge(rule, tensors, *mine)
            held[rule.megatron].data.copy_(part)


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) * 1000 + sum(name.encode()))) * 0.1


def score(chunks: Sequence[Any], groups: Any) -> list[np.ndarray] | None:
    """Log-probs of every label, an array for each micro-batch of this rank; None where there are no logits."""
    from megarl.training.batch import cut_sequences, to_device
    from megarl.training.schedule import run_schedule

    layout, micros = groups.layout, micro_batches(groups.layout.dp)[groups.place.dp]
    batches = [to_device(micro, {}, PLATFORM.device, layout, groups.place.cp) for micro in micros]
    with torch.no_grad():
        found = run_schedule(chunks, batches, _logprobs(groups), groups, forward_only=True)
    whole = []
    for part, micro in zip(found, micros, strict=groups.is_last_stage):
        parts = [torch.empty_like(part) for _ in range(layout.cp)]
        dist.all_gather(parts, part.contiguous(), group=groups.cp)
        whole.append(cut_sequences(micro.cu_seqlens, layout).gather([p.cpu().numpy() for p in parts], micro.num_tokens))
    return whole if groups.is_last_stage else None


def _logprobs(groups: Any) -> Any:
    from megarl.training.logprob import vocab_parallel_logprobs

    def evaluate(batch: Any, logits: Tensor) -> Tensor:
        return vocab_parallel_logprobs(logits, batch.labels, vocab_size=VOCAB, group=groups.tp).logprobs

    return evaluate


class Trainer:
    """Data parallel, gradients and one optimizer step for adapted chunks."""

    def __init__(self, chunks: Sequence[Any], groups: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from megarl.training.optimizer import Stepper
        from megarl.training.schedule import finalize_without_scaling

        config = chunks[0].config
        config.finalize_model_grads_func = finalize_without_scaling
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False)
        self.groups = groups
        self.wrapped = [
            DistributedDataParallel(config, settings, chunk, pg_collection=groups.collection) for chunk in chunks
        ]
        self.stepper = Stepper(OPTIMIZER, self.wrapped, torch.float32, total_steps=4)

    def step(self) -> float:
        """Gradients of the weighted sum of log-probs, and one step; returns their norm."""
        from megarl.training.batch import to_device
        from megarl.training.schedule import run_schedule

        groups, evaluate = self.groups, _logprobs(self.groups)

        def loss(batch: Any, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return (evaluate(batch, logits) * batch.weights).sum(), torch.tensor(1, dtype=torch.int32), {}

        micros = micro_batches(groups.layout.dp)[groups.place.dp]
        batches = [to_device(micro, {}, PLATFORM.device, groups.layout, groups.place.cp) for micro in micros]
        self.stepper.zero_grad()
        run_schedule(self.wrapped, batches, loss, groups, forward_only=False)
        # Clipping scales the gradients by what the norm says: here they are as they were, and in `step` not any more.
        self.gradients = {
            p.data_ptr(): p.main_grad.clone() for w in self.wrapped for p in w.parameters() if p.requires_grad
        }
        return self.stepper.step(groups.rank).grad_norm

    def gradient(self, _: str, parameter: Tensor) -> Tensor:
        """For exports: the gradient of an adapter in its place; what is frozen as it is."""
        return self.gradients.get(parameter.data_ptr(), parameter)


def observe(case: Case, root: Path, groups: Any, target: Path) -> dict[str, Any]:
    """Everything that must not depend on the layout. The adapters, PEFT files and merged weights are left in `target`."""
    from megatron.core import dist_checkpointing

    from megarl.models.hf_gather import Gatherer, export_buckets
    from megarl.models.hf_save import save_hf
    from megarl.models.lora import adapters_off, merged
    from megarl.models.peft import peft_tensors, save_peft
    from megarl.training.checkpoint_files import RankStrategy

    folder, layout, rank = root / case.model, groups.layout, groups.rank
    config, pool = load_model_config(folder), dist.group.WORLD if layout.world_size > 1 else None
    settings = settings_of(case.model)
    place = (config, settings, layout, rank, pool)
    with groups.active():
        chunks = adapted(case, folder, groups)
        result: dict[str, Any] = {"initial": peft_tensors(chunks, *place), "untouched": score(chunks, groups)}
        fill_b(chunks, folder, groups, settings)
        result["logprobs"] = score(chunks, groups)
        with adapters_off(chunks):
            result["off"] = score(chunks, groups)
        save_peft(chunks, *place, target / "peft", base_model="tiny")
        buckets = export_buckets(Gatherer(chunks, config, layout, rank, pool, merged(chunks)), 1 << 14)
        if rank == 0:
            save_hf(buckets, config, folder, target / "merged")
        else:
            assert not any(buckets)
        trainer = Trainer(chunks, groups)
        result["norm"] = trainer.step()
        result["gradients"] = peft_tensors(chunks, *place, value=trainer.gradient)
        result["stepped"] = peft_tensors(chunks, *place)
        if layout.vpp == 1 and layout.world_size > 1:  # those that are read
            (target / "checkpoint").mkdir(parents=True, exist_ok=True)
            state = {f"chunk{i}": adapter_state(chunk) for i, chunk in enumerate(chunks)}
            # Megatron's own strategy would start a process that loads all anew, to put a queue in.
            strategy = RankStrategy(copy=False)
            dist_checkpointing.save(state, str(target / "checkpoint"), sharded_strategy=strategy)
        result["trainable"] = sorted(
            name for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad != is_adapter(name)
        )
    return result


def adapter_state(chunk: Any) -> dict[str, Any]:
    """A chunk's adapters as Megatron's checkpoints know them."""
    return {name: entry for name, entry in chunk.sharded_state_dict(metadata={}).items() if is_adapter(name)}


def reload(case: Case, root: Path, groups: Any, source: Path) -> dict[str, Tensor]:
    """The adapters of another layout's checkpoint, as this layout exports them."""
    from megatron.core import dist_checkpointing

    from megarl.models.peft import peft_tensors

    folder, settings = root / case.model, settings_of(case.model)
    pool = dist.group.WORLD if groups.layout.world_size > 1 else None
    with groups.active():
        chunks = adapted(case, folder, groups)
        state = {f"chunk{i}": adapter_state(chunk) for i, chunk in enumerate(chunks)}
        loaded = dist_checkpointing.load(state, str(source / "checkpoint"))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"chunk{index}"], strict=False)
        return peft_tensors(chunks, load_model_config(folder), settings, groups.layout, groups.rank, pool)


def refused(rank: int) -> str:
    """What a pipeline says of which the second stage has no target."""
    from megarl.models.lora import add_adapters
    from megarl.training.parallel import make_groups

    chunk = torch.nn.Module()
    chunk.add_module("linear_fc1" if rank == 0 else "linear_proj", torch.nn.Linear(2, 2))
    groups = make_groups(Layout(pp=2, world_size=2), timeout_s=60, seed=1)
    try:
        add_adapters([chunk], LoraSettings(2, 2, ("linear_fc1",)), groups.collection, SEED)
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    """Go through all cases with one process, and leave the results in `rank<rank>.pt`."""
    rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare_megatron(PLATFORM)
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    join_ranks(rank, 2, PLATFORM, "127.0.0.1", port, timeout_s=60)
    results = {}
    for name, case in CASES.items():
        groups = make_groups(case.layout, timeout_s=60, seed=1)
        results[name] = observe(case, root, groups, root / name)
        if name in RELOADED:
            results[name]["from"] = reload(case, root, groups, root / RELOADED[name])
    results["refused"] = refused(rank)
    torch.save(results, root / f"rank{rank}.pt")
    close_ranks()
