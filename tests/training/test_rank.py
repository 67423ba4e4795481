import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec
from tests.training import torch_loop
from tests.training.harness import VOCAB, weights
from tests.training.samples import examples, shards


def test_the_driver_gets_the_names_without_torch():
    code = (
        "import sys; import megarl.training.rank; sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.host_only  # its rank is a CPU's, which none can be where torch sees a device
def test_a_rank_loads_megatron_without_what_it_does_not_use():
    """What is installed for the driver's metrics, and what only tensors have that no rank has: a second of every start."""
    code = (
        "import sys; from megarl.training.rank import Rank; Rank(0, 1, 'cpu', seed=1)\n"
        "unwanted = {'wandb', 'tensorboard', 'sympy', 'torch._dynamo', 'torch.distributed.tensor'}\n"
        "sys.exit('megatron.core' not in sys.modules or bool(unwanted & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_nothing_is_built_before_the_ranks_have_met(folder, platform):
    with pytest.raises(MegarlError, match="call rendezvous first"):
        Rank(0, 1, platform.name, seed=1).build("actor", RoleSpec(folder, "float32"))


def test_a_layout_of_another_size_is_refused(rank, folder):
    spec = RoleSpec(folder, "float32", layout=Layout(tp=2, world_size=4))
    with pytest.raises(MegarlError, match="layout of 4 ranks was given to a pool of 1"):
        rank.build("actor", spec)


def test_the_ranks_of_a_layout_wait_for_each_other_as_long_as_they_were_told_to(rank, platform, monkeypatch):
    """Megatron counts minutes."""
    monkeypatch.setattr(rank, "_timeout_s", 80.0)
    monkeypatch.setattr(rank, "_groups", {})
    groups = rank.groups_of(Layout())
    waits = groups.tp._get_backend(torch.device(platform.device)).options._timeout
    groups.close()
    assert waits == timedelta(minutes=2)


def test_the_exported_folder_is_the_trained_model(rank, spec, folder, tmp_path, bounds):
    rank.build("actor", spec)
    made = examples([9, 17], VOCAB)
    [shard], [columns] = shards([made])
    rank.update("actor", shard, columns)
    rank.export_hf("actor", folder, tmp_path / "exported")
    exported = torch_loop.load(tmp_path / "exported")
    expected = weights(rank, "actor")
    assert dict.fromkeys(exported.state_dict(), True) == {
        name: torch.equal(tensor, exported.state_dict()[name]) for name, tensor in expected.items()
    }
    with torch.no_grad():
        scored = torch.cat([torch_loop.scores(exported, example, torch_loop.TEMPERATURE)[0] for example in made])
    torch.testing.assert_close(torch.tensor(rank.logprobs("actor", shard)[0][0]), scored, atol=bounds.logprob, rtol=0)


def test_what_a_pass_has_freed_is_kept_for_the_update_that_follows(rank, spec, folder, tmp_path, monkeypatch):
    returned = []

    def returned_memory(_, *, but_little=False):
        returned.append(but_little)

    monkeypatch.setattr("megarl.training.rank.return_free_memory", returned_memory)
    [shard], [columns] = shards([examples([9, 17], VOCAB)])

    def returns(call, *arguments):
        returned.clear()
        call(*arguments)
        return len(returned)

    for role in ("actor", "reference"):  # the rank is other tests' too: its actor may learn
        assert returns(rank.build, role, RoleSpec(folder, "float32")) == 1
    assert returns(rank.logprobs, "reference", shard) == 1, "nothing learns here"
    rank.build("actor", spec)
    assert returns(rank.logprobs, "actor", shard) == returns(rank.logprobs, "reference", shard) == 0
    assert returns(rank.update, "actor", shard, columns) == 1 and returned == [True]
    (tmp_path / "saved").mkdir()
    assert returns(rank.save, "actor", tmp_path / "saved") == 1


def test_the_port_where_ranks_meet_is_the_first_ones_until_they_have_met(rank, platform):
    """It listens only once all are up, seconds later."""
    again = Rank(0, 1, platform.name, seed=1)
    port = again.free_port()
    rank.close()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    again.rendezvous("127.0.0.1", port, timeout_s=30)
    assert again._meet is None


def test_the_ranks_meet_at_their_address_alone(rank, platform):
    """Whoever reaches the store, which asks for no key, says where the ranks find each other."""
    again = Rank(0, 1, platform.name, seed=1)
    port = again.free_port()
    rank.close()
    again.rendezvous("127.0.0.1", port, timeout_s=30)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_rank_can_close_and_meet_again(rank, folder, platform):
    again = Rank(0, 1, platform.name, seed=1)
    rank.close()
    again.rendezvous("127.0.0.1", again.free_port(), timeout_s=30)
    again.build("reference", RoleSpec(folder, "float32"))
    [shard], _ = shards([examples([9], VOCAB)])
    assert again.logprobs("reference", shard) is not None
