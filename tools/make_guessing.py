"""Writes the guessing game's rows: train.jsonl and eval.jsonl (`prompt`, `answer`: the secret), and sft.jsonl, whole games.

The demonstrated games are legal, and most of their guesses are not clever: the lowest number that is left. Some halve what is
left. So a tiny model learns both, mostly says the lowest, and seldom wins; reinforcement learning has to find which of the two
wins games. In the first rows all guesses halve, so that the model knows the middle of whatever is left before it takes to the
habit of saying the lowest: they are to be read in order. These games begin with any part of the numbers, and so does every second
one of the others: what few games come to is seen as well.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.make_arithmetic import write_jsonl


def question(low: int, high: int) -> str:
    """What the model is asked."""
    return f"Guess {low}-{high}"


def demonstrate(rng: random.Random, *, low: int, high: int, guesses: int, halve: float) -> dict[str, Any]:
    """A game as a chat, with what the environment says under `tell_range`. halve: chance of each guess to halve what is left."""
    secret = rng.randint(low, high)
    messages = [{"role": "user", "content": question(low, high)}]
    for turn in range(guesses):
        guess = (low + high) // 2 if rng.random() < halve else low
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == guesses - 1:
            break
        higher = guess < secret
        low, high = (guess + 1, high) if higher else (low, guess - 1)
        messages.append({"role": "user", "content": f"{'higher' if higher else 'lower'}: {low}-{high}"})
    return {"messages": messages}


def make_guessing(
    folder: Path,
    *,
    seed: int = 1,
    low: int = 10,
    high: int = 45,
    guesses: int = 6,
    num_train: int = 1000,
    num_eval: int = 144,
    num_sft: int = 16000,
    halve: float = 0.15,
    drill: float = 0.5,
) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl. Held-out rows have all secrets equally often, the others any.

    drill: share of the demonstrated games, the first ones, which all begin with any part of the numbers, and in which all
    guesses halve what is left.
    The same arguments give the same bytes. Raises ValueError where there is nothing to guess, and where `halve` or `drill` is not
    in [0, 1].
    """
    if low >= high or guesses < 1:
        raise ValueError(f"low={low}, high={high}, guesses={guesses}: wanted are low < high and at least one guess")
    if not (0 <= halve <= 1 and 0 <= drill <= 1):
        raise ValueError(f"halve={halve}, drill={drill}: chances and shares lie between 0 and 1")
    rng = random.Random(seed)
    asked = question(low, high)
    numbers = range(low, high + 1)
    folder.mkdir(parents=True, exist_ok=True)
    secrets = [rng.choice(numbers) for _ in range(num_train)]
    write_jsonl(folder / "train.jsonl", ({"prompt": asked, "answer": str(secret)} for secret in secrets))
    held_out = [numbers[index % len(numbers)] for index in range(num_eval)]
    write_jsonl(folder / "eval.jsonl", ({"prompt": asked, "answer": str(secret)} for secret in held_out))
    games = []
    for number in range(num_sft):
        drilled = number < drill * num_sft
        first, last = sorted(rng.sample(numbers, 2)) if drilled or number % 2 else (low, high)
        games.append(demonstrate(rng, low=first, high=last, guesses=guesses, halve=1.0 if drilled else halve))
    write_jsonl(folder / "sft.jsonl", games)


def main(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder to write train.jsonl, eval.jsonl and sft.jsonl to; made if missing.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the games. The same seed gives the same bytes.")] = 1,
    low: Annotated[int, typer.Option(help="Smallest number.")] = 10,
    high: Annotated[int, typer.Option(help="Largest number.")] = 45,
    guesses: Annotated[int, typer.Option(help="Guesses of a game.")] = 6,
    halve: Annotated[float, typer.Option(help="Share of demonstrated guesses that halve what is left, 0 to 1.")] = 0.15,
) -> None:
    """Write the guessing game: training and held-out secrets, and games for a warm start.

    Example: python -m tools.make_guessing --out .cache/agent/data --seed 1
    """
    try:
        make_guessing(out, seed=seed, low=low, high=high, guesses=guesses, halve=halve)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{out}: games of {guesses} guesses from {low} to {high}, {halve:.0%} of guesses halve what is left, seed {seed}"
    )


if __name__ == "__main__":
    typer.run(main)
