"""What can be refused of a recipe's servers before a device is taken: their layout and flags, and whether those that somebody
else started answer, serve the recipe's model, and are where a run may speak with them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.platform import Platform
from megarl.core.versions import pins
from megarl.data.chat import load_tokenizer
from megarl.models.config import ModelConfig
from megarl.models.fp8_weights import check_servable
from megarl.models.hf_layers import period_of
from megarl.models.layout_check import NO_HEAD_DIM
from megarl.models.lora_served import ServedLora, served_lora
from megarl.models.lora_settings import LoraSettings
from megarl.recipe.rollout_rules import longest_served
from megarl.recipe.run import Run
from megarl.recipe.schema import Recipe
from megarl.rewards.check import read_key
from megarl.run.draft_check import check_draft
from megarl.run.images_check import check_seeing_servers
from megarl.run.rope_check import check_served_rope
from megarl.serving.server_flags import SPARE_TOKENS, check_server_args

if TYPE_CHECKING:
    from megarl.serving.external import ExternalPool

KEY = "rollout.servers"
OWN_WEIGHTS = "0"  # the version of weights that no run has sent
SEPARATE_EXPERTS = "--disable-shared-experts-fusion"
ALL_SPARSE = ("qwen2_moe", "qwen3_moe", "qwen3_next")  # families that SGLang builds with experts in all layers
ATTENTION = "-attention-backend"  # and of prefill and decode apart
SLIDING_FAMILIES = ("gemma3", "gemma4", "gpt_oss", "olmo3", "exaone4")  # whose windows SGLang keeps to
HEAD_EPS = {"exaone4": 1e-6}  # of norms of queries and keys that SGLang gives no other (models/exaone4.py)
PERIODIC = ("exaone4", "qwen3_5", "qwen3_5_moe", "qwen3_next")  # whose layers of two kinds SGLang counts
# Families that SGLang builds with a head of its own, and those whose head it does not load.
OWN_HEADS = (
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "mixtral",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "olmoe",
    "minimax_m2",
)
TIED_HEADS = ("gemma3",)
UNSCALED = ("mixtral", "granitemoe")  # families that SGLang builds with plain RoPE
BUILT_AS_STORED = ("gpt_oss",)  # families of which SGLang builds parts in the dtype that the config names
UNREAD_CALLS = ("gpt_oss",)  # families that write calls of tools which SGLang's parsers pass over
OLMOE_EPS = 1e-5
MARK = "servers_mark"  # in a run's folder
HUB_CACHE = "snapshots"  # the hub's cache has models--OWNER--NAME/snapshots/COMMIT


def check_servers(
    recipe: Recipe, model: ModelConfig, platform: Platform, *, here: bool = True, own_weights: bool = False
) -> ExternalPool | None:
    """The servers that somebody else started, each asked what it serves; None where the run starts its own. Raises UserError.

    here: whether the run will be on this machine: elsewhere it may reach what is out of reach here, and nobody is asked.
    own_weights: they have to have the model's own weights still.
    """
    check_server_args(recipe.rollout.server_args, platform)
    _check_dtype(recipe, platform)
    _check_layers("`model.path`", model, platform, longest_served(recipe))
    _check_constants("`model.path`", model)
    _check_stored_dtype("`model.path`", recipe.model.path, model, recipe.model.dtype)
    check_served_rope("`model.path`", recipe.model.path, model)
    check_seeing_servers(recipe, model)
    check_draft(recipe, model)
    if recipe.agent is not None:
        check_calls("`agent.tool_parser`", recipe.agent.tool_parser, model)
    if not own_weights:
        lora_at_servers(recipe, model)
    _check_quantization(recipe, model, platform, own_weights=own_weights)
    if not own_weights:
        _check_hashes(recipe, model, platform)
    external = recipe.rollout.external
    if external is None or not here:
        return None
    from megarl.serving.external import ModelFacts, check_external, probe_ids  # with a client: it takes a while to load

    key = read_key(external.key_env, KEY) or ""
    if not key:
        _check_private(external.urls)
    expected = ModelFacts(
        name=model_name(recipe.model.path),
        architectures=(model.architecture,),
        context=longest_served(recipe) + SPARE_TOKENS,
        probe_ids=probe_ids(load_tokenizer(recipe.model.path).encode),
        sglang=pins()["sglang"],
        device=platform.device,
        weight_version=OWN_WEIGHTS if own_weights else "",
        routing=recipe.actor.routing_replay,
        run="" if own_weights else run_mark(recipe.run),
    )
    return check_external(external.urls, key, expected)


def lora_at_servers(recipe: Recipe, model: ModelConfig) -> ServedLora | None:
    """Room for adapters at the servers, where they are sent alone (`sync.lora`). Raises UserError where servers take none."""
    lora = recipe.actor.lora
    if lora is None or recipe.sync.lora != "adapters":
        return None
    return served_lora(model, LoraSettings(lora.rank, lora.alpha, lora.targets))


def _check_dtype(recipe: Recipe, platform: Platform) -> None:
    """Whether the run's own servers can compute in the model's dtype. Raises UserError.

    SGLang 0.5.21 chooses its attention without a look at it: FlashAttention 3 on Hopper, which takes no float32.
    """
    chosen = any(word.split("=")[0].endswith(ATTENTION) for word in recipe.rollout.server_args)
    if (
        recipe.model.dtype == "float32"
        and not platform.serves_float32
        and recipe.rollout.external is None
        and not chosen
    ):
        raise UserError(
            f"`model.dtype` is float32, and on {platform.name} SGLang's attention computes in 16 bits alone. Set model.dtype to "
            "bfloat16; or name a kernel that takes float32 in rollout.server_args (--attention-backend ...); or set "
            "cluster.platform to cpu."
        )


def check_alone(folder: Path, model: ModelConfig, platform: Platform, dtype: str) -> int:
    """The longest conversation that `megarl serve` answers as the model would. Raises UserError where it answers none so."""
    if model.head == "score":
        raise UserError(
            f"{folder} is a reward model: it has one score a token in the place of a vocabulary, and generates nothing. Serve a "
            "language model."
        )
    if model.quantised is not None and not platform.serves_fp8:
        raise UserError(
            f"{folder} has {model.quantised} weights, and SGLang on {platform.name} cannot serve them. Write an unquantised "
            f"folder once, by `megarl convert hf-to-mcore {folder} CHECKPOINT` and `megarl convert mcore-to-hf CHECKPOINT "
            "FOLDER`; serve that."
        )
    if dtype == "float32" and not platform.serves_float32:
        raise UserError(
            f"--dtype float32: on {platform.name} SGLang's attention computes in 16 bits alone. Say bfloat16."
        )
    _check_layers(str(folder), model, platform, longest=0)
    _check_constants(str(folder), model)
    _check_stored_dtype(str(folder), folder, model, dtype)
    check_served_rope(str(folder), folder, model)
    if model.window is None or model.family in SLIDING_FAMILIES:
        return model.context
    return min(model.context, model.window + 1)  # the last token is nobody's query


def _check_layers(where: str, model: ModelConfig, platform: Platform, longest: int) -> None:
    """Whether SGLang builds the layers that the model has. longest: tokens of a sample. Raises UserError.

    0.5.21 knows no sliding window in models of Llama's kind (models/qwen2.py, qwen3.py, qwen3_moe.py, mistral.py, ministral3.py,
    mixtral.py, and llama.py for Phi-3): they attend to all tokens. It reads neither mlp_only_layers nor decoder_sparse_step
    (models/qwen2_moe.py, qwen3_moe.py, qwen3_next.py: every layer is sparse): weights of a dense layer would go nowhere, and
    experts that nothing fills would answer.
    The OWN_HEADS it builds in any case (models/qwen2_moe.py, qwen3_moe.py, qwen3_next.py, mixtral.py, glm4_moe.py,
    glm4_moe_lite.py, gpt_oss.py, olmoe.py, minimax_m2.py), and nothing would fill them either; that of Gemma 3 it never loads
    (gemma3_causal.py). GLM-4.7-Flash it builds with experts in all layers behind the first dense ones. Heads of attention of
    the NO_HEAD_DIM (models/mixtral.py, olmo2.py, olmoe.py, granitemoe.py) are hidden_size / num_attention_heads wide there,
    whatever head_dim says, and RoPE of the UNSCALED is never scaled.
    """
    _check_windows(where, model, longest)
    _check_head_norms(where, model)
    _check_attention(where, model, platform)
    if model.family in OWN_HEADS and model.tied_embeddings:
        raise UserError(
            f"{where}: the head of the model is its embedding (tie_word_embeddings in its config.json), and SGLang builds "
            f"{model.architecture} with a head of its own: it cannot serve this model. Take one that has a head."
        )
    if model.family in TIED_HEADS and not model.tied_embeddings:
        raise UserError(
            f"{where}: the model has a head of its own (tie_word_embeddings is false in its config.json), and SGLang does not "
            f"load that of {model.architecture}: it cannot serve this model. Take one whose head is its embedding."
        )
    if model.family in UNSCALED and model.rope.kind != "default":
        raise UserError(
            f"{where}: the model's RoPE is scaled ({model.rope.kind} in its config.json), and SGLang builds {model.architecture} "
            "with plain RoPE: it cannot serve this model. Take one whose RoPE is not scaled."
        )
    width = model.hidden_size // model.num_heads
    if model.family in NO_HEAD_DIM and model.head_dim != width:
        raise UserError(
            f"{where}: the heads of the model have {model.head_dim} elements (head_dim in its config.json), and SGLang builds "
            f"{model.architecture} with {width}, hidden_size / num_attention_heads: it cannot serve this model. Take another."
        )
    dense = sorted(set(range(model.num_layers)) - model.moe_layers)
    if model.family == "glm4_moe_lite" and dense != list(range(len(dense))):
        raise UserError(
            f"{where}: the last layer of the model without experts is {dense[-1]}, behind layers with them (mlp_layer_types in "
            "its config.json), and SGLang builds experts in all layers behind the first without: it cannot serve this model. "
            "Take one whose dense layers come first."
        )
    if model.family in ALL_SPARSE and model.moe is not None and dense:
        raise UserError(
            f"{where}: layers {', '.join(map(str, dense[:4]))}{', ...' if len(dense) > 4 else ''} of the model have an MLP "
            "without experts (mlp_only_layers, decoder_sparse_step in its config.json), and SGLang builds "
            f"{model.architecture} with experts in every layer: it cannot serve this model. Take one that has experts in all of "
            "its layers."
        )


def _check_windows(where: str, model: ModelConfig, longest: int) -> None:
    """Whether SGLang gives windows and positions to the layers that have them. Raises UserError.

    Of EXAONE 4's, and of Gated DeltaNet's, it knows those of a period alone (0.5.21, models/exaone4.py, configs/qwen3_next.py).
    """
    if model.window is not None and model.window < longest - 1 and model.family not in SLIDING_FAMILIES:
        raise UserError(
            f"{where}: the model attends to the last {model.window} tokens (sliding_window in its config.json), and SGLang "
            f"to all of them: what it generates beyond is not the model's. Samples have up to {longest} tokens: make "
            f"data.max_prompt_tokens + rollout.max_response_tokens at most {model.window + 1}, or take a model without a window."
        )
    if model.family in PERIODIC and period_of(model.local_layers | model.linear_layers, model.num_layers) is None:
        raise UserError(
            f"{where}: the layers with full attention are not every second, third or so (layer_types in its config.json), and "
            f"SGLang builds {model.architecture} in no other way: it cannot serve this model. Take another."
        )


def _check_head_norms(where: str, model: ModelConfig) -> None:
    """Whether SGLang's norms of queries and keys have the model's epsilon. Raises UserError."""
    if model.family in HEAD_EPS and model.norm_eps != HEAD_EPS[model.family]:
        raise UserError(
            f"{where}: rms_norm_eps in its config.json is {model.norm_eps:g}, and SGLang gives the norms of queries and keys of "
            f"{model.architecture} {HEAD_EPS[model.family]:g}: what it generates is not quite the model's. Write "
            f"{HEAD_EPS[model.family]:g} there: servers, training and transformers then compute the same, and almost what they "
            "did. Or take another model."
        )


def _check_constants(where: str, model: ModelConfig) -> None:
    """Whether the model's config says what SGLang has in its code. Raises UserError.

    0.5.21 gives all norms of OLMoE this epsilon, and that of keys the width of the queries' (models/olmoe.py); it divides no
    chosen scores by their sum. Of Granite's models with experts it rounds RoPE's base off (models/granitemoe.py).
    """
    constants: list[tuple[str, object, object]] = []  # a key, what the config says, what SGLang has
    if model.family == "olmoe":
        assert model.moe is not None
        constants += [
            ("rms_norm_eps", model.norm_eps, OLMOE_EPS),
            ("norm_topk_prob", model.moe.normalize, False),
            ("num_key_value_heads", model.num_kv_heads, model.num_heads),
        ]
    if model.family == "granitemoe":
        constants.append(("rope_theta", model.rope.theta, float(int(model.rope.theta))))
    for key, said, theirs in constants:
        if said != theirs:
            raise UserError(
                f"{where}: {key} is {said} in the model's config.json, and SGLang has {theirs} for {model.architecture}, "
                "whatever that says: it cannot serve this model. Take one with that."
            )


def _check_attention(where: str, model: ModelConfig, platform: Platform) -> None:
    """Whether SGLang has the model's kind of attention on this platform. Raises UserError."""
    if model.mla is not None and not platform.serves_latents:
        raise UserError(
            f"{where}: {model.architecture} has latent attention, and SGLang 0.5.21 starts with it on {platform.name} and "
            "ends at the first request (its torch attention takes no keys of another width than queries). Roles train on it: "
            "`megarl sft`, `rm`, `dpo` and `kto` start no servers. Generate on cuda, or take another model."
        )
    if model.delta is not None and not platform.serves_delta:
        raise UserError(
            f"{where}: {model.architecture} has Gated DeltaNet, and SGLang 0.5.21 computes that on {platform.name} by compiled "
            "kernels (sgl_kernel) that come with no package. Roles train on it: `megarl sft`, `rm`, `dpo` and `kto` start no "
            "servers. Generate on cuda, or take another model."
        )


def check_calls(where: str, parser: str | None, model: ModelConfig) -> None:
    """Whether SGLang's parsers read the model's calls of tools. Raises UserError.

    0.5.21 looks for calls of gpt-oss behind `<|start|>assistant` alone (function_call/gpt_oss_detector.py: bot_token), with
    which a prompt ends: a call without reasoning before it would count as an answer.
    """
    if parser is not None and model.family in UNREAD_CALLS:
        raise UserError(
            f"{where}: nothing reads every call that {model.architecture} writes. SGLang's parser passes over one that begins "
            "the response. Set it to null, and play episodes without tools, or take another model."
        )


def _check_stored_dtype(where: str, folder: Path, model: ModelConfig, dtype: str) -> None:
    """Whether SGLang builds all layers in the dtype that servers are to have. Raises UserError.

    0.5.21 gives attention and routers of gpt-oss the dtype that the config names (models/gpt_oss.py: params_dtype=config.dtype).
    """
    if model.family not in BUILT_AS_STORED:
        return
    config = read_object(folder / "config.json", "Export the model again.")
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored not in (None, dtype):
        raise UserError(
            f"{where}: the dtype in its config.json is {stored}, and SGLang builds parts of {model.architecture} in that, "
            f"whatever servers are told; they are to have {dtype}. Say {stored} as the run's dtype (model.dtype, --dtype), "
            f"or export the model in {dtype}."
        )


def _check_quantization(recipe: Recipe, model: ModelConfig, platform: Platform, *, own_weights: bool) -> None:
    """Whether servers can hold the model in FP8. Raises UserError."""
    if recipe.rollout.quantization is None:
        return
    if own_weights:
        raise UserError(
            "`rollout.quantization` is what a trainer sends, and `megarl eval` has no trainer: its servers load the "
            "model's folder. Add rollout.quantization=null to the command."
        )
    if not platform.serves_fp8:
        raise UserError(
            f"`rollout.quantization`: SGLang cannot serve FP8 weights on {platform.name}. Set it to null, or run on cuda."
        )
    check_servable(model, recipe.rollout.tp)


def _check_hashes(recipe: Recipe, model: ModelConfig, platform: Platform) -> None:
    """Whether hashes of the servers' weights can be told from the trainer's (`sync.verify`). Raises UserError."""
    if recipe.sync.verify == "hash" and model.moe is not None and model.moe.biases and platform.has_device_memory:
        raise UserError(
            f"`sync.verify`: on {platform.name} the kernels that SGLang chooses say how {model.architecture}'s experts lie in "
            "memory, and hashes of that are not known. Set it to probe."
        )
    if recipe.sync.verify == "hash" and model.delta is not None:
        raise UserError(
            f"`sync.verify`: how SGLang holds the linears of {model.architecture}'s Gated DeltaNet is not known here, nor hashes "
            "of that. Set it to probe."
        )
    moe = model.moe  # a shared expert with a gate stays apart (models/qwen2_moe.py)
    shared = moe is not None and moe.shared_ffn_hidden_size > 0 and not moe.shared_gate
    if recipe.sync.verify != "hash" or not shared or not platform.fuses_shared_experts:
        return
    if SEPARATE_EXPERTS not in recipe.rollout.server_args:
        raise UserError(
            f"`sync.verify`: on {platform.name} SGLang may hold the model's shared experts among the others, and hashes of "
            f"that are not known. Add {SEPARATE_EXPERTS} to rollout.server_args, or set sync.verify to probe."
        )


def run_mark(run: Run) -> str:
    """What tells a run's weights at a server from another run's: the same each time that it goes on, on whatever machine.

    It is in the run's folder once servers were marked (`keep_mark`); until then it is of this machine and the folder's path.
    """
    kept = run.folder / MARK
    if kept.is_file():
        return f"{run.name}-{kept.read_text().strip()}"
    place = os.fsencode(f"{socket.gethostname()}:{run.folder.resolve()}")
    return f"{run.name}-{hashlib.sha256(place).hexdigest()[:8]}"


def keep_mark(run: Run) -> None:
    """Write into the run's folder what its servers know it by. Raises OSError."""
    if not (run.folder / MARK).exists():
        (run.folder / MARK).write_text(run_mark(run).rpartition("-")[2])


def model_name(folder: Path) -> str:
    """What a server calls the model by default: the last part of its path, or of its name on the hub."""
    path = Path(os.path.abspath(folder))
    return path.parents[1].name.rpartition("--")[2] if path.parent.name == HUB_CACHE else path.name


def _check_private(urls: Sequence[str]) -> None:
    """Servers without a key are reached by nobody else. Raises UserError."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except OSError as error:
            raise UserError(
                f"`{KEY}.urls`: the host of {url} has no address: {error.strerror or error}. Mend its name, or give its address."
            ) from None
        public = sorted(address for address in found if ipaddress.ip_address(address.partition("%")[0]).is_global)
        if public:
            raise UserError(
                f"`{KEY}.urls`: {url} is at {', '.join(public)}, which is neither loopback nor a private address, and no "
                f"{KEY}.key_env is given: whoever reaches a server without a key can read prompts, and put other weights there. "
                f"Start it with --api-key, and name the environment variable that holds the key in {KEY}.key_env."
            )
