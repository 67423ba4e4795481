"""Whether a server holds an HF folder's weights, bit for bit: its own hashes of all its tensors against those of the files.

Independent of how the weights came: nothing of a transport, and nothing of the trainer's, is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models.hf_config import load_model_config
from megarl.models.rules import expected_tensors
from megarl.models.tower_files import with_tower
from megarl.serving.client import ServerEndpoint
from megarl.sync.hashes import ExpectedSums, differences, server_sums
from tests.support.platforms import chosen

DEADLINE_S = 60.0


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an HF folder, by name."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as found:
            for name in found.keys():  # noqa: SIM118
                yield name, found.get_tensor(name)


def _of_part(name: str) -> str:
    """What a tensor of a multimodal folder with newer names is called in its text part, which a tower that learns is beside."""
    return name.replace("model.language_model.", "model.").removeprefix("model." if ".visual." in name else "")


def differing(
    server: ServerEndpoint,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    tower: bool = False,
) -> list[str]:
    """Tensors of the server that are not what the folder (or `tensors`, by HF's names) has; none where all bits are equal.

    dtype: that the server was started with. tower: that of a model that sees is among them.
    """
    config = load_model_config(folder)
    config = with_tower(config, folder) if tower else config
    expected = expected_tensors(config)
    sums = ExpectedSums(config, [server.tp], dtype, chosen())
    for name, tensor in tensors.items() if tensors is not None else tensors_in(folder):
        name = _of_part(name) if tower else name
        if name in expected:  # files of tied models may have the head as well
            sums.add(name, tensor)
    return differences(sums.finish()[server.tp], asyncio.run(server_sums(server, DEADLINE_S)))
