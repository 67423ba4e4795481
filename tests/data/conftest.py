"""Small tokenizers, made on the spot: one token a byte, beside the special ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.models.vision import Vision

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(*, chat_template: str | None, bos: bool = False) -> Any:
    """bos: begin plain text with `<s>`, as Llama's tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<s>", "<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return make_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    return make_tokenizer(chat_template=None, bos=True)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of a model that sees images."""
    from tests.support.sight import seeing_tokenizer  # which imports make_tokenizer from here

    return seeing_tokenizer()


@pytest.fixture(scope="module")
def sight(tokenizer: Any) -> Vision:
    """How that model sees them."""
    from tests.support.sight import sight_for

    return sight_for(tokenizer)
