"""Tokenizers and chat templates in the forms of several model families, made on the spot; nothing of them is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Frames of `<|im_start|>role`; thinking is dropped from turns before the last question.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' and '</think>' in message.content and loop.index0 <= ns.last %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# A header for each message, content trimmed, `<|eot_id|>` behind it; the text begins with a token of its own.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# A mark before each role and no line breaks; what an assistant said ends with the end of the sentence.
DEEPSEEK = """\
{{- '<bos>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- else %}{{- '<|Assistant|>' + message.content + '<eos>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}"""
# Instructions in brackets; the assistant's turn begins without a mark, after a space; roles have to take turns.
MISTRAL = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{- ' ' + message.content + '</s>' }}{% endif %}
{%- endfor %}"""
# The assistant is called model, and nobody may be the system.
GEMMA = """\
{{- '<bos>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + (message.content | trim) }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

# Template, special tokens, those of them that end a turn, and tokens that are no special ones.
FORMS: Mapping[str, tuple[str, list[str], list[str], list[str]]] = {
    "qwen3": (QWEN3, ["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"], ["<tool_call>", "<think>", "</think>"]),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        [],
    ),
    "deepseek": (DEEPSEEK, ["<bos>"], ["<eos>"], ["<|User|>", "<|Assistant|>", "<think>", "</think>"]),
    "mistral": (MISTRAL, ["<s>", "[INST]", "[/INST]"], ["</s>"], []),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>"], ["<end_of_turn>", "<eos>"], []),
}
WORDS = ("user", "assistant", "model", "\n\n", " [", "high", "low", "er", "ing", "12", "the", " the", "\nThe")


@cache
def make_tokenizer(form: str, *, spaced: bool = False, template: str | None = None) -> Any:
    """Byte-level, with merges; spaced: as in SentencePiece's, a space is put before a text that does not begin with one."""
    own, special, ends, plain = FORMS[form]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    lines = pre_tokenizers.Split(
        Regex(r"[\r\n]+"), "isolated"
    )  # a run of line breaks is a piece, as it is in Llama 3's
    for word in WORDS:
        symbols = list(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0])
        while len(symbols) > 1:
            pair = (symbols[0], symbols[1])
            if "".join(pair) not in vocab:
                merges.append(pair)
                vocab["".join(pair)] = len(vocab)
            symbols = ["".join(pair), *symbols[2:]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*special, *ends]])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=ends[0],
        chat_template=own if template is None else template,
        clean_up_tokenization_spaces=False,
    )


def ends_of(form: str) -> list[int]:
    """Ids of the tokens that end a turn."""
    found: list[int] = make_tokenizer(form).convert_tokens_to_ids(FORMS[form][2])
    return found
