"""What a weight sync cannot do is refused when the recipe is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.platform import CUDA_SHARED
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe

HASH = "sync.verify=hash"
TOWER = "actor.optimizer.freeze_vision_tower=false"
APART = ("sync.lora=adapters", "actor.lora={}")
FP8 = ("rollout.quantization=fp8", "model.dtype=bfloat16")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([HASH, "rollout.servers={urls: ['http://10.0.0.2:1'], key_env: K}"], "names servers of somebody else"),
        ([HASH, "rollout.server_args=[--ep-size, '2']"], "with --ep-size in rollout.server_args"),
        ([HASH, "rollout.server_args=[--torchao-config=int4wo-128]"], "in another form than the hashes"),
        ([HASH, TOWER, "rollout.server_args=[--mm-enable-dp-encoder]"], "with --mm-enable-dp-encoder in rollout"),
        ([HASH, *FP8], "Set it to probe, or rollout.quantization to null"),
        ([FP8[0], "model.dtype=float32"], "model.dtype is float32. Set that to bfloat16"),
        ([*FP8, "rollout.servers={urls: ['http://10.0.0.2:1'], key_env: K}"], "names those of somebody else"),
        ([*FP8, "rollout.server_args=[--quantization=fp8]"], "would undo it: --quantization=fp8"),
        ([*FP8, "sync.transport=shared_memory"], "Set sync.transport to auto or broadcast"),
        (["rollout.quantization=int8"], "`rollout.quantization`"),
        (["sync.lora=adapters"], "there are no adapters: set actor.lora"),
        ([*APART, "sync.bucket_mb=1"], "in one piece"),
        ([*APART, HASH], "not with sync.verify: hash"),
        ([*APART, "rollout.deterministic=true"], "not with rollout.deterministic: true"),
        ([*APART, "rollout.offload=[weights, kv_cache]"], "not with rollout.offload: [weights]"),
        ([*APART, *FP8], "not with rollout.quantization: fp8"),
        ([*APART, "rollout.servers={urls: ['http://10.0.0.2:1'], key_env: K}"], "not with rollout.servers.urls"),
        (["sync.verify=both"], "log-probs of a few sequences"),
    ],
)
def test_what_cannot_be_hashed_is_refused_in_a_paragraph(recipe_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, overrides, Recipe)
    assert says in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


SYMMETRIC = "rollout.server_args=[--enable-symm-mem, --enable-nccl-nvls]"
ON_CUDA = ("cluster.platform=cuda", "model.dtype=bfloat16")


def test_flags_by_which_servers_have_another_nccl_than_ranks_are_refused_where_weights_go_by_it(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUDA_SHARED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"--enable-symm-mem, .*Export NCCL_CUMEM_ENABLE=1 NCCL_NVLS_ENABLE=1, so"):
        load_recipe(recipe_file, [*ON_CUDA, SYMMETRIC], Recipe)
    load_recipe(recipe_file, [*ON_CUDA, SYMMETRIC, "sync.transport=shared_memory"], Recipe)
    load_recipe(recipe_file, [SYMMETRIC], Recipe)  # there is no NCCL on a CPU
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    load_recipe(recipe_file, [*ON_CUDA, "rollout.server_args=[--enable-nccl-nvls]"], Recipe)
    with pytest.raises(UserError, match=r"with --enable-symm-mem in .*Export NCCL_CUMEM_ENABLE=1, so"):
        load_recipe(recipe_file, [*ON_CUDA, SYMMETRIC], Recipe)


def test_hashes_are_asked_for_beside_the_probe(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, [], Recipe).recipe.sync.verify == "probe"
    recipe = load_recipe(recipe_file, [HASH, "rollout.server_args=[--log-level=info]"], Recipe).recipe
    assert recipe.sync.verify == "hash" and recipe.sync.tolerance is None
