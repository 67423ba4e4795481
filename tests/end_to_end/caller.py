"""A tiny model that has learned to think, to call a tool of the MCP server in tests/agents/mcp_shop.py, and to name numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_model import make_tiny_model

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("price_of", "close_down", "wait")]
PRICES = {"apple": "3.0", "pear": "2.5"}
THOUGHT = "Hm.</think>"
# What an assistant thought is left out, but for the last turn, which nothing follows.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- set said = message.content if loop.last else message.content.split('</think>')[-1] %}
{{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
STEPS, BATCH, LR = 90, 8, 6e-3


def make_caller(folder: Path, questions: Path) -> None:
    """Write the model. questions: JSONL of prompts that it is asked."""
    make_tiny_model(folder, hidden_size=64, context=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    asked = [json.loads(line)["prompt"] for line in questions.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rng = random.Random(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10, (STEPS - step) / 30)
        rows = [_row(tokenizer, rng, rng.choice(asked)) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows])
        labels = torch.tensor([[*[-100] * first, *ids[first:], *[-100] * (longest - len(ids))] for ids, first in rows])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _row(tokenizer: Any, rng: random.Random, question: str) -> tuple[list[int], int]:
    """The ids of a conversation up to an answer of the policy's, and where that begins."""
    messages = [{"role": "user", "content": question}]
    for _ in range(rng.randrange(3)):
        answer, told = _answer(rng)
        messages += [{"role": "assistant", "content": answer}, told]
    prompt = tokenizer.apply_chat_template(messages, TOOLS, add_generation_prompt=True, return_dict=False)
    answer = tokenizer(_answer(rng)[0], add_special_tokens=False)["input_ids"]
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def _answer(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A turn of the policy's, and what it is told then."""
    if rng.random() < 0.5:
        fruit = rng.choice(sorted(PRICES))
        return f'{THOUGHT}[price_of(fruit="{fruit}")]', {"role": "tool", "content": PRICES[fruit]}
    return f"{THOUGHT}{rng.randrange(100, 1000)}", {"role": "user", "content": rng.choice(["higher", "lower"])}
