"""SGLang servers of tests as copies of one process that has loaded SGLang, which costs five seconds of a core each time.

For tests of what a server holds and answers, not of how one starts. On devices each is a process that starts from nothing: CUDA
survives no fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.core.platform import Platform, get_platform
from megarl.models.multimodal import MULTIMODALS
from megarl.serving import server_models
from megarl.serving.guarded import PR_SET_PDEATHSIG
from megarl.serving.process import Command
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec

LOAD_S = 120.0  # a quiet machine needs six


class Child:
    """A forked process, with what `ManagedProcess` asks of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs; how it ended is not known here."""
        return -signal.SIGKILL if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float) -> None:
        """Until it has ended."""
        assert select.select([self._handle], [], [], timeout)[0], f"{self.pid} still runs after {timeout:g} s"

    def terminate(self) -> None:
        """Ask it to end."""
        signal.pidfd_send_signal(self._handle, signal.SIGTERM)


class ForkedServer(ServerProcess):
    """A server that starts as a copy, when it is started."""

    def __init__(self, copies: Copies, name: str, spec: ServerSpec, platform: Platform, place: ProcessPlace) -> None:
        super().__init__(name, spec, platform, place)
        self._copies = copies

    def start(self) -> None:
        """Returns at once, when SGLang is loaded."""
        self.command.log.parent.mkdir(parents=True, exist_ok=True)
        child: Any = self._copies.fork(self.command)
        self._process = child
        self._pidfd = os.pidfd_open(child.pid)


class Copies:
    """Makes servers. SGLang is loaded when the first is started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def server(self, name: str, spec: ServerSpec, platform: Platform, place: ProcessPlace) -> ServerProcess:
        """A server, not started yet."""
        if platform.has_device_memory or spec.deterministic:
            return ServerProcess(name, spec, platform, place)
        return ForkedServer(self, name, spec, platform, place)

    def fork(self, command: Command) -> Child:
        """Start a copy that does what the command's process would."""
        module, words = command.argv[2], command.argv[3:]
        assert module == get_platform("cpu").server_module
        told = {"words": words, "env": dict(command.env), "log": str(command.log), "secret": command.secret}
        return self.call("tests.support.forked_servers:serve", **told)

    def call(self, function: str, **values: Any) -> Child:
        """Start a copy that calls `MODULE:FUNCTION` with these values, and ends."""
        if self._process is None:
            self._process = self._load()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, values]).encode() + b"\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], LOAD_S)[0], f"SGLang was not loaded in {LOAD_S:g} s"
        return Child(int(self._process.stdout.readline() or b"0"))

    def _load(self) -> subprocess.Popen[bytes]:
        platform = get_platform("cpu")
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_servers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **platform.env, server_models.VARIABLE: ",".join(unused_models())},
            start_new_session=True,
        )

    def close(self) -> None:
        """End all."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def forked_servers() -> Iterator[Copies]:
    copies = Copies()
    try:
        yield copies
    finally:
        copies.close()


def unused_models() -> tuple[str, ...]:
    """Of SGLang's models those that no tiny model is of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.support.tiny import CONFIGS, tiny_config

    on_cuda = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # which no server on a CPU has
    served = [family for family in CONFIGS if family not in on_cuda]
    names = [name for name, each in MULTIMODALS.items() if each.sees]
    names += [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[tiny_config(family).model_type] for family in served]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": names}))
        return server_models.unused_models(Path(folder))


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def serve(words: list[str], env: dict[str, str], log: str, secret: str) -> None:
    """What a server's copy does, until it is ended."""
    from megarl.serving import sglang_cpu
    from megarl.serving.launcher import Secret, run_sglang_server

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.update(env)
    tempfile.tempdir = None  # where it was asked for before
    if sglang_cpu.LORA in words:
        sglang_cpu._forget_pinning()
    if sglang_cpu.IMAGES in words:
        sglang_cpu.load_images()
    run_sglang_server(words, Secret(secret))


def _call(parent: int, function: str, values: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(**values)


def main() -> None:
    """Load, then fork whatever is asked for on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    from megarl.serving import sglang_cpu

    sglang_cpu.load()
    sglang_cpu.fork_children()
    signal.signal(signal.SIGCHLD, _reap)
    here = os.getpid()
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(answers)
                _call(here, *json.loads(line))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.write(answers, b"%d\n" % pid)


if __name__ == "__main__":
    main()
