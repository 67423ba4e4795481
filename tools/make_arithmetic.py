"""Writes the quickstart's task in GSM8K's shape: addition problems, worked answers that end with `#### 1455`.

Three files: train.jsonl and eval.jsonl (`prompt`, `answer`; no problem is in both), and sft.jsonl (`prompt`,
`response`), demonstrations for a warm start. The demonstrations are all correct, in two styles: most give the sum at
once, the others work it out column by column. A tiny model cannot yet add in its head but can follow the columns, so
after the warm start it is mostly wrong, and reinforcement learning has something real to find: work it out first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

COLUMNS = ("ones", "tens", "hundreds", "thousands")


class Problem(NamedTuple):
    """Two numbers to add."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """What the model is asked."""
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> str:
        """The sum, in digits."""
        return str(self.left + self.right)

    def direct(self) -> str:
        """The answer at once."""
        return f"#### {self.answer}"

    def worked(self, sums_of: Problem | None = None) -> str:
        """The sum column by column, from the ones up: digit + digit + carry; then the answer.

        Every line is equally long: a digit is then always found at the same distance, which is learned quickly.
        sums_of: another problem, whose columns are added in the place of this one's: a wrong answer that looks right.
        """
        added = sums_of or self
        lines, carry = [], 0
        for column, (left, right), digits in zip(COLUMNS, self.columns(), added.columns(), strict=False):
            total = sum(map(int, digits)) + carry
            lines.append(f"{column} {left}+{right}+{carry}={total:02d}")
            carry = total // 10
        return "\n".join([*lines, added.direct()])

    def columns(self) -> list[tuple[str, str]]:
        """The digits above each other, from the ones up."""
        return list(zip(str(self.left)[::-1], str(self.right)[::-1], strict=False))


def num_problems(digits: int) -> int:
    """How many pairs there are of numbers of so many digits, in either order."""
    numbers = 9 * 10 ** (digits - 1)
    return numbers * (numbers + 1) // 2


def draw_problems(rng: random.Random, digits: int) -> Iterator[Problem]:
    """Problems of two numbers of so many digits, none twice, not even the other way round; ends with the last one."""
    low, high = 10 ** (digits - 1), 10**digits
    drawn: set[tuple[int, int]] = set()
    while len(drawn) < num_problems(digits):
        left, right = rng.randrange(low, high), rng.randrange(low, high)
        pair = (min(left, right), max(left, right))
        if pair not in drawn:
            drawn.add(pair)
            yield Problem(left, right)


def demonstrate(problem: Problem, rng: random.Random, worked_share: float) -> dict[str, str]:
    """One demonstration: worked with this probability, otherwise direct."""
    response = problem.worked() if rng.random() < worked_share else problem.direct()
    return {"prompt": problem.question, "response": response}


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_arithmetic(
    folder: Path,
    *,
    seed: int = 1,
    digits: int = 3,
    num_train: int = 4096,
    num_eval: int = 200,
    num_sft: int = 17920,
    worked_share: float = 0.4,
) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl; no problem appears twice, neither within a file nor across files.

    The same arguments give the same bytes. Raises ValueError where so many digits have too few problems, or where
    `digits` is not 1 to 4 or `worked_share` not in [0, 1].
    """
    if not 1 <= digits <= len(COLUMNS):
        raise ValueError(f"digits={digits}: allowed are 1 to {len(COLUMNS)}")
    if not 0 <= worked_share <= 1:
        raise ValueError(f"worked_share={worked_share}: a share lies between 0 and 1")
    wanted, there_are = num_train + num_eval + num_sft, num_problems(digits)
    if wanted > there_are:
        raise ValueError(
            f"{wanted} problems wanted, but with digits={digits} there are {there_are}: use more digits or fewer rows"
        )
    rng = random.Random(seed)
    source = draw_problems(rng, digits)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("eval", num_eval), ("train", num_train)):
        problems = [next(source) for _ in range(count)]
        write_jsonl(folder / f"{name}.jsonl", ({"prompt": p.question, "answer": p.answer} for p in problems))
    problems = [next(source) for _ in range(num_sft)]
    write_jsonl(folder / "sft.jsonl", (demonstrate(p, rng, worked_share) for p in problems))


def main(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder to write train.jsonl, eval.jsonl and sft.jsonl to; made if missing.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems. The same seed gives the same bytes.")] = 1,
    digits: Annotated[int, typer.Option(help="Digits of each number, 1 to 4.")] = 3,
    train: Annotated[int, typer.Option(min=1, help="Rows to train on with reinforcement learning.")] = 4096,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out rows.")] = 200,
    sft: Annotated[int, typer.Option(min=1, help="Demonstrations.")] = 17920,
    worked_share: Annotated[
        float, typer.Option(help="Share of demonstrations that work column by column, 0 to 1.")
    ] = 0.4,
) -> None:
    """Write the quickstart's addition task: train, held-out and demonstration rows, no problem twice.

    Example: python tools/make_arithmetic.py --out .cache/quickstart/data --seed 1
    """
    try:
        make_arithmetic(
            out, seed=seed, digits=digits, num_train=train, num_eval=held_out, num_sft=sft, worked_share=worked_share
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{out}: {train} train, {held_out} held-out, {sft} demonstrations ({worked_share:.0%} worked), seed {seed}"
    )


if __name__ == "__main__":
    typer.run(main)
