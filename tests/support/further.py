"""Layers that predict further tokens, as models with them are published, for small models of one file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Of families whose names are their own: how they begin, and which layer of the model one is like; others follow the last layer.
OWN = {
    "qwen3_next": ("mtp.layers.0.", 1),
    "qwen3_5": ("mtp.layers.0.", 1),
    "qwen3_5_moe": ("mtp.layers.0.", 1),
    "ernie4_5_moe": ("model.mtp_block.0.", 0),
}


def further_layer(tensors: dict[str, Tensor], family: str, layers: int, *, model: str = "model.") -> dict[str, Tensor]:
    """One layer's tensors, with numbers of their own. model: how names of the text part begin."""
    begin, like = OWN.get(family, (f"model.layers.{layers}.", layers - 1))
    layer = f"{model}layers.{like}."
    shapes = {begin + name.removeprefix(layer): each.shape for name, each in tensors.items() if name.startswith(layer)}
    hidden = tensors[f"{model}norm.weight"].shape[0]
    if family in OWN:
        above = begin.partition("_block.")[0] + "_linear_proj.0." if family.startswith("ernie") else "mtp.fc."
        shapes |= {f"{above}weight": torch.Size([hidden, 2 * hidden])}
    else:
        shapes |= {f"{begin}{name}.weight": torch.Size([hidden]) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{begin}eh_proj.weight": torch.Size([hidden, 2 * hidden])}
        copied = tensors[f"{model}embed_tokens.weight"].shape
        shapes |= {f"{begin}{name}.weight": copied for name in ("embed_tokens", "shared_head.head")}
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def add_further(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> set[str]:
    """Give a folder of one file such a layer; returns its names."""
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors, raw = load_file(path), json.loads(config.read_text())
    more = further_layer(tensors, family, raw["num_hidden_layers"])
    save_file(tensors | {name: each.to(dtype) for name, each in more.items()}, path, {"format": "pt"})
    config.write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    return set(more)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether both are the same names, shapes, dtypes and bytes."""
    alike = found.keys() == expected.keys() and all(found[name].dtype == each.dtype for name, each in expected.items())
    return alike and all(
        torch.equal(found[name].view(-1).view(torch.uint8), each.view(-1).view(torch.uint8))
        for name, each in expected.items()
    )
