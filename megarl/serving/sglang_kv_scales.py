"""What a server that waits for FP8 does at the beginning of each weight update: SGLang calls it by its name, in its own process.

Its layers of attention have scales of the KV cache among their weights, which no trainer sends. SGLang 0.5.21 draws them at
random with all weights of such a server, and after a sleep their memory holds what it happens to hold: it keeps buffers alone
(managers/scheduler_components/weight_updater.py), and these are parameters (layers/quantization/kv_cache.py). What is above 0 it
would take for scales that were sent.
"""

from __future__ import annotations

from typing import Any

SCALES = ("k_scale", "v_scale")
LOADER = f"{__name__}.reset"


def reset(model: Any, _: Any) -> None:
    """Give every scale of the cache the value that stands for none was sent: 1."""
    for module in model.modules():
        for name in SCALES:
            if (scale := module._parameters.get(name)) is not None:
                scale.data.fill_(1.0)
