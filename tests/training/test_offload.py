"""A role that slept goes on as if it had not: what it computes is compared, bit for bit, with a twin that stayed awake."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.core.platform import held_bytes
from megarl.models.bootstrap import prepare_megatron
from megarl.models.config import ModelConfig, Rope
from megarl.recipe.roles import Optimizer
from megarl.training.batch import to_device
from megarl.training.offload import PARTS, FileHost, MemoryHost, Offload
from megarl.training.rank import Rank
from tests.support.platforms import chosen
from tests.training.samples import examples, shards

PLATFORM = chosen()
prepare_megatron(PLATFORM)
VOCAB = 97
OPTIMIZERS = {
    "adam": Optimizer(lr=1e-2, weight_decay=0.1),
    "sgd": Optimizer(name="sgd", lr=1e-1, momentum=0.9),
}
KINDS = [(name, dtype) for name in OPTIMIZERS for dtype in (torch.float32, torch.bfloat16)]


class Role:
    """A tiny model with random weights, its optimizer if it has one, and its place to rest."""

    def __init__(self, groups, name, dtype, *, tied=False, make_host=None, hidden=32):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        from megarl.models.gpt import build_gpt
        from megarl.training.optimizer import Stepper, is_distributed
        from megarl.training.schedule import finalize_without_scaling

        self.groups, self.stepper = groups, None
        with groups.active():
            [self.model] = build_gpt(
                _config(tied, hidden), groups.layout, groups.collection, dtype=dtype, platform=PLATFORM
            )
            random = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
            self.model.register_buffer("routing_bias", torch.arange(7.0, device=PLATFORM.device))
            chunk = Float16Module(self.model.config, self.model) if dtype == torch.bfloat16 else self.model
            if name is not None:
                distributed = is_distributed(OPTIMIZERS[name])
                data_parallel = DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
                )
                self.model.config.finalize_model_grads_func = finalize_without_scaling
                self.model.config.grad_scale_func = None
                chunk = DistributedDataParallel(
                    self.model.config, data_parallel, chunk, pg_collection=groups.collection
                )
                self.stepper = Stepper(OPTIMIZERS[name], [chunk], dtype, total_steps=10)
        self.chunk = chunk
        self.offload = Offload([chunk], self.stepper and self.stepper.optimizer, PLATFORM, make_host)

    def logprobs(self, seed=0):
        """Of one micro-batch: [T]."""
        with torch.no_grad():
            [scores] = self._run(seed, lambda batch, logits: _logprobs(batch, logits), forward_only=True)
        return scores

    def step(self, seed):
        """One optimizer step on two micro-batches."""

        def evaluate(batch, logits):
            loss = -(batch.weights * _logprobs(batch, logits)).sum()
            return loss, batch.mask.sum().int(), {}

        self.stepper.zero_grad()
        self._run(seed, evaluate, forward_only=False)
        return self.stepper.step(0)

    def _run(self, seed, evaluate, *, forward_only):
        from megarl.training.schedule import run_schedule

        [shard], _ = shards([examples([9, 17, 30, 12], VOCAB, seed)], micro_batches=1 if forward_only else 2)
        batches = [to_device(micro, {}, PLATFORM.device, Layout(), 0) for micro in shard.mini_batches[0].micro_batches]
        with self.groups.active():
            return run_schedule([self.chunk], batches, evaluate, self.groups, forward_only=forward_only)

    def state(self):
        """Everything that a next step could depend on, copied."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if self.stepper is not None:
            for member in self.stepper.optimizer.chained_optimizers:
                tensors += [p for group in member.optimizer.param_groups for p in group["params"]]
                tensors += [v for each in member.optimizer.state.values() for v in each.values() if torch.is_tensor(v)]
        return [tensor.detach().clone() for tensor in tensors]


def _logprobs(batch, logits):
    return torch.log_softmax(logits.float(), dim=-1).gather(1, batch.labels[:, None])[:, 0]


def _config(tied, hidden):
    return ModelConfig(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        num_layers=2,
        hidden_size=hidden,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=2 * hidden,
        vocab_size=VOCAB,
        max_positions=512,
        rope=Rope(theta=1e4),
        norm_eps=1e-6,
        tied_embeddings=tied,
        qkv_bias=False,
        qk_norm=True,
        eos_token_ids=(2,),
    )


@pytest.fixture(scope="module")
def groups():
    rank = Rank(0, 1, PLATFORM.name, seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=30)
    yield rank.groups_of(Layout())
    rank.close()


def _equal(one, other):
    assert len(one) == len(other)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_steps_after_sleep_are_those_of_a_role_that_stayed_awake(groups, name, dtype, tied):
    sleeper, twin = (Role(groups, name, dtype, tied=tied) for _ in range(2))
    for seed in range(3):
        sleeper.offload.sleep()  # before the first step too, when the optimizer has no moments yet
        sleeper.offload.wake()
        assert _equal(sleeper.state(), twin.state())
        assert sleeper.step(seed) == twin.step(seed)
    assert _equal(sleeper.state(), twin.state())
    start = Role(groups, name, dtype, tied=tied).model.parameters()
    assert not _equal(list(sleeper.model.parameters()), list(start)), "the steps have to do something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_role_says_the_same_after_sleep(groups, dtype):
    role = Role(groups, None, dtype)
    before, state = role.logprobs(), role.state()
    assert role.offload.sleep() > 0
    assert role.offload.device_bytes() == dict.fromkeys(PARTS, 0)
    role.offload.wake()
    assert torch.equal(role.logprobs(), before)
    assert _equal(role.state(), state)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_bytes_of_each_part_are_those_of_the_formula(groups, name, dtype):
    role = Role(groups, name, dtype)
    role.step(0)
    count = sum(parameter.numel() for parameter in role.model.parameters())
    held, asleep = role.offload.device_bytes(), role.offload.sleep()
    moments, main = (2 if name == "adam" else 1), dtype == torch.bfloat16
    slack = 128 * 4 * (count // 1000 + 8)  # the packed buffers are aligned, and Adam counts its steps
    assert held["grads"] == pytest.approx(4 * count, abs=slack)
    assert held["params"] == pytest.approx(dtype.itemsize * count, abs=slack)
    assert held["optimizer"] == pytest.approx(4 * count * (moments + main), abs=slack)
    assert asleep == sum(held.values())
    assert role.offload.asleep == PARTS
    assert role.offload.device_bytes() == dict.fromkeys(PARTS, 0)
    assert all(t.untyped_storage().nbytes() == 0 for t in role.model.parameters())
    assert role.offload.wake() == asleep
    assert role.offload.device_bytes() == held


def test_a_log_prob_pass_needs_the_parameters_alone(groups):
    sleeper, twin = (Role(groups, "adam", torch.bfloat16) for _ in range(2))
    sleeper.step(0), twin.step(0)
    sleeper.offload.sleep()
    sleeper.offload.wake(["params"])
    assert sleeper.offload.asleep == ("grads", "optimizer")
    held = sleeper.offload.device_bytes()
    assert held["params"] > 0
    assert held["grads"] == held["optimizer"] == 0
    assert torch.equal(sleeper.logprobs(), twin.logprobs())
    sleeper.offload.sleep(["params"])
    sleeper.offload.wake()
    assert sleeper.step(1) == twin.step(1)
    assert _equal(sleeper.state(), twin.state())


def test_gradient_buffers_go_and_come_back_as_zeros(groups):
    role = Role(groups, "adam", torch.float32)
    role.step(0)
    gradient = next(role.model.parameters()).main_grad
    assert gradient.abs().max() > 0
    size = role.offload.sleep(["grads"])
    assert gradient.untyped_storage().nbytes() == 0
    assert role.offload.asleep == ("grads",)
    assert role.offload.wake(["grads"]) == size
    assert next(role.model.parameters()).main_grad is gradient
    assert not gradient.any()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_no_other_tensor_keeps_the_last_gradients(groups, name):
    role = Role(groups, name, torch.bfloat16)
    role.step(0)
    role.offload.sleep(["grads"])
    members = role.stepper.optimizer.chained_optimizers
    assert all(p.grad is None for member in members for p in member.get_parameters())


@settings(max_examples=25, deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(PARTS))), max_size=12))
def test_any_order_of_parts_gives_everything_back(groups, calls):
    role = Role(groups, "adam", torch.float32)
    role.step(0)
    before, awake = role.state(), set(PARTS)
    for sleeps, parts in calls:
        role.offload.sleep(parts) if sleeps else role.offload.wake(parts)
        awake = awake - parts if sleeps else awake | parts
        assert set(role.offload.asleep) == set(PARTS) - awake
        held = role.offload.device_bytes()
        assert {part for part in PARTS if held[part]} == awake
    role.offload.wake()
    assert _equal(role.state(), before)


def test_views_stay_bound_to_the_packed_buffers(groups):
    role = Role(groups, "adam", torch.float32)
    [buffer] = role.chunk.buffers
    role.offload.sleep()
    role.offload.wake()
    with torch.no_grad():
        buffer.param_data.fill_(3.0)
    assert all(bool((parameter == 3).all()) for parameter in role.model.parameters())
    shards_of_adam = [p for group in role.stepper.optimizer.param_groups for p in group["params"]]
    assert all(bool((shard == 3).all()) for shard in shards_of_adam)


def test_memory_of_the_process_goes_down(groups):
    role = Role(groups, "adam", torch.float32, hidden=1024)
    role.step(0)
    awake = held_bytes(PLATFORM)
    freed = role.offload.sleep()
    asleep = held_bytes(PLATFORM)
    assert freed > 190 * 2**20
    assert awake - asleep > 0.9 * freed
    role.offload.wake()
    assert held_bytes(PLATFORM) - asleep > 0.9 * freed


@pytest.mark.parametrize(
    "make_host", [FileHost, lambda: MemoryHost(pinned=False), lambda: MemoryHost(pinned=False, part_bytes=2**14)]
)
def test_hosts_keep_bytes_whatever_their_number(make_host):
    random = np.random.default_rng(0)
    host = make_host()
    for sizes in ([5, 1, 70_000], [3], [], [90_000, 2]):
        blocks = [torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
        wanted = copy.deepcopy(blocks)
        host.put(blocks)
        for block in blocks:
            block.zero_()
        host.get(blocks)
        assert _equal(blocks, wanted)


def test_host_memory_grows_by_parts_and_never_by_a_copy(monkeypatch):
    """torch rounds pinned memory up to a power of two, and gives none back: only a last part may be taken anew."""
    taken, empty = [], torch.empty

    def counted(size, **options):
        taken.append(size)
        return empty(size, **options)

    host = MemoryHost(pinned=False, part_bytes=64)
    for size in (150, 40, 200, 200):
        block = torch.arange(size, dtype=torch.uint8)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", counted)
            host.put([block])
        back = torch.zeros_like(block)
        host.get([back])
        assert torch.equal(back, block)
    assert [size for size in taken if size] == [64, 64, 22, 64, 8]


def test_memory_of_the_host_serves_as_well(groups):
    role = Role(groups, "adam", torch.bfloat16, make_host=lambda: MemoryHost(pinned=False))
    role.step(0)
    before = role.state()
    for _ in range(2):
        role.offload.sleep()
        role.offload.wake()
        assert _equal(role.state(), before)


class CountedHost(MemoryHost):
    """Host memory that counts what is copied into it."""

    puts = 0

    def put(self, blocks):
        self.puts += 1
        super().put(blocks)


@pytest.mark.parametrize(("name", "copies"), [(None, 2), ("adam", 6)])  # two parts, once or three times
def test_weights_that_nobody_changed_are_copied_to_the_host_once(groups, name, copies):
    hosts = []

    def make_host():
        hosts.append(CountedHost(pinned=False))
        return hosts[-1]

    role = Role(groups, name, torch.bfloat16, make_host=make_host)
    before = role.state()
    for _ in range(3):
        role.offload.sleep()
        role.offload.wake()
        role.logprobs()
        assert _equal(role.state(), before)
    assert sum(host.puts for host in hosts) == copies


def _checkpoint(role):
    role.model.load_state_dict(
        {name: value + 1 for name, value in role.model.state_dict().items() if value is not None}
    )


def _parameter(role):
    with torch.no_grad():
        list(role.model.parameters())[-1].add_(1)


CHANGES = {
    "a parameter": _parameter,
    "a checkpoint": _checkpoint,
    "a buffer": lambda role: role.model.routing_bias.mul_(2),
    "a buffer's memory": lambda role: setattr(role.model.routing_bias, "data", role.model.routing_bias * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_changed_are_copied_to_the_host_again(groups, change):
    role = Role(groups, None, torch.bfloat16, make_host=lambda: MemoryHost(pinned=False))
    role.offload.sleep()
    role.offload.wake()
    before = role.state()
    change(role)
    changed = role.state()
    assert not _equal(before, changed)
    role.offload.sleep()
    role.offload.wake()
    assert _equal(role.state(), changed)


@pytest.mark.host_only  # elsewhere there is memory beside the device, and no file
def test_a_role_that_cannot_be_put_away_stays_awake(groups):
    role = Role(groups, "adam", torch.float32, make_host=lambda: FileHost(Path("/dev/full")))
    before = role.state()
    with pytest.raises(MegarlError, match=r"needs [\d,]+ bytes in /dev/full.*TMPDIR"):
        role.offload.sleep()
    assert role.offload.asleep == ("grads",)
    assert _equal(role.state(), before)
    role.offload.wake()
    role.step(0)


def test_an_unknown_part_is_refused(groups):
    role = Role(groups, "adam", torch.float32)
    with pytest.raises(MegarlError, match="grads, params, optimizer; got weights"):
        role.offload.sleep(["weights"])
