"""TRL's side of `bench.peers_trl`: its GRPOTrainer, timed by part. Runs in TRL's own environment and knows no megarl.

    python bench/support/trl_step.py SETTINGS RESULT    # both JSON

SETTINGS: model, train, held_out (file of rows, or null), samples, longest, steps, out, options. `options` go to GRPOConfig as
they are. Of a step, `generate` is TRL's generation, `rest` the other work before its first loss, and `update` all else: losses,
backward passes and optimizers. With held-out rows the reward is 1 for a right sum, and training ends as soon as 0.9 of them
are answered rightly; their seconds are part of the run, as they are on the other side.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

ENOUGH = 0.9
HELD_OUT_BATCH = 200


def luck(completions: list[Any], **_: Any) -> list[float]:
    """As bench.support.peers has it: costs nothing and differs within a group."""
    return [(sum(map(ord, one[0]["content"])) % 7) / 6 for one in completions]


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where what follows the last #### is the answer."""
    return [float(_answer(one[0]["content"]) == wanted) for one, wanted in zip(completions, answer, strict=True)]


def _answer(text: str) -> str | None:
    found = re.findall(r"####\s*(\d+)\s*$", text)
    return found[-1] if found else None


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of parts, by optimizer step. held_out: gives the share of right answers, asked every so many steps."""

    def __init__(self, held_out: Callable[[], float] | None, every: int) -> None:
        self.steps: list[dict[str, float]] = []
        self.accuracy: list[dict[str, float]] = []
        self._held_out, self._every = held_out, every
        self._parts: dict[str, float] = {}
        self._began = self._start = 0.0

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds counted as a part."""

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **options)
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed

    def count(self, tokens: int, samples: int) -> None:
        """Add what was generated."""
        self._parts["tokens"] = self._parts.get("tokens", 0) + tokens
        self._parts["samples"] = self._parts.get("samples", 0) + samples

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self._start = time.perf_counter()
        self._look(0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self._began, self._parts = time.perf_counter(), {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer, after the optimizer."""
        whole, parts = time.perf_counter() - self._began, self._parts
        generate, scored = parts.get("generate", 0.0), parts.get("scored", 0.0)
        self.steps.append(
            {
                "tokens": parts.get("tokens", 0),
                "samples": parts.get("samples", 0),
                "whole": whole,
                "generate": generate,
                "rest": scored - generate,
                "update": whole - scored,
            }
        )
        if self._held_out is not None and state.global_step % self._every == 0:
            self._look(state.global_step)
            control.should_training_stop = self.accuracy[-1]["accuracy"] >= ENOUGH

    def _look(self, step: int) -> None:
        if self._held_out is not None:
            share = self._held_out()
            self.accuracy.append({"step": step, "accuracy": share, "seconds": time.perf_counter() - self._start})


def held_out(model: Any, tokenizer: Any, rows: list[dict[str, str]], longest: int) -> float:
    """Share of the rows that are answered rightly, greedily."""
    prompts = [_chat(row) for row in rows]
    texts: list[str] = []
    training = model.training
    model.eval()
    for first in range(0, len(prompts), HELD_OUT_BATCH):
        given = tokenizer.apply_chat_template(
            prompts[first : first + HELD_OUT_BATCH],
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            made = model.generate(**given, max_new_tokens=longest, do_sample=False)
        texts += tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(training)
    return sum(_answer(text) == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def _chat(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def _rows(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the steps."""
    data = Dataset.from_list([{"prompt": _chat(row), "answer": row["answer"]} for row in _rows(settings["train"])])
    fixed = {
        "output_dir": settings["out"],
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_steps": settings["steps"],
        "num_generations": settings["samples"],
        "max_completion_length": settings["longest"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    graded = settings["held_out"] is not None
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=right if graded else luck,
        train_dataset=data,
        args=GRPOConfig(**fixed, **settings["options"]),
    )
    rows = _rows(settings["held_out"]) if graded else []
    look = (lambda: held_out(trainer.model, tokenizer, rows, settings["longest"])) if graded else None
    clock = Clock(look, settings.get("every", 1))
    trainer.add_callback(clock)
    prompts: list[list[int]] = []
    generate = trainer._generate_single_turn

    def counted(*args: Any, **named: Any) -> Any:
        result = generate(*args, **named)
        clock.count(sum(map(len, result[0])), len(result[0]))
        prompts.extend(args[0])
        return result

    trainer._generate_single_turn = clock.around("generate", counted)
    trainer._generate_and_score_completions = clock.around("scored", trainer._generate_and_score_completions)
    ready = time.time()
    trainer.train()
    return {
        "steps": clock.steps,
        "accuracy": clock.accuracy,
        "start_s": ready - STARTED,
        "train_s": time.time() - ready,
        "threads": torch.get_num_threads(),
        "prompt": prompts[0],
        "log": [line for line in trainer.state.log_history if "loss" in line],
    }


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
