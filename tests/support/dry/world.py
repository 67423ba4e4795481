"""What dry runs read: tiny models, and rows with more fields than a recipe names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.tiny import write_tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}

TRAIN = """\
run: {{dir: {root}/runs, name: r}}
cluster: {{platform: cpu}}
model: {{path: {root}/dense, dtype: float32}}
data: {{train: {root}/prompts.jsonl, max_prompt_tokens: 48}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 12}}
actor: {{mini_batch_samples: 8, optimizer: {{lr: 1.0e-2}}}}
train: {{steps: 2}}
"""
SUPERVISED = """\
run: {{dir: {root}/runs, name: r}}
cluster: {{platform: cpu}}
model: {{path: {root}/dense, dtype: float32}}
data: {{train: {root}/ROWS.jsonl, max_tokens: 64}}
actor: {{optimizer: {{lr: 1.0e-2}}}}
train: {{steps: 3, batch_samples: 4}}
"""
RECIPES = {
    "train": TRAIN,
    "sft": SUPERVISED.replace("ROWS", "demonstrations"),
    "rm": SUPERVISED.replace("ROWS", "pairs") + "rm: {{}}\n",
    "dpo": SUPERVISED.replace("ROWS", "pairs") + "dpo: {{}}\n",
    "kto": SUPERVISED.replace("ROWS", "labelled") + "kto: {{}}\n",
}


def write_world(root: Path) -> None:
    """Models, rows, recipes and a cluster file."""
    write_tiny_model(root / "dense", **SIZES)
    write_tiny_model(root / "dense2", **SIZES, seed=1)
    write_tiny_model(root / "moe", "qwen3_moe", **SIZES, mlp_only_layers=[])
    # Whole blocks of FP8.
    write_tiny_model(root / "wide", **{**SIZES, "hidden_size": 128, "intermediate_size": 128, "head_dim": 64})
    write_tiny_model(root / "latent", "deepseek_v3", num_hidden_layers=2, max_position_embeddings=512)
    _write_scored(root / "dense", root / "scored", 2)
    _write_scored(root / "dense", root / "scored2", 3)
    _write_scored(root / "moe", root / "scored_moe", 4)
    _write_other_words(root / "dense", root / "other_words")
    for name, first in (("prompts", 1), ("prompts2", 7)):
        _write(root / f"{name}.jsonl", [_prompt(first + index) for index in range(8)])
    for name, first in (("demonstrations", 1), ("demonstrations2", 7)):
        _write(root / f"{name}.jsonl", [_demonstration(first + index) for index in range(8)])
    for name, first in (("pairs", 1), ("pairs2", 7)):
        _write(root / f"{name}.jsonl", [_pair(first + index) for index in range(8)])
    for name, first in (("labelled", 1), ("labelled2", 7)):
        _write(root / f"{name}.jsonl", [_labelled(first + index) for index in range(8)])
    kinds = (
        ("prompts", _prompt, 0),
        ("demonstrations", _demonstration, 3),
        ("pairs", _pair, 5),
        ("labelled", _labelled, 7),
    )
    for name, write, base in kinds:
        for place, config in enumerate(("plain", "other")):
            for split in ("train", "more", "test"):
                file = root / "sets" / name / config / f"{split}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                base += 3
                _write(file, [write(base + place + index) for index in range(8)])
    for command, text in RECIPES.items():
        (root / f"{command}.yaml").write_text(text.format(root=root))
    (root / "cluster.yaml").write_text("nodes: 1\ndevice: cpu\nmeasured: {server_bytes: 1.0e+6}\n")


def _prompt(n: int) -> dict[str, Any]:
    """The last of the rows is too long for the recipes."""
    text = f"{n}+{n}" + ("?" * 60 if n % 8 == 0 else "")
    row = {"prompt": text, "question": f"{n}*{n}", "answer": 2 * n, "gold": n * n + 1000, "marked": f"so #### {n}"}
    return row | {"rubric": "short"} | _sets(n)


def _demonstration(n: int) -> dict[str, Any]:
    chat = [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}"}]
    row: dict[str, Any] = {"prompt": f"{n}", "question": f"what is {n}", "response": f"{n}!", "reply": f"it is {n}"}
    if n % 8 == 0:
        row["response"] = "x" * 50
    return row | ({"messages": chat} if n % 2 else {"chat": chat}) | _sets(n)


def _pair(n: int) -> dict[str, Any]:
    worse = "x" * 50 if n % 8 == 0 else f"{n}?"
    row: dict[str, Any] = {
        "prompt": f"{n}",
        "question": f"what is {n}",
        "chosen": f"{n}" + "!" * (n % 8),
        "rejected": worse,
    }
    return row | {"better": f"good {n}", "worse": f"bad {n}", "margin": 0.1 * n, "ahead": 1.0} | _sets(n)


def _labelled(n: int) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": f"{n}", "question": f"what is {n}", "completion": f"{n}" + "!" * (n % 8)}
    if n % 8 == 0:
        row["completion"] = "x" * 50
    return row | {"label": n % 3 == 0, "reply": f"it is {n}", "good": n % 2} | _sets(n)


def _sets(n: int) -> dict[str, str]:
    return {"data_source": "ab"[n % 2], "kind": "ab"[n % 3 == 0]}


def _write(path: Path, rows: list[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_other_words(source: Path, target: Path) -> None:
    """The tokenizer with a chat template that says only whose each message is."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    )
    tokenizer.save_pretrained(target)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


def _write_scored(source: Path, target: Path, seed: int) -> None:
    """The model with a head of one score."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    [architecture] = config["architectures"]
    scored = architecture.replace("ForCausalLM", "ForSequenceClassification")
    config |= {"architectures": [scored], "id2label": {"0": "SCORE"}}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    width = tensors["model.embed_tokens.weight"].shape[1]
    tensors.pop("lm_head.weight", None)  # tied embeddings have none
    tensors["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
