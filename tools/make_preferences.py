"""Writes preference pairs for the quickstart's task: a right answer to an addition, and a wrong one that looks like it.

Two files of `prompt`, `chosen`, `rejected`: train.jsonl and eval.jsonl, and no problem is in both. labelled_train.jsonl and
labelled_eval.jsonl have one answer of each pair, the right and the wrong one in turn: `prompt`, `completion`, `label`.

A wrong answer has the sums of another problem under this one's digits, carried as they come. So the figures of wrong answers are
drawn as those of right ones are, and so are their styles: who does not compare sums with digits is right half of the time. In
some pairs the two have different styles, so that scores can be compared across styles as well.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from tools.make_arithmetic import Problem, draw_problems, num_problems, write_jsonl


def draw_other(problem: Problem, rng: random.Random) -> Problem:
    """Another problem of as many digits, with another answer."""
    digits = len(str(problem.left))
    while True:
        other = Problem(*(rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2)))
        if other.answer != problem.answer:
            return other


def in_style(worked: str, style: str) -> str:
    """A worked answer, or only its last line."""
    return worked if style == "worked" else worked.splitlines()[-1]


def prefer(problem: Problem, rng: random.Random, worked_share: float, mixed_share: float) -> dict[str, str]:
    """One pair. The styles are drawn for both at once, or for each by itself."""

    def draw_style() -> str:
        return "worked" if rng.random() < worked_share else "direct"

    style = draw_style()
    other = draw_style() if rng.random() < mixed_share else style
    return {
        "prompt": problem.question,
        "chosen": in_style(problem.worked(), style),
        "rejected": in_style(problem.worked(sums_of=draw_other(problem, rng)), other),
    }


def label(number: int, pair: dict[str, str]) -> dict[str, str | bool]:
    """One answer of the pair of that number."""
    right = number % 2 == 0
    return {"prompt": pair["prompt"], "completion": pair["chosen" if right else "rejected"], "label": right}


def make_preferences(
    folder: Path,
    *,
    seed: int = 1,
    digits: int = 3,
    num_train: int = 16384,
    num_eval: int = 400,
    worked_share: float = 0.8,
    mixed_share: float = 0.5,
) -> None:
    """Write train.jsonl and eval.jsonl, and the same with labelled answers; no problem appears twice in either.

    The same arguments give the same bytes. Raises ValueError where so many digits have too few problems, or a share is not
    in [0, 1].
    """
    for name, share in (("worked_share", worked_share), ("mixed_share", mixed_share)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={share}: a share lies between 0 and 1")
    wanted, there_are = num_train + num_eval, num_problems(digits)
    if wanted > there_are:
        raise ValueError(
            f"{wanted} pairs wanted, but with digits={digits} there are {there_are} problems: ask for fewer"
        )
    rng = random.Random(seed)
    source = draw_problems(rng, digits)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("eval", num_eval), ("train", num_train)):
        problems = [next(source) for _ in range(count)]
        pairs = [prefer(problem, rng, worked_share, mixed_share) for problem in problems]
        write_jsonl(folder / f"{name}.jsonl", pairs)
        write_jsonl(folder / f"labelled_{name}.jsonl", (label(number, pair) for number, pair in enumerate(pairs)))


def main(
    *,
    out: Annotated[Path, typer.Option(help="Folder to write the files to; made if missing.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pairs. The same seed gives the same bytes.")] = 1,
    digits: Annotated[int, typer.Option(min=1, max=4, help="Digits of each number.")] = 3,
    train: Annotated[int, typer.Option(min=1, help="Pairs to train on.")] = 16384,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out pairs.")] = 400,
    worked_share: Annotated[float, typer.Option(help="Share of answers that work column by column, 0 to 1.")] = 0.8,
    mixed_share: Annotated[float, typer.Option(help="Share of pairs whose styles are drawn apart, 0 to 1.")] = 0.5,
) -> None:
    """Write preference pairs for the quickstart's addition task, train and held-out, no problem twice.

    Example: python -m tools.make_preferences --out .cache/quickstart/preferences --seed 1
    """
    try:
        make_preferences(
            out,
            seed=seed,
            digits=digits,
            num_train=train,
            num_eval=held_out,
            worked_share=worked_share,
            mixed_share=mixed_share,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: {train} pairs to train on, {held_out} held out, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
