"""Packs what a machine without a network needs beside torch to check megarl's engine, and uses it there.

    python -m tools.gpu_kit make --python 3.12 --torch 2.11 --out kit         # here: kit/gpu_kit and kit/part-00, part-01, ...
    python gpu_kit use part-*                                                  # there: with Python and torch alone

`make` takes wheels from the package index that pip knows, by name and version from requirements/cpu.lock, and the project's
files as git has them. `use` unpacks both, puts them before all else on the path, and runs tools/gpu_check within --minutes; with
--run another of the project's modules, with the words behind it, in the folder of --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_kit.parts import KitError


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_kit", description="megarl's engine on a machine without a network.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="pack the kit")
    make.add_argument("--python", default="3.12", help="version of Python there (3.12)")
    make.add_argument("--torch", default="2.11", help="version of torch there, which the kit does not carry (2.11)")
    make.add_argument("--out", type=Path, default=Path("gpu-kit"), help="folder for the parts (gpu-kit)")
    make.add_argument("--part-mb", type=int, default=60, help="largest part, in megabytes (60)")
    use = commands.add_parser("use", help="unpack the kit and run the check")
    use.add_argument("parts", type=Path, nargs="+", help="the parts, or folders that hold them")
    use.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="what to check (cuda)")
    use.add_argument("--minutes", type=float, default=7.0, help="after which no test begins; the last has two more (7)")
    use.add_argument("--go-on", action="store_true", help="keep the results that are there, and try what is left")
    use.add_argument("--into", type=Path, help="where to unpack (a new temporary folder)")
    use.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for the results (gpu-check)")
    use.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="in place of the check, with all words behind it; in --out",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: those of tools/gpu_check; 2 for what a user can mend."""
    chosen = parsed(words)
    try:
        if chosen.command == "make":
            from tools.gpu_kit.make import make_kit

            return make_kit(chosen.out, chosen.python, chosen.torch, chosen.part_mb * 10**6)
        from tools.gpu_kit.use import Check, Module, use_kit

        what = Module(tuple(chosen.run)) if chosen.run else Check(chosen.platform, chosen.minutes, chosen.go_on)
        return use_kit(chosen.parts, what, chosen.into, chosen.out)
    except KitError as error:
        print(f"gpu_kit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
