"""`megarl profile`: measures this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megarl.commands.options import Timeout
from megarl.core.scratch import Scratch


def profile(
    out: Annotated[Path, typer.Option(help="Cluster file to write.")] = Path("cluster.yaml"),
    servers: Annotated[int, typer.Option(min=0, max=2, help="SGLang servers to time; 0 leaves generation out.")] = 2,
    timeout: Timeout = 600,
) -> None:
    """Measure this machine with small reference models, in some minutes, for `megarl plan --cluster`.

    Times matrix products, memory, collectives, passes and updates on 1, 2, 4... ranks, and answers of real servers.

    Example: megarl profile --out cluster.yaml
    """
    with Scratch.open() as scratch:
        from megarl.profiling.command import run_profile

        run_profile(out, servers, timeout, scratch)
