"""The CPU adapter reaches Megatron and nobody else, and refuses what it was not written for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import megatron.core.optimizer.optimizer as megatron_optimizer
import megatron.core.parallel_state as megatron_state
import megatron.core.utils as megatron_utils
import pytest
import torch

from bench.support.training import Size, write_model
from megarl.core.errors import MegarlError
from megarl.core.platform import get_platform
from megarl.models import bootstrap, megatron_cpu, megatron_torch_adam
from tests.support.platforms import may_lack


def test_megatron_sees_a_device_and_nobody_else_does() -> None:
    assert megatron_state.torch.cuda.device_count() == 1
    assert megatron_state.torch is not torch
    assert torch.cuda.device_count() == 0
    assert not torch.cuda.is_available()


def test_megatron_makes_cuda_tensors_on_the_cpu_and_nobody_else_does() -> None:
    made = megatron_optimizer.torch.zeros(2, device="cuda", pin_memory=True)
    assert made.device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_the_norm_of_a_long_gradient_is_its_norm() -> None:
    gradient = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(gradient.double().square().sum().sqrt())
    norm, _ = megatron_utils.local_multi_tensor_l2_norm(0, None, [[gradient[:7], gradient[7:]]], False)
    assert float(norm) == pytest.approx(exact, rel=2e-6)


def test_only_megatrons_optimizers_are_told_that_a_tensor_is_of_cuda() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    told = eval("tensor.type()", {"tensor": tensor, "__name__": "megatron.core.optimizer.optimizer"})
    assert told == "torch.cuda.BFloat16Tensor"
    assert tensor.type() == "torch.BFloat16Tensor"
    assert tensor.type(torch.float32).dtype == torch.float32


ONE_RANK = """
import json
import sys
from pathlib import Path

from bench.support.training import Size, micro_batches, one_rank, role, to_shard

import torch

size = Size(**json.loads(sys.argv[2]))
shard, columns = to_shard(micro_batches(size))
with one_rank() as rank:
    torch.set_num_threads(2)
    rank.build("actor", role(Path(sys.argv[1])))
    rank.update("actor", shard, columns)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    # gloo has two of the former for each of the latter; what such a thread starts has its name.
    print("told", names.count("pt_gloo_runloop"), 2 * names.count("gloo_tcp_loop"), "torch._dynamo" in sys.modules)
"""


def test_a_step_starts_no_threads_of_openmp_beside_gloos_and_loads_no_compiler(tmp_path: Path) -> None:
    size = Size(layers=1, hidden=128, vocab=512, sequences=4, micro_batches=1)
    command = [sys.executable, "-c", ONE_RANK, str(write_model(tmp_path, size)), json.dumps(asdict(size))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    _, found, of_gloo, compiler = next(line for line in done.stdout.splitlines() if line.startswith("told")).split()
    if of_gloo == "0" and may_lack():  # as torch 2.11: all are called alike
        pytest.skip("needs a torch that names gloo's threads")
    assert int(found) == int(of_gloo) > 0  # where a group is one rank
    assert compiler == "False"


def test_optimizers_step_without_torchs_compiler_as_with_it() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    kinds = ((torch.optim.SGD, {"momentum": 0.5}), (torch.optim.AdamW, {"weight_decay": 0.5}), (torch.optim.Adam, {}))
    found = []
    for kind, options in kinds:
        with torch.no_grad():
            weight.copy_(torch.tensor([1.0, -2.0]))
        optimizer = kind([weight], lr=0.25, **options)
        for gradient in ([4.0, -1.0], [4.0, -1.0]):
            weight.grad = torch.tensor(gradient)
            assert torch.is_grad_enabled()
            optimizer.step()
        assert torch.is_grad_enabled() and weight.grad is not None and weight.is_leaf and weight.requires_grad
        optimizer.zero_grad()
        assert weight.grad is None
        found.append(weight.tolist())
    # SGD: 4 and 1.5 times 4 are taken, a quarter of each. Adam: a step of 0.25 against the gradient's sign; AdamW after an
    # eighth of the weight is gone.
    assert found[0] == [1.0 - 1.0 - 1.5, -2.0 + 0.25 + 0.375]
    assert found[1] == pytest.approx([(1 * 0.875 - 0.25) * 0.875 - 0.25, (-2 * 0.875 + 0.25) * 0.875 + 0.25], abs=1e-6)
    assert found[2] == pytest.approx([0.5, -1.5], abs=1e-6)


def test_streams_and_events_have_nothing_to_wait_for() -> None:
    cuda = megatron_state.torch.cuda
    with cuda.stream(cuda.Stream()), cuda.current_stream() as stream:
        event = stream.record_event()
        stream.wait_event(event)
        cuda.current_stream().wait_stream(stream)
        cuda.synchronize()
    assert event.query()
    assert stream == cuda.default_stream()


def test_random_states_are_the_cpus() -> None:
    from megatron.core.tensor_parallel.random import _get_cuda_rng_state, _set_cuda_rng_state

    state = _get_cuda_rng_state()
    first = torch.rand(3)
    _set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_installing_again_changes_nothing() -> None:
    before = torch.Tensor.type, megatron_state.torch, torch.compile
    bootstrap.prepare_megatron(get_platform("cpu"))
    assert (torch.Tensor.type, megatron_state.torch, torch.compile) == before


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    monkeypatch.delattr(torch.Tensor, megatron_cpu.MARK)
    with pytest.raises(
        MegarlError, match=r"megatron_cpu\.py was written for megatron-core 0\.16\.1 and found 0\.17\.0"
    ):
        megatron_cpu.install()
    with pytest.raises(MegarlError, match=r"megatron_torch_adam\.py was written for"):
        megatron_torch_adam.check_version("megatron_torch_adam.py")


def test_the_adapter_refuses_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MegarlError, match="must not be used where CUDA is available"):
        megatron_cpu.install()


pytestmark = pytest.mark.host_only


@pytest.mark.parametrize(
    ("fused", "adapted"), [("has_transformer_engine", "[]"), ("has_apex", "[None]")], ids=["transformer engine", "apex"]
)
def test_a_cuda_platform_with_a_fused_adam_is_left_alone(fused: str, adapted: str) -> None:
    """Without Transformer Engine, Megatron's experts read a name that is not there."""
    # In a process of its own: in this one the adapters are already there.
    code = f"""
import sys
from dataclasses import replace
from megarl.core.platform import get_platform
from megarl.models import bootstrap
from megarl.models.bootstrap import prepare_megatron

bootstrap._load_transformer_engine = lambda: None  # it is not here
plain = replace(get_platform("cuda"), has_transformer_engine=False, has_apex=False)
prepare_megatron(replace(plain, {fused}=True))
moe = [module for name, module in sys.modules.items() if name == "megatron.core.transformer.moe.moe_utils"]
assert [module.te_general_gemm for module in moe] == {adapted}, moe
assert not [name for name in sys.modules if name.startswith("megarl.models.megatron")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
