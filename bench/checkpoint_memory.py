"""Host memory and seconds of an Adam's state in a checkpoint, by data-parallel ranks, beside megatron-core's own gathering.

    python -m bench.checkpoint_memory

A bfloat16 model whose optimizer keeps 12 bytes for each parameter, split over the ranks. Saved and loaded twice: as megarl does,
where every rank takes a fair part of the parameters whole; and as megatron-core's `fully_reshardable` does in the form that
spares memory, which gathers all of them on the first rank, and reads all of them on every rank. Peaks are beyond what the
rank held before, as a multiple of its part of the state; a rank is a fresh process. That the loaded state is the saved one is
checked. Exit code 0 only where no rank of megarl's takes more than BOUND parts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.load import write_checkpoint
from bench.support.measure import in_fresh_ranks, peak, summary, write
from megarl.core.layout import Layout
from megarl.core.ports import free_port
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer

# A part gathered whole, which is what is written while training goes on, and what one round sends and takes.
BOUND = 2.5
SIDES = ("megarl", "megatron-core")
UPSTREAM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


class Upstream:
    """Megatron's own way, called as megarl's `OptimizerState`."""

    gathered = ()

    def __init__(self, optimizer: Any) -> None:
        [self._member] = optimizer.chained_optimizers

    def to_save(self, weights: Any) -> dict[str, Any]:
        state = self._member.sharded_state_dict(weights, is_loading=False, metadata=UPSTREAM)["param_state"]
        return {"optimizer_state": {"0": state} if state is not None else {}}

    def to_load(self, weights: Any) -> dict[str, Any]:
        return {
            "optimizer_state": {
                "0": self._member.sharded_state_dict(weights, is_loading=True, metadata=UPSTREAM)["param_state"]
            }
        }

    def load(self, found: Any) -> None:
        member, plain = self._member, self._member._set_main_param_and_optimizer_states

        def with_step(parameter: Any, tensors: dict[str, Any]) -> None:
            """Megatron looks for torch's `step` among what it restores, where it saved none."""
            plain(parameter, {"step": member._get_main_param_and_optimizer_states(parameter)["step"], **tensors})

        member._set_main_param_and_optimizer_states = with_step
        member.load_parameter_state_from_fully_reshardable(found["optimizer_state"]["0"])


def build(rank: int, ranks: int, port: int, model: Path) -> tuple[Any, Any]:
    """A rank with the model, and its engine."""
    from megarl.training.rank import Rank
    from megarl.training.spec import PolicyObjective, RoleSpec

    one = Rank(rank, ranks, "cpu", seed=1)
    one.rendezvous("127.0.0.1", port, timeout_s=300)
    objective = PolicyObjective(Algorithm())
    layout = Layout(world_size=ranks)
    spec = RoleSpec(model, "bfloat16", optimizer=Optimizer(), total_steps=2, objective=objective, layout=layout)
    one.build("actor", spec)
    return one, one.engine("actor")


def kept(member: Any) -> list[torch.Tensor]:
    """What this rank keeps of all parameters, made where there was no step yet."""
    member.state_dict()
    states = [member._get_main_param_and_optimizer_states(each) for each in member.model_param_group_index_map]
    return [state[key].detach() for state in states for key in ("param", "exp_avg", "exp_avg_sq")]


def measured(rank: int, ranks: int, port: int, model: Path, folder: Path, side: str) -> dict[str, Any]:
    """One rank: save a random state, forget it, load it."""
    one, engine = build(rank, ranks, port, model)
    from megatron.core import dist_checkpointing

    from megarl.training.checkpoint import _weights
    from megarl.training.checkpoint_files import RankStrategy
    from megarl.training.optimizer_state import OptimizerState

    optimizer = engine._stepper.optimizer
    state: Any = (OptimizerState if side == "megarl" else Upstream)(optimizer)
    tensors = kept(optimizer.chained_optimizers[0])
    for tensor in tensors:
        tensor.uniform_()
    sums = [float(tensor.double().sum()) for tensor in tensors]

    def save() -> None:
        content = state.to_save(_weights(engine._chunks))
        strategy = RankStrategy(copy=True, spare=state.gathered)
        request = dist_checkpointing.save(content, str(folder), sharded_strategy=strategy, async_sharded_save=True)
        request.async_fn()
        torch.distributed.barrier()
        for finalize in request.finalize_fns:
            finalize()

    def load() -> None:
        for tensor in tensors:
            tensor.zero_()
        state.load(dist_checkpointing.load(state.to_load(_weights(engine._chunks)), str(folder)))

    found: dict[str, Any] = {"part_bytes": sum(tensor.nbytes for tensor in tensors)}
    with engine._groups.active():
        for name, call in (("save", save), ("load", load)):
            torch.distributed.barrier()
            began = time.perf_counter()
            with peak() as held:
                call()
                torch.distributed.barrier()
            found[name] = {"seconds": time.perf_counter() - began, "peak_over_part": held.bytes / found["part_bytes"]}
    found["same"] = sums == [float(tensor.double().sum()) for tensor in tensors]
    one.close()
    return found


def of_ranks(ranks: int, model: Path, repeats: int) -> list[dict[str, Any]]:
    """A row for each side: the highest peak of any rank, and seconds, over turns."""
    seen: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            with tempfile.TemporaryDirectory(prefix="megarl-state-") as folder:
                seen[side].append(in_fresh_ranks(ranks, measured, ranks, free_port(), model, Path(folder), side))
    rows = []
    for side, turns in seen.items():
        everyone = [rank for turn in turns for rank in turn]
        row: dict[str, Any] = {"side": side, "ranks": ranks, "part_bytes": everyone[0]["part_bytes"]}
        row["same"] = all(rank["same"] for rank in everyone)
        for name in ("save", "load"):
            row[f"{name}_peak"] = max(rank[name]["peak_over_part"] for rank in everyone)
            row[f"{name}_seconds"] = summary([max(rank[name]["seconds"] for rank in turn) for turn in turns])
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="An Adam's state in a checkpoint: peak memory in parts of a rank, and seconds")
    for column in ("ranks", "side", "part", "save", "load", "save, s", "load, s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(str(row["ranks"]), row["side"], f"{row['part_bytes'] / 1e6:.0f} MB"),
            *(f"{row[f'{name}_peak']:.1f}" for name in ("save", "load")),
            *(f"{row[f'{name}_seconds']['median']:.2f}" for name in ("save", "load")),
        )
    Console(width=120).print(table)


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; the highest peak counts.")] = 3,
    quick: Annotated[bool, typer.Option(help="A small model on two ranks: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure what checkpoints of an optimizer's state take."""
    with tempfile.TemporaryDirectory(prefix="megarl-state-model-") as name:
        size = {"layers": 2, "hidden": 64, "vocab": 512} if quick else {"layers": 12, "hidden": 512, "vocab": 32768}
        write_checkpoint(Path(name), **size)
        rows = [
            row
            for ranks in ((2,) if quick else (1, 2, 4))
            for row in of_ranks(ranks, Path(name), 1 if quick else repeats)
        ]
    show(rows)
    write("checkpoint_memory", {"rows": rows}, out)
    mine = [max(row["save_peak"], row["load_peak"]) for row in rows if row["side"] == "megarl"]
    if not all(row["same"] for row in rows) or not (quick or max(mine) <= BOUND):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
