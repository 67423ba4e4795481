"""Shipped recipes on the cluster that each names: every layout can be, nodes match, and their own placement fits in memory.

Nothing of the models but their config.json is needed; those of published models were never run.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import megarl
from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.core.ray_env import RAY_ADDRESS_VARIABLE, RAY_NODES_VARIABLE
from megarl.launch.fit import check_fit
from megarl.models.known_configs import known_config
from megarl.models.layout_check import check_layout
from megarl.placement import local
from megarl.placement.apply import place
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.local import host_cluster
from megarl.placement.own import own_placement
from megarl.placement.recipe_plan import check_fits
from megarl.placement.workload import Workload, recipe_workload
from megarl.recipe.examples import examples
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import detect_kind, load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.plan_models import PlannedModels
from tools.make_tiny_model import make_config, make_tokenizer

RECIPES = Path(megarl.__file__).parent.parent / "recipes"
LARGE_HOST = SimpleNamespace(total=2 * 2**40)  # as nodes of eight GPUs have
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("quickstart"))
# Supervised runs have one role and no servers: there is nothing to place.
QUICKSTART = sorted(
    path.stem
    for path in RECIPES.glob("quickstart*.yaml")
    if detect_kind(path) is Recipe and path.stem != "quickstart_base"
)


@dataclass(frozen=True)
class Case:
    """A recipe, and the command that its own words give for planning it."""

    name: str
    words: list[str]

    @property
    def file(self) -> Path:
        return RECIPES / f"{self.name}.yaml"

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.file).recipe

    @property
    def nodes(self) -> int:
        return int(self.words[self.words.index("--nodes") + 1])

    @property
    def per_node(self) -> int:
        flag = "--devices-per-node"
        return int(self.words[self.words.index(flag) + 1]) if flag in self.words else 8

    @property
    def cluster(self) -> Cluster:
        return make_cluster(self.words[self.words.index("--device") + 1], self.nodes, self.per_node)

    @property
    def workload(self) -> Workload:
        models = PlannedModels(self.recipe)
        return recipe_workload(self.recipe, models.policy, read=models)


@pytest.fixture(params=SHIPPED)
def case(request: pytest.FixtureRequest) -> Case:
    words = re.search(r"^#   megarl (plan .*)$", (RECIPES / f"{request.param}.yaml").read_text(), re.MULTILINE)
    assert words, "its first lines say on what it is planned"
    return Case(request.param, shlex.split(words[1]))


def test_these_recipes_are_shipped() -> None:
    assert len(SHIPPED) >= 4
    assert len(QUICKSTART) >= 7


def test_the_nodes_of_its_own_words_are_what_it_uses(case: Case) -> None:
    fit = check_fit(case.recipe, case.nodes, case.per_node)
    assert fit.per_node == case.per_node
    assert ("on the ranks' " if case.recipe.rollout.offload else "GPUs of their own") in fit.servers
    assert case.name.endswith(f"_{case.nodes * case.per_node}")
    assert f"--nodes {case.nodes} --gpus-per-node {case.per_node}" in case.file.read_text()
    listed = next(example for example in examples() if example.name == case.name)
    assert listed.devices.split()[0] == case.name.rpartition("_")[2]


def test_its_servers_are_asked_for_all_that_they_decode_at_once(case: Case) -> None:
    rollout = case.recipe.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    assert rollout.most_in_flight >= min(samples, rollout.num_servers * rollout.max_running_requests)


def test_nobody_waits_for_its_evaluation(case: Case) -> None:
    """Where its servers have devices of their own."""
    evaluates, apart = case.recipe.eval.every is not None, not case.recipe.rollout.offload
    assert case.recipe.eval.overlap == (evaluates and apart)


def test_every_role_can_be_laid_out(case: Case) -> None:
    models, rollout = case.workload.models, case.recipe.rollout
    for role, layout in role_layouts(case.recipe).items():
        check_layout(models[role], layout, role)
    assert models["rollout"].num_heads % rollout.tp == 0 and models["rollout"].ffn_hidden_size % rollout.tp == 0


def test_its_own_placement_fits_in_the_memory_of_its_cluster(case: Case) -> None:
    own = own_placement(case.recipe, case.workload, case.cluster)
    assert own.problem is None and own.predicted is not None
    assert sum(pool.devices for pool in own.predicted.pools) == case.nodes * case.per_node
    assert check_fits(case.recipe, case.workload, case.cluster).step_s == own.predicted.step_s


def test_a_run_of_it_is_predicted_for_all_nodes_of_its_ray_or_for_none(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes for its ranks alone would not hold one whose servers have devices of their own."""
    config = known_config(case.recipe.model.path)
    assert config is not None
    scored = [f"reward_model.path={config.parent}"] if case.recipe.reward_model is not None else []
    recipe = load_recipe(case.file, [f"model.path={config.parent}", *scored]).recipe
    monkeypatch.setattr(local, "num_local_devices", lambda platform: case.per_node)
    monkeypatch.setattr(local, "device_name", lambda: case.cluster.device.name)
    monkeypatch.setattr(local.psutil, "virtual_memory", lambda: LARGE_HOST)
    monkeypatch.setenv(RAY_ADDRESS_VARIABLE, "10.0.0.1:6379")
    monkeypatch.setenv(RAY_NODES_VARIABLE, str(case.nodes + recipe.cluster.spares))
    predicted = place(recipe).predicted
    assert predicted is not None and sum(pool.devices for pool in predicted.pools) == case.nodes * case.per_node
    monkeypatch.delenv(RAY_NODES_VARIABLE)
    assert place(recipe).predicted is None
    with pytest.raises(UserError, match=f"{RAY_NODES_VARIABLE} does not say how many nodes"):
        place(recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"name": "auto"})}))


def test_a_search_takes_the_devices_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the recipe counts; without a search too many are refused by others, and nothing is predicted."""
    path = RECIPES / "qwen3_4b_grpo_8.yaml"
    config = known_config(load_recipe(path).recipe.model.path)
    assert config is not None
    recipe = load_recipe(path, [f"model.path={config.parent}", "cluster.devices=16"]).recipe
    monkeypatch.delenv(RAY_ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr(local, "num_local_devices", lambda platform: 8)
    monkeypatch.setattr(local, "device_name", lambda: "H100")
    monkeypatch.setattr(local.psutil, "virtual_memory", lambda: LARGE_HOST)
    assert place(recipe).predicted is None
    placed = place(recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"name": "auto"})}))
    assert placed.predicted is not None and sum(pool.devices for pool in placed.predicted.pools) == 8


def test_its_own_words_plan_it_where_its_model_is_not(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    told = CliRunner().invoke(app, [*case.words[:1], str(case.file), *case.words[2:]])
    assert told.exit_code == 0, told.output
    assert f"There is no folder {case.recipe.model.path}: planned with the published sizes of " in told.output
    assert "the recipe's own: " in told.output
    assert "cannot run here" not in told.output


@pytest.mark.parametrize("name", QUICKSTART)
def test_a_recipe_of_the_quickstart_fits_on_this_machine(name: str, tmp_path: Path) -> None:
    make_config(make_tokenizer(), hidden_size=256, layers=2, heads=8, kv_heads=2, context=512).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["Qwen3ForCausalLM"], ', 1))
    file = RECIPES / f"{name}.yaml"
    scores = [f"reward_model.path={tmp_path}"] if name.endswith("ppo_rm") else []
    recipe = load_recipe(file, [f"model.path={tmp_path}", *scores]).recipe
    models = PlannedModels(recipe)
    workload = recipe_workload(recipe, models.policy, read=models)
    assert check_fits(recipe, workload, host_cluster(recipe.cluster.devices)).step_s > 0


def test_the_recipe_of_one_gpu_fits_into_24_gb() -> None:
    """As its first lines say."""
    recipe = load_recipe(RECIPES / "qwen3_4b_lora_gsm8k_1.yaml").recipe
    models = PlannedModels(recipe)
    for device in ("RTX-4090", "L4", "A10"):
        own = own_placement(recipe, recipe_workload(recipe, models.policy, read=models), make_cluster(device, 1, 1))
        assert own.problem is None and own.predicted is not None and len(own.predicted.pools) == 1
