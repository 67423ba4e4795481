"""What a plan shows beside its pick: the recipe's own placement, equal losers once, the weight sync; and what it is asked of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.models.known_configs import known_config
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.own import own_placement
from megarl.placement.page import gantt, page
from megarl.placement.plan import Own, Plan, make_plan, smallest_cluster
from megarl.placement.report import EQUALS, as_json, other_lines, render
from megarl.placement.workload import ROLLOUT, read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.plan_models import PlannedModels
from tests.placement.samples import GRPO, PPO, QWEN_7B, QWEN_30B_A3B, workload, write_config

LONG = ("rollout.max_response_tokens=4096", "actor.micro_batch_tokens=8192", "rollout.kv_tokens=300000")
EIGHT = ("cluster.devices=8", "actor.parallel.tp=4")
MIXED = replace(make_cluster("H100", 2), others=(make_cluster("H20", 4),))


def recipe(folder: Path, *overrides: str) -> Recipe:
    words = [f"model.path={write_config(folder)}", *LONG, "model.dtype=bfloat16", *overrides]
    return load_recipe(Path("recipes/quickstart.yaml"), words, Recipe).recipe


def own(folder: Path, cluster: Cluster, *overrides: str) -> tuple[Own, Plan]:
    given = recipe(folder, *overrides)
    work = recipe_workload(given, read_model(folder))
    found = own_placement(given, work, cluster)
    return found, replace(make_plan(work, cluster, top=2), own=found)


def told(plan: Plan) -> str:
    console = Console(record=True, width=250, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan))
    return console.export_text()


@pytest.mark.parametrize(
    ("cluster", "overrides", "says"),
    [
        (make_cluster("H100", 1), ["cluster.devices=4", "actor.parallel.tp=4"], ""),
        (MIXED, ["cluster.devices=8", "actor.parallel.tp=4"], ""),
        (make_cluster("H100", 1), ["cluster.devices=1"], r"actor\+reference on 1 needs \d+\.\d GiB of each device"),
        (MIXED, ["cluster.devices=1"], "GiB of each device while actor works"),
        (make_cluster("H100", 1), ["cluster.devices=16"], "its ranks are 16 devices .*, and there are 8"),
        (make_cluster("H100", 1), ["cluster.devices=3", "actor.parallel.tp=3"], "tp 3 does not divide"),
        (make_cluster("H100", 1), ["rollout.tp=3"], "rollout.tp 3 does not divide the model"),
        (
            make_cluster("H100", 1, 4),
            ["cluster.devices=2", "rollout.tp=4"],
            "rollout.tp 4 fits neither beside the ranks nor",
        ),
        (
            make_cluster("H100", 1),
            ["cluster.devices=4", "actor.mini_batch_samples=2"],
            "less than one sample for each of 4",
        ),
        (make_cluster("H100", 1), ["actor.micro_batch_tokens=100"], "does not hold the longest sample"),
        (
            make_cluster("H100", 1),
            [*EIGHT, "rollout.max_staleness=1"],
            "rollout.max_staleness is 1, and there are not devices",
        ),
        (make_cluster("H100", 1), [*EIGHT, "eval.overlap=true"], "eval.overlap is set, and there are not devices"),
        (
            make_cluster("H100", 1),
            ["cluster.platform=cuda", "rollout.kv_tokens=null", "rollout.server_args=[--mem-fraction-static, '0.15']"],
            "do not hold the weights and, in the KV cache, one sample",
        ),
    ],
    ids=[
        "fits",
        "fits on one of two kinds",
        "too full",
        "too full on both kinds",
        "too many",
        "cannot be cut",
        "servers cannot be cut",
        "servers fit nowhere",
        "too small mini-batches",
        "too small micro-batches",
        "no devices to work beside the ranks",
        "no devices to answer beside the ranks",
        "no cache",
    ],
)
def test_the_recipes_own_placement_stands_beside_the_pick(
    tmp_path: Path, cluster: Cluster, overrides: list[str], says: str
) -> None:
    found, plan = own(tmp_path, cluster, *overrides)
    text, values = told(plan), as_json(plan)["own"]
    assert "the recipe's own" in text and "the recipe's own" in unescape(page(plan))
    assert values["fits"] == (not says)
    if says:
        assert found.problem is not None and re.search(says, found.problem)
        assert "cannot run here: " in text and "cannot run here: " in page(plan)
    else:
        assert found.predicted is not None and found.problem is None
        # The search looks at this one too, or at one that is better.
        assert plan.best.step_s <= found.predicted.step_s == values["step_s"]


def test_on_several_kinds_of_nodes_the_recipe_has_the_fastest_that_holds_it(tmp_path: Path) -> None:
    words = ("cluster.devices=8", "actor.parallel.tp=4")
    both, _ = own(tmp_path, MIXED, *words)
    alone = [own(tmp_path, kind, *words)[0].predicted for kind in MIXED.kinds]
    assert both.predicted is not None
    assert both.predicted.step_s <= min(each.step_s for each in alone if each is not None)
    where = {role.role: pool.kind.device.name for pool in both.predicted.pools for role in pool.roles}
    assert where["actor"] == "H100", "it multiplies faster"


def test_equal_losers_are_one_line() -> None:
    plan = make_plan(workload(QWEN_7B, GRPO), make_cluster("H100", 2), top=3)
    [first, second], why, other = [each for each, _ in plan.others], "one reason", "another"
    alike = replace(plan, others=((first, why),) * (EQUALS + 2) + ((second, other),))
    lines = other_lines(alike)
    assert len(lines) == 2
    assert lines[0][0].split("\n") == [first.describe()] * EQUALS + ["and 2 more"]
    assert lines[1] == (second.describe(), f"{second.step_s:.4g}", other)
    assert told(alike).count(why) == 1 and page(alike).count(why) == 1
    assert len(as_json(alike)["others"]) == EQUALS + 3, "programs get them all"


def test_partitions_that_nothing_is_known_of_but_a_bound_are_few_lines() -> None:
    plan = make_plan(workload(QWEN_7B, PPO), make_cluster("H100", 4), top=1)
    assert len(plan.bounds) > 40
    console = Console(record=True, width=250, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan, explain=True))
    lines = [line for line in console.export_text().splitlines() if "not looked into further" in line]
    assert 0 < len(lines) == len({line.split("over ")[1] for line in lines}) < len(plan.bounds)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_weight_sync_is_drawn_before_the_rollout(staleness: int) -> None:
    work = workload(QWEN_30B_A3B, GRPO, samples_per_prompt=8, staleness=staleness)
    best = make_plan(work, make_cluster("H100", 8), name="split", top=1).best
    assert best.asynchronous == (staleness > 0)
    bars = re.findall(
        r"<title>(\w+), ([\w ]+): [^<]*</title><rect x=\"([\d.]+)\" y=\"\d+\" width=\"([\d.]+)\"", gantt(best)
    )
    ends: dict[str, float] = {}
    starts: dict[str, float] = {}
    for _, stage, left, width in bars:
        starts[stage] = min(starts.get(stage, 1e9), float(left))
        ends[stage] = max(ends.get(stage, 0.0), float(left) + float(width))
    assert {role for role, stage, *_ in bars if stage == "sync"} == {"actor", ROLLOUT}
    # It begins the step, takes its share of the 810 units of width, and the samples come after it.
    assert starts["sync"] == 150 and ends["sync"] <= starts["rollout"] + 0.2
    drawn = sum(float(width) for _, stage, _, width in bars if stage == "sync")
    assert drawn == pytest.approx(810 * best.phases["sync"] / best.step_s, abs=2)


def planned(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", "recipes/quickstart.yaml", *words], env={"COLUMNS": "300"})
    return done.exit_code, done.output if done.exception is None or done.exit_code == 0 else str(done.exception)


def test_asynchronous_plans_are_asked_for_in_a_recipe_and_on_the_command_line(tmp_path: Path) -> None:
    grown = ("rollout.prompts_per_step=512", "actor.mini_batch_samples=1024", "--response-mean", "1500")
    words = [f"model.path={write_config(tmp_path)}", *LONG, *grown, "--device", "H100", "--nodes", "4", "--json"]
    words += ["--placement", "split"]
    steps = []
    for more in (
        [],
        ["--max-staleness", "1"],
        ["rollout.max_staleness=1"],
        ["rollout.max_staleness=1", "--max-staleness", "0"],
    ):
        code, text = planned(*more, *words)
        assert code == 0, text
        best = json.loads(text[text.index("{") :])["best"]
        assert best["asynchronous"] == (more in (["--max-staleness", "1"], ["rollout.max_staleness=1"]))
        steps.append(best["step_s"])
    assert steps[1] == steps[2] < steps[0] == steps[3]


def test_a_pick_that_the_recipe_does_not_run_on_as_it_is_says_so(tmp_path: Path) -> None:
    words = [f"model.path={write_config(tmp_path)}", *LONG, "model.dtype=bfloat16", "data.eval=rows.jsonl"]
    words += ["--device", "H100", "--response-mean", "1500"]
    for more, says in (
        ([], ""),
        (
            ["eval.overlap=true", "--placement", "colocate"],
            "eval.overlap has servers work while the ranks train, and",
        ),
        (["eval.overlap=true", "--placement", "split"], ""),
    ):
        code, text = planned(*more, *words)
        assert code == 0, text
        shown = " ".join(text.split())
        assert says in shown and ("work while the ranks train" in shown) == bool(says)


def test_a_model_that_nothing_is_known_of_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model folder models/Mystery-9B") as caught:
        PlannedModels(recipe(tmp_path, "model.path=models/Mystery-9B"))
    assert "Qwen/Qwen3-4B" in str(caught.value) and "config.json" in str(caught.value)


def test_a_reward_model_that_is_not_there_has_the_policys_sizes_and_says_so(tmp_path: Path) -> None:
    given = recipe(tmp_path, "reward_model.path=models/its-own")
    models = PlannedModels(given)
    work = recipe_workload(given, models.policy, read=models)
    assert work.models["reward_model"] == models.policy
    assert models.notes == ["There is no folder models/its-own: the reward model is planned with the policy's sizes."]
    with pytest.raises(UserError, match="models/its-own"):
        recipe_workload(given, models.policy)


@pytest.mark.parametrize(
    ("name", "device", "most"), [("deepseek-ai/DeepSeek-V3", "H800", 256), ("Qwen/Qwen3-235B-A22B", "H100", 64)]
)
def test_models_whose_layers_no_pipeline_divides_need_no_more_devices_than_they_were_run_on(
    name: str, device: str, most: int
) -> None:
    path = known_config(name)
    assert path is not None
    work = workload(
        read_model(path.parent),
        ("actor", ROLLOUT),
        prompts=256,
        samples_per_prompt=16,
        mini_batches=4,
        longest_sample=18432,
        micro_tokens=(18432, 20480),
    )
    smallest = smallest_cluster(work, make_cluster(device, 1))
    assert smallest is not None and smallest.num_devices <= most
    best = make_plan(work, make_cluster(device, most // 8), top=1).best
    [actor] = [role for pool in best.pools for role in pool.roles if role.role == "actor"]
    assert actor.choice["pp"] in (4, 8, 16)
    assert actor.choice["first_stage_layers"] > 0 and actor.choice["last_stage_layers"] > 0


def test_a_server_that_eight_devices_do_not_hold_is_a_larger_part_of_a_node_where_nodes_are_large() -> None:
    path = known_config("deepseek-ai/DeepSeek-V3")
    assert path is not None
    work = workload(read_model(path.parent), ("actor", ROLLOUT), longest_sample=4096, micro_tokens=(4096,))
    best = make_plan(work, make_cluster("GB200", 2), top=1).best
    [rollout] = [role for pool in best.pools for role in pool.roles if role.role == ROLLOUT]
    assert rollout.choice["tp"] in (16, 32)
