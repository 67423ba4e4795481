"""How ranks are told to send: servers that share devices with them are found by the names that they answer under."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.cluster import server_actors
from megarl.cluster.nodes import Node
from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.server_actors import ServerActor
from megarl.cluster.slots import ServerSlot, Slot
from megarl.core.platform import get_platform
from megarl.models.fp8_weights import quantised
from megarl.models.hf_config import load_model_config
from megarl.models.rules import expected_tensors
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.role_specs import ACTOR
from megarl.run.sending import sending_of
from megarl.serving.server import ProcessPlace, ServerSpec
from megarl.sync.fetch import mirror_of
from megarl.sync.memory import DeviceMemory
from megarl.sync.parcel import Parcel
from megarl.sync.quantized import announced
from megarl.sync.sending import Sending
from tests.support.dry.world import write_world


def test_what_ranks_hand_over_on_a_device_reaches_the_server_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_world(tmp_path)
    recipe = load_recipe(tmp_path / "train.yaml", ["cluster.platform=cuda", "cluster.devices=2"], Recipe).recipe
    node = Node("node", "127.0.0.1", "0" * 56, tmp_path, 2)
    ranks = tuple(Slot(node, (str(device),), {}) for device in range(2))
    runtime: Any = SimpleNamespace(platform=get_platform("cuda"), slots=ranks, here=node)
    checked: Any = SimpleNamespace(model=load_model_config(tmp_path / "dense"), external=None)
    servers = [ServerSlot((slot,), shared=True) for slot in ranks]
    sending = sending_of(runtime, recipe, checked, role_layouts(recipe)[ACTOR], servers)
    assert sending.transport == "shared_memory"
    assert [receiver.ranks for receiver in sending.beside] == [(0,), (1,)]

    monkeypatch.setattr(server_actors, "configure_process", lambda spec: ProcessFacts(1, "host"))
    place = ProcessPlace(tmp_path, api_key="key", temp=tmp_path)
    spec = ServerSpec(tmp_path / "dense", "float32", tp=1)
    actor = ServerActor(
        ProcessSpec("server 1", tmp_path, "127.0.0.1"), tmp_path / "registry", spec, "cpu", place, answer_s=1.0
    )
    hosts = {receiver.name: receiver.ranks for receiver in sending.beside}
    memory = DeviceMemory(rank=1, hosts=hosts, make=lambda num_bytes: _Handles())
    memory.take(64)
    memory.fill(_Nothing(), 0, 0, hosts)
    assert memory.payloads(actor._endpoint, (), 0) == ["handle"]


@pytest.mark.parametrize(
    ("tp", "deterministic", "through"), [(1, "true", False), (2, "false", False), (2, "true", True)]
)
def test_weights_go_through_the_host_to_servers_whose_nccl_is_fixed(
    tp: int, deterministic: str, through: bool, tmp_path: Path
) -> None:
    """SGLang gives NCCL so many channels in them, and the ranks' has its own number."""
    write_world(tmp_path)
    own = (f"rollout.tp={tp}", f"rollout.deterministic={deterministic}", "rollout.kv_tokens=4096")
    recipe = load_recipe(tmp_path / "train.yaml", ["cluster.platform=cuda", *own], Recipe).recipe
    node = Node("node", "127.0.0.1", "0" * 56, tmp_path, 1 + tp)
    mine, *others = (Slot(node, (str(device),), {}) for device in range(1 + tp))
    runtime: Any = SimpleNamespace(platform=get_platform("cuda"), slots=(mine,), here=node)
    checked: Any = SimpleNamespace(model=load_model_config(tmp_path / "dense"), external=None)
    server = ServerSlot((Slot(node, tuple(slot.devices[0] for slot in others), {}),), shared=False)
    sending = sending_of(runtime, recipe, checked, role_layouts(recipe)[ACTOR], [server])
    assert (sending.transport, sending.through_host) == ("broadcast", through)


@pytest.mark.parametrize("overrides", [(), ("rollout.quantization=fp8",)])
def test_room_on_the_disk_is_asked_for_as_much_as_is_sent(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """In FP8 half of what the trainer has."""
    write_world(tmp_path)
    sending, model = over_the_disk(tmp_path, *overrides), load_model_config(tmp_path / "wide")
    shapes = expected_tensors(model)
    whole = Parcel(0, (0,), tuple(shapes), (torch.bfloat16,) * len(shapes), tuple(shapes.values()))
    sent = announced(whole, quantised(model)) if overrides else whole
    assert sending.versions is not None and sending.versions.whole_bytes == sent.nbytes


def over_the_disk(tmp_path: Path, *overrides: str) -> Sending:
    own = (f"model.path={tmp_path / 'wide'}", "model.dtype=bfloat16", "sync.transport=disk", "cluster.platform=cuda")
    recipe = load_recipe(tmp_path / "train.yaml", [*own, *overrides], Recipe).recipe
    node = Node("node", "127.0.0.1", "0" * 56, tmp_path, 2)
    mine, other = (Slot(node, (str(device),), {}) for device in range(2))
    runtime: Any = SimpleNamespace(
        platform=get_platform("cuda"),
        slots=(mine,),
        here=node,
        run_id="run",
        folder=tmp_path / "run",
        scratch=SimpleNamespace(registry=tmp_path / "registry"),
    )
    checked: Any = SimpleNamespace(model=load_model_config(tmp_path / "wide"), external=None)
    servers = [ServerSlot((other,), shared=False)]
    return sending_of(runtime, recipe, checked, role_layouts(recipe)[ACTOR], servers)


def test_another_life_of_a_run_removes_the_versions_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are up to four times the model. What this node made of them goes too; those of other runs stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_world(tmp_path)
    others = {tmp_path / "versions" / "weights-other-1234", tmp_path / "mirror-weights-other-1234"}
    for folder in others:
        folder.mkdir(parents=True)
    own: set[Path] = set()
    for _ in range(3):
        sending = over_the_disk(tmp_path, f"sync.folder={tmp_path / 'versions'}")
        assert sending.versions is not None
        own = {sending.versions.store.folder, mirror_of(sending.versions.store)}
        mirror_of(sending.versions.store).mkdir()
    assert {*(tmp_path / "versions").iterdir(), *tmp_path.glob("mirror-*")} == own | others


class _Handles:
    """A device's memory."""

    flat: Any = ()

    def payload(self, bucket: object, start: int, num_readers: int) -> str:
        return "handle"

    def close(self) -> None:
        return None


class _Nothing:
    """What is sent: one empty bucket."""

    buckets = ((),)

    def write(self, number: int, flat: object) -> None:
        return None
