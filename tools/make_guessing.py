"""Writes the guessing game's rows: train.jsonl and eval.jsonl (`prompt`, `answer`: the secret), and sft.jsonl, whole games.

The demonstrated games are legal and not clever: most guesses are drawn from all numbers, whatever was said before. Some heed
what was said, by chance. So a tiny model learns to name numbers and sees what follows, and reinforcement learning has the game
itself to find: use the hints, and halve what is left.
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


def demonstrate(rng: random.Random, *, low: int, high: int, guesses: int, heed: float) -> dict[str, Any]:
    """A game as a chat. heed: chance that the guesses of this game are drawn from what the hints have left."""
    secret = rng.randint(low, high)
    messages = [{"role": "user", "content": question(low, high)}]
    heeds = rng.random() < heed
    first, last = low, high
    for turn in range(guesses):
        guess = rng.randint(first, last) if heeds else rng.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == guesses - 1:
            break
        higher = guess < secret
        if higher:
            first = max(first, guess + 1)
        else:
            last = min(last, guess - 1)
        messages.append({"role": "user", "content": "higher" if higher else "lower"})
    return {"messages": messages}


def make_guessing(
    folder: Path,
    *,
    seed: int = 1,
    low: int = 1,
    high: int = 30,
    guesses: int = 7,
    num_train: int = 1000,
    num_eval: int = 90,
    num_sft: int = 16384,
    heed: float = 0.15,
) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl. Held-out rows have all secrets equally often, the others any.

    The same arguments give the same bytes. Raises ValueError where there is nothing to guess, or `heed` is not in [0, 1].
    """
    if low >= high or guesses < 1:
        raise ValueError(f"low={low}, high={high}, guesses={guesses}: wanted are low < high and at least one guess")
    if not 0 <= heed <= 1:
        raise ValueError(f"heed={heed}: a chance lies between 0 and 1")
    rng = random.Random(seed)
    asked = question(low, high)
    numbers = range(low, high + 1)
    folder.mkdir(parents=True, exist_ok=True)
    secrets = [rng.choice(numbers) for _ in range(num_train)]
    write_jsonl(folder / "train.jsonl", ({"prompt": asked, "answer": str(secret)} for secret in secrets))
    held_out = [numbers[index % len(numbers)] for index in range(num_eval)]
    write_jsonl(folder / "eval.jsonl", ({"prompt": asked, "answer": str(secret)} for secret in held_out))
    games = (demonstrate(rng, low=low, high=high, guesses=guesses, heed=heed) for _ in range(num_sft))
    write_jsonl(folder / "sft.jsonl", games)


def main(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder to write train.jsonl, eval.jsonl and sft.jsonl to; made if missing.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the games. The same seed gives the same bytes.")] = 1,
    low: Annotated[int, typer.Option(help="Smallest number.")] = 1,
    high: Annotated[int, typer.Option(help="Largest number.")] = 30,
    guesses: Annotated[int, typer.Option(help="Guesses of a game.")] = 7,
    heed: Annotated[float, typer.Option(help="Share of demonstrated games that heed the hints, 0 to 1.")] = 0.15,
) -> None:
    """Write the guessing game: training and held-out secrets, and games for a warm start.

    Example: python -m tools.make_guessing --out .cache/agent/data --seed 1
    """
    try:
        make_guessing(out, seed=seed, low=low, high=high, guesses=guesses, heed=heed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: games of {guesses} guesses from {low} to {high}, {heed:.0%} of them heeding hints, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
