"""Plans as a whole: what they say, what they refuse, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megarl.core.errors import UserError
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.devices import DEVICES, GIB
from megarl.placement.generation import rollout_seconds
from megarl.placement.lengths import lognormal
from megarl.placement.page import gantt, page
from megarl.placement.placed import PHASES, PlacementPlan, PoolPlan, RolePlan, why_lost
from megarl.placement.plan import make_plan
from megarl.placement.report import as_json, render
from megarl.placement.simulate import Conditions
from megarl.placement.space import Space, servers
from megarl.placement.tables import RoleTable, role_table, rollout_table, served_bytes
from megarl.placement.weight_sync import sync_seconds
from megarl.placement.workload import ROLLOUT, Workload
from megarl.run.plan import PlanOptions, run_plan
from tests.placement.samples import GRPO, LLAMA_7B, QWEN_7B, workload, write_config
from tests.support.command import megarl

ROOT = Path(__file__).parents[2]
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


def test_an_asynchronous_rollout_goes_on_between_the_ranks_stages() -> None:
    responses = lognormal(1000, 0.3, 4096)
    work = workload(QWEN_7B, GRPO, prompts=32, samples_per_prompt=8, mini_batches=4, responses=responses, staleness=4)
    best = make_plan(work, make_cluster("H100", 4), name="split", top=1).best
    stages = best.phases["prepare"] + best.phases["train"]
    # Longer than the stages, and not than they are with what is between them.
    assert best.asynchronous and stages < _of(best, ROLLOUT).seconds["rollout"] < stages + best.phases["between stages"]
    assert best.phases["rollout"] == 0


def test_servers_that_samples_of_other_steps_fill_are_chosen_by_how_fast_they_are_then() -> None:
    """By itself a step wants servers of two devices; beside those before and after it, of one."""
    responses = lognormal(1267, 0.9, 8192)
    work = workload(
        LLAMA_7B, GRPO, prompts=256, samples_per_prompt=8, responses=responses, longest_sample=9216, max_running=256
    )
    every = servers(Space(), LLAMA_7B, [8], 8)
    held = served_bytes(every, work, CLUSTER)
    for staleness in (0, 1):
        some = replace(work, staleness=staleness)
        seconds = rollout_seconds(LLAMA_7B, every, held, some, CLUSTER)
        least = float((seconds.flow if staleness else seconds.total).min())
        table = rollout_table(some, CLUSTER, Space(), [8])
        costs = table.flowing.cost[:, 3] if staleness else table.separate.cost[:, 0]
        assert costs.min() == pytest.approx(least + sync_seconds(LLAMA_7B, some, CLUSTER)[0])
    assert every.tp[seconds.flow.argmin()] < every.tp[seconds.total.argmin()]


def test_servers_on_processes_are_cut_as_sglang_can_there() -> None:
    few = replace(QWEN_7B, family="mixtral", num_kv_heads=1)
    work = workload(few, roles=("actor", "rollout"), responses=lognormal(8, 0.1, 16), longest_sample=32, kv_tokens=64)

    def sizes(device: str) -> set[int]:
        cluster = replace(make_cluster(device, 1, 4), device=replace(DEVICES[device], memory_bytes=1e12))
        return set(rollout_table(work, cluster, Space(), (4,)).servers.tp.tolist())

    assert sizes("cpu") == {1} and sizes("H100") > {1}


def test_why_a_placement_lost_is_not_said_of_one_that_is_faster() -> None:
    best = make_plan(workload(QWEN_7B, GRPO), CLUSTER, top=1).best
    faster = replace(best, step_s=best.step_s - 2.0, phases={**best.phases, "rollout": best.phases["rollout"] - 2.0})
    assert why_lost(faster, best) == "2 s faster than the pick: the search did not come upon it"
    assert why_lost(best, faster).startswith("rollout takes")


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


def test_six_devices_are_cut_into_three_stages_where_halves_do_not_fit() -> None:
    six = make_cluster("H100", 1, 6)
    small = replace(six, device=replace(six.device, memory_bytes=28 * GIB))
    with pytest.raises(UserError, match="actor alone does not fit"):
        make_plan(workload(LLAMA_7B, GRPO), small, top=1, space=Space(pp=(1, 2, 4, 8, 16)))
    [pool] = make_plan(workload(LLAMA_7B, GRPO), small, top=1).best.pools
    assert next(role.shape for role in pool.roles if role.role == "actor").startswith("tp2 pp3 ")


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


def test_a_share_that_leaves_no_room_for_what_is_kept_is_named_as_what_does_not_fit() -> None:
    held = r"rollout alone does not fit .*74\.8 GiB.* has --mem-fraction-static 0\.95: lower it to at most 0\.9\.$"
    with pytest.raises(UserError, match=held):
        make_plan(workload(QWEN_7B, GRPO, server_share=0.95), CLUSTER)
    with pytest.raises(UserError, match=r"0\.91: lower it to at most 0\.9\.$"):
        make_plan(workload(QWEN_7B, GRPO, server_share=0.91), CLUSTER)
    assert make_plan(workload(QWEN_7B, GRPO, server_share=0.9), CLUSTER, top=1).best.step_s > 0


@pytest.mark.parametrize("nodes", [3, 100_000])
def test_a_search_for_the_smallest_cluster_ends_where_clusters_do(nodes: int) -> None:
    few = make_cluster("H100", nodes)
    tiny = replace(few, device=replace(few.device, memory_bytes=3 * GIB))
    with pytest.raises(UserError, match=f"up to {max(nodes, 4096)} such nodes works either: take devices with more"):
        make_plan(workload(LLAMA_7B, GRPO), tiny, top=1)


MIXED = replace(make_cluster("H100", 2), others=(make_cluster("H20", 4),))


def test_ranks_and_servers_may_be_on_nodes_of_different_kinds() -> None:
    work = workload(QWEN_7B, GRPO, prompts=2048, responses=lognormal(900, 0.9, 1536), longest_sample=2048)
    plan = make_plan(work, MIXED)
    alone = [make_plan(work, kind).best.step_s for kind in MIXED.kinds]
    best = plan.best
    assert best.step_s < min(alone)
    [servers] = [pool for pool in best.pools if pool.roles[0].role == ROLLOUT]
    ranks = [pool for pool in best.pools if pool is not servers]
    assert {pool.kind.device.name for pool in ranks} != {servers.kind.device.name}
    # Devices are counted kind by kind, and every pool is within its own.
    spans = sorted((pool.first, pool.first + pool.devices, pool.kind.device.name) for pool in best.pools)
    assert all(end <= 16 if name == "H100" else start >= 16 and end <= 48 for start, end, name in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert "H100" in best.describe() and "H20" in best.describe()
    # What each role takes is what it takes on its own kind.
    again = make_plan(work, servers.kind, allowed=lambda partition: (ROLLOUT,) in partition, top=1)
    assert servers.roles[0].seconds["rollout"] <= _of(again.best, ROLLOUT).seconds["rollout"]
    assert as_json(plan)["cluster"]["others"] == [{"nodes": 4, "devices_per_node": 8, "device": "H20"}]
    assert "H20" in page(plan)


def test_choices_of_ranks_are_priced_once_for_each_kind_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[tuple[str, str, tuple[int, ...]]] = []

    def counted(role: str, work: Workload, cluster: Cluster, *others: object) -> RoleTable:
        priced.append((role, cluster.device.name, work.micro_tokens))
        return role_table(role, work, cluster, *others)  # type: ignore[arg-type]

    monkeypatch.setattr("megarl.placement.tables.role_table", counted)
    plan = make_plan(workload(QWEN_7B, GRPO), replace(MIXED, others=(*MIXED.others, make_cluster("H200", 1))))
    assert len(priced) == len(set(priced)) and {kind for _, kind, _ in priced} == {"H100", "H20", "H200"}
    assert plan.best.step_s > 0


def test_one_kind_beside_another_that_is_too_small_is_used_alone() -> None:
    tiny = replace(make_cluster("H100", 2), others=(make_cluster("L40S", 1, 1),))
    plan = make_plan(workload(QWEN_7B, GRPO), tiny)
    assert plan.best.step_s == make_plan(workload(QWEN_7B, GRPO), tiny.kinds[0]).best.step_s
    assert {pool.kind.device.name for pool in plan.best.pools} == {"H100"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_where_nothing_fits_every_kind_of_nodes_says_why_and_how_many_of_it_would_do(order: tuple[int, int]) -> None:
    kinds = [make_cluster("L4", 1, 1), make_cluster("L40S", 1, 1)]
    first, second = (kinds[index] for index in order)
    with pytest.raises(UserError) as caught:
        make_plan(workload(LLAMA_7B), replace(first, others=(second,)))
    said = str(caught.value).partition("= 1 device. On ")[2]
    for kind, told in zip((first, second), said.split(" On ", 1), strict=True):
        assert told.startswith(f"{kind.describe()}: actor") and f"{kind.usable_bytes / GIB:.1f} GiB" in told
        with pytest.raises(UserError) as alone:
            make_plan(workload(LLAMA_7B), kind)
        assert told.partition(": ")[2] == str(alone.value).partition(": ")[2]


def _of(placement: PlacementPlan, role: str) -> RolePlan:
    return next(each for pool in placement.pools for each in pool.roles if each.role == role)


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


def test_the_command_plans_from_config_json_alone(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    model = f"model.path={write_config(tmp_path)}"
    command = [sys.executable, "-m", "megarl", "plan", "recipes/quickstart.yaml", model]
    options = ["--device", "H20", "--json", "--html", str(html)]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    band = plan["lengths"]["step_s"]
    assert 0 < band["low"] <= band["likely"] == plan["best"]["step_s"] <= band["high"]
    assert "<svg" in html.read_text()
    assert run.stderr.startswith("Lengths are not known: a step takes")


LONG = ("rollout.max_response_tokens=4096", "actor.micro_batch_tokens=8192", "rollout.kv_tokens=300000")


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str, **options: object) -> tuple[dict, str]:  # type: ignore[type-arg]
    """What `megarl plan --json` prints, and what it says beside."""
    recipe, model = Path("recipes/quickstart.yaml"), f"model.path={write_config(folder)}"
    run_plan(recipe, [model, *LONG, *overrides], CLUSTER, PlanOptions(as_text=True, **options))  # type: ignore[arg-type]
    printed = capsys.readouterr()
    return json.loads(printed.out), " ".join(printed.err.split())


@pytest.mark.parametrize(("nodes", "says"), [(128, True), (2, False)])
def test_a_search_that_takes_long_is_spoken_of_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nodes: int, says: bool
) -> None:
    class BegunError(Exception): ...

    def begin(*_: object, **__: object) -> None:
        raise BegunError

    monkeypatch.setattr("megarl.run.plan.plan_recipe", begin)
    with pytest.raises(BegunError):
        run_plan(
            Path("recipes/quickstart.yaml"),
            [f"model.path={write_config(tmp_path)}"],
            make_cluster("H100", nodes),
            PlanOptions(),
        )
    said = " ".join(capsys.readouterr().err.split())
    assert ("Searching placements on 128 nodes of 8 H100 = 1024 devices: so many take a minute" in said) == says


def test_a_plan_says_first_how_sure_its_lengths_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown, said = planned(tmp_path, capsys)
    band = unknown["lengths"]["step_s"]
    assert band["low"] < 0.8 * band["likely"] < 0.64 * band["high"]
    assert said.startswith("Lengths are not known: a step takes") and "--lengths FILE" in said
    (tmp_path / "lengths.txt").write_text("400\n500\n600\n")
    known, said = planned(tmp_path, capsys, lengths=tmp_path / "lengths.txt")
    assert said.startswith("Lengths: 3 samples in") and "mean response of 500" in said
    assert known["lengths"]["response_mean"] == pytest.approx(500, rel=0.01)
    given, _ = planned(tmp_path, capsys, response_mean=500.0, response_spread=0.1)
    assert known["best"]["step_s"] == pytest.approx(given["best"]["step_s"], rel=0.1)
    longer, _ = planned(tmp_path, capsys, response_mean=500.0, response_spread=0.1, prompt_mean=31.0)
    assert longer["best"]["step_s"] > given["best"]["step_s"] and longer["lengths"]["prompt_mean"] == 31.0


def test_a_run_is_played_with_the_checkpoints_of_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    often, seldom = (
        planned(tmp_path, capsys, f"train.save_every={steps}", simulate=40, conditions=Conditions(1.0))[0]["simulation"]
        for steps in (1, 20)
    )
    assert often["step_s"] == seldom["step_s"] and 0 < often["lost_s"] < seldom["lost_s"]


def test_prompts_of_a_log_are_no_longer_than_the_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "verl.log").write_text("response_length/mean:200.0 - prompt_length/mean:900.0\n")
    found, said = planned(tmp_path, capsys, "data.max_prompt_tokens=100", lengths=tmp_path / "verl.log")
    assert found["lengths"]["prompt_mean"] == 100 and "a mean prompt of 100" in said


def test_servers_in_fp8_generate_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, _ = planned(tmp_path, capsys, response_mean=1000.0)
    half, _ = planned(tmp_path, capsys, response_mean=1000.0, quantization="fp8")
    assert half["best"]["phases_s"]["rollout"] < 0.9 * whole["best"]["phases_s"]["rollout"]


def test_a_context_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = ("rollout.max_response_tokens=32768", "actor.micro_batch_tokens=65536", "rollout.kv_tokens=3000000")
    with pytest.raises(UserError, match=r"longer than the context of 32768 tokens"):
        planned(tmp_path, capsys, *longest)


def test_lengths_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="Give one of them"):
        planned(tmp_path, capsys, lengths=tmp_path, response_mean=3.0)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--cluster"),
        (["--device", "H1000"], "not in the table"),
        (["--device", "H100", "--placement", "colo"], "There is no placement named"),
        (["--device", "H100", "--response-mean", "99999"], "mean response"),
        (["--cluster", "nowhere.yaml"], "no cluster file"),
        (["--device", "H100", "--prompt-mean", "nan"], "--prompt-mean nan cannot be"),
        (["--device", "H100", "--html", "nowhere/x.html"], "--html nowhere/x.html cannot be written"),
        (["--device", "H100", "--nodes", "1000000000"], "at most 1048576"),
    ],
)
def test_the_command_refuses_with_one_paragraph(tmp_path: Path, words: list[str], part: str) -> None:
    run = megarl("plan", "recipes/quickstart.yaml", f"model.path={write_config(tmp_path)}", *words, folder=ROOT)
    assert run.returncode == 2
    assert part in run.stderr
    assert "Traceback" not in run.stderr
