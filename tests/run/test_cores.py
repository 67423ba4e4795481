"""A server a core only where that saves more than its start takes, and only where nobody said how many; threads by their work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.models.hf_config import load_model_config
from megarl.placement.workload import read_model
from megarl.recipe.load import load_recipe
from megarl.run.cores import START_S, server_threads, servers_for, share_cores
from tests.placement.samples import write_config
from tests.support.bad_input import Place, good_place
from tests.support.tiny import write_tiny_qwen

GIB = 2**30
LONG = ("rollout.max_response_tokens=512", "train.steps=1000", "rollout.kv_tokens=8192", "rollout.prompts_per_step=16")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture
def place(tmp_path: Path, model_folder: Path) -> Place:
    return good_place(tmp_path, model_folder)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.core.platform.os.sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize(
    ("overrides", "cores", "memory", "wanted"),
    [
        ((), 2, 24 * GIB, 2),
        ((), 1, 24 * GIB, 1),
        ((), 64, 256 * GIB, 2),  # 64 samples, 32 for a server
        (("rollout.prompts_per_step=32",), 64, 256 * GIB, 4),
        ((), 2, 6 * GIB, 1),  # two servers' processes are 4 GiB, more than half of it
        (("train.steps=2",), 2, 24 * GIB, 1),
        (("rollout.prompts_per_step=15",), 2, 24 * GIB, 1),
    ],
)
def test_a_server_a_core_where_it_pays(place, model_folder, overrides, cores, memory, wanted):
    recipe = load_recipe(place.recipe, [*LONG, *overrides]).recipe
    assert servers_for(recipe, load_model_config(model_folder), cores, memory) == wanted


def test_the_limit_is_what_a_start_takes(place, model_folder):
    model = load_model_config(model_folder)
    per_step = 512 * model.num_layers * 0.003 * 0.2
    for steps, wanted in ((int(START_S / per_step), 1), (int(START_S / per_step) + 1, 2)):
        recipe = load_recipe(place.recipe, [*LONG, f"train.steps={steps}"]).recipe
        assert servers_for(recipe, model, 2, 24 * GIB) == wanted


@pytest.mark.usefixtures("two_cores")
def test_what_is_not_given_is_decided_and_said(place, capsys):
    assert share_cores(load_recipe(place.recipe, LONG)).resolved["rollout"]["servers"] == 2
    assert "rollout.servers: 2 (not given; this machine has 2 cores" in capsys.readouterr().out


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "given",
    [
        "rollout.servers=1",
        "rollout.tp=2",
        "cluster.platform=cuda",
        "rollout.max_staleness=1",
    ],
)
def test_what_is_given_stays(place, given, capsys):
    loaded = load_recipe(place.recipe, [*LONG, given])
    assert share_cores(loaded) is loaded
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "most", "wanted"),
    [
        ((), 8, 2),
        ((), 1, 1),
        (("rollout.samples_per_prompt=8",), 8, 3),
        (("rollout.samples_per_prompt=8", "rollout.servers=2"), 8, 2),
        (("rollout.samples_per_prompt=8", "rollout.max_running_requests=32"), 8, 1),
        (("rollout.samples_per_prompt=8", "rollout.tp=2"), 8, 2),
        (("rollout.prompts_per_step=1",), 8, 1),
    ],
)
def test_a_thread_has_two_hundred_million_operations_of_a_layer(place, overrides, most, wanted):
    """Of a token: attention 2 x 384 x 32 x (2 x 12 + 2 x 6), MLP 2 x 3 x 384 x 1152, together 3.54e6; of 64 requests 2.3e8."""
    model = read_model(write_config(place.root, layers=2, hidden=384, heads=12, ffn=1152, vocab=320))
    few = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "rollout.max_running_requests=200")
    recipe = load_recipe(place.recipe, [*few, *overrides]).recipe
    assert server_threads(recipe, model, most) == wanted
