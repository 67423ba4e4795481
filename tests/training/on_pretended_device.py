"""Mistakes that a device refuses and a CPU does not, for test_pretend_device: run there, in a process of its own."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.core.platform import held_bytes, peak_bytes, reset_peak_bytes


def on(device, *shape):
    return torch.ones(shape, device=device)


def test_tensors_of_both_sides_do_not_meet(device):
    assert device == "cuda"
    with pytest.raises(RuntimeError, match="same device"):
        on(device, 3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([on(device, 2, 2), torch.ones(2, 2)])
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(3)[torch.tensor([0, 1], device=device)]
    assert (on(device, 3) + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert on(device, 3)[torch.tensor([0, 1])].is_cuda


def test_numpy_takes_nothing_of_the_device(device):
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        on(device, 3).numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(on(device, 3))
    assert on(device, 3).cpu().numpy().tolist() == [1, 1, 1]


def test_what_is_made_of_a_tensor_is_where_it_is(device):
    made = on(device, 2, 2)
    assert {each.device for each in (made * 2, made[0], made.new_zeros(1), torch.zeros_like(made))} == {made.device}
    assert made.to("cpu").device == torch.device("cpu") != made.device
    assert torch.ones(2).to(made).device == made.device


def test_gradients_cross_with_their_tensors(device):
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to(device) * on(device, 3)).sum().backward()
    assert leaf.grad.device == torch.device("cpu")


def test_collectives_take_nothing_of_the_host(rank, device):
    with pytest.raises(RuntimeError, match="NCCL takes none of the host"):
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(on(device, 3))
    everyone = [None]
    dist.all_gather_object(everyone, {"a": 1})
    assert everyone == [{"a": 1}]


def test_memory_is_counted(platform, device):
    before = held_bytes(platform)
    reset_peak_bytes(platform)
    block = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    assert held_bytes(platform) - before == 1 << 20 <= peak_bytes(platform) - before
    del block
    assert held_bytes(platform) == before
