"""`python -m tests.serving.alone MODULE...`: loads what a server serves with, says what that was, and runs modules' `main`.

Each module in a copy of the process, which costs nothing, where loading SGLang costs seconds: what one changes there no other
sees. Prints one JSON object: `loaded`, and by the module's name what went wrong in it, if anything.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress

UNWANTED = ("megatron", "wandb", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor")
LONGEST_S = 100


def wrong_in(module: str) -> str:
    """What the module's `main` ends with in a copy of this process; nothing where all is well."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(LONGEST_S)  # it does not outlive who waits for it
        told = b"ended by itself"
        try:
            importlib.import_module(module).main()
            told = b""
        except BaseException:
            told = traceback.format_exc().encode()
        finally:
            os.write(writer, b"it came to its end\n" + told)
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.wait()
    begun, _, problem = text.partition("\n")
    return problem if begun else "its process died"


def main() -> None:
    from megarl.serving import sglang_cpu

    sglang_cpu.load()
    sglang_cpu.fork_children()
    unwanted = [name for name in UNWANTED if name in sys.modules]
    with suppress(ImportError):  # what SGLang tries before it answers, and goes on without
        importlib.import_module(sglang_cpu.RESPONSES)
        unwanted.append(sglang_cpu.RESPONSES)
    multiprocessing.set_start_method("spawn", force=True)
    loaded = {
        "unwanted": unwanted,
        "children": multiprocessing.get_start_method(),
        "threads": len(os.listdir("/proc/self/task")),
    }
    found = {module: wrong_in(module) for module in sys.argv[1:]}
    for name in ("scipy", "megatron.core"):  # kept away from the server alone
        importlib.import_module(name)
    print(json.dumps({"loaded": loaded, **found}))


if __name__ == "__main__":
    main()
