from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe.check import unread_keys
from megarl.recipe.explain import Schema
from megarl.recipe.load import load_recipe
from megarl.recipe.rules import CONTRADICTIONS, OWNED_FLAGS, UNREAD_RULES
from megarl.recipe.supervised import SftRecipe

REMOTE = "reward.graders.x={kind: remote, url: 'http://h'}"
UNREAD = [
    (["algorithm.kl_kind=k1"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.kl_in=reward"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.kl_coef=0.1", "algorithm.kl_control.target=1.0"], ["algorithm.kl_in=reward"]),
    (["algorithm.gamma=0.9"], ["algorithm.advantage=reinforce_pp"]),
    (["algorithm.lam=0.9"], ["algorithm.advantage=gae"]),
    (["algorithm.whiten=false"], ["algorithm.advantage=gae"]),
    (["algorithm.settings.scale=2.0"], ["algorithm.advantage=mine:function"]),
    (["algorithm.refill_rounds=2"], ["algorithm.drop_zero_variance_groups=true"]),
    (["algorithm.correction.low=0.1"], ["algorithm.correction.kind=mask"]),
    (["critic.epochs=2"], ["algorithm.advantage=gae"]),
    (["teacher.path=m"], ["algorithm.policy_loss=distill"]),
    (["reference.refresh_every=2"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.advantage=rloo", "algorithm.normalize_std=true"], ["algorithm.advantage=egpo"]),
    (["algorithm.policy_loss=reinforce", "algorithm.clip_low=0.1"], ["algorithm.policy_loss=gspo"]),
    (["algorithm.policy_loss=reinforce", "algorithm.clip_high=0.1"], ["algorithm.policy_loss=cispo"]),
    (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"], ["algorithm.policy_loss=ppo"]),
    (["actor.optimizer.momentum=0.9"], ["actor.optimizer.name=sgd"]),
    (["actor.optimizer.name=sgd", "actor.optimizer.beta1=0.8"], ["actor.optimizer.name=adam"]),
    (["actor.optimizer.name=sgd", "actor.optimizer.beta2=0.8"], ["actor.optimizer.name=adam"]),
    (["actor.optimizer.name=sgd", "actor.optimizer.eps=1e-6"], ["actor.optimizer.name=adam"]),
    (["reference.parallel.tp=1"], ["algorithm.kl_coef=0.1"]),
    (["reference.resting=[params]"], ["algorithm.kl_coef=0.1"]),
    (["actor.optimizer.min_lr=1e-7"], ["actor.optimizer.schedule=cosine"]),
    (["eval.every=5"], ["data.eval=held_out.jsonl"]),
    (["eval.temperature=0.5"], ["data.eval=held_out.jsonl"]),
    (["eval.samples_per_prompt=1"], ["data.eval=held_out.jsonl"]),
    (["eval.max_prompts=5"], ["data.eval=held_out.jsonl"]),
    (["eval.by=math"], ["data.eval=held_out.jsonl"]),
    ([REMOTE, "reward.workers=2"], ["reward.graders.y={kind: rule, fn: math}"]),
    ([REMOTE, "reward.timeout_s=2"], ["reward.graders.y={kind: rule, fn: math}"]),
    *(
        (["placement.name=auto", *needs, key], ["placement.name=null"])
        for key, *needs in (
            ("actor.parallel.tp=1",),
            ("actor.recompute=full",),
            ("actor.resting=[params]",),
            ("rollout.servers=1",),
            ("rollout.tp=1",),
            ("rollout.resting=[weights]",),
            ("critic.parallel.pp=1", "algorithm.advantage=gae"),
            ("critic.recompute=full", "algorithm.advantage=gae"),
            ("critic.resting=[params]", "algorithm.advantage=gae"),
            ("reward_model.parallel.tp=1", "reward_model.path=m"),
            ("reward_model.resting=[params]", "reward_model.path=m"),
            ("teacher.parallel.tp=1", "teacher.path=m", "algorithm.policy_loss=distill"),
            ("teacher.resting=[params]", "teacher.path=m", "algorithm.policy_loss=distill"),
        )
    ),
]


@pytest.mark.parametrize(("given", "mends"), UNREAD, ids=lambda words: words[-1])
def test_a_key_that_nothing_reads_is_refused_until_it_counts(
    recipe_file: Path, given: list[str], mends: list[str]
) -> None:
    key = given[-1].partition("=")[0]
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, given)
    assert f"`{key}` (on the command line) is read by nothing in this configuration" in str(caught.value)
    assert load_recipe(recipe_file, given + mends)


def test_every_rule_is_tested_above_and_names_keys_that_exist() -> None:
    sections = {
        "reference.parallel.tp": "reference.parallel",
        "critic.epochs": "critic",
        "algorithm.settings.scale": "algorithm.settings",
        "teacher.path": "teacher",
        "actor.parallel.tp": "actor.parallel",
        "critic.parallel.pp": "critic.parallel",
        "reward_model.parallel.tp": "reward_model.parallel",
        "teacher.parallel.tp": "teacher.parallel",
        "algorithm.kl_control.target": "algorithm.kl_control",
    }
    names = [given[-1].partition("=")[0] for given, _ in UNREAD]
    tested = {sections.get(name, name) for name in names} | {
        "deadlines.rollout_s",
        "deadlines.sync_s",
        "report.samples",
        "reward.fn",  # in test_reward.py: no further key makes it count
        "dpo.label_smoothing",
        "cluster.file",
        "placement.pools",
    }
    assert {key for rule in UNREAD_RULES for key in rule.keys} == tested
    for rule in (*UNREAD_RULES, *CONTRADICTIONS):
        for key in getattr(rule, "keys", ()) or (rule.key,):  # type: ignore[union-attr]
            for kind in rule.kinds:
                assert Schema(kind).node(tuple(key.split("."))) is not None, f"{key} in {kind.__name__}"


def test_pools_are_given_or_searched_for(recipe_file: Path) -> None:
    pools = "placement.pools={all: {devices: 1, roles: [actor]}}"
    assert load_recipe(recipe_file, [pools])
    with pytest.raises(UserError, match=r"placement\.pools.*placement\.name decides it"):
        load_recipe(recipe_file, [pools, "placement.name=auto"])


def test_a_supervised_run_has_nothing_to_place(sft_file: Path, recipe_file: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.file.*read by nothing"):
        load_recipe(sft_file, ["cluster.file=c.yaml"], SftRecipe)
    assert load_recipe(recipe_file, ["cluster.file=c.yaml"])


@pytest.mark.parametrize("key", ["deadlines.rollout_s=5", "deadlines.sync_s=5", "report.samples=5"])
def test_a_supervised_run_has_no_rollout(sft_file: Path, recipe_file: Path, key: str) -> None:
    with pytest.raises(UserError, match=r"read by nothing.*a supervised run has no rollout"):
        load_recipe(sft_file, [key], SftRecipe)
    assert load_recipe(recipe_file, [key])


def test_a_default_that_nothing_reads_is_no_mistake_and_is_not_shown(recipe_file: Path) -> None:
    loaded = load_recipe(recipe_file)
    assert "algorithm.kl_kind" in unread_keys(loaded.recipe)
    assert "kl_kind" not in loaded.resolved["algorithm"]
    assert "eval" not in loaded.resolved


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.samples_per_prompt=1"], "a group of 1 has none"),
        (["actor.lora={}", "algorithm.kl_coef=0.1", "reference.parallel.tp=1"], "Remove reference.parallel"),
        (["algorithm.kl_coef=0.1", "reference.resting=[grads]"], "allowed: a list of params"),
        (
            ["algorithm.kl_coef=0.1", "reference.refresh_every=1", "reference.parallel.tp=2", "cluster.devices=2"],
            "which needs the actor's layout",
        ),
        (
            [
                *("algorithm.kl_coef=0.1", "reference.refresh_every=1", "cluster.devices=2"),
                "placement.pools={a: {devices: 1, roles: [actor]}, b: {devices: 1, roles: [reference]}}",
            ],
            "Put both into one pool",
        ),
        (["algorithm.policy_loss=distill"], "there is nobody to distill from"),
        (["algorithm.correction={}", "algorithm.old_logprobs=rollout"], "there is no ratio between the two"),
        (["algorithm.correction.kind=mask", "algorithm.correction.low=3.0"], "it has to be above low 3; got 2"),
        (["reward_model.path=m", "algorithm.advantage=remax"], "which only the graders see"),
        (["reward_model.path=m", "algorithm.drop_zero_variance_groups=true"], "before the reward model scores them"),
        (["algorithm.advantage=gae", "critic.warmup_steps=100000"], "the actor would never learn"),
        (["rollout.top_k=0"], "got 0; allowed: -1 (off)"),
        (["rollout.top_k=-2"], "got -2; allowed: -1 (off)"),
        (["rollout.stop=['']"], "an empty stop string"),
        (["rollout.kv_tokens=1000"], "Set it to 1088 or more"),
        (["data.eval=x", "eval.samples_per_prompt=2"], "2 greedy answers to one prompt are all the same"),
        (["actor.optimizer.schedule=linear", "actor.optimizer.min_lr=1"], "Set it to at most 1e-06"),
        (["rollout.server_args=[--port=80]"], "--port (decided by nothing: a free port is chosen)"),
        (["rollout.server_args=[--tp, '2']"], "--tp (decided by rollout.tp)"),
    ],
)
def test_values_that_contradict_each_other(recipe_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, overrides)
    assert says in str(caught.value)


def test_flags_of_the_server_that_megarl_does_not_set_are_welcome(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["rollout.server_args=[--chunked-prefill-size, '512']"])
    keys = [key for key in OWNED_FLAGS.values() if not key.startswith("nothing")]
    flags = Schema(type(load_recipe(recipe_file).recipe))
    assert all(flags.node(tuple(key.split("."))) is not None for key in keys)


def test_several_problems_are_listed_together(recipe_file: Path) -> None:
    with pytest.raises(UserError, match="for 3 reasons"):
        load_recipe(recipe_file, ["rollout.top_k=0", "eval.every=5", "actor.optimizer.momentum=0.5"])


def test_the_cache_size_is_computed_where_the_server_cannot(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["cluster.platform=cpu"]).recipe.rollout.kv_tokens == 64 * (1024 + 64)
    assert load_recipe(recipe_file, ["cluster.platform=cuda"]).recipe.rollout.kv_tokens is None
    chosen = load_recipe(recipe_file, ["cluster.platform=cpu", "rollout.kv_tokens=5000"])
    assert chosen.recipe.rollout.kv_tokens == 5000
