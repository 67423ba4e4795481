"""What the launchers of SGLang's server and router share: the API key, kept off command lines and logs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megarl.serving.device_share import devices_in_use, share_flags

DETERMINISTIC = "--enable-deterministic-inference"
ATTENTION = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")


class Secret(str):
    """A string that does not show itself in representations: SGLang writes all of its settings to its log."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (str(self),)


def read_api_key() -> Secret:
    """The key, from the first line of standard input, where the starting process wrote it."""
    key = sys.stdin.readline().strip()
    if not key:
        sys.exit("This launcher expects an API key as the first line of its standard input.")
    return Secret(key)


def name_instance(name: str) -> None:
    """Have the server that this process starts be called so, where SGLang would draw a name.

    Its shared memory is named after it, and no end of a process that is killed removes that: whoever started the server has to
    know the name beforehand.
    """
    from sglang.srt.server_args import PortArgs

    drawn = PortArgs.init_new

    def named(*values: Any, **options: Any) -> PortArgs:
        ports = drawn(*values, **options)
        ports.instance_id = name
        return ports

    PortArgs.init_new = staticmethod(named)


def keep_scales(load_format: str) -> None:
    """Have a server that waits for its weights hold scales of FP8 as they come.

    On Blackwell SGLang gives them another form for DeepGEMM whenever it has loaded some, and fails with the next that come
    (0.5.21, layers/quantization/fp8.py); of the other kernels that it has there none does.
    """
    import os

    from sglang.srt.runtime_context import get_platform

    if load_format == "dummy" and get_platform().is_blackwell:
        os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"


def attention_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """The attention of a deterministic server on Blackwell, where its words name none.

    SGLang takes FlashInfer's there, without cached prefixes and with 2 GiB of workspace; or what the model has by default, which
    for DeepSeek-V3 and gpt-oss is none of its deterministic ones, so that no server starts (0.5.21, arg_groups/overrides.py and
    model_overrides, layers/attention/flashinfer_backend.py).
    """
    from sglang.srt.runtime_context import get_platform

    names = {word.partition("=")[0] for word in argv}
    is_open = DETERMINISTIC in names and not names.intersection(ATTENTION)
    return (ATTENTION[0], "triton") if is_open and get_platform().is_blackwell else ()


def run_sglang_server(argv: list[str], api_key: Secret) -> None:
    """Serve until told to stop; argv: flags of `sglang.launch_server`."""
    import os
    import tempfile
    from pathlib import Path

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args([*argv, *attention_flags(argv), *share_flags(argv, devices_in_use())])
    server_args.api_key = api_key
    keep_scales(server_args.load_format)
    name_instance(Path(tempfile.gettempdir()).name)  # a folder of the server's own
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
