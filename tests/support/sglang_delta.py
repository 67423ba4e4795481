"""`python -m tests.support.sglang_delta FOLDER...`: SGLang's own models with Gated DeltaNet, filled by its own loader.

SGLang 0.5.21 builds them on a CPU where it is not told that it is one, and without the kernels of that, which nothing here
calls. Each in a process of its own; prints as its last line {folder: {"unfilled": parameters, "otherwise": numbers of elements
that were sent and are not held, or the other way round, "tower": its tensors that are not what was sent, "base": RoPE's,
"layers": their kinds, "turns by three axes": whether RoPE does}}.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.core.platform import get_platform
from megarl.serving import sglang_cpu
from megarl.serving.server_models import missing_settings
from megarl.sync.held_tower import engine_name
from tests.support.sglang_fp8 import build

# Which modules name as they load.
KERNELS = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    *("fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_qkvzba_split_reshape_cat_cpu"),
)
MODULES = ("qwen3_next", "qwen3_5")


def filled(folder: Path) -> dict[str, Any]:
    """What the model holds of the folder's tensors; numbers of the folder that are alike at another place are not told apart."""
    import torch
    from safetensors.torch import load_file

    words = ["--model-path", str(folder), "--dtype", "float32"]
    words += ["--json-model-override-args", json.dumps(missing_settings(folder))]
    model = build([*get_platform("cpu").server_args, *words])
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    sent = load_file(folder / "model.safetensors")
    model.load_weights(iter(sent.items()))
    held = dict(model.named_parameters())
    unfilled = [name for name, parameter in held.items() if parameter.isnan().any()]
    tower = {name.removeprefix("model."): each for name, each in sent.items() if "visual." in name}
    # Of a tower SGLang fills up a table of positions.
    towers = {name: each for name, each in held.items() if "visual." in name}
    sent, held = ({name: each for name, each in some.items() if "visual." not in name} for some in (sent, held))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    # An update has the text part's own names, and those of a tower that learns.
    text = {name.replace("model.language_model.", "model."): each for name, each in sent.items()}
    model.load_weights(iter((tower | text).items()))
    unfilled += [name for name, parameter in held.items() if parameter.isnan().any()]
    ours, theirs = (torch.cat([each.flatten() for each in some.values()]) for some in (sent, held))
    ours, theirs = ours.sort().values, theirs.sort().values
    [rope, *_] = [layer.rotary_emb for layer in model.model.layers if hasattr(layer, "rotary_emb")]
    return {
        "unfilled": unfilled,
        "otherwise": int((ours != theirs).sum()) if len(ours) == len(theirs) else len(ours) - len(theirs),
        "tower": [
            name
            for name, each in tower.items()
            if not torch.equal(towers[engine_name(name)][: len(each)], each) or towers[engine_name(name)].isnan().any()
        ],
        "base": rope.base,
        "layers": model.config.layers_block_type,
        "turns by three axes": getattr(model, "is_mrope_enabled", False),
    }


def main() -> None:
    """Load once; a process for each folder."""
    import torch

    sglang_cpu.load()
    for name in KERNELS:
        setattr(torch.ops.sgl_kernel, name, None)
    import_module("sglang.srt.models.registry")
    for name in MODULES:
        vars(import_module(f"sglang.srt.models.{name}"))["_is_cpu"] = False
    found = {}
    for folder in sys.argv[1:]:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, json.dumps(filled(Path(folder))).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as answer:
            found[folder] = json.loads(answer.read())
        os.wait()
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
