"""transformers reads the score of an exported reward model at the last token of each text of a padded batch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.models.hf_config import load_model_config
from megarl.models.hf_save import save_hf
from megarl.models.score_padding import name_padding, padding_id
from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.support.tiny import tiny_config, write_tiny_model, write_tokenizer

TEXTS = ["1+1=2<|im_end|>", "12+34=46<|im_end|>"]


def exported(folder: Path, pad: int | None, token: str | None, specials: list[str] | None = None) -> Path:
    """A model with a score head, of a source whose config and tokenizer name this padding."""
    source = write_tiny_model(folder / "source")
    for name, change in (("config.json", {"pad_token_id": pad}), ("tokenizer_config.json", {"pad_token": token})):
        raw = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(raw | change))
    (source / "special_tokens_map.json").write_text(json.dumps({"pad_token": token} if token else {}))
    if specials is not None:
        path = source / "tokenizer.json"
        raw = json.loads(path.read_text())
        raw["added_tokens"] = [each for each in raw["added_tokens"] if each["content"] in specials]
        path.write_text(json.dumps(raw))
        path = source / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "unk_token": None}))
    tensors = {name: each for name, each in load_file(source / "model.safetensors").items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    save_hf([list(tensors.items())], load_model_config(source).with_score_head(), source, folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize(
    ("pad", "token", "found"),
    [(2, "<|im_end|>", "<|pad|>"), (None, None, "<|pad|>"), (0, "<|pad|>", "<|pad|>"), (None, "<|unk|>", "<|unk|>")],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_scores_the_last_tokens(
    pad: int | None, token: str | None, found: str, side: str, tmp_path: Path
) -> None:
    folder = exported(tmp_path, pad, token)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert tokenizer.pad_token == found and model.config.pad_token_id == tokenizer.pad_token_id
    with torch.no_grad():
        alone = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        expected = torch.stack([model.score(model.model(ids).last_hidden_state[0, -1]) for ids in alone])
        logits = model(**tokenizer(TEXTS, padding=True, padding_side=side, return_tensors="pt")).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("ends", "found"), [(2, 0), ([2, 0], 3), (None, 0)])
def test_a_token_that_ends_responses_does_not_pad(ends: Any, found: int, tmp_path: Path) -> None:
    """As <|endoftext|> of Qwen's models, which pads, and in generation_config.json ends responses beside <|im_end|>."""
    write_tokenizer(tmp_path)
    config = tiny_config("qwen3").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    name_padding(tmp_path, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        **json.loads(json.dumps(config)),
        "pad_token_id": found,
    }
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == found


def test_the_source_keeps_its_padding(tmp_path: Path) -> None:
    exported(tmp_path, 2, "<|im_end|>")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["pad_token_id"] == 2


def test_a_tokenizer_without_another_special_token_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megarl"):
        folder = exported(tmp_path, None, None, ["<|im_start|>", "<|im_end|>"])
    assert f"{folder}: the tokenizer has no special token that no text ends with" in caplog.text
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.parametrize(
    ("config", "chat", "found"),
    [
        ({}, True, "<s>"),  # the first token of texts, where there is no other
        ({}, False, "<|im_start|>"),
        ({"eos_token_id": [257, 258]}, False, "<s>"),
        ({"vocab_size": 256}, False, None),  # the model has no row for any of them
    ],
)
def test_what_texts_end_with_does_not_pad(config: dict[str, Any], chat: bool, found: str | None) -> None:
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE if chat else None)
    tokenizer.bos_token = "<s>"
    number = padding_id(tokenizer, {"vocab_size": 300, "eos_token_id": 258, **config}, {})
    assert (None if number is None else tokenizer.convert_ids_to_tokens(number)) == found
