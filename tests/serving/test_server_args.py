"""What the installed SGLang's parser says of flags, before any server starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.core.platform import get_platform
from megarl.serving.server_flags import check_server_args

UNKNOWN = ["--disable-radix-cache", "--chunked-prefil-size", "5"]
SHORT = ["--json-model", '{"a": 1}', "--log-level=info", "--weight-ver=7"]
# The command for each list of words, in a process that loads SGLang once for all.
COMMANDS = """
import runpy
import sys
_, launcher, *asked = sys.argv
for words in asked:
    sys.argv = ["sglang_flags", launcher, words]
    runpy.run_module("megarl.serving.sglang_flags", run_name="__main__")
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the command says, by its words as JSON."""
    asked, platform = [json.dumps(UNKNOWN), json.dumps(SHORT)], get_platform("cpu")
    command = [sys.executable, "-c", COMMANDS, platform.server_module, *asked]
    done = subprocess.run(command, env={**os.environ, **platform.env}, capture_output=True, text=True, check=True)
    return dict(zip(asked, done.stdout.splitlines()[-2:], strict=True))


@pytest.fixture
def parser(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the command, another that says the same, run in the same way."""
    run, platform = subprocess.run, get_platform("cpu")

    def answer(command: list[str], *, env: dict[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert command[:-1] == [sys.executable, "-m", "megarl.serving.sglang_flags", platform.server_module]
        assert env.items() >= platform.env.items()
        return run(["echo", said[command[-1]]], env=env, **how)

    monkeypatch.setattr("megarl.serving.server_flags.subprocess.run", answer)


@pytest.mark.slow
@pytest.mark.usefixtures("parser")
def test_a_flag_that_sglang_does_not_know_is_refused_with_the_nearest() -> None:
    # Flags that it takes are in test_cuda_flags.
    with pytest.raises(UserError) as caught:
        check_server_args(UNKNOWN, get_platform("cpu"))
    text = str(caught.value)
    assert "`rollout.server_args`" in text and "unrecognized arguments: --chunked-prefil-size 5" in text
    assert "Did you mean --chunked-prefill-size?" in text


@pytest.mark.slow
@pytest.mark.usefixtures("parser")
def test_a_flag_is_written_out() -> None:
    """The beginning of one that megarl sets itself would pass by the rule that refuses it."""
    with pytest.raises(
        UserError, match=r"`rollout\.server_args`: SGLang takes --weight-ver for --weight-version\. Write"
    ):
        check_server_args(SHORT, get_platform("cpu"))


def test_without_flags_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.serving.server_flags.subprocess.run", None)
    check_server_args((), get_platform("cpu"))


@pytest.mark.parametrize("value", ["{rope_theta: 5}", "[1]", "5", ""])
def test_changes_of_a_config_that_are_no_json_object_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.serving.server_flags.subprocess.run", None)
    for words in (
        ["--json-model-override-args", value],
        [f"--json-model-override-args={value}"],
        ["--json-model", value],
    ):
        with pytest.raises(
            UserError, match=r"`rollout\.server_args`: --json-model-override-args .* takes a JSON object"
        ):
            check_server_args(words, get_platform("cpu"))
