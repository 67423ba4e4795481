"""Run by `alone.py`: the attention of deterministic servers is the launcher's to name on Blackwell, and only where nobody did."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megarl.core.platform import get_platform
from megarl.serving.launcher import ATTENTION, attention_flags


def main() -> None:
    """Raises AssertionError where it names another, or where it should name none."""
    platform: Any = import_module("sglang.srt.runtime_context")
    own = get_platform("cuda").deterministic_server_args
    assert platform.get_platform().is_blackwell is False and attention_flags(own) == ()
    with platform.override_platform(is_blackwell=True):
        assert attention_flags(own) == ("--attention-backend", "triton")
        assert attention_flags(("--device", "cuda")) == ()
        for flag in ATTENTION:
            assert attention_flags((*own, flag, "fa4")) == attention_flags((*own, f"{flag}=fa4")) == ()
