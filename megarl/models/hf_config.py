"""What megarl needs to know of a model, read from an HF folder's config.json. Without torch.

Families are rows of `families`; what a config asks for and megarl's model does not do is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.hub.names import address
from megarl.models.config import Mla, ModelConfig
from megarl.models.families import FAMILIES, LANGUAGE_MODEL, SCORE_MODEL, score_architecture
from megarl.models.family import Family
from megarl.models.family_limits import OF_LAYERS
from megarl.models.hf_beside import files_beside
from megarl.models.hf_delta import DELTA_REQUIRED, read_delta
from megarl.models.hf_fields import Fields, refuse_feature, shown
from megarl.models.hf_fp8 import read_fp8_block
from megarl.models.hf_global import read_global
from megarl.models.hf_layers import read_unrotated, read_window
from megarl.models.hf_moe import read_moe, required
from megarl.models.hf_mxfp4 import is_mxfp4
from megarl.models.hf_rope import read_ropes, read_rotary_dim
from megarl.models.hf_scales import read_scales
from megarl.models.multimodal import read_multimodal, sees, unsupported
from megarl.models.text_config import text_config
from megarl.models.vision import load_vision, parse_vision, read_processor

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
MOST_LAYERS = 2000  # more than any model has; a list of what a model of a billion layers holds would never end
_MLA_REQUIRED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

GENERATION, EOS = "generation_config.json", "eos_token_id"
_SCORED = {score_architecture(name): name for name in FAMILIES}


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and check that the folder is whole.

    Raises UserError: the folder, its config, tokenizer or weights are missing; the architecture is not supported.
    """
    _check_folder(folder)
    files_beside(folder)
    if (folder / GENERATION).exists():
        read_object(folder / GENERATION, "Servers read it: export the model again, or remove the file.")
    path = folder / "config.json"
    model = parse_model_config(read_object(path, "Export the model again."), path)
    return model if model.vision is None else replace(model, vision=load_vision(folder))


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """A config.json's content as a ModelConfig; `path` is named in errors. Raises UserError.

    Of a multimodal model it is the text part's, with `vision`, by what the folder says of images where it does.
    """
    fields = Fields(raw, path)
    return _with_vision(fields) if sees(fields.words("architectures", lone=True)) else _of_text(fields)


def _of_text(fields: Fields) -> ModelConfig:
    """Of a model of text. Raises UserError."""
    architectures = fields.words("architectures", lone=True)
    # HF's models with one score a sequence are those of the family in everything but the head.
    heads_of = {_SCORED.get(name, name.replace(SCORE_MODEL, LANGUAGE_MODEL)): name for name in architectures}
    architecture = next((name for name in heads_of if name in FAMILIES), None)
    if architecture is None:
        raise unsupported(architectures, fields.path)
    family = FAMILIES[architecture]
    _check_model_type(fields, family, architecture)
    _check_present(fields, family, architecture)
    _check_features(fields, family, architecture)
    layers, hidden = fields.count("num_hidden_layers", most=MOST_LAYERS), fields.count("hidden_size")
    heads, kv_heads, head_dim, mla = _heads(fields, family, hidden)
    window, local_layers = read_window(fields, family, layers, architecture)
    rotary_dim = read_rotary_dim(fields, family, head_dim)
    rope, local_rope = read_ropes(fields, family, rotary_dim, head_dim)
    moe, moe_layers = read_moe(fields, family, layers)
    mxfp4 = moe is not None and moe.biases and is_mxfp4(fields)
    config = ModelConfig(
        family=family.name,
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=fields.count(family.ffn_hidden_size),
        vocab_size=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings"),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied),
        **_biases(fields, family),
        qk_norm=_said(fields, family.qk_norm),
        eos_token_ids=_ends(fields, family),
        moe=moe,
        moe_layers=moe_layers,
        mla=mla,
        rotary_dim=rotary_dim,
        interleaved_rope=family.interleaved,
        activation=family.activation,
        sinks=family.sinks,
        output_gate=family.output_gate,
        **_norms(family),
        **read_global(fields, family, architecture),
        **read_scales(fields, family, hidden),
        **read_delta(fields, family, layers),
        window=window,
        local_layers=local_layers,
        local_rope=local_rope if local_layers or family.global_heads else None,
        unrotated_layers=read_unrotated(fields, family, layers, local_layers),
        pad_token_id=_pad_token(fields, family),
        fp8_block=None if mxfp4 else read_fp8_block(fields),
        mxfp4=mxfp4,
    )
    return _with_head(config, fields, heads_of[architecture])


def _with_vision(fields: Fields) -> ModelConfig:
    """Of a multimodal model. Raises UserError."""
    text = text_config(fields, read_multimodal(fields))
    said = read_processor(fields.path.parent) or {}
    model, vision = parse_model_config(text, fields.path), parse_vision(fields.raw, fields.path, said)
    if sum(vision.axes) != model.rotated // 2:
        wanted = f"as many frequencies as a head has, {model.rotated // 2}, are wanted together"
        fields.refuse("mrope_section", list(vision.axes), wanted)
    return replace(model, vision=vision)


def _ends(fields: Fields, family: Family) -> tuple[int, ...]:
    """The tokens that end a response. Raises UserError."""
    unsaid = fields.get(EOS) is None if family.eos_at_null else EOS not in fields.raw
    return family.eos if unsaid else fields.counts(EOS, lone=True)


def _biases(fields: Fields, family: Family) -> dict[str, Any]:
    """Of attention, as ModelConfig calls them. Raises UserError."""
    qkv = _said(fields, family.qkv_bias, unsaid=family.qkv_bias_unsaid)
    return {"qkv_bias": qkv, "output_bias": _said(fields, family.output_bias)}


def _norms(family: Family) -> dict[str, Any]:
    """Of all kinds, as ModelConfig calls them."""
    return {
        "norm_offset": family.gemma or family.norm_offset,
        "pre_norms": family.pre_norms,
        "post_norms": family.gemma or family.post_norms,
        "whole_qk_norm": family.whole_qk_norm,
        "late_qk_norm": family.late_qk_norm,
    }


def _said(fields: Fields, answer: bool | str, *, unsaid: bool = False) -> bool:
    """What a family has, or what the key says where it leaves that to one. Raises UserError."""
    return answer if isinstance(answer, bool) else fields.flag(answer, unsaid)


def _with_head(config: ModelConfig, fields: Fields, architecture: str) -> ModelConfig:
    """The same, with one score where the architecture, as the config names it, has that. Raises UserError."""
    if not architecture.endswith(SCORE_MODEL):
        return config
    # A count goes before names, and 2 is transformers' own default.
    labels = fields.count("num_labels", len(fields.part("id2label").raw) or 2)
    if labels != 1:
        raise UserError(
            f"{fields.path}: {architecture} must have one label, the score (num_labels=1); it has {labels}."
        )
    return config.with_score_head()


def _pad_token(fields: Fields, family: Family) -> int | None:
    """The row of the embedding that transformers does not train (`padding_idx`). Raises UserError."""
    value, vocab = fields.raw.get("pad_token_id", family.pad), fields.count("vocab_size")
    if value is None:  # an answer here, unlike elsewhere: no such row
        return None
    if type(value) is not int or not -vocab <= value < vocab:
        fields.refuse("pad_token_id", value, f"a token of the vocabulary, from 0 to {vocab - 1}, or null is wanted")
    return value % vocab  # torch counts negative ones from the end


def _check_model_type(fields: Fields, family: Family, architecture: str) -> None:
    """Raise UserError where transformers, which goes by this key, would build a model of another family."""
    value = fields.get("model_type", family.model_types[0])
    if value not in family.model_types:
        raise UserError(
            f"{fields.path}: model_type {shown(value)} is not that of {architecture}; transformers would build another "
            f"model. Set model_type to {family.model_types[0]!r}, or architectures to those of the model."
        )


def _check_present(fields: Fields, family: Family, architecture: str) -> None:
    wanted = [*_REQUIRED, *(_MLA_REQUIRED if family.mla else ()), *(DELTA_REQUIRED if family.delta else ())]
    wanted.append(family.ffn_hidden_size)
    wanted += required(fields, family.moe) if family.moe is not None else []
    wanted += ["head_dim"] if family.head_dim_wanted else []
    wanted += ["num_key_value_heads"] if family.global_heads else []  # transformers has a number of its own
    missing = [key for key in dict.fromkeys(wanted) if key not in fields.raw]
    if missing:
        raise UserError(f"{fields.path} lacks {', '.join(missing)}: it is not a whole config of {architecture}.")


def _check_features(fields: Fields, family: Family, architecture: str) -> None:
    """Raise UserError for what the family's models may have and megarl's do not: they would train on other numbers."""
    asked = [
        f"{key}={shown(value)} ({what})"
        for key, (only, what) in family.only.items()
        # null is no to a question whose one answer is yes, and elsewhere no answer.
        if not _is_only(key, value := fields.raw.get(key, only), only) and (value is not None or only is True)
    ]
    if asked:
        refuse_feature(fields, ", ".join(asked), architecture)


def _is_only(key: str, value: Any, only: Any) -> bool:
    return all(each == only for each in value) if key in OF_LAYERS and isinstance(value, list) else value == only


def _heads(fields: Fields, family: Family, hidden: int) -> tuple[int, int, int, Mla | None]:
    """Query heads, key-value heads, width of a query head."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if fields.raw.get("head_dim", 0) is None and not family.head_dim_null:
        fields.refuse(
            "head_dim", None, "a whole number, or no such key, is wanted: transformers makes no model of null"
        )
    if not family.mla:
        if heads % kv_heads:
            raise UserError(
                f"{fields.path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}."
            )
        return heads, kv_heads, _head_dim(fields, family, hidden, heads), None
    if kv_heads != heads:
        raise UserError(
            f"{fields.path}: num_key_value_heads {kv_heads} is not num_attention_heads {heads}, as latent attention has it."
        )
    mla = Mla(
        q_rank=None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        v_dim=fields.count("v_head_dim"),
    )
    _check_rotated(fields, "qk_rope_head_dim", mla.rope_dim)
    if fields.count("head_dim", mla.rope_dim) != mla.rope_dim:  # to transformers, the same thing by another name
        fields.refuse(
            "head_dim", fields.get("head_dim"), f"qk_rope_head_dim, which is {mla.rope_dim}, or none is wanted"
        )
    return heads, heads, mla.nope_dim + mla.rope_dim, mla


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """Width of a head, as transformers takes it. Raises UserError for one of which it makes no model."""
    share = hidden // heads
    head_dim = fields.count("head_dim", share if "head_dim" in fields.raw else family.head_dim or share)
    _check_rotated(fields, "head_dim", head_dim)
    if family.head_dim_fixed and head_dim * heads != hidden:
        wanted = f"hidden_size {hidden} / num_attention_heads {heads} is wanted, by which transformers sizes the norms"
        fields.refuse("head_dim", head_dim, wanted)
    return head_dim


def _check_rotated(fields: Fields, key: str, width: int) -> None:
    if width % 2:
        fields.refuse(key, width, "RoPE turns pairs, so an even number is wanted")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        if url := address(folder):
            raise UserError(
                f"model.path is the address {url}. Give a folder in HF format, or a name on the hub, OWNER/NAME."
            )
        raise UserError(
            f"The model folder {folder} {what}. Set model.path to a folder in HF format, or to a name on the hub, "
            "OWNER/NAME."
        )
    weights = "weights (*.safetensors)"
    wanted = {
        "config.json": ("config.json",),
        "tokenizer (tokenizer.json or tokenizer_config.json)": ("tokenizer.json", "tokenizer_config.json"),
        weights: ("*.safetensors",),
    }
    missing = [what for what, patterns in wanted.items() if not any(any(folder.glob(each)) for each in patterns)]
    if missing == [weights] and any(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"The model folder {folder} holds its weights as .bin files, and megarl reads *.safetensors. Load it with "
            "transformers and save it again, by save_pretrained."
        )
    if missing:
        trained = folder / "hf"  # of a run's folder
        hint = f" The model of this run is {trained}." if (trained / "config.json").is_file() else ""
        raise UserError(
            f"The model folder {folder} has no {' and no '.join(missing)}. It must be a whole HF folder, as "
            f"save_pretrained of the model and of its tokenizer write it.{hint}"
        )
