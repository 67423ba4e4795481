"""bench/recipes_published: which runs stand beside which recipe, and what is compared."""

from __future__ import annotations

import pytest

from bench.recipes_published import beside, compare, nemo_run, of_step, shipped, table, verl_run
from bench.support.published import MODELS, read_rows

ROWS = read_rows()


def test_every_recipe_of_a_real_model_has_its_row() -> None:
    runs = {each.name: [run.model for run in beside(each, ROWS)] for each in shipped()}
    assert runs["qwen3_30b_a3b_grpo_32"] == [MODELS["qwen3-30b-a3b"]] * 2
    assert runs["qwen3_4b_grpo_8"] == runs["qwen3_4b_gsm8k_8"] == [MODELS["qwen2.5-7b"]]
    assert runs["deepseek_v3_moe_512"] == runs["llama31_70b_ppo_128"] == runs["qwen3_4b_lora_gsm8k_1"] == []


def test_published_figures_are_the_rows_own() -> None:
    run = verl_run(ROWS, "dapo-7b", 8)
    assert (run.step_s, run.mfu, run.devices, run.samples) == (389.0, 0.444, 8, 8192)
    nemo = nemo_run(32)
    # Published as well, and nothing of it is taken: what a device does in a second.
    assert nemo.samples * nemo.tokens / nemo.step_s / nemo.devices == pytest.approx(1102, rel=0.05)


def test_a_recipe_is_planned_with_the_lengths_of_the_run() -> None:
    [each] = [each for each in shipped() if each.name == "qwen3_4b_grpo_8"]
    [run] = beside(each, ROWS)
    row = compare(each, run)
    assert row["tokens_s"]["planned"] == pytest.approx(1024 * run.tokens / row["step_s"] / 8)
    update = of_step(each.models.policy, run.tokens, 1024) / row["phases"]["train"] / 8
    assert 0.1 < row["mfu"]["planned"] == pytest.approx(update / 989.4e12, rel=0.01)
    assert row["pick"]["step_s"] <= row["step_s"] * 1.001
    assert len(table([row, compare(each, None)]).splitlines()) == 4
