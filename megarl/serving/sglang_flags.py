"""`python -m megarl.serving.sglang_flags LAUNCHER WORDS`: what SGLang's parser says of a server's flags, as one JSON line.

It starts nothing. LAUNCHER: the module that starts servers on this platform. WORDS: a JSON list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from importlib.metadata import version
from typing import NoReturn


class _RefusedError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls for flags that it does not take."""
        raise _RefusedError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """What `--help` and the like do."""
        raise _RefusedError(message or "one of them ends the server as soon as it starts")


def main() -> None:
    """Parse, and print what there is to say."""
    launcher, words = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2])
    if hasattr(launcher, "install"):  # what SGLang needs there to be imported at all
        launcher.install()
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    problem = None
    try:
        parser.parse_args(["--model-path", "model", *words])
    except _RefusedError as error:
        problem = str(error)
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    print(json.dumps({"problem": problem, "flags": flags, "version": version("sglang")}))


if __name__ == "__main__":
    main()
