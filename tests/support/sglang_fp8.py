"""SGLang's own FP8 models on a machine that cannot run them: built by the flags of a server, and filled by its own loader.

SGLang 0.5.21 builds them on a CPU, and refuses only what comes after loading, which is for its kernels. As a program, with a
JSON list of [flags, file of what is sent, file for what the model then holds]: each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.core.platform import get_platform
from megarl.serving import server_models, sglang_cpu
from tests.support.forked_servers import unused_models

SENT = ("act_fn.beta", "act_fn.eps")  # buffers that are weights
Case = tuple[list[str], Path, Path]


def loaded_by_sglang(cases: Sequence[Case], deadline_s: float = 300.0) -> None:
    """Run all cases. Fails with what SGLang said."""
    platform = get_platform("cpu")
    words = [[[*platform.server_args, *flags], str(sent), str(held)] for flags, sent, held in cases]
    command = [sys.executable, "-m", "tests.support.sglang_fp8", json.dumps(words)]
    env = {**os.environ, **platform.env, server_models.VARIABLE: ",".join(unused_models())}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def joined(flags: list[str], rank: int = 0, store: Path | None = None) -> Any:
    """The model's config as a server with these flags reads it, in a process that is that rank of it. store: where they meet."""
    runtime, distributed = import_module("sglang.srt.runtime_context"), import_module("sglang.srt.distributed")
    arguments = import_module("sglang.srt.server_args")
    args = arguments.prepare_server_args(flags)
    arguments.set_global_server_args_for_scheduler(args)
    config = import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(args)
    ranks = runtime.SpawnRanks(world_rank=rank)
    runtime.publish(args, role="scheduler", hf_config=config.hf_config, ranks=ranks)
    path = store or Path("/tmp") / f"megarl-sglang-{os.getpid()}"
    distributed.init_distributed_environment(
        backend="gloo", world_size=args.tp_size, rank=rank, local_rank=rank, distributed_init_method=f"file://{path}"
    )
    distributed.initialize_model_parallel()
    if store is None:
        path.unlink(missing_ok=True)
    import_module("sglang.srt.layers.dp_attention").initialize_dp_attention(args)
    import_module("sglang.srt.distributed.bootstrap").init_layer_runtime(model_config=config)
    return config


def build(flags: list[str]) -> Any:
    """A model as a server with these flags builds it, on one rank and without weights."""
    import torch

    loader = import_module("sglang.srt.model_loader.loader")
    config = joined(flags)
    load = import_module("sglang.srt.configs.load_config").LoadConfig(load_format="dummy")
    torch.set_default_dtype(config.dtype)
    return loader._initialize_model(config, load, loader._get_quantization_config(config, load))


def run(flags: list[str], sent: str, held: str) -> None:
    """One case: scales that nothing sets stay what SGLang puts there, the smallest float32; other numbers stay NaN.

    Scales of the KV cache, one number each, are none of the weights.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = build(flags)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.dim()}
    weights |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(SENT)}
    assert any(name.endswith("scale_inv") for name in weights), "the flags ask for FP8"
    for name, parameter in weights.items():
        if not name.endswith("scale_inv"):
            parameter.data.reshape(-1).view(torch.uint8).fill_(255)
    model.load_weights(iter(load_file(sent).items()))
    save_file({name: parameter.detach().contiguous() for name, parameter in weights.items()}, held)


def main() -> None:
    """Load once; a process for each case."""
    cases = json.loads(sys.argv[1])
    sglang_cpu.load()
    import_module("sglang.srt.models.registry")  # and with it all models that are built
    for case in cases:
        child = os.fork()
        if child == 0:
            run(*case)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{case[0]}: status {status}")


if __name__ == "__main__":
    main()
