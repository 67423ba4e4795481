"""Writes the calculator's task: train.jsonl and eval.jsonl (`prompt`, `answer`), and sft.jsonl, demonstrated episodes.

A problem is a chain of sums and differences, `47+38-15+22`, to be worked off with a calculator that does one operation a turn
(the environment `calculator` with `chain`). All numbers have two digits, also those on the way.

The demonstrations are all correct, in two styles: at every turn with operations left, most give the answer at once, and the
others ask the calculator. A tiny model cannot add so much in its head, but can copy the next operation: after the warm start it
is mostly wrong, and reinforcement learning has to find that asking, every time, is what works. The first rows are worked off to
their ends, all of them, so that copying is learned before the habit of answering at once: they are to be read in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.make_arithmetic import write_jsonl

LOW, HIGH = 10, 99


def draw_chain(rng: random.Random, operations: int) -> tuple[int, ...]:
    """The first number, and those that are added to it, with their signs; every sum on the way has two digits."""
    chain = [rng.randint(LOW, HIGH)]
    while len(chain) <= operations:
        link = rng.choice((1, -1)) * rng.randint(LOW, HIGH)
        if LOW <= sum(chain) + link <= HIGH:
            chain.append(link)
    return tuple(chain)


def text(first: int, links: tuple[int, ...]) -> str:
    """A chain as it is read."""
    return f"{first}" + "".join(f"{link:+d}" for link in links)


def draw_chains(rng: random.Random, operations: int) -> Iterator[tuple[int, ...]]:
    """Chains, none twice."""
    drawn: set[tuple[int, ...]] = set()
    while True:
        chain = draw_chain(rng, operations)
        if chain not in drawn:
            drawn.add(chain)
            yield chain


def demonstrate(rng: random.Random, chain: tuple[int, ...], ask: float) -> dict[str, Any]:
    """An episode as a chat. ask: chance of each turn with operations left to ask for the next one."""
    first, links = chain[0], chain[1:]
    messages = [{"role": "user", "content": text(first, links)}]
    while links and rng.random() < ask:
        messages.append({"role": "assistant", "content": f"{text(first, links[:1])}="})
        first, links = first + links[0], links[1:]
        messages.append({"role": "user", "content": text(first, links)})
    messages.append({"role": "assistant", "content": f"#### {sum(chain)}"})
    return {"messages": messages}


def make_chains(
    folder: Path,
    *,
    seed: int = 1,
    operations: int = 3,
    num_train: int = 4096,
    num_eval: int = 128,
    num_sft: int = 16000,
    ask: float = 0.4,
    drill: float = 0.6,
) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl; no problem appears twice, neither within a file nor across files.

    drill: share of demonstrations, the first ones, that are worked off to their ends.
    The same arguments give the same bytes. Raises ValueError where `operations` is not 2 to 6, or `ask` or `drill` not in [0, 1].
    """
    if not 2 <= operations <= 6:
        raise ValueError(f"operations={operations}: allowed are 2 to 6")
    if not (0 <= ask <= 1 and 0 <= drill <= 1):
        raise ValueError(f"ask={ask}, drill={drill}: chances and shares lie between 0 and 1")
    rng = random.Random(seed)
    source = draw_chains(rng, operations)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("eval", num_eval), ("train", num_train)):
        chains = [next(source) for _ in range(count)]
        rows = ({"prompt": text(chain[0], chain[1:]), "answer": str(sum(chain))} for chain in chains)
        write_jsonl(folder / f"{name}.jsonl", rows)
    asks = (1.0 if number < drill * num_sft else ask for number in range(num_sft))
    write_jsonl(folder / "sft.jsonl", (demonstrate(rng, next(source), each) for each in asks))


def main(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder to write train.jsonl, eval.jsonl and sft.jsonl to; made if missing.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems. The same seed gives the same bytes.")] = 1,
    operations: Annotated[int, typer.Option(help="Operations of a problem, 2 to 6.")] = 3,
    ask: Annotated[
        float, typer.Option(help="Share of demonstrated turns that ask the calculator where they could, 0 to 1.")
    ] = 0.4,
) -> None:
    """Write the calculator's task: training and held-out problems, and demonstrations for a warm start.

    Example: python -m tools.make_chains --out .cache/calculator/data --seed 1
    """
    try:
        make_chains(out, seed=seed, operations=operations, ask=ask)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: chains of {operations} operations, {ask:.0%} of demonstrated turns ask for one, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
