"""What the installed SGLang's parser says of flags, before any server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.platform import get_platform
from megarl.serving.server import ServerSpec
from megarl.serving.server_flags import check_server_args


@pytest.mark.slow
def test_a_flag_that_sglang_does_not_know_is_refused_with_the_nearest() -> None:
    # Flags that it takes are among the words of a whole run in tests/end_to_end.
    with pytest.raises(UserError) as caught:
        check_server_args(["--disable-radix-cache", "--chunked-prefil-size", "5"], get_platform("cpu"))
    text = str(caught.value)
    assert "`rollout.server_args`" in text and "unrecognized arguments: --chunked-prefil-size 5" in text
    assert "Did you mean --chunked-prefill-size?" in text


@pytest.mark.slow
def test_sglang_takes_the_flags_of_a_server_of_fp8() -> None:
    spec = ServerSpec(Path("/models/m"), "bfloat16", tp=2, quantized=True, deterministic=True)
    cuda = get_platform("cuda")
    words = [*cuda.server_args, *cuda.deterministic_server_args, *spec.flags("127.0.0.1", 30000)]
    check_server_args(words, get_platform("cpu"))


def test_without_flags_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.serving.server_flags.subprocess.run", None)
    check_server_args((), get_platform("cpu"))
