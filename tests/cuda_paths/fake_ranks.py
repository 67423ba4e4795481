"""`python -m tests.cuda_paths.fake_ranks`: what CUDA's ranks build and run, without a device; one JSON line, by kind of layers.

Each kind has a process of its own, a copy of this one, which meets Megatron there.
fused: Megatron's own Transformer Engine layers, over a fake of that package with the real one's names and signatures
(tests/support/fake_transformer_engine.py). torch: our layers, as CUDA has them where Transformer Engine is not installed.
`built`: every role of every recipe of a real model, and models of families without a recipe, on torch's meta device, at ranks
that together hold every part of it; the process groups are torch's fake ones. `ran`: updates of small models, one rank, all
of the engine real but the kernels.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.core.layout import Layout, place
from megarl.core.platform import Platform, get_platform
from megarl.core.types import Column, FloatArray, Shard
from megarl.models import megatron_cpu
from megarl.models.config import ModelConfig
from megarl.models.hf_config import load_model_config
from megarl.models.known_configs import FOLDER, known_config
from megarl.placement.workload import read_model
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import load_recipe
from megarl.recipe.roles import Lora, Optimizer
from megarl.training.rank import Rank
from megarl.training.spec import PolicyObjective, RoleSpec, SftObjective
from tests.support import fake_transformer_engine
from tests.support.large import LAYOUTS, large_model
from tests.support.tiny import longrope, write_tiny_model
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_MOE, write_tiny_vision_model
from tests.training.samples import examples, shards
from tests.training.seeing import pictured_shards, some_pictured

RECIPES = Path(__file__).parents[2] / "recipes"
SCORES = ("critic", "reward_model")
# All that changes which modules of a layer are called, and how.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recompute": {"recompute": "full"},
    "recompute of two layers": {"recompute": "full", "recompute_num_layers": 2},
    "selective recompute": {"recompute": "selective"},
    "bfloat16": {"dtype": "bfloat16"},
    "adapters": {"lora": Lora(rank=8, targets=("linear_proj",))},
    "adapters behind norms": {"lora": Lora(rank=8, targets=("linear_qkv", "linear_proj"))},
}
# Families whose layers Transformer Engine can make, and what differs from the common tiny model.
TWO = {"num_hidden_layers": 2}  # checkpoints of experts have many tensors: with one layer of each kind there are fewer
FAMILIES: dict[str, dict[str, Any]] = {
    "seed_oss": {"attention_out_bias": False},  # as published: with one the layers are torch's
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {"num_key_value_heads": 1},
    "smollm3": {},
    "ministral3": {},
    "granite": {},
    "granitemoe": TWO,
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v3": {},
    "deepseek_v2": TWO,
    "ernie4_5": {},
    "ernie4_5_moe": TWO,
    "glm4_moe": TWO,
    "glm4_moe_lite": TWO,  # whose latents' norms have another epsilon than the others
    "qwen2_moe": TWO,
    "phi3": longrope(0.75)
    | {"seed": 1},  # at 0 a gradient of an adapter is all rounding, of which Adam makes a whole step
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
WITH_EXPERTS = (
    *("deepseek_v2", "ernie4_5_moe"),
    *("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen2_moe", "granitemoe"),
)
# Dense, with experts, with latents: families of one kind of layer differ in modules that these ways do not tell from others.
KINDS_OF_LAYERS = ("qwen3", "qwen3_moe", "deepseek_v3")
TORCHS = "torch's attention"  # as on devices where Transformer Engine has none for packed sequences
# In which ways checkpoints go from one kind of layers to the other: the others write the same tensors.
READ = ("plain", "adapters", "adapters behind norms")
# What is tried of those alone: it is of layers, not of a family's names and numbers.
OF_KINDS = ("full recompute", "recompute of two layers", "selective recompute", "bfloat16")
# Layers of a model without stages that are built: all it has are like them.
FEW = 4
ROLE = "actor"
KINDS = ("fused", "torch")
# Models that see images: their rotation is not of Transformer Engine's.
SEEING = (QWEN2_5, QWEN3, QWEN3_MOE)
SEEING_WAYS = ("plain", "full recompute")
# A published model of a family that no recipe has, at a layout that cuts all it has; its first layers are enough. More: LAYOUTS.
GLM = "zai-org/GLM-4.5-Air", Layout(tp=2, pp=2, ep=8, sequence_parallel=True, world_size=16)


def cases() -> Iterator[tuple[str, ModelConfig, Layout]]:
    """Every role of every recipe of a real model; roles that are built alike once. And models of families without a recipe."""
    seen = set()
    yield GLM[0], shortened(read_model(FOLDER / GLM[0])), GLM[1]
    for family, layout in LAYOUTS.items():
        yield family, shortened(large_model(family)), layout
    for file in sorted(RECIPES.glob("*.yaml")):
        if file.stem.startswith("quickstart"):
            continue
        recipe = load_recipe(file).recipe
        known = known_config(recipe.model.path)
        assert known is not None, recipe.model.path
        model = read_model(known.parent)  # a reward model that is not here has the policy's sizes, as in a plan
        for role, layout in role_layouts(recipe).items():
            config = model.with_score_head() if role in SCORES else model
            key = (config.head, known, layout)
            if key not in seen:
                seen.add(key)
                yield f"{file.stem} {role}", config if layout.pp > 1 else shortened(config), layout


def shortened(config: ModelConfig) -> ModelConfig:
    """The model's first layers."""
    first = frozenset(range(FEW))
    kinds = ("moe_layers", "local_layers", "linear_layers", "unrotated_layers")
    return replace(config, num_layers=FEW, **{kind: getattr(config, kind) & first for kind in kinds})


def covering(config: ModelConfig, layout: Layout) -> list[int]:
    """Ranks that together have every stage, every share of the dense weights, and every share of the experts.

    Shares of different stages are cut alike: not every stage comes with every share.
    """
    chosen, covered = [], set()
    for rank in range(layout.world_size):
        where = place(rank, layout)
        parts: set[tuple[Any, ...]] = {("stage", where.pp), ("dense", where.tp)}
        if config.moe is not None:
            parts.add(("experts", where.ep, where.etp))
        if parts - covered:
            chosen.append(rank)
            covered |= parts
    return chosen


def build(config: ModelConfig, layout: Layout, platform: Platform) -> dict[str, Any]:
    """Bytes of the weights of the fullest rank; a mistake is an exception."""
    from megatron.core import parallel_state

    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import by_rule, layer_spec
    from megarl.training.parallel import make_groups

    ranks, sizes, specs = covering(config, layout), [], set()
    for rank in ranks:
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        try:
            groups = make_groups(layout, timeout_s=60, seed=1)
            with groups.active():
                chunks = build_gpt(config, layout, groups.collection, dtype=torch.bfloat16, platform=platform)
            held = [tensor for _, _, tensor in by_rule(chunks, config, layout, rank)]
            assert all(tensor.is_meta for tensor in held)
            sizes.append(sum(tensor.nbytes for tensor in held))
            specs.add(layer_spec(chunks))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return {"ranks": len(ranks), "of": layout.world_size, "bytes": max(sizes), "specs": sorted(specs)}


def build_all(platform: Platform) -> dict[str, Any]:
    """What each case's ranks hold, or why they cannot be built. What is the same for many of them is made once."""
    from megatron.core import parallel_state

    from megarl.models import hf_weights

    found: dict[str, Any] = {}
    made = hf_weights.rules

    @functools.cache
    def rules_once(*given: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(made(*given, **options))

    ranks_of = functools.cache(parallel_state.generate_masked_orthogonal_rank_groups)

    def ranks_once(world_size: int, sizes: list[int], mask: list[bool]) -> list[list[int]]:
        return [list(ranks) for ranks in ranks_of(world_size, tuple(sizes), tuple(mask))]

    with (
        patch.object(hf_weights, "rules", rules_once),
        patch.object(parallel_state, "generate_masked_orthogonal_rank_groups", ranks_once),
    ):
        for name, config, layout in cases():
            start = time.monotonic()
            found[name] = attempt(functools.partial(build, config, layout, platform))
            found[name]["seconds"] = round(time.monotonic() - start, 1)
    return found


def read_in(family: str) -> list[str]:
    """The ways in which each kind reads what the other wrote; adapters' parts are named as kinds of layers have them."""
    return [way for way in ways(family) if way in READ and (way == "plain" or family in KINDS_OF_LAYERS)]


def ways(family: str) -> dict[str, dict[str, Any]]:
    """What is tried of a family: latent attention has no linear_qkv, and some ways are for whole kinds of layers.

    Where there are adapters behind norms, the linears behind none have some as well, and so have routed experts.
    """
    without = "adapters behind norms" if family in LATENT else "adapters"
    tried = [way for way in RUNS if way != without]
    found = {way: RUNS[way] for way in tried if family in KINDS_OF_LAYERS or way not in OF_KINDS}
    if family in WITH_EXPERTS:
        for way in found.keys() & {"adapters", "adapters behind norms"}:
            lora = found[way]["lora"]
            targets = (*lora.targets, "experts.linear_fc1", "experts.linear_fc2")
            found[way] = {"lora": lora.model_copy(update={"targets": targets})}
    return found


def run_all(root: Path) -> dict[str, Any]:
    """Updates of each small model, in each way, by both kinds of layers: largest difference of log-probs, and gradient norms."""
    from megarl.models import layer_spec
    from megarl.training import rank as ranks

    cpu = get_platform("cpu")
    found: dict[str, Any] = {}
    with_engine = replace(cpu, has_transformer_engine=True)
    with patch.object(ranks, "get_platform", lambda name: with_engine):
        kinds = {fused: ranks.Rank(0, 1, "cpu", seed=1) for fused in (False, True)}
    kinds[False].platform = cpu
    kinds[False].rendezvous("127.0.0.1", kinds[False].free_port(), 60.0)
    kinds[True]._timeout_s = 60.0  # the process has joined itself
    with in_float32_too():
        for family, differs in FAMILIES.items():
            write_tiny_model(root / family, family, **differs)
            for way, settings in ways(family).items():
                reads = way in read_in(family)
                found[f"{family}: {way}"] = attempt(functools.partial(compare, kinds, root / family, settings, reads))
            if family in KINDS_OF_LAYERS:
                with patch.object(layer_spec, "attends_packed", lambda *_: False):
                    found[f"{family}: {TORCHS}"] = attempt(functools.partial(compare, kinds, root / family, {}, True))
        for architecture in SEEING:
            write_tiny_vision_model(root / architecture, architecture)
            for way in SEEING_WAYS:
                found[f"{architecture}: {way}"] = attempt(
                    functools.partial(compare, kinds, root / architecture, RUNS[way], False)
                )
    kinds[False].close()
    return found


@contextmanager
def in_float32_too() -> Iterator[None]:
    """Transformer Engine's layers also where it would compute in TF32: what stands in for it computes in float32."""
    from megarl.models import gpt, layer_spec

    real = layer_spec.uses_transformer_engine

    def uses(config: ModelConfig, platform: Platform, dtype: torch.dtype, cp: int) -> bool:
        return real(config, platform, torch.bfloat16, cp)

    with patch.object(gpt, "uses_transformer_engine", uses), patch.object(layer_spec, "uses_transformer_engine", uses):
        yield


def compare(kinds: dict[bool, Rank], folder: Path, settings: dict[str, Any], reads: bool) -> dict[str, Any]:
    """One update and the log-probs after it, by both kinds of layers, from the same weights.

    reads: also from each other's checkpoint.
    """
    from megarl.models.hf_weights import layer_spec

    parts, columns = shards([examples([20, 33, 7, 12], 128)], 1, 2)
    settings, vision = dict(settings), load_model_config(folder).vision
    if vision is not None:
        parts, columns = pictured_shards(some_pictured(vision), 1, 2), [{}]
        settings["objective"] = SftObjective()
    norms, logprobs, specs = [], [], []
    for rank in kinds.values():
        spec = RoleSpec(
            folder,
            optimizer=Optimizer(lr=1e-3, freeze_vision_tower=vision is None),
            total_steps=10,
            **{"dtype": "float32", "objective": PolicyObjective(Algorithm()), **settings},
        )
        rank.build(ROLE, spec)
        specs.append(layer_spec(rank.engine(ROLE)._chunks))
        norms.append(rank.update(ROLE, parts[0], columns[0])["actor/grad_norm"])
        logprobs.append(scores(rank, parts[0]))
    return {
        "specs": specs,
        "norms": norms,
        "difference": float(np.abs(logprobs[0] - logprobs[1]).max()),
        "size": float(np.abs(logprobs[0]).mean()),
        "read": read(kinds, spec, parts[0], columns[0]) if reads else None,
    }


def read(kinds: dict[bool, Rank], spec: RoleSpec, shard: Shard, columns: dict[str, Column]) -> float:
    """The largest difference of log-probs after one more update, where each kind reads the checkpoint that the other wrote."""
    found = []
    for writer, reader in (kinds[True], kinds[False]), (kinds[False], kinds[True]):
        with tempfile.TemporaryDirectory() as folder:
            writer.save(ROLE, Path(folder))
            reader.build(ROLE, spec)
            reader.load(ROLE, Path(folder))
        for rank in (writer, reader):
            rank.update(ROLE, shard, columns)
        found.append(float(np.abs(scores(writer, shard) - scores(reader, shard)).max()))
    return max(found)


def scores(rank: Rank, shard: Shard) -> FloatArray:
    """Log-probs of a shard, end to end."""
    return np.concatenate([np.concatenate(part) for part in rank.logprobs(ROLE, shard) or ()])


def attempt(work: Any) -> dict[str, Any]:
    """What it gives, or the end of what it says."""
    try:
        return {"problem": None, **work()}
    except Exception:
        return {"problem": traceback.format_exc()[-2000:]}


def fake_groups() -> None:
    """All process groups of `build` talk to nobody; Megarl's own updates meet over gloo, alone."""
    new_group = dist.new_group

    def quiet(ranks: Any = None, *_: Any, **options: Any) -> Any:
        if dist.get_backend() != "fake":
            return new_group(ranks, **options)
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER  # as torch says it, which makes something of each group before
        return new_group(ranks, backend="fake")

    dist.new_group = quiet


def look(kind: str) -> dict[str, Any]:
    """Build on meta, then run on the CPU."""
    fused = kind == "fused"
    package = fake_transformer_engine.install() if fused else None
    fake_groups()
    megatron_cpu.CPU = torch.device("meta")
    megatron_cpu.install()
    built = build_all(replace(get_platform("cuda"), device="meta", has_transformer_engine=fused))
    megatron_cpu.CPU = torch.device("cpu")
    with tempfile.TemporaryDirectory() as root:
        ran = run_all(Path(root)) if fused else {}
    return {"built": built, "ran": ran, "used": sorted(package.used) if package else []}


def main() -> None:
    """Say what both kinds do."""
    with multiprocessing.get_context("fork").Pool(len(KINDS), maxtasksperchild=1) as pool:
        found = dict(zip(KINDS, pool.map(look, KINDS, chunksize=1), strict=True))
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
