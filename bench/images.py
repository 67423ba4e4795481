"""Does a model learn to see? Colors of squares in images, for a tiny Qwen2.5-VL and a tiny Qwen3-VL. One command:

    python -m bench.images

Each model is random, and its warm start has no images: what it knows then is how answers look, and it guesses. GRPO on rows with
images follows; of Qwen3-VL once more with a vision tower that learns as well. Then the trained model, in transformers alone,
answers held-out rows greedily with their images, and again with the image of another row, whose answer differs: who does not look
answers the same. Writes a table and bench/results/images.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.support.measure import write
from bench.support.quickstart import ROOT, accuracy, call, metrics

RUNS = (("qwen2_5_vl", "frozen"), ("qwen3_vl", "frozen"), ("qwen3_vl", "learns"))  # a model, and its tower
LEARNS = "actor.optimizer.freeze_vision_tower=false"
COLUMNS = {
    "kind": "model",
    "tower": "tower",
    "moved": "of its tensors changed",
    "before": "held out, before",
    "after": "after GRPO",
    "transformers": "in transformers",
    "exchanged": "with another's image",
    "logprob_diff": "servers against trainer, nats",
    "seconds": "seconds of GRPO",
}


def run(kind: str, tower: str, folder: Path, seed: int) -> dict[str, Any]:
    """From nothing to a model that sees."""
    shutil.rmtree(folder, ignore_errors=True)
    model, data = folder / "model", folder / "data"
    call("-m", "tools.make_tiny_vision_model", "--kind", kind, "--out", str(model), "--seed", str(seed))
    call("-m", "tools.make_colors", "--out", str(data), "--seed", str(seed))
    common = [f"run.dir={folder}", f"run.seed={seed}"]
    words = [*common, f"model.path={model}", f"data.train={data}/sft.jsonl", "run.name=sft"]
    call("-m", "megarl", "sft", "recipes/quickstart_colors_sft.yaml", *words)
    words = [*common, f"model.path={folder}/sft/hf", f"data.train={data}/train.jsonl", f"data.eval={data}/eval.jsonl"]
    words += [LEARNS] if tower == "learns" else []
    seconds = call("-m", "megarl", "train", "recipes/quickstart_colors.yaml", *words, "run.name=grpo")
    rows = metrics(folder / "grpo")
    held_out = accuracy(rows)
    seen = answers(folder / "grpo" / "hf", data / "eval.jsonl")
    return {
        "kind": kind,
        "tower": tower,
        "moved": moved(folder / "sft" / "hf", folder / "grpo" / "hf"),
        "seed": seed,
        "accuracy": held_out,
        "before": held_out[0],
        "after": held_out[max(held_out)],
        **seen,
        "logprob_diff": max(row["rollout/logprob_diff_max"] for row in rows if row["step"]),
        "seconds": seconds,
    }


def moved(before: Path, after: Path) -> str:
    """How many of the tower's tensors are others than before."""
    was, found = (tensors(folder) for folder in (before, after))
    tower = [name for name in was if "visual." in name]
    return f"{sum(not was[name].equal(found[name]) for name in tower)} of {len(tower)}"


def tensors(folder: Path) -> dict[str, Any]:
    """Of an HF folder."""
    from safetensors.torch import load_file

    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def answers(model: Path, rows: Path) -> dict[str, float]:
    """Shares of greedy answers of transformers' own model that are right: to the rows, and with the images of others."""
    import torch
    import transformers
    from PIL import Image

    net = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    kind = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    process = __import__(kind, fromlist=["x"]).Qwen2VLImageProcessorPil.from_pretrained(model)
    asked = [json.loads(line) for line in rows.read_text().splitlines()]
    pad = net.config.image_token_id

    def answer(prompt: str, image: str) -> str:
        """To one question."""
        with Image.open(rows.parent / image) as picture:
            patches = process(images=[picture], return_tensors="pt")
        said = prompt.removeprefix("<image>")
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": said}]}]
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        place, squares = ids.index(pad), int(patches["image_grid_thw"].prod()) // process.merge_size**2
        tokens = torch.tensor([[*ids[:place], *[pad] * squares, *ids[place + 1 :]]])
        made = net.generate(
            input_ids=tokens, **patches, mm_token_type_ids=(tokens == pad).int(), max_new_tokens=8, do_sample=False
        )
        return str(tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True))

    own = [answer(row["prompt"], row["images"][0]) == row["answer"] for row in asked]
    others = [
        next(each for each in asked[at:] + asked[:at] if each["answer"] != row["answer"])
        for at, row in enumerate(asked)
    ]
    exchanged = [
        answer(row["prompt"], other["images"][0]) == row["answer"] for row, other in zip(asked, others, strict=True)
    ]
    return {"transformers": sum(own) / len(own), "exchanged": sum(exchanged) / len(exchanged)}


def main(
    folder: Annotated[Path, typer.Option(help="where the runs go")] = ROOT / ".cache" / "images",
    seed: Annotated[int, typer.Option(help="of model, task and runs")] = 1,
) -> None:
    """Train, ask, tabulate."""
    from rich.console import Console
    from rich.table import Table

    results = [run(kind, tower, folder.resolve() / f"{kind}-{tower}", seed) for kind, tower in RUNS]
    table = Table(title="colors of squares, held-out rows")
    for column in COLUMNS.values():
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(*(f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS))
    Console().print(table)
    write("images", {"models": results}, None)


if __name__ == "__main__":
    typer.run(main)
