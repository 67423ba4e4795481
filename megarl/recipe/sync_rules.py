"""What a weight sync asks of the other keys."""

from __future__ import annotations

from megarl.core.platform import SETTING_SHARED, get_platform
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe

# Flags of SGLang by which a server holds its weights otherwise than the hashes of `sync.verify: hash` are computed of.
REARRANGING = (
    "--quantization",
    "--torchao-config",
    "--enable-lora",
    "--ep",
    "--expert-parallel-size",
    "--dp",
    "--data-parallel-size",
    "--enable-dp-",
    "--pp",
    "--pipeline-parallel-size",
    "--moe-",
    "--speculative-",
    "--init-expert-location",
    "--enable-eplb",
    "--load-format",
)


WHOLE_TOWER = "--mm-enable-dp-encoder"  # every rank has all of the vision tower, of which hashes are where it learns


def _rearranging(recipe: Recipe) -> list[str]:
    learns = not recipe.actor.optimizer.freeze_vision_tower
    flags = (*REARRANGING, WHOLE_TOWER) if learns else REARRANGING
    return [word for word in recipe.rollout.server_args if word.startswith(flags)]


# Flags of SGLang by which rollout.quantization has servers start.
QUANTIZING = (
    "--load-format",
    "--custom-weight-loader",
    "--json-model-override-args",
    "--quantization",
    "--torchao-config",
)


def quantizing(recipe: Recipe) -> list[str]:
    """Words of rollout.server_args by which servers may hold quantised weights."""
    return [word for word in recipe.rollout.server_args if word.startswith(QUANTIZING)]


def _unlike_ranks(recipe: Recipe) -> dict[str, list[str]]:
    """Words of rollout.server_args by which servers have other settings of NCCL than ranks, and the variables that say so."""
    env = get_platform(recipe.cluster.platform).env
    unlike = {
        word: [name for name in SETTING_SHARED.get(word, ()) if env.get(name, "1") != "1"]
        for word in recipe.rollout.server_args
    }
    return {word: names for word, names in unlike.items() if names}


def _told_apart(recipe: Recipe) -> str:
    unlike = _unlike_ranks(recipe)
    exports = " ".join(dict.fromkeys(f"{name}=1" for names in unlike.values() for name in names))
    return (
        f"with {', '.join(unlike)} in rollout.server_args servers start NCCL otherwise than ranks do, which cannot broadcast "
        f"weights to them then. Export {exports}, so that both have the same, remove the flag, or set sync.transport to "
        "shared_memory or disk"
    )


def _is_fp8(recipe: Recipe) -> bool:
    return recipe.rollout.quantization is not None


def _is_apart(recipe: Recipe) -> bool:
    """Whether adapters go to servers alone."""
    return recipe.sync.lora == "adapters" and recipe.actor.lora is not None


def _against_adapters(recipe: Recipe) -> str:
    """A key and its value that adapters alone do not go with; nothing where there is none."""
    rollout = recipe.rollout
    found = {
        "rollout.servers.urls": rollout.external is not None,
        "rollout.quantization: fp8": _is_fp8(recipe),
        "rollout.deterministic: true": rollout.deterministic,
        "rollout.in_flight: in_place": rollout.in_flight == "in_place",
        "rollout.offload: [weights]": "weights" in rollout.offload,
        "sync.verify: hash": _hashes(recipe),
    }
    return next((text for text, given in found.items() if given), "")


SYNC_UNREAD: tuple[Unread, ...] = (
    Unread(("sync.lora",), lambda r, _: r.actor.lora is not None, "there are no adapters: set actor.lora", RL),
    Unread(
        ("sync.transport", "sync.bucket_mb"),
        lambda r, _: not _is_apart(r),
        "sync.lora is adapters, which go through the run's folder in one piece",
        RL,
    ),
)


def _hashes(recipe: Recipe) -> bool:
    return recipe.sync.verify == "hash"


QUANTIZATION_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.quantization",
        lambda r, _: _is_fp8(r) and r.model.dtype != "bfloat16",
        lambda r: (
            f"FP8 weights are multiplied with activations in bfloat16, and model.dtype is {r.model.dtype}. Set that to "
            "bfloat16, or this to null"
        ),
        RL,
    ),
    Contradiction(
        "rollout.quantization",
        lambda r, _: _is_fp8(r) and r.rollout.external is not None,
        lambda r: (
            "the run starts servers so that they take FP8 weights, and rollout.servers.urls names those of somebody else. Set it "
            "to null, or rollout.servers to a number"
        ),
        RL,
    ),
    Contradiction(
        "rollout.quantization",
        lambda r, _: _is_fp8(r) and bool(quantizing(r)),
        lambda r: (
            f"rollout.server_args would undo it: {', '.join(quantizing(r))}. Remove that, or set rollout.quantization to null"
        ),
        RL,
    ),
    Contradiction(
        "rollout.quantization",
        lambda r, _: _is_fp8(r) and r.sync.transport == "shared_memory",
        lambda r: "it needs each weight whole, and ranks share memory by rows. Set sync.transport to auto or broadcast",
        RL,
    ),
)

SYNC_CONTRADICTIONS: tuple[Contradiction, ...] = (
    *QUANTIZATION_CONTRADICTIONS,
    Contradiction(
        "sync.lora",
        lambda r, _: _is_apart(r) and bool(_against_adapters(r)),
        lambda r: (
            "adapters alone go to servers that the run starts, that hold the model's own weights all the time, and that answer "
            f"nothing during a sync: not with {_against_adapters(r)}. Set sync.lora to merged, or change that"
        ),
        RL,
    ),
    Contradiction(
        "sync.transport",
        lambda r, _: r.sync.transport in ("auto", "broadcast") and bool(_unlike_ranks(r)),
        _told_apart,
        RL,
    ),
    Contradiction(
        "sync.verify",
        lambda r, _: _hashes(r) and _is_fp8(r),
        lambda r: (
            "engines hash FP8 weights as they understand them, and change their scales on some devices. Set it to probe, or "
            "rollout.quantization to null"
        ),
        RL,
    ),
    Contradiction(
        "sync.verify",
        lambda r, _: _hashes(r) and r.rollout.external is not None,
        lambda r: (
            "hashes tell what servers hold where the run knows by which flags they were started, and rollout.servers.urls names "
            "servers of somebody else. Set it to probe, or rollout.servers to a number"
        ),
        RL,
    ),
    Contradiction(
        "sync.verify",
        lambda r, _: _hashes(r) and bool(_rearranging(r)),
        lambda r: (
            f"with {', '.join(_rearranging(r))} in rollout.server_args servers hold weights in another form than the hashes are "
            "computed of. Remove that, or set sync.verify to probe"
        ),
        RL,
    ),
)
