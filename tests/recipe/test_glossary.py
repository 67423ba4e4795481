"""Every key of the glossary exists, the page is the generated one, and a peer's key is answered with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe import glossary
from megarl.recipe.explain import Schema
from megarl.recipe.load import KINDS, load_recipe

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "glossary.md").read_text() == glossary.page() + "\n"


def test_every_key_exists_and_stands_once() -> None:
    schemas = [Schema(kind) for kind in KINDS.values()]
    keys = [entry.key for entry in glossary.ENTRIES]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if not any(schema.knows(tuple(key.split("."))) for schema in schemas)] == []
    leaves = [leaf for schema in schemas for leaf in schema.leaves()]
    assert [old for old, new in glossary.RENAMED.items() if not any(leaf[-1] == new for leaf in leaves)] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.resting=[grads]", "`actor.offload` now"),
        ("rollout.resting=[weights]", "`rollout.offload` now"),
        ("actor.parallel.virtual_stages=2", "`actor.parallel.vpp` now"),
        ("eval.by=math", "`eval.grader` now"),
        ("algorithm.adv_estimator=gae", "What verl has by that name is `algorithm.advantage` here"),
        ("rollout.num_generations=8", "What TRL has by that name is `rollout.samples_per_prompt` here"),
        ("rollout.n_samples_per_prompt=8", "`rollout.samples_per_prompt`"),
        ("actor.ppo_mini_batch_size=8", "is `actor.mini_batch_samples` here (samples; verl counts prompts)."),
        (
            "algorithm.clip_ratio=0.1",
            "What verl has by that name is `algorithm.clip_low` and `algorithm.clip_high` here",
        ),
        ("epsilon=0.1", "What TRL has by that name is `algorithm.clip_low` and `algorithm.clip_high` here"),
        (
            "actor_rollout_ref.actor.clip_ratio=0.1",
            "clip_ratio` is `algorithm.clip_low` and `algorithm.clip_high` (0.2",
        ),
        (
            "actor_rollout_ref.rollout.val_kwargs.n=16",
            "`actor_rollout_ref.rollout.val_kwargs.n` is `eval.samples_per_prompt`;",
        ),
        ("eval.n=16", "What verl has by that name is `eval.samples_per_prompt` here"),
        ("rollout.n=16", "What verl has by that name is `rollout.samples_per_prompt` here"),
        (
            "train_batch_size=8",
            "What verl has by that name is `rollout.prompts_per_step` here (prompts; TRL counts samples). What OpenRLHF has by "
            "that name is `actor.mini_batch_samples` here",
        ),
        ("algorithm.kl_loss_coef=0.1", "What verl and slime have by that name"),
        ("algorithm.eps_clip_high=0.3", "What slime has by that name is `algorithm.clip_high` here"),
        ("rollout.tensor_model_parallel_size=2", "is `rollout.tp` here"),
        ("actor.tensor_model_parallel_size=2", "is `actor.parallel.tp` here"),
        ("critic.tensor_model_parallel_size=2", "is `critic.parallel.tp` here"),
        ("actor.train_max_tokens_per_gpu=2", "OpenRLHF has by that name is `actor.micro_batch_tokens`"),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "tensor_model_parallel_size` is `actor.parallel.tp`",
        ),
        (
            "actor_rollout_ref={model: {path: x}, rollout: {n: 8, mode: y}}",
            "Here `actor_rollout_ref.model.path` is `model.path`, `actor_rollout_ref.rollout.n` is",
        ),
        ("trainer.n_gpus_per_node=8", "`trainer.n_gpus_per_node` is `cluster.devices`"),
        (
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "`policy.megatron_cfg.tensor_model_parallel_size` is `actor.parallel.tp`;",
        ),
        ("policy.generation.vllm_cfg.tensor_parallel_size=2", "tensor_parallel_size` is `rollout.tp`;"),
        ("grpo={max_num_steps: 4, num_generations_per_prompt: 2}", "`grpo.max_num_steps` is `train.steps`"),
        ("loss_fn.ratio_clip_max=0.3", "`loss_fn.ratio_clip_max` is `algorithm.clip_high`"),
        ("cluster.gpus_per_node=8", "What NeMo-RL has by that name is `cluster.devices` here"),
        (
            "reward.data_source=gsm8k",
            "What verl has by that name is `reward.graders.NAME.only` here (the rows that a grader",
        ),
        ("trainer={}", "Did you mean `train`?"),
        ("algorithm.preset=Dr-GRPO", "Did you mean dr_grpo?"),
        ("algorithm.init_kl_coef=0.3", "`algorithm.kl_coef`"),
        ("train.stepz=3", "Did you mean `train.steps`?"),
    ],
)
def test_an_old_key_and_a_peers_key_are_answered_with_ours(override: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_recipe(ROOT / "recipes" / "quickstart.yaml", [override])
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("command", "override", "words"),
    [
        ("dpo", "dpo.loss_type=ipo", "What TRL has by that name is `dpo.loss` here (ipo goes by sums"),
        ("dpo", "rpo_alpha=1.0", "What TRL has by that name is `dpo.sft_coef` here"),
        ("rm", "rm.center_rewards_coefficient=0.1", "What TRL has by that name is `rm.center_coef` here"),
        ("kto", "data.max_length=512", "`data.max_tokens` here (of supervised runs: longer rows are dropped, not cut)"),
        ("sft", "train.gradient_accumulation_steps=4", "What TRL has by that name is `train.batch_samples` here"),
    ],
)
def test_a_key_of_a_peers_supervised_trainers_is_answered_with_ours(command: str, override: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_recipe(ROOT / "recipes" / f"quickstart_{command}.yaml", [override], KINDS[command])
    assert words in str(refusal.value)
