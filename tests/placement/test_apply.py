"""Plans as recipes: what is applied is predicted as the plan was, and what cannot fit is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.known_configs import known_config
from megarl.placement.apply import apply_plan, place, plan_recipe
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.local import host_cluster
from megarl.placement.own import own_placement
from megarl.placement.placed import PlacementPlan
from megarl.placement.recipe_plan import check_fits, predict_recipe, too_full
from megarl.placement.sizes import model_sizes
from megarl.placement.states import StatePool
from megarl.placement.workload import ROLLOUT, read_model, recipe_workload
from megarl.recipe.batch import plan_batches
from megarl.recipe.layouts import pools_of, role_layouts
from megarl.recipe.load import load_recipe, resolve
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml
from tests.placement.samples import QWEN_7B, write_config

LARGE = (
    "model.dtype=bfloat16",
    "rollout.prompts_per_step=256",
    "rollout.max_response_tokens=4096",
    "actor.mini_batch_samples=512",
    "actor.micro_batch_tokens=8192",
)


EXTERNAL = """
model: {{path: {model}}}
data: {{train: rows.jsonl, max_prompt_tokens: 32}}
rollout: {{samples_per_prompt: 8}}
train: {{steps: 1}}
"""


def recipe(folder: Path, *overrides: str) -> Recipe:
    model = f"model.path={write_config(folder)}"
    return load_recipe(Path("recipes/quickstart.yaml"), [model, *overrides], Recipe).recipe


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(("loss", "k"), [("distill_top", 8), ("distill", 0)])
def test_a_teachers_likeliest_tokens_are_planned_for_where_the_loss_asks_for_them(
    tmp_path: Path, loss: str, k: int, served: bool
) -> None:
    """The actor has them whoever says them; a teacher that is served takes nothing else."""
    plain = tmp_path / "plain.yaml"
    plain.write_text(EXTERNAL.format(model=write_config(tmp_path)))
    top = ["algorithm.distill_top_k=8"] * (k > 0)
    sizes = ("rollout.prompts_per_step=4", "rollout.max_response_tokens=64")
    teacher = "teacher.servers.urls=['http://a:1']" if served else f"teacher.path={tmp_path}"
    words = [f"algorithm.policy_loss={loss}", teacher, *top, *sizes]
    distilled = load_recipe(plain, words, Recipe).recipe
    work = recipe_workload(distilled, read_model(tmp_path))
    assert work.teacher_top == k and ("teacher" in work.models) is not served


@pytest.mark.parametrize("name", ["auto", "colocate", "split", "standalone"])
def test_an_applied_plan_is_predicted_as_it_was_planned(tmp_path: Path, name: str) -> None:
    cluster = make_cluster("H100", 2)
    before = recipe(tmp_path, *LARGE, "algorithm.advantage=gae")
    plan = plan_recipe(before, recipe_workload(before, read_model(tmp_path)), cluster, name)
    after = apply_plan(before, plan)
    again = predict_recipe(after, recipe_workload(after, read_model(tmp_path)), cluster)
    # What the servers' cache holds is the recipe's own; all else is as planned.
    assert _seconds(again) == pytest.approx(_seconds(plan.best))
    pools = [{role.role for role in pool.roles} for pool in again.pools]
    assert sorted(map(sorted, pools)) == sorted(sorted(role.role for role in pool.roles) for pool in plan.best.pools)
    layouts = role_layouts(after)
    for pool in plan.best.pools:
        for role in pool.roles:
            if role.role in layouts:
                assert layouts[role.role].world_size == pool.devices
                assert (layouts[role.role].tp, layouts[role.role].pp) == (role.choice["tp"], role.choice["pp"])
    assert resolve(after)["rollout"]["servers"] == after.rollout.servers


@pytest.mark.parametrize("name", ["colocate", "split"])
def test_an_applied_plan_has_the_servers_that_were_planned_by_the_workload_before_it(tmp_path: Path, name: str) -> None:
    """What is looked for behind a search, as how few layers need recomputing, knows the pick by the first recipe's workload."""
    before, cluster = recipe(tmp_path, *LARGE, "rollout.kv_tokens=9000000"), make_cluster("H100", 1)
    work = recipe_workload(before, read_model(tmp_path))
    plan = plan_recipe(before, work, cluster, name)
    again = predict_recipe(apply_plan(before, plan), work, cluster)
    assert again.phases["rollout"] == pytest.approx(plan.best.phases["rollout"])
    assert [pool.peak_bytes for pool in again.pools] == pytest.approx([pool.peak_bytes for pool in plan.best.pools])


def test_what_is_offloaded_in_part_leaves_the_rest_on_the_device(tmp_path: Path) -> None:
    """In bfloat16 with 2 bytes a weight, 4 a gradient and 12 of Adam; on one device, where nothing is cut."""

    def rest(key: str, parts: str) -> float:
        """Bytes of the actor, or of the servers, that are left on the device while they are not needed."""
        changed = recipe(tmp_path, *LARGE, "cluster.devices=1", f"{key}.offload={parts}")
        plan = predict_recipe(changed, recipe_workload(changed, read_model(tmp_path)), make_cluster("H100", 1, 1))
        [pool] = plan.pools
        return next(
            role for role in pool.roles if role.role == ("rollout" if key == "rollout" else "actor")
        ).offloaded_bytes

    write_config(tmp_path)
    weights = model_sizes(QWEN_7B).total * 2
    every = {parts: rest("rollout", parts) for parts in ("[]", "[weights]", "[kv_cache]", "[weights, kv_cache]")}
    assert every["[kv_cache]"] - every["[weights, kv_cache]"] == pytest.approx(weights, rel=0.01)
    cache = every["[weights]"] - every["[weights, kv_cache]"]
    assert every["[]"] > cache + weights and cache > 0
    gone = {part: rest("actor", "[]") - rest("actor", f"[{part}]") for part in ("params", "grads", "optimizer")}
    assert gone["grads"] / gone["params"] == pytest.approx(2) and gone["optimizer"] / gone["params"] == pytest.approx(6)
    assert rest("actor", "[grads, params, optimizer]") == pytest.approx(rest("actor", "[]") - sum(gone.values()))


def _seconds(plan: PlacementPlan) -> dict[tuple[str, str], float]:
    roles = (role for pool in plan.pools for role in pool.roles if role.role != ROLLOUT)
    return {(role.role, stage): role.seconds[stage] for role in roles for stage in ("prepare", "train")}


def small(folder: Path, *overrides: str) -> Recipe:
    before = recipe(folder, *overrides)
    write_config(folder, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
    return before


def test_processes_that_share_cores_are_placed_and_pools_named(tmp_path: Path) -> None:
    before = small(tmp_path, "cluster.devices=4", "algorithm.advantage=gae")
    plan = plan_recipe(before, recipe_workload(before, read_model(tmp_path)), host_cluster(4), "split")
    after = apply_plan(before, plan)
    pools = {name: (pool.devices, pool.roles) for name, pool in pools_of(after).items()}
    assert {roles for _, roles in pools.values()} == {("actor", "reference"), ("critic",)}
    assert sum(devices for devices, _ in pools.values()) == after.cluster.devices
    assert after.placement.name is None


@pytest.mark.parametrize("tie", ["actor.lora.rank=8", "reference.refresh_every=2"])
@pytest.mark.parametrize("device", ["H100", "A100-80", "L40S"])
def test_a_reference_that_is_tied_to_the_actor_is_planned_as_it_runs(tmp_path: Path, tie: str, device: str) -> None:
    """In the actor's pool, and at the actor's layout."""
    before, cluster = recipe(tmp_path, *LARGE, tie), make_cluster(device, 2)
    plan = plan_recipe(before, recipe_workload(before, read_model(tmp_path)), cluster)
    [pool] = [pool for pool in plan.best.pools if "actor" in {role.role for role in pool.roles}]
    actor, reference = ({role.role: role for role in pool.roles}[name].choice for name in ("actor", "reference"))
    axes = ("tp", "pp", "cp", "ep", "vpp", "dp", "first_stage_layers", "last_stage_layers")
    assert [reference.get(axis) for axis in axes] == [actor.get(axis) for axis in axes]
    after = apply_plan(before, plan)
    assert after.reference.parallel is None
    assert _seconds(check_fits(after, recipe_workload(after, read_model(tmp_path)), cluster)) == _seconds(plan.best)


@pytest.mark.parametrize(("key", "value"), [("rollout.max_staleness", "1"), ("eval.overlap", "true")])
def test_servers_that_work_while_the_ranks_train_are_placed_apart(tmp_path: Path, key: str, value: str) -> None:
    cluster, held_out = make_cluster("H100", 2), "data.eval=rows.jsonl"
    before = recipe(tmp_path, *LARGE, held_out, f"{key}={value}")
    work = recipe_workload(before, read_model(tmp_path))
    plan = plan_recipe(before, work, cluster, as_it_is=True)
    assert ["rollout"] in [[role.role for role in pool.roles] for pool in plan.best.pools]
    assert own_placement(apply_plan(before, plan), work, cluster).problem is None
    with pytest.raises(UserError, match=f"colocate puts the servers on devices of the ranks, and {key}"):
        plan_recipe(before, work, cluster, "colocate", as_it_is=True)
    with pytest.raises(UserError, match=f"Servers need devices of their own here, because of {key}"):
        plan_recipe(before, work, make_cluster("H100", 1, 1), as_it_is=True)


def test_a_recipe_that_is_searched_for_is_planned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: 1\ndevice: H100\ndevices_per_node: 2\n")
    words = (f"cluster.file={tmp_path / 'cluster.yaml'}", "placement.name=auto", "model.dtype=bfloat16")
    for staleness in (0, 1):
        before = recipe(tmp_path, *words, "cluster.platform=cuda", f"rollout.max_staleness={staleness}")
        write_config(tmp_path, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
        placed = place(before)
        assert placed.predicted is not None
        assert placed.predicted.asynchronous == (len(placed.predicted.pools) == 2) == (staleness > 0)
        assert load_recipe(_saved(tmp_path, placed.recipe)).recipe == placed.recipe


def _saved(folder: Path, given: Recipe) -> Path:
    (folder / "saved.yaml").write_text(dump_yaml(resolve(given)))
    return folder / "saved.yaml"


def test_groups_that_are_carried_over_do_not_make_a_plan_asynchronous(tmp_path: Path) -> None:
    before = recipe(tmp_path, *LARGE, "rollout.max_staleness=1", "rollout.oversample=1.25")
    assert recipe_workload(before, read_model(tmp_path)).staleness == 0


def test_mini_batches_that_do_not_divide_a_step_are_not_planned(tmp_path: Path) -> None:
    before = recipe(tmp_path, *LARGE, "actor.mini_batch_samples=300")
    with pytest.raises(UserError, match=r"300 does not divide .* Nearest valid value: 256 or 512"):
        recipe_workload(before, read_model(tmp_path))


def test_a_placement_of_the_recipe_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    given = recipe(tmp_path, *LARGE, "cluster.devices=1")
    work, small = recipe_workload(given, read_model(tmp_path)), make_cluster("H100", 1, 1)
    with pytest.raises(UserError, match=r"actor.*needs .* GiB of each device") as caught:
        check_fits(given, work, small)
    assert "The smallest cluster of this kind that holds the run, placed best: " in str(caught.value)
    cut = recipe(tmp_path, *LARGE, "cluster.devices=8", "actor.parallel.tp=4", "rollout.server_args=[]")
    check_fits(cut, recipe_workload(cut, read_model(tmp_path)), make_cluster("H100", 1))


@pytest.mark.parametrize("cluster", [make_cluster("H100", 1), host_cluster(8)], ids=["devices", "processes"])
def test_servers_that_somebody_else_started_take_no_device_of_the_run(tmp_path: Path, cluster: Cluster) -> None:
    write_config(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(EXTERNAL.format(model=tmp_path))
    many = ", ".join(f"http://10.0.0.1:{port}" for port in range(1, 100))
    eight = ("cluster.devices=8", "actor.parallel.tp=4")
    plans = {}
    for servers in ("8", "{urls: ['http://10.0.0.1:1']}", f"{{urls: [{many}]}}"):
        given = load_recipe(file, [*LARGE, *eight, f"rollout.servers={servers}"], Recipe).recipe
        work = recipe_workload(given, read_model(tmp_path))
        plans[given.rollout.num_servers] = predict_recipe(given, work, cluster)
    own, one, most = plans[8], plans[1], plans[99]
    assert [pool.devices for pool in most.pools] == [pool.devices for pool in one.pools] == [8, 0]
    assert one.describe() == "standalone: actor on 8, rollout on external servers"
    # Nothing of the ranks' memory is a server's, however many there are; and many are faster than one.
    assert one.pools[0].peak_bytes == most.pools[0].peak_bytes < own.pools[0].peak_bytes
    assert one.phases["rollout"] >= most.phases["rollout"] > 0
    assert "(rollout)" not in one.summary() and "rollout" not in (too_full(most, cluster) or "")


def test_what_a_recipe_says_of_sequences_and_of_experts_is_predicted_of_its_own_placement(tmp_path: Path) -> None:
    cluster, path = make_cluster("H100", 4), known_config("Qwen/Qwen3-30B-A3B")
    assert path is not None
    experts = read_model(path.parent)

    def held(config: ModelConfig, *parallel: str) -> tuple[float, float, str]:
        own = recipe(tmp_path, *LARGE, "cluster.devices=16", *(f"actor.parallel.{each}" for each in parallel))
        pools = predict_recipe(own, recipe_workload(own, config), cluster).pools
        [actor] = [role for pool in pools for role in pool.roles if role.role == "actor"]
        return actor.held_bytes["weights"], sum(actor.held_bytes.values()), actor.shape

    cut, whole = (held(QWEN_7B, "tp=2", f"sequence_parallel={on}") for on in ("true", "false"))
    assert cut[0] == whole[0] and 1.05 * cut[1] < whole[1]
    assert cut[2].startswith("tp2 sp dp8") and whole[2].startswith("tp2 dp8")
    one, shared, more = (held(experts, *each) for each in (("ep=4",), ("ep=4", "etp=2"), ("ep=8",)))
    # Columns cut in two are as many weights as half the experts; each rank has the rows of both.
    assert shared[0] == more[0] < 0.6 * one[0] and more[1] < shared[1] < one[1]
    assert shared[2].startswith("ep4 etp2")


def test_servers_that_share_a_device_are_no_faster_than_one_and_hold_what_all_hold(tmp_path: Path) -> None:
    cluster, rollout, held = make_cluster("H100", 1), {}, {}
    for servers in (4, 8, 64):
        words = ("cluster.devices=8", "actor.parallel.tp=4", "rollout.server_args=[]", f"rollout.servers={servers}")
        given = recipe(tmp_path, *LARGE, *words)
        plan = predict_recipe(given, recipe_workload(given, read_model(tmp_path)), cluster)
        rollout[servers] = plan.phases["rollout"]
        [role] = [role for pool in plan.pools for role in pool.roles if role.role == ROLLOUT]
        held[servers] = sum(role.held_bytes.values())
        assert (too_full(plan, cluster) is None) == (servers < 64)
    assert rollout[64] == rollout[8] < rollout[4]
    assert held[64] == pytest.approx(8 * held[8])


def test_processes_take_from_one_memory(tmp_path: Path) -> None:
    huge = recipe(tmp_path, "cluster.devices=2", "rollout.servers=4", "rollout.kv_tokens=16000000")
    with pytest.raises(UserError, match="this machine's processes can use"):
        place(huge)


def test_place_keeps_a_recipe_that_fits_and_searches_when_asked(tmp_path: Path) -> None:
    kept = small(tmp_path, "cluster.devices=2")
    assert place(kept).recipe is kept
    assert place(kept).plan is None
    placed = place(small(tmp_path, "cluster.devices=2", "placement.name=auto"))
    assert placed.plan is not None
    assert placed.predicted is placed.plan.best
    assert placed.recipe.placement.name is None


def test_a_cluster_file_says_what_processes_reach(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: cpu\nmeasured: {at_once: 1.5, layer_s: 0.25}\n")
    cluster = host_cluster(4, file)
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert (cluster.rates.at_once, cluster.rates.layer_s) == (1.5, 0.25)


@pytest.mark.parametrize("tokens", [8192, 2_000_000])
def test_a_plan_keeps_to_the_cache_that_the_recipe_gives_its_servers(tmp_path: Path, tokens: int) -> None:
    """A small cache is as slow in the plan as in the run; a huge one takes no more than the servers' share."""
    before = recipe(tmp_path, *LARGE, f"rollout.kv_tokens={tokens}")
    work, cluster = recipe_workload(before, read_model(tmp_path)), make_cluster("H100", 1)
    plan = plan_recipe(before, work, cluster)
    [servers] = [role for pool in plan.best.pools for role in pool.roles if role.role == ROLLOUT]
    assert 4096 < servers.choice["kv_tokens"] <= tokens
    after = apply_plan(before, plan)
    again = check_fits(after, recipe_workload(after, read_model(tmp_path)), cluster)
    assert again.step_s == pytest.approx(plan.best.step_s, rel=1e-3)


def test_the_servers_share_that_the_recipe_gives_is_the_plans(tmp_path: Path) -> None:
    before = recipe(tmp_path, *LARGE, "rollout.server_args=[--mem-fraction-static=0.35]")
    plan = plan_recipe(before, recipe_workload(before, read_model(tmp_path)), make_cluster("H100", 1))
    [servers] = [role for pool in plan.best.pools for role in pool.roles if role.role == ROLLOUT]
    assert servers.choice["memory_share"] == 0.35
    assert apply_plan(before, plan).rollout.server_args == ("--mem-fraction-static=0.35",)
    wrong = recipe(tmp_path, *LARGE, "rollout.server_args=[--mem-fraction-static, much]")
    with pytest.raises(UserError, match="--mem-fraction-static much: it is the share of a device's"):
        recipe_workload(wrong, read_model(tmp_path))


def test_what_a_recipe_says_of_its_servers_states_is_planned(tmp_path: Path) -> None:
    before = recipe(tmp_path, *LARGE, "rollout.server_args=[--max-mamba-cache-size, '90']")
    assert recipe_workload(before, read_model(tmp_path)).states == StatePool(slots=90)


def test_the_pools_of_a_plan_share_out_a_mini_batch(tmp_path: Path) -> None:
    few = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "actor.mini_batch_samples=16")
    before = recipe(tmp_path, *LARGE, *few, "algorithm.advantage=gae")
    plan = plan_recipe(before, recipe_workload(before, read_model(tmp_path)), make_cluster("H100", 7), top=4)
    for pick in (plan.best, *(other for other, _ in plan.others)):
        after = apply_plan(before, replace(plan, best=pick))
        assert plan_batches(after).shards <= 16
