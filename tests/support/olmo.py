"""OLMo-3 in transformers as it was trained: layers with a sliding window rotate without the scaling of the others.

transformers 5.12 scales them all; from 5.23 on it has this itself.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch


def unscale_local_layers(model: Any) -> Any:
    """The same model; one that is not OLMo-3, or whose positions are not scaled, is left as it is."""
    config = model.config
    if config.model_type != "olmo3" or config.rope_parameters["rope_type"] == "default":
        return model
    plain = deepcopy(config)
    plain.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    rotary = type(model.model.rotary_emb)(plain)

    def unscaled(_: Any, given: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
        return given, options | {"position_embeddings": rotary(given[0], options["position_ids"])}

    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(unscaled, with_kwargs=True)
    return model


def as_published(folder: Path) -> Path:
    """The same folder, whose config has RoPE as the published models of OLMo-3 do: rope_theta, and rope_scaling beside it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    file.write_text(json.dumps(config))
    return folder
