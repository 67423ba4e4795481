"""Writes a tiny Qwen3 in HF format: random weights, a small byte-level tokenizer made on the spot, a chat template.

For quickstarts and tests: nothing is downloaded, and the same options give the same bytes. Not for anything that must
know language: the weights are random until a warm start (`megarl sft`) teaches them something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Kept whole, so that a chat's frame and the arithmetic task's fixed words cost one token each.
WORDS = ("user\n", "assistant\n", "system\n", "What is ", " + ", "ones ", "tens ", "hundreds ", "thousands ", "#### ")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Vocabulary sizes divide evenly among this many tensor-parallel ranks.
VOCAB_MULTIPLE = 64

# Larger than Qwen3's 0.02: so narrow a model starts to learn in half as many steps with it.
INITIALIZER_RANGE = 0.05


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that can encode any text: 256 bytes, the merges that build WORDS, three special tokens.

    Every digit is a token of its own: arithmetic is then done on digits, not on chunks of them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        symbols = list(to_symbols.pre_tokenize_str(word)[0][0])
        for pair in merges:
            symbols = _merge(symbols, pair)
        while len(symbols) > 1:
            pair = (symbols[0], symbols[1])
            merges.append(pair)
            vocab["".join(pair)] = len(vocab)
            symbols = _merge(symbols, pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_symbols])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """One merge of a byte pair encoding, at every place from the left: what the tokenizer will do with it."""
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def make_config(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, layers: int, heads: int, kv_heads: int, context: int
) -> Qwen3Config:
    """Qwen3's shape at that size: grouped queries, QK norm, head_dim 32, SwiGLU of triple width, tied embeddings."""
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 1,
    hidden_size: int = 256,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    context: int = 512,
) -> int:
    """Write config, tokenizer, generation config and random weights (float32 safetensors); returns the parameter count.

    The same arguments give the same bytes. Torch's global random state is left as it was.
    Raises ValueError where `heads` is not a multiple of `kv_heads`.
    """
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}: each KV head serves equally many query heads"
        )
    tokenizer = make_tokenizer()
    config = make_config(
        tokenizer, hidden_size=hidden_size, layers=layers, heads=heads, kv_heads=kv_heads, context=context
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def main(
    *,
    out: Annotated[Path, typer.Option(help="Folder to write; made if missing, overwritten if there.")],
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random weights. The same seed gives the same bytes.")
    ] = 1,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the residual stream.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of 32 dimensions; a multiple of --kv-heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key-value heads; tensor parallel size must divide it.")] = 2,
    context: Annotated[int, typer.Option(min=64, help="Longest sequence, in tokens.")] = 512,
) -> None:
    """Write a tiny random Qwen3 with its tokenizer: the start of the quickstart.

    Example: python tools/make_tiny_model.py --out .cache/quickstart/model --seed 1
    """
    disable_progress_bar()
    try:
        parameters = make_tiny_model(
            out, seed=seed, hidden_size=hidden_size, layers=layers, heads=heads, kv_heads=kv_heads, context=context
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    vocab = json.loads((out / "config.json").read_text())["vocab_size"]
    typer.echo(
        f"{out}: Qwen3, {parameters / 1e6:.2f}M random parameters, {layers} layers, vocabulary {vocab}, seed {seed}"
    )


if __name__ == "__main__":
    typer.run(main)
