from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.recipe.algorithm_rules import learning_notes
from megarl.recipe.check import check_functions, unread_keys
from megarl.recipe.explain import Schema
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import load_recipe
from megarl.recipe.rules import CONTRADICTIONS, OWNED_FLAGS, UNREAD_RULES
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe

DISTILL = ("algorithm.policy_loss=distill", "teacher.path=m")
TOP = ("algorithm.policy_loss=distill_top", "teacher.path=m")
SERVED = ("algorithm.policy_loss=distill", "teacher.servers.urls=['http://127.0.0.1:1']")
DISTILLED = ("algorithm.advantage=distill", "teacher.path=m")
DETERMINISTIC = ("rollout.deterministic=true", "cluster.platform=cpu")
GUESSES = ("cluster.platform=cuda",)
REMOTE = "reward.graders.x={kind: remote, url: 'http://h'}"
EXTERNAL = "rollout.servers.urls=['http://127.0.0.1:1']"
UNREAD = [
    (["algorithm.kl_kind=k1"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.kl_in=reward"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.kl_coef=0.1", "algorithm.kl_control.target=1.0"], ["algorithm.kl_in=reward"]),
    (["algorithm.gamma=0.9"], ["algorithm.advantage=reinforce_pp"]),
    (["algorithm.lam=0.9"], ["algorithm.advantage=gae"]),
    (["algorithm.whiten=false"], ["algorithm.advantage=gae"]),
    (["algorithm.advantage=reinforce_pp_baseline", "algorithm.whiten=true"], ["algorithm.advantage=rloo"]),
    ([*DISTILL, "algorithm.whiten=true"], ["algorithm.policy_loss=ppo", "teacher=null"]),
    (["algorithm.settings.scale=2.0"], ["algorithm.advantage=mine:function"]),
    (["algorithm.refill_rounds=2"], ["algorithm.drop_zero_variance_groups=true"]),
    (["algorithm.keep_groups.above=0.1"], ["algorithm.drop_zero_variance_groups=true"]),
    (["algorithm.correction.low=0.1"], ["algorithm.correction.kind=mask"]),
    (["critic.epochs=2"], ["algorithm.advantage=gae"]),
    *(
        ([EXTERNAL, given], ["rollout.servers=1"])
        for given in (
            "rollout.tp=2",
            "rollout.max_running_requests=8",
            "rollout.kv_tokens=4096",
            "rollout.server_args=[--log-level, info]",
            "rollout.offload=[kv_cache]",
        )
    ),
    (["sync.folder=weights"], ["sync.transport=disk"]),
    (["sync.lora=adapters"], ["actor.lora.rank=4"]),
    (["actor.lora.rank=4", "sync.lora=adapters", "sync.transport=broadcast"], ["sync.lora=merged"]),
    (["actor.lora.rank=4", "sync.lora=adapters", "sync.bucket_mb=64"], ["sync.lora=merged"]),
    (["teacher.path=m"], ["algorithm.policy_loss=distill"]),
    ([*DISTILL, "algorithm.distill_top_k=8"], ["algorithm.policy_loss=distill_top"]),
    (["algorithm.distill_beta=0.5"], ["algorithm.policy_loss=distill_top", "teacher.path=m"]),
    (["algorithm.distill_forward_weight=0.5"], ["algorithm.policy_loss=distill_top", "teacher.path=m"]),
    (
        [*TOP, "algorithm.distill_forward_weight=0.5", "algorithm.distill_beta=0.5"],
        ["algorithm.distill_forward_weight=null"],
    ),
    *(
        ([*SERVED, key], ["teacher.servers=null", "teacher.path=m"])
        for key in ("teacher.parallel.tp=1", "teacher.offload=[params]")
    ),
    (["reference.refresh_every=2"], ["algorithm.kl_coef=0.1"]),
    (["algorithm.advantage=rloo", "algorithm.normalize_std=true"], ["algorithm.advantage=egpo"]),
    *(
        ([*DISTILL, key], ["algorithm.policy_loss=ppo", "teacher=null"])
        for key in (
            "algorithm.advantage=rloo",
            "algorithm.normalize_std=false",
            "algorithm.advantage_clip=2.0",
            "algorithm.correction.high=3.0",
            "algorithm.overlong_buffer=0.5",
            "reward_model.path=m",
        )
    ),
    *(
        ([*needs, "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"], ["algorithm.kl_in=loss"])
        for needs in (DISTILL, DISTILLED)
    ),
    *(
        (
            [*DISTILLED, "algorithm.kl_coef=0.1", "algorithm.kl_in=reward", key],
            ["algorithm.advantage=rloo", "teacher=null"],
        )
        for key in ("algorithm.kl_kind=k1", "algorithm.kl_control.target=1.0", "reference.parallel.tp=1")
    ),
    ([*DISTILLED, "algorithm.overlong_buffer=0.5"], ["algorithm.advantage=rloo", "teacher=null"]),
    (["algorithm.advantage=gdpo", "algorithm.overlong_buffer=0.5"], ["algorithm.advantage=rloo"]),
    ([*DISTILLED, "reward_model.path=m"], ["algorithm.advantage=rloo", "teacher=null"]),
    (["algorithm.policy_loss=reinforce", "algorithm.clip_low=0.1"], ["algorithm.policy_loss=gspo"]),
    (["algorithm.policy_loss=reinforce", "algorithm.clip_high=0.1"], ["algorithm.policy_loss=cispo"]),
    (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"], ["algorithm.policy_loss=ppo"]),
    *(
        ([*needs, *beside, f"{role}.optimizer.{key}"], [f"{role}.optimizer.{mends}"])
        for role, *needs in (("actor",), ("critic", "algorithm.advantage=gae"))
        for beside, key, mends in (
            ((), "momentum=0.9", "name=sgd"),
            *(((f"{role}.optimizer.name=sgd",), key, "name=adam") for key in ("beta1=0.8", "beta2=0.8", "eps=1e-6")),
            ((), "min_lr=1e-7", "schedule=cosine"),
        )
    ),
    *(
        ([*needs, *beside, f"{role}.recompute_num_layers=2"], [f"{role}.recompute=full"])
        for role, *needs in (("actor",), ("critic", "algorithm.advantage=gae"))
        for beside in ((), (f"{role}.recompute=selective",))
    ),
    *(
        ([*needs, f"{role}.parallel.sequence_parallel=false"], ["cluster.devices=2", f"{role}.parallel.tp=2"])
        for role, *needs in (
            ("actor",),
            ("reference", "algorithm.kl_coef=0.1"),
            ("critic", "algorithm.advantage=gae"),
            ("reward_model", "reward_model.path=m"),
            ("teacher", *DISTILL),
        )
    ),
    (["reference.parallel.tp=1"], ["algorithm.kl_coef=0.1"]),
    (["reference.offload=[params]"], ["algorithm.kl_coef=0.1"]),
    (["data.train_split=more"], ["data.train=own/rows"]),
    (["data.config=main"], ["data.train=own/rows"]),
    (["data.eval_split=more"], ["data.eval=own/rows"]),
    *((["data.eval=held_out.jsonl", f"eval.{given}"], ["eval.temperature=0.5"]) for given in ("top_p=0.9", "top_k=5")),
    (["eval.max_response_tokens=99"], ["data.eval=held_out.jsonl"]),
    (["data.eval=held_out.jsonl", "data.eval_config=main"], ["data.eval=own/rows"]),
    (["train.keep_best.metric=eval/accuracy"], ["data.eval=held_out.jsonl", "eval.every=2", "train.save_every=2"]),
    (["actor.lora.rank=4", "actor.optimizer.freeze_router=true"], ["actor.lora=null"]),
    (["data.images_key=null", "data.max_image_pixels=90000"], ["data.images_key=images"]),
    (["data.mix_key=source"], ["data.mix={math: 3, code: 1}"]),
    (["eval.before=false"], ["data.eval=held_out.jsonl"]),
    (["eval.every=5"], ["data.eval=held_out.jsonl"]),
    (["eval.temperature=0.5"], ["data.eval=held_out.jsonl"]),
    (["eval.samples_per_prompt=1"], ["data.eval=held_out.jsonl"]),
    (["eval.max_prompts=5"], ["data.eval=held_out.jsonl"]),
    (["eval.set_key=source"], ["data.eval=held_out.jsonl"]),
    (["eval.sets.aime.max_response_tokens=9"], ["data.eval=held_out.jsonl", "eval.set_key=source"]),
    (["data.eval=held_out.jsonl", "eval.sets.aime.max_response_tokens=9"], ["eval.set_key=source"]),
    (
        ["data.eval=held_out.jsonl", "eval.set_key=source", "eval.top_p=0.9"],
        ["eval.sets={aime: {temperature: 0.5}}"],
    ),
    (["eval.grader=math"], ["data.eval=held_out.jsonl", "reward.graders.math={kind: rule, fn: math, weight: 0.5}"]),
    (
        ["data.eval=held_out.jsonl", "eval.grader=math"],
        ["reward.graders={math: {kind: rule, fn: math}, b: {kind: rule, fn: exact}}"],
    ),
    (["agent.max_turns=3", "agent.settings.low=1"], ["agent.environment=guess_number"]),
    *(
        (["agent.max_turns=3", f"agent.{given}"], ["agent.command=[play]"])
        for given in ("served_as=other", "listen=node", "processes=3")
    ),
    *(
        (["agent.environment=maze", f"agent.{given}"], ["agent.tools=[kit:tool]", "agent.tool_parser=qwen25"])
        for given in ("tool_parser=llama3", "tool_timeout_s=3", "tool_result_characters=80", "max_calls=1")
    ),
    (
        ["agent.tools=[kit:tool]", "agent.tool_parser=qwen25", "agent.step_timeout_s=3"],
        ["agent.environment=guess_number"],
    ),
    (["agent.tools=[kit:tool]", "agent.tool_parser=qwen25", "agent.workers=3"], ["agent.environment=guess_number"]),
    (
        ["agent.tools=[kit:tool]", "agent.tool_parser=qwen25", "agent.environment_tools=[look]"],
        ["agent.environment=shop:Shop"],
    ),
    (
        ["agent.environment=shop:Shop", "agent.max_calls=1"],
        ["agent.environment_tools=[look]", "agent.tool_parser=qwen25"],
    ),
    (
        ["agent.environment=maze", "agent.environment_key=source"],
        ["agent.environment=null", "agent.environments={a: {environment: maze}}"],
    ),
    (
        [
            "agent.environments={a: {environment: maze}}",
            "agent.environment_key=s",
            "agent.listen=node",
        ],
        ["agent.environments={a: {environment: maze}, b: {function: 'shop:play'}}"],
    ),
    (
        ["agent.environments={a: {function: 'shop:play'}}", "agent.environment_key=s", "agent.processes=2"],
        ["agent.environments={a: {function: 'shop:play'}, b: {command: [play]}}"],
    ),
    (
        ["agent.environments={a: {command: [play]}}", "agent.environment_key=s", "agent.workers=1"],
        ["agent.environments={a: {command: [play]}, b: {environment: maze}}"],
    ),
    (["agent.environment=maze", "agent.credit=turn"], ["algorithm.advantage=reinforce_pp"]),
    (["agent.environment=maze", "agent.credit=turn"], ["algorithm.advantage=grpo_turns"]),
    (["algorithm.old_logprobs=rollout", "algorithm.max_logprob_diff=0.1"], ["algorithm.old_logprobs=trainer"]),
    (["algorithm.on_logprob_diff=skip"], ["algorithm.max_logprob_diff=0.1"]),
    (["train.max_rewinds=2"], ["actor.optimizer.on_bad_gradient=rewind"]),
    (["train.async_save=true"], ["train.save_every=2"]),
    (["train.epochs=2"], ["train.steps=0"]),
    (["train.journal=false", "train.journal_keep=all"], ["train.journal=true"]),
    (["rollout.late=drop"], ["rollout.max_staleness=1"]),
    (["rollout.in_flight=finish"], ["rollout.max_staleness=1"]),
    (["rollout.max_staleness=1", "rollout.oversample=1.5", "rollout.in_flight=finish"], ["rollout.oversample=1.0"]),
    (["rollout.keep_kv=true"], ["rollout.max_staleness=1", "rollout.in_flight=in_place"]),
    (["rollout.max_staleness=1", "rollout.keep_kv=true"], ["rollout.in_flight=in_place"]),
    (["eval.overlap=true"], ["data.eval=held_out.jsonl"]),
    (["data.eval=held_out.jsonl", "rollout.offload=[weights]", "eval.overlap=true"], ["rollout.offload=[]"]),
    ([REMOTE, "reward.workers=2"], ["reward.graders.y={kind: rule, fn: math}"]),
    ([REMOTE, "reward.timeout_s=2"], ["reward.graders.y={kind: rule, fn: math}"]),
    *(
        (["placement.name=auto", *needs, key], ["placement.name=null"])
        for key, *needs in (
            ("actor.parallel.tp=1",),
            ("actor.recompute=full",),
            ("actor.offload=[params]",),
            ("rollout.servers=1",),
            ("rollout.tp=1",),
            ("rollout.offload=[weights]",),
            ("critic.parallel.pp=1", "algorithm.advantage=gae"),
            ("critic.recompute=full", "algorithm.advantage=gae"),
            ("critic.offload=[params]", "algorithm.advantage=gae"),
            ("reward_model.parallel.tp=1", "reward_model.path=m"),
            ("reward_model.offload=[params]", "reward_model.path=m"),
            ("teacher.parallel.tp=1", "teacher.path=m", "algorithm.policy_loss=distill"),
            ("teacher.offload=[params]", "teacher.path=m", "algorithm.policy_loss=distill"),
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
        "agent.settings.low": "agent.settings",
        "actor.parallel.tp": "actor.parallel",
        "critic.parallel.pp": "critic.parallel",
        "reward_model.parallel.tp": "reward_model.parallel",
        "teacher.parallel.tp": "teacher.parallel",
        "algorithm.kl_control.target": "algorithm.kl_control",
        "algorithm.correction.high": "algorithm.correction",
        "algorithm.correction.reject.low": "algorithm.correction.reject",
        "algorithm.keep_groups.above": "algorithm.keep_groups",
        "eval.sets.aime.max_response_tokens": "eval.sets",
        "reward_model.path": "reward_model",
        "train.keep_best.metric": "train.keep_best",
    }
    names = [given[-1].partition("=")[0] for given, _ in UNREAD]
    tested = {sections.get(name, name) for name in names} | {
        "deadlines.rollout_s",
        "deadlines.sync_s",
        "deadlines.answer_s",
        "report.samples",
        "reward.fn",  # in test_reward.py: no further key makes it count
        "dpo.label_smoothing",
        "dpo.margin",
        "dpo.length_normalized",
        "dpo.sft_coef",
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


def test_without_a_field_of_images_demonstrations_have_none_to_bound(sft_file: Path) -> None:
    given = ["data.images_key=null", "data.max_image_pixels=90000"]
    with pytest.raises(UserError, match=r"`data.max_image_pixels` .* is read by nothing.*data.images_key is null"):
        load_recipe(sft_file, given, SftRecipe)
    assert load_recipe(sft_file, given[1:], SftRecipe)


def test_a_supervised_run_has_nothing_to_place(sft_file: Path, recipe_file: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.file.*read by nothing"):
        load_recipe(sft_file, ["cluster.file=c.yaml"], SftRecipe)
    assert load_recipe(recipe_file, ["cluster.file=c.yaml"])


@pytest.mark.parametrize(
    "key", ["deadlines.rollout_s=5", "deadlines.sync_s=5", "deadlines.answer_s=5", "report.samples=5"]
)
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
        (["rollout.samples_per_prompt=1", "algorithm.advantage=grpo_turns"], "a group of 1 has none"),
        (["actor.lora={}", "algorithm.kl_coef=0.1", "reference.parallel.tp=1"], "Remove reference.parallel"),
        (["algorithm.kl_coef=0.1", "reference.offload=[grads]"], "allowed: a list of params"),
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
        (["train.journal=false", "actor.optimizer.on_bad_gradient=rewind"], "is written in its journal"),
        (
            ["train.journal=false", "algorithm.max_logprob_diff=0.1", "algorithm.on_logprob_diff=rewind"],
            "is written in its journal",
        ),
        (["algorithm.policy_loss=distill"], "there is nobody to distill from"),
        (["algorithm.policy_loss=distill_top"], "there is nobody to distill from"),
        (
            [
                "rollout.samples_per_prompt=1",
                "algorithm.advantage=reinforce_pp",
                "algorithm.drop_zero_variance_groups=true",
            ],
            "every sample would be dropped",
        ),
        (
            ["algorithm.advantage=mine:function", "algorithm.settings={rewards: 1.0, lam: 0.5, scale: 2.0}"],
            "lam, rewards is the name of an input of functions",
        ),
        (
            ["reward_model={path: m, weight: 0.0}", "reward.graders.a={kind: rule, fn: math, weight: 0.0}"],
            "all that grades",
        ),
        (["algorithm.advantage=gae", "critic.optimizer={schedule: linear, min_lr: 1}"], "critic.optimizer.lr 1e-06"),
        (["algorithm.correction={}", "algorithm.old_logprobs=rollout"], "there is no ratio between the two"),
        (["algorithm.correction.kind=mask", "algorithm.correction.low=3.0"], "it has to be above low 3; got 2"),
        (["algorithm.correction.reject.low=3.0"], "it has to be above low 3; got 2"),
        (["algorithm.correction={kind: reject, reject: {}}"], "algorithm.correction.kind is reject already"),
        (["reward_model.path=m", "algorithm.advantage=remax"], "which only the graders see"),
        (["reward_model.path=m", "algorithm.drop_zero_variance_groups=true"], "before the reward model scores them"),
        (
            ["reward_model.path=m", "algorithm.drop_zero_variance_groups=true", "algorithm.keep_groups.above=0.1"],
            "before the reward model scores them",
        ),
        (
            ["algorithm.drop_zero_variance_groups=true", "algorithm.keep_groups.grader=exact"],
            "there is no grader 'exact'. The recipe's graders: math",
        ),
        (
            [
                "reward.graders={right: {kind: rule, fn: math}, code: {kind: code, only: {kind: code}}}",
                *("algorithm.drop_zero_variance_groups=true", "algorithm.keep_groups.grader=code"),
            ],
            "code grades some rows alone (reward.graders.code.only)",
        ),
        (
            ["algorithm.drop_zero_variance_groups=true", "algorithm.keep_groups={above: 0.5, below: 0.5}"],
            "`algorithm.keep_groups.below` (on the command line): it has to be over above 0.5; got 0.5",
        ),
        (["algorithm.advantage=egpo", "algorithm.drop_zero_variance_groups=true"], "egpo learns from groups whose"),
        (["algorithm.advantage=remax", "algorithm.drop_zero_variance_groups=true"], "remax learns from groups whose"),
        (["algorithm.advantage=gae", "critic.warmup_steps=100000"], "the actor would never learn"),
        (["algorithm.truncated=mask", "algorithm.advantage=opo"], "goes by trained tokens, of which an answer"),
        (
            ["train={save_every: 1, keep_best: {metric: sft/eval_loss}}", "data.eval=e.jsonl", "eval.every=1"],
            "sft/eval_loss is no metric that this run writes, and none would be the best by it. Name one of eval/acc",
        ),
        *(
            (
                [
                    f"train={{save_every: 1, keep_best: {{metric: {metric}}}}}",
                    "data.eval=e.jsonl",
                    "eval.every=1",
                    *given,
                ],
                f"{metric} is no metric that this run writes",
            )
            for metric, *given in (
                ("eval/pass_at_8",),
                ("eval/pass_at_8", "eval.samples_per_prompt=4", "eval.temperature=1.0"),
                ("eval/pass_at_3", "eval.samples_per_prompt=4", "eval.temperature=1.0"),
                ("eval/set/aime/accuracy",),
                ("eval/set/a/b/pass_at_8", "eval.set_key=source"),
                (
                    "eval/set/a/pass_at_8",
                    "eval={set_key: source, temperature: 1.0, sets: {b: {samples_per_prompt: 8}}}",
                ),
                ("eval/pass_at_8", "eval={set_key: source, temperature: 1.0, sets: {b: {samples_per_prompt: 8}}}"),
                ("eval/turns_mean",),
                ("eval/by/score",),
                ("perf/eval_s",),
            )
        ),
        (["data.mix={math: 0}"], "all of its shares are 0"),
        (["train.steps=3", "report.profiler.steps=[3, 4]"], "step 4 is behind the run's last (train.steps=3)"),
        (["report.profiler={steps: [2], ranks: [0, 1]}"], "there is no rank 1: the largest pool has 1, counted from 0"),
        (["train.steps=0"], "nothing says how long the run is. Set it, or train.epochs"),
        (
            [*SERVED, "rollout.servers.urls=['http://127.0.0.1:1', 'http://127.0.0.1:2']"],
            "http://127.0.0.1:1 is among rollout.servers.urls, too",
        ),
        (
            [SERVED[0], "teacher={}"],
            "`teacher.path` (by default): it is missing. Name the teacher's folder, or in teacher.servers",
        ),
        ([*SERVED, "teacher.path=m"], "teacher.path has the teacher on the run's ranks. Remove one of the two"),
        (
            [*SERVED, "rollout.temperature=0.7"],
            "at temperature 1 alone, and those of the policy are at rollout.temperature 0.7. Set that to 1",
        ),
        (["actor.optimizer={warmup_steps: 2, warmup_share: 0.1}"], "actor.optimizer.warmup_steps says how long"),
        (["actor={aux_loss_coef: 0.1, optimizer: {freeze_router: true}}"], "and frozen ones cannot. Set that to 0"),
        (
            ["actor={lora: {rank: 4}, optimizer: {freeze_vision_tower: false}}"],
            "adapters alone learn, and the vision tower has none. Set it to true, or remove actor.lora",
        ),
        (["agent.max_turns=3"], "nobody would answer the policy"),
        (["agent.tools=[kit:tool]"], "nobody could read the model's calls"),
        (["agent.environment=shop:Shop", "agent.environment_tools=[look]"], "nobody could read the model's calls"),
        (
            ["agent.environments={a: {environment: maze, environment_tools: [look]}}", "agent.environment_key=source"],
            "nobody could read the model's calls",
        ),
        (
            ["agent.environments={a: {environment: maze}, b: {environment: code}}"],
            "nothing says which row is for which of a, b",
        ),
        (
            ["agent.environments={a: {environment: maze}}", "agent.environment_key=s", "agent.environment=maze"],
            "agent.environment and agent.environments are set",
        ),
        (
            ["agent.environments={a: {settings: {size: 3}}}", "agent.environment_key=s"],
            "one plays the episodes of a: an environment, a command or a function. Name one of the three there",
        ),
        (
            [
                "agent.environments={a: {environment: maze, command: [play]}, b: {command: [play]}}",
                "agent.environment_key=s",
            ],
            "one plays the episodes of a: an environment, a command or a function",
        ),
        (
            ["agent.environments={a: {command: [play], settings: {size: 3}}}", "agent.environment_key=s"],
            "a harness has none of what an environment has. Remove agent.environments.a.settings",
        ),
        (
            ["agent.environments={a: {command: [play]}}", "agent.environment_key=s", "agent.tools=[kit:tool]"],
            "a harness has tools of its own",
        ),
        (
            [
                "agent.environments={a: {environment: maze}, b: {function: 'shop:play'}}",
                "agent.environment_key=s",
                "agent.rewritten=split",
            ],
            "split is for environments and tools",
        ),
        (["agent.command=[play]", "agent.rewritten=split"], "split is for environments and tools"),
        (["agent.environment=maze", "agent.turn_tokens=65"], "does not fit into rollout.max_response_tokens 64"),
        (
            ["agent.environment=maze", "reward.graders.environment={kind: rule, fn: math}"],
            "is the name of the environment's own reward",
        ),
        (["reward.fn=null"], "it is null, and nothing else grades"),
        (["agent.environment=maze", "data.eval=x", "eval.grader=math"], "The recipe's graders: environment"),
        (["rollout.top_k=0"], "got 0; set it to -1 (off)"),
        (["rollout.top_k=-2"], "got -2; set it to -1 (off)"),
        (["rollout.stop=['']"], "an empty stop string"),
        ([f"rollout.stop={[str(number) for number in range(33)]}"], "SGLang takes 32 stop strings, and got 33"),
        (["rollout.temperature=9e-7"], "the trainer divides by 9e-07. Set it to more"),
        (["rollout.kv_tokens=1000"], "Set it to 1088 or more"),
        (["data.eval=x", "eval.samples_per_prompt=2"], "2 greedy answers to one prompt are all the same"),
        *(
            (["data.eval=x", "eval.set_key=source", f"eval.sets={{b: {{}}, aime: {given}}}"], message)
            for given, message in (
                (
                    "{samples_per_prompt: 2}",
                    "the answers to rows of aime are greedy: several to one prompt are all the same",
                ),
                ("{top_p: 0.5}", "Set eval.sets.aime.temperature above 0, or its samples_per_prompt to 1"),
                ("{grader: exact}", "aime: there is no grader 'exact'. The recipe's graders: math"),
                ("{grader: math}", "aime.grader: the only grader's score is the reward."),
            )
        ),
        (["actor.optimizer.schedule=linear", "actor.optimizer.min_lr=1"], "Set it to at most 1e-06"),
        (["rollout.server_args=[--port=80]"], "--port (a free port is chosen)"),
        (["rollout.server_args=[--tp, '2']"], "--tp (decided by rollout.tp)"),
        # A file of flags would bring in what is refused here.
        (["rollout.server_args=[--config=flags.yaml]"], "--config (the flags of such a file go into"),
        (
            ["rollout.server_args=[--enable-hierarchical-cache, --hicache-storage-backend, file]"],
            "Remove --hicache-storage-backend (what it stores outlives a weight sync",
        ),
        (
            ["rollout.server_args=[--delete-ckpt-after-loading]"],
            "--delete-ckpt-after-loading (the model's folder is read again)",
        ),
        *(
            ([f"rollout.server_args=[{words}]"], f"on cpu no server comes up with these flags. Remove {named}")
            for words, named in (
                ("--tokenizer-worker-num, '2'", "--tokenizer-worker-num 2 (its workers load SGLang anew"),
                ("--dp-size=2", "--dp-size 2 (SGLang wants a NUMA node"),
                ("--data-parallel-size, '4', --log-level, info", "--data-parallel-size 4 (SGLang wants a NUMA node"),
                ("--speculative-algorithm=NGRAM", "--speculative-algorithm (tokens are guessed"),
                ("--enable-hierarchical-cache", "--enable-hierarchical-cache (what it keeps"),
                ("--enable-torch-compile", "--enable-torch-compile (the attention"),
                ("--enable-lora, --lora-backend, triton", "--enable-lora (adapters are computed"),
                ("--lora-paths, a=/a", "--lora-paths (adapters are computed"),
                (
                    "--enable-torch-compile, --dp-size, '2'",
                    "--dp-size 2 (SGLang wants a NUMA node for each copy of the model; rollout.servers has a server for each); "
                    "--enable-torch-compile (",
                ),
            )
        ),
        (
            [*DETERMINISTIC, "rollout.kv_tokens=69631"],
            "Set rollout.kv_tokens to 69632 or more (rollout.max_running_requests",
        ),
        (["rollout.deterministic=true", "cluster.platform=cuda"], "a server whose cache runs full drops a request"),
        ([*DETERMINISTIC, "rollout.tp=4"], "on cpu the sum over more than 2 ranks"),
        (
            [*DETERMINISTIC, "rollout.server_args=[--chunked-prefill-size, '512']"],
            "would undo it: --chunked-prefill-size.",
        ),
        (
            [*DETERMINISTIC, "rollout.server_args=[--speculative-algorithm=EAGLE]"],
            "--speculative-algorithm=EAGLE. Remove",
        ),
        *(
            ([*GUESSES, *overrides, f"rollout.server_args=[{words}]"], says)
            for words, overrides, says in (
                ("--speculative-accept-threshold-single, '0.5'", [], "with --speculative-accept-threshold-single"),
                (
                    "--speculative-accept-threshold-acc=0.5",
                    [],
                    "with --speculative-accept-threshold-acc=0.5 servers keep",
                ),
                (
                    "--speculative-algorithm, NGRAMS",
                    [],
                    "NGRAMS is none that megarl knows. Allowed are NGRAM, NEXTN, EAGLE, EAGLE3, STANDALONE, DFLASH, DSPARK.",
                ),
                (
                    "--speculative-algorithm=UNO",
                    [],
                    "--speculative-algorithm UNO gives no log-probs. Allowed are NGRAM",
                ),
                (
                    "--speculative-algorithm=EAGLE, --speculative-adaptive",
                    [],
                    "with --speculative-adaptive a pass gives",
                ),
                (
                    "--speculative-algorithm=STANDALONE, --speculative-draft-model-path=/draft",
                    ["actor.lora.rank=8", "sync.lora=adapters"],
                    "SGLang computes no adapters beside --speculative-algorithm STANDALONE.",
                ),
                (
                    "--speculative-algorithm, ngram",
                    ["actor.routing_replay=true"],
                    "SGLang does not say for every token",
                ),
                (
                    "--speculative-algorithm=eagle",
                    ["sync.transport=disk"],
                    "with --speculative-algorithm EAGLE in rollout",
                ),
                (
                    "--speculative-algorithm, NEXTN",
                    ["rollout.quantization=fp8", "model.dtype=bfloat16"],
                    "set it to NGRAM, which has no draft; or set this to null",
                ),
            )
        ),
        (
            [*DETERMINISTIC, "rollout.server_args=[--attention-backend, triton]"],
            "--attention-backend triton. Remove that; attention backends that are deterministic on cpu: torch_native",
        ),
    ],
)
def test_values_that_contradict_each_other(recipe_file: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "given"),
    [
        ("eval/truncated", []),
        ("eval/pass_at_2", ["eval.samples_per_prompt=3", "eval.temperature=1.0"]),
        ("eval/pass_at_3", ["eval.samples_per_prompt=3", "eval.temperature=1.0"]),
        ("eval/set/a/b/pass_at_8", ["eval.set_key=source", "eval.samples_per_prompt=8", "eval.temperature=1.0"]),
        ("eval/by/score", ["agent.environment=maze"]),
        ("eval/set/b/pass_at_8", ["eval={set_key: source, temperature: 1.0, sets: {b: {samples_per_prompt: 8}}}"]),
        ("eval/by/math/acc", []),
    ],
)
def test_the_best_may_be_known_by_whatever_the_run_writes(recipe_file: Path, metric: str, given: list[str]) -> None:
    best = [f"train={{save_every: 1, keep_best: {{metric: {metric}}}}}", "data.eval=e.jsonl", "eval.every=1"]
    assert load_recipe(recipe_file, [*best, *given])


def test_flags_of_the_server_that_megarl_does_not_set_are_welcome(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["rollout.server_args=[--chunked-prefill-size, '512']"])
    for words in ("--dp-size, '1', --tokenizer-worker-num=1", "--enable-lora, --lora-backend=torch_native"):
        assert load_recipe(recipe_file, [f"rollout.server_args=[{words}]"])
    only_there = "--dp-size, '2', --enable-torch-compile, --speculative-algorithm=NGRAM, --enable-lora"
    assert load_recipe(recipe_file, ["cluster.platform=cuda", f"rollout.server_args=[{only_there}]"])
    keys = [key for key in OWNED_FLAGS.values() if not key.startswith("nothing")]
    flags = Schema(type(load_recipe(recipe_file).recipe))
    assert all(flags.node(tuple(key.split("."))) is not None for key in keys)


@pytest.mark.parametrize(
    "overrides",
    [
        DETERMINISTIC,
        [*DETERMINISTIC, "rollout.tp=2", "rollout.servers=3"],
        [*DETERMINISTIC, "rollout.concurrency=3", "rollout.kv_tokens=3264"],
        [*DETERMINISTIC, "rollout.server_args=[--attention-backend=torch_native]"],
        [
            *("rollout.deterministic=true", "cluster.platform=cuda", "rollout.kv_tokens=69632", "rollout.tp=8"),
            "rollout.server_args=[--attention-backend, fa3, --chunked-prefill-size, '512']",
        ],
    ],
)
def test_deterministic_servers_are_accepted_where_they_can_be(recipe_file: Path, overrides: list[str]) -> None:
    assert load_recipe(recipe_file, overrides).recipe.rollout.deterministic  # type: ignore[union-attr]


def test_several_problems_are_listed_together(recipe_file: Path) -> None:
    with pytest.raises(UserError, match="for 3 reasons"):
        load_recipe(recipe_file, ["rollout.top_k=0", "eval.every=5", "actor.optimizer.momentum=0.5"])


def test_the_cache_size_is_computed_where_the_server_cannot(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["cluster.platform=cpu"]).recipe.rollout.kv_tokens == 64 * (1024 + 64)
    assert load_recipe(recipe_file, ["cluster.platform=cuda"]).recipe.rollout.kv_tokens is None
    chosen = load_recipe(recipe_file, ["cluster.platform=cpu", "rollout.kv_tokens=5000"])
    assert chosen.recipe.rollout.kv_tokens == 5000


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["cluster.platform=cpu"], 2048),
        (["cluster.platform=cuda"], 16384),
        (["cluster.platform=cpu", "actor.micro_batch_tokens=16384"], 16384),
        (["cluster.platform=cpu", "data.max_prompt_tokens=4096"], 6144),  # a sample of 4160 tokens
        (["cluster.platform=cpu", "data.max_prompt_tokens=4032"], 4096),
        (["cluster.platform=cpu", "data.max_prompt_tokens=16300"], 16384),
    ],
)
def test_a_forward_pass_has_fewer_tokens_on_a_cpu(recipe_file, words, wanted):
    assert load_recipe(recipe_file, words).recipe.actor.micro_batch_tokens == wanted


OWN = "tests.support.dry.own"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["algorithm.policy_loss=OWN:scaled_loss", "algorithm.clip_low=0.1"],
            "no function of this recipe has such a setting",
        ),
        (["algorithm.policy_loss=OWN:plain_loss", "algorithm.overlong_buffer=0.5", "teacher.path=m"], "asks for none"),
        (["algorithm.policy_loss=OWN:plain_loss", "algorithm.advantage=rloo", "teacher.path=m"], "asks for none"),
        (["algorithm.advantage=OWN:scaled_advantages", "critic.epochs=2"], "nothing asks for its values"),
        (["algorithm.advantage=OWN:scaled_advantages", "teacher.path=m"], "nothing asks for its log-probs"),
        (["algorithm.advantage=OWN:shapeless_advantages", "reward_model.path=m"], "asks for no rewards"),
        (
            ["algorithm.advantage=OWN:shapeless_advantages", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "takes it off tokens' rewards, and nothing asks for these",
        ),
        (
            ["algorithm.advantage=OWN:of_samples_at_tokens", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "takes it off tokens' rewards, and nothing asks for these",
        ),
        (
            ["algorithm.advantage=OWN:of_samples_at_tokens", "reward_model={path: m, level: token}"],
            "nothing asks for their rewards: set it to sequence",
        ),
    ],
)
def test_what_an_own_function_does_not_ask_for_is_refused_when_it_is_looked_at(
    recipe_file: Path, given: list[str], says: str
) -> None:
    """A recipe is read without importing anything; what is refused then is told by the function's parameters."""
    loaded = load_recipe(recipe_file, [text.replace("OWN", OWN) for text in given])
    with pytest.raises(UserError, match="read by nothing") as caught:
        check_functions(loaded.recipe, loaded.sources)
    assert says in str(caught.value) and "on the command line" in str(caught.value)
    needed = [given[0], *(["teacher.path=m"] if "plain_loss" in given[0] else [])]
    without = load_recipe(recipe_file, [text.replace("OWN", OWN) for text in needed])
    check_functions(without.recipe, without.sources)


def test_what_a_preset_says_and_nothing_reads_is_as_if_nobody_had_said_it(recipe_file: Path) -> None:
    given = ["algorithm.preset=reinforce_pp", *DISTILL]
    recipe = load_recipe(recipe_file, given).recipe
    assert (recipe.algorithm.advantage, recipe.algorithm.kl_coef, recipe.algorithm.kl_in) == ("grpo", 0.0, "loss")
    assert set(role_layouts(recipe)) == {"actor", "teacher"}
    assert recipe.critic is None and load_recipe(recipe_file, ["algorithm.preset=ppo"]).recipe.critic is not None
    # What was said to count in rewards counts in the loss where it is told to.
    kept = load_recipe(recipe_file, [*given, "algorithm.kl_in=loss"]).recipe
    assert kept.algorithm.kl_coef == 0.01 and "reference" in role_layouts(kept)


def test_who_turns_off_what_nothing_reads_is_not_asked_why(recipe_file: Path) -> None:
    """As an override does to a key of the recipe, for one that would be read by nothing with another override beside it."""
    assert load_recipe(
        recipe_file, ["teacher=null", "critic=null", "algorithm.correction=null", "algorithm.kl_control=null"]
    )
    turns = ["rollout.offload=[weights]", "data.eval=e.jsonl", "eval.every=1"]
    assert not load_recipe(recipe_file, [*turns, "eval.overlap=false"]).recipe.eval.overlap
    with pytest.raises(UserError, match=r"eval\.overlap.* is read by nothing"):
        load_recipe(recipe_file, [*turns, "eval.overlap=true"])
    assert load_recipe(recipe_file, ["algorithm.kl_coef=0", "reference.offload=[]"])
    with pytest.raises(UserError, match=r"reference\.offload.* is read by nothing"):
        load_recipe(recipe_file, ["algorithm.kl_coef=0", "reference.offload=[params]"])
    with pytest.raises(UserError, match="read by nothing"):
        load_recipe(recipe_file, ["critic={}"])


def test_a_search_for_a_placement_needs_no_other_role(recipe_file: Path) -> None:
    """Two rules say that nothing reads reference.parallel."""
    loaded = load_recipe(recipe_file, ["placement.name=auto"])
    assert "parallel" not in loaded.resolved.get("reference", {}) and "parallel" not in loaded.resolved["actor"]


def test_where_an_environment_rewards_a_rule_grades_only_if_it_is_named(recipe_file: Path) -> None:
    maze = "agent.environment=maze"
    assert load_recipe(recipe_file, [maze]).recipe.reward.by_name() == {}
    assert list(load_recipe(recipe_file, [maze, "reward.fn=exact"]).recipe.reward.by_name()) == ["exact"]
    assert list(load_recipe(recipe_file, [maze, REMOTE]).recipe.reward.by_name()) == ["x"]
    # What was resolved is read again as the same.
    loaded = load_recipe(recipe_file, [maze])
    assert Recipe.model_validate(loaded.resolved).reward == loaded.recipe.reward
    assert load_recipe(recipe_file).recipe.agent is None
    for player in ("environment: maze", "command: [play]"):
        several = [f"agent.environments={{a: {{{player}}}}}", "agent.environment_key=kind"]
        assert load_recipe(recipe_file, several).recipe.reward.by_name() == {}


@pytest.mark.parametrize("name", ["environment", "x"])
def test_an_evaluation_may_ask_environment_or_grader_what_is_right(recipe_file: Path, name: str) -> None:
    given = ["agent.environment=maze", "data.eval=held_out.jsonl", f"eval.grader={name}"]
    assert load_recipe(recipe_file, [*given, REMOTE]).recipe.eval.grader == name
    with pytest.raises(UserError, match=r"eval\.grader"):
        load_recipe(recipe_file, given)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.kl_coef=0.1", "algorithm.kl_kind=k1"], True),
        (["algorithm.kl_coef=0.1", "algorithm.kl_kind=k2"], False),
        (["algorithm.kl_coef=0.1"], False),
        (["algorithm.preset=reinforce_pp"], False),  # k1 in the reward
        (["algorithm.preset=ppo"], False),  # no KL
    ],
)
def test_a_kl_in_the_loss_that_holds_nothing_back_is_told(recipe_file: Path, overrides: list[str], told: bool) -> None:
    said = " ".join(learning_notes(load_recipe(recipe_file, overrides, Recipe).recipe))
    assert ("Set it to k2" in said) == told == bool(said)
    shown = CliRunner().invoke(app, ["recipe", "show", str(recipe_file), *overrides])
    assert ("algorithm.kl_kind: k1 in the loss holds nothing back" in shown.output) == told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.advantage=rloo"], ""),
        (["algorithm.advantage=rloo", "algorithm.kl_coef=0.1"], ""),
        (["algorithm.advantage=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "kl_in: reward makes their"),
        (["algorithm.advantage=reinforce_pp"], "reinforce_pp does not compare samples of a group"),
        (["algorithm.advantage=gdpo"], "gdpo goes by each grader's scores"),
        (["algorithm.advantage=gae"], "gae does not compare samples of a group"),
        (["algorithm.advantage=grpo_turns", "agent.environment=maze"], ""),
        (["algorithm.advantage=grpo_turns", "agent.environment=maze", "agent.credit=turn"], "in other turns"),
    ],
)
def test_groups_that_are_dropped_although_they_teach_are_told(
    recipe_file: Path, overrides: list[str], told: str
) -> None:
    for drops in ("true", "false"):
        words = [f"algorithm.drop_zero_variance_groups={drops}", *overrides]
        said = " ".join(learning_notes(load_recipe(recipe_file, words, Recipe).recipe))
        assert bool(said) == (bool(told) and drops == "true") and (not said or told in said)


def test_who_says_which_groups_are_kept_is_not_told_that_others_teach(recipe_file: Path) -> None:
    drops = ["algorithm.advantage=gdpo", "algorithm.drop_zero_variance_groups=true"]
    assert learning_notes(load_recipe(recipe_file, drops).recipe)
    assert not learning_notes(load_recipe(recipe_file, [*drops, "algorithm.keep_groups.above=0.1"]).recipe)
    # Nor is a reward model in the way where a grader's scores decide.
    scored = [*drops[1:], "reward_model.path=m", "algorithm.keep_groups.grader=math"]
    assert load_recipe(recipe_file, scored).recipe.algorithm.keep_groups is not None
