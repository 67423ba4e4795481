"""Does a reward model learn to tell right answers from wrong ones? From nothing, one command:

    python -m bench.reward_model

The quickstart's warm start, preference pairs (tools/make_preferences.py: a right and a wrong answer, chance is one half), and
`megarl rm` with recipes/quickstart_rm.yaml. Accuracy on held-out pairs is what the run reports, and once more, by the styles of
the two answers, what transformers says with the exported folder. Seconds are wall time of the commands, starts included.
Writes bench/results/reward_model.json; exit code 0 only at 0.9 and above.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT, call, metrics, warm_start

CHANCE, WANTED = 0.5, 0.9
RECIPE = "recipes/quickstart_rm.yaml"


def score(folder: Path, rows: Sequence[dict[str, str]]) -> list[tuple[float, float]]:
    """Scores of the chosen and the rejected answer of each row, by transformers: text in, number out."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def one(prompt: str, answer: str) -> float:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False)).rstrip("\n")
        with torch.no_grad():
            return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0])

    return [(one(row["prompt"], row["chosen"]), one(row["prompt"], row["rejected"])) for row in rows]


def style(answer: str) -> str:
    """Whether an answer works column by column."""
    return "worked" if "\n" in answer else "direct"


def by_style(rows: Sequence[dict[str, str]], scores: Sequence[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Accuracy and number of pairs, of all and by the styles of chosen and rejected; equal scores count half."""
    right: dict[str, list[float]] = defaultdict(list)
    for row, (chosen, rejected) in zip(rows, scores, strict=True):
        found = 0.5 if chosen == rejected else float(chosen > rejected)
        for name in ("all", f"{style(row['chosen'])} over {style(row['rejected'])}"):
            right[name].append(found)
    return {name: {"accuracy": sum(each) / len(each), "pairs": len(each)} for name, each in sorted(right.items())}


def run(folder: Path, seed: int, model: Path | None) -> dict[str, Any]:
    """Warm start where no model is given, pairs, reward model."""
    warm_start_s = warm_start(seed, folder) if model is None else None
    pairs, name = folder / "preferences", "rm"
    call("-m", "tools.make_preferences", "--out", str(pairs), "--seed", str(seed))
    shutil.rmtree(folder / name, ignore_errors=True)
    seconds = call(
        *("-m", "megarl", "rm", RECIPE, f"run.dir={folder}", f"run.name={name}", f"run.seed={seed}"),
        *(f"model.path={model or folder / 'sft' / 'hf'}", f"data.train={pairs}/train.jsonl"),
        f"data.eval={pairs}/eval.jsonl",
    )
    steps = metrics(folder / name)
    held_out = {row["step"]: row["rm/eval_accuracy"] for row in steps if "rm/eval_accuracy" in row}
    rows = [json.loads(line) for line in (pairs / "eval.jsonl").read_text().splitlines()]
    return {
        "chance": CHANCE,
        "accuracy": held_out,
        "before": held_out[0],
        "after": held_out[max(held_out)],
        "by_style": by_style(rows, score(folder / name / "hf", rows)),
        "warm_start_s": warm_start_s,
        "seconds": seconds,
    }


def main(
    folder: Annotated[Path, typer.Option(help="where the runs go")] = ROOT / ".cache" / "reward_model",
    seed: Annotated[int, typer.Option(help="of model, task, pairs and order")] = 1,
    model: Annotated[Path | None, typer.Option(help="begin with this folder, without a warm start")] = None,
    out: Annotated[Path | None, typer.Option(help="where the result goes; default: bench/results")] = None,
) -> None:
    """Train a reward model, tabulate."""
    folder = folder.resolve()
    result = run(folder, seed, None if model is None else model.resolve())
    table = Table(title=f"held-out pairs the right way round; chance is {CHANCE}")
    for column in ("pairs", "accuracy", "number"):
        table.add_column(column, justify="right")
    for name, row in result["by_style"].items():
        table.add_row(name, f"{row['accuracy']:.3f}", f"{row['pairs']:.0f}")
    Console().print(table)
    Console().print(
        f"before {result['before']:.3f}, after {result['after']:.3f} in {result['seconds']:.0f} s", highlight=False
    )
    write("reward_model", result, out)
    sys.exit(result["after"] < WANTED)


if __name__ == "__main__":
    typer.run(main)
