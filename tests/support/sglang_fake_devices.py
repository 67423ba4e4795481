"""`python -m tests.support.sglang_fake_devices H100`: how SGLang settles flags on a node of 8 H100, or B200, where there is none.

Reads {name: words of the launcher} as JSON; prints as its last line {name: {"problem": text or null, "settled": {setting: value},
"nccl": {variable: value}}}, the last with CUDA's queues. Everything is SGLang's own code, from the parser to the last check
before processes start; fake is what it asks of the machine: whether there are devices, of what kind, with how much memory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megarl.serving import sglang_cpu
from megarl.serving.launcher import attention_flags

ENGINE = "sglang.srt.entrypoints.engine"
GIB = 2**30
DEVICES = {
    "H100": SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132
    ),
    "B200": SimpleNamespace(name="NVIDIA B200", major=10, minor=0, total_memory=180 * GIB, multi_processor_count=148),
}
OF_KIND = {"H100": ("is_sm90", "is_hopper_with_cuda_12_3"), "B200": ("is_sm100", "is_blackwell")}


def become(kind: str) -> None:
    """Fake the devices. What has kernels of its own is imported before, as on a CPU: nothing is computed here."""
    device = DEVICES[kind]
    capability, memory = (device.major, device.minor), device.total_memory
    facts = {"is_cuda": True, "has_flashinfer": True, "device_sm": 10 * device.major, "device_capability": capability}
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda of=None: device,
        "get_device_name": lambda of=None: device.name,
        "mem_get_info": lambda device=None: (memory, memory),
    }
    sglang_cpu.install()
    for module in ("server_args", "configs.model_config", "arg_groups.expert_pack_hook"):
        importlib.import_module(f"sglang.srt.{module}")
    engine: Any = importlib.import_module(ENGINE)
    engine.assert_pkg_version = lambda *_: None  # of FlashInfer, which Qwen3-VL's decode steps take
    common: Any = importlib.import_module("sglang.srt.utils.common")
    importlib.import_module("sglang.srt.runtime_context").override_platform(
        **facts, **dict.fromkeys(OF_KIND[kind], True)
    ).install()
    torch: Any = importlib.import_module("torch")
    torch.version.cuda = "13.0"
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for each in list(vars(common).values()):
        if hasattr(each, "cache_clear"):  # what it has found out about this machine
            each.cache_clear()
    common.is_flashinfer_available = lambda: True


def settle(words: list[str]) -> dict[str, Any]:
    """What SGLang makes of the words, or the first thing that it says against them."""
    from sglang.srt.server_args import prepare_server_args

    try:
        with patch.dict("os.environ"):  # some settings end in variables, for the server's own processes
            settings = prepare_server_args([*words, *attention_flags(words)])
            settings.resolve_once()
            settings.check_server_args()
            importlib.import_module(ENGINE)._set_envs_and_config(settings)
            nccl = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "CUDA_DEVICE_"))}
            return {"problem": None, "settled": settings.resolved_dict(), "nccl": nccl}
    except (Exception, SystemExit) as error:
        return {"problem": "".join(traceback.format_exception_only(error)), "settled": {}}


def main() -> None:
    """Answer for each name."""
    asked = json.load(sys.stdin)
    become(sys.argv[1])
    print()
    print(json.dumps({name: settle(words) for name, words in asked.items()}, default=str))


if __name__ == "__main__":
    main()
