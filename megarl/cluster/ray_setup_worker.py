"""What Ray runs before a worker that its job gives variables: sets them, and becomes the worker.

Ray's own (2.60, setup_worker.py) loads Ray to do so, which the worker then loads again. It is run where more is asked for.
Run as a file; the standard library alone. The raylet (2.60) leaves a file of this name out where nothing is set, by the name's
end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
PYTHON = "PYTHON"
# Of the context, what the short way knows; anything else has to be empty.
VARIABLES, EXECUTABLE = "env_vars", "py_executable"


def worker_of(words: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """The worker's command and its variables; None where more is asked for than to set them as they are.

    words: of this process's command line.
    """
    contexts = [word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)]
    languages = [word.removeprefix(LANGUAGE) for word in words if word.startswith(LANGUAGE)]
    if len(contexts) != 1 or languages != [PYTHON]:
        return None
    context = json.loads(contexts[0])
    variables, executable = context.pop(VARIABLES, {}), context.pop(EXECUTABLE, sys.executable)
    if any(context.values()) or executable != sys.executable or any("$" in value for value in variables.values()):
        return None
    return [executable, *(word for word in words if not word.startswith((CONTEXT, LANGUAGE)))], variables


def main() -> None:
    """Become the worker, or Ray's own setup of it."""
    worker = worker_of(sys.argv[1:])
    if worker is not None:
        command, variables = worker
        os.execve(command[0], command, os.environ | variables)
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None, "Ray has started this process"
    runpy.run_path(str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py"), run_name="__main__")


if __name__ == "__main__":
    main()
