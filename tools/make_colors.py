"""Writes a task that only who sees can solve: images of a square, or of some, and the question which color it has.

train.jsonl and eval.jsonl (`prompt` with `<image>` in it, `images`, `answer`), the images beside them, no image in both; and
sft.jsonl (`prompt`, `response`), a warm start without images in which every color is named equally often: after it the model
answers in the task's form, and guesses. Reinforcement learning has to find that the answer is to be seen.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from tools.make_arithmetic import write_jsonl

COLORS = {"red": (220, 30, 40), "green": (30, 180, 60), "blue": (40, 70, 220), "white": (240, 240, 240)}
NOISE = 20  # how far a square's color is from its name's, at most, in each of red, green and blue


def draw(names: tuple[str, ...], rng: random.Random, side: int) -> Image.Image:
    """The squares in a row, each `side` pixels wide, of a shade of its color."""
    image = Image.new("RGB", (side * len(names), side))
    for place, name in enumerate(names):
        red, green, blue = (min(255, max(0, part + rng.randint(-NOISE, NOISE))) for part in COLORS[name])
        image.paste((red, green, blue), (place * side, 0, (place + 1) * side, side))
    return image


def question(place: int, squares: int) -> str:
    """What the model is asked."""
    return "What color?" if squares == 1 else f"What color is {place + 1}?"


def make_colors(
    folder: Path,
    *,
    seed: int = 1,
    squares: int = 1,
    side: int = 56,
    num_train: int = 2048,
    num_eval: int = 64,
    num_sft: int = 2048,
) -> None:
    """Write the three files, and a PNG for each row of the first two.

    The same arguments give the same bytes. Raises ValueError for no squares, or more than nine.
    """
    if not 1 <= squares <= 9:
        raise ValueError(f"squares={squares}: allowed are 1 to 9")
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    kinds = list(itertools.product(COLORS, repeat=squares))
    for name, count in (("eval", num_eval), ("train", num_train)):
        rows = []
        for number in range(count):
            names = kinds[number % len(kinds)]
            place = number // len(kinds) % squares
            file = f"images/{name}_{number:05d}.png"
            draw(names, rng, side).save(folder / file)
            rows.append({"prompt": f"<image>{question(place, squares)}", "images": [file], "answer": names[place]})
        write_jsonl(folder / f"{name}.jsonl", rows)
    guesses = [
        {"prompt": question(rng.randrange(squares), squares), "response": rng.choice(list(COLORS))}
        for _ in range(num_sft)
    ]
    write_jsonl(folder / "sft.jsonl", guesses)


def main(
    *,
    out: Annotated[Path, typer.Option(help="Folder to write rows and images to; made if missing.")],
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of shades and guesses. The same seed gives the same bytes.")
    ] = 1,
    squares: Annotated[int, typer.Option(help="Squares of an image, 1 to 9.")] = 1,
    side: Annotated[int, typer.Option(min=28, help="Pixels of a square's side.")] = 56,
    train: Annotated[int, typer.Option(min=1, help="Rows to train on with reinforcement learning.")] = 2048,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out rows.")] = 64,
    sft: Annotated[int, typer.Option(min=1, help="Demonstrations, without images.")] = 2048,
) -> None:
    """Write a task of colors in images: train, held-out and warm-start rows.

    Example: python -m tools.make_colors --out .cache/colors/data
    """
    try:
        make_colors(out, seed=seed, squares=squares, side=side, num_train=train, num_eval=held_out, num_sft=sft)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: {train} train, {held_out} held-out and {sft} warm-start rows, {squares} squares, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
