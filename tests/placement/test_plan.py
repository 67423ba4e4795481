"""Plans as a whole: what they say, what they refuse, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megarl.core.errors import UserError
from megarl.placement.cluster import make_cluster
from megarl.placement.page import gantt, page
from megarl.placement.plan import PHASES, PlacementPlan, PoolPlan, make_plan
from megarl.placement.report import as_json, render
from tests.placement.samples import GRPO, LLAMA_7B, QWEN_7B, workload, write_config

CLUSTER = make_cluster("H100", 2)


def test_the_report_adds_up_to_what_the_search_minimised() -> None:
    plan = make_plan(workload(QWEN_7B), CLUSTER, top=6)
    assert plan.best.step_s == pytest.approx(sum(plan.best.phases[phase] for phase in PHASES))
    others = [other.step_s for other, _ in plan.others]
    assert len(others) == 5
    assert [plan.best.step_s, *others] == sorted([plan.best.step_s, *others])
    for placement in (plan.best, *(other for other, _ in plan.others)):
        used = [device for pool in placement.pools for device in range(pool.first, pool.first + pool.devices)]
        assert len(used) == len(set(used)) and max(used) < 16
        assert all(pool.peak_bytes <= CLUSTER.device.memory_bytes for pool in placement.pools)


@pytest.mark.parametrize("name", ["colocate", "hybrid", "split", "standalone"])
def test_named_placements_can_be_asked_for(name: str) -> None:
    plan = make_plan(workload(QWEN_7B), make_cluster("H100", 4), name=name)
    assert name in plan.best.names


def test_an_asynchronous_rollout_hides_behind_training() -> None:
    cluster = make_cluster("H100", 4)
    waits = make_plan(workload(QWEN_7B, GRPO, samples_per_prompt=8), cluster, name="split")
    flows = make_plan(workload(QWEN_7B, GRPO, samples_per_prompt=8, staleness=1), cluster, name="split")
    assert flows.best.step_s < waits.best.step_s
    assert flows.best.asynchronous
    assert flows.best.step_s == pytest.approx(sum(flows.best.phases.values()))


def test_a_critic_on_devices_of_its_own_learns_beside_the_next_rollout() -> None:
    cluster = make_cluster("H100", 4)
    apart, together = (frozenset({"critic", "reward_model"}), frozenset({"reference", "critic", "reward_model"}))

    def placed(others: frozenset[str]) -> PlacementPlan:
        return make_plan(workload(QWEN_7B), cluster, allowed=lambda pools: others in map(frozenset, pools), top=1).best

    for others in (apart, together):
        best = placed(others)
        [late] = [pool for pool in best.pools if {role.role for role in pool.roles} == others]
        [first] = [pool for pool in best.pools if pool is not late]

        def seconds(pool: PoolPlan, *phases: str) -> float:
            return sum(role.seconds.get(phase, 0.0) for role in pool.roles for phase in phases)

        everyone = sum(seconds(pool, "sync", "sleep and wake", "rollout") for pool in best.pools)
        prepare = max(seconds(pool, "prepare") for pool in best.pools)
        own = seconds(late, "sleep and wake", "prepare", "train")
        expected = max(everyone + prepare + seconds(first, "train"), own) + best.phases["between stages"]
        assert best.step_s == pytest.approx(expected) == pytest.approx(sum(best.phases.values()))
        ElementTree.fromstring(gantt(best))


def test_what_does_not_fit_is_refused_with_the_smallest_cluster() -> None:
    small = make_cluster("L40S", 1, 1)
    with pytest.raises(UserError, match=r"actor .*alone.* do not fit|actor .*alone does not fit") as caught:
        make_plan(workload(LLAMA_7B), small)
    words = str(caught.value)
    assert "smallest cluster of this kind that works" in words
    nodes = int(words.rpartition("works: ")[2].split(maxsplit=1)[0])
    assert make_plan(workload(LLAMA_7B), small.of_nodes(nodes)).best.step_s > 0
    with pytest.raises(UserError):
        make_plan(workload(LLAMA_7B), small.of_nodes(nodes - 1))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="colocate, hybrid, split, standalone"):
        make_plan(workload(), CLUSTER, name="collocate")


def test_tables_json_and_page_show_every_role() -> None:
    plan = make_plan(workload(QWEN_7B), CLUSTER)
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan, explain=True))
    text = console.export_text()
    values = json.loads(json.dumps(as_json(plan)))
    drawn = page(plan)
    for role in plan.best.pools[0].roles:
        assert role.role in text
        assert role.role in drawn
        assert role.role in values["best"]["pools"][0]["roles"]
    for start in (drawn.index("<svg"), drawn.rindex("<svg")):
        ElementTree.fromstring(drawn[start : drawn.index("</svg>", start) + 6])
    assert "http" not in drawn and "<script" not in drawn


def plan_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megarl", "plan", *words], capture_output=True, text=True, check=False)


def test_the_command_plans_from_config_json_alone(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    model = f"model.path={write_config(tmp_path)}"
    run = plan_command("recipes/quickstart.yaml", model, "--device", "H100", "--json", "--html", str(html))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["best"]["step_s"] > 0
    assert "<svg" in html.read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--cluster"),
        (["--device", "H1000"], "not in the table"),
        (["--device", "H100", "--placement", "colo"], "There is no placement named"),
        (["--device", "H100", "--response-mean", "99999"], "mean response"),
        (["--cluster", "nowhere.yaml"], "no cluster file"),
    ],
)
def test_the_command_refuses_with_one_paragraph(tmp_path: Path, words: list[str], part: str) -> None:
    run = plan_command("recipes/quickstart.yaml", f"model.path={write_config(tmp_path)}", *words)
    assert run.returncode == 2
    assert part in run.stderr
    assert "Traceback" not in run.stderr
