"""The ranks of a profile: a reference model is one that everything else reads, and two ranks time it together."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.core.ports import free_port
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.rules import expected_tensors
from megarl.profiling import worker
from megarl.profiling.job import Case, Job, Measured
from megarl.profiling.reference_model import Size, write_reference_model
from tests.support.forked_ranks import Ranks


def test_a_reference_model_is_whole_and_has_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_reference_model(tmp_path / "model", Size(2, 64, 128))
    config = load_model_config(folder)
    check_weights(expected_tensors(config), folder, config)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 64, 128)
    assert AutoTokenizer.from_pretrained(folder).encode("5 17") == [5, 17]


@pytest.mark.parametrize(("has_device_memory", "copied"), [(True, 2**20), (False, 2**18)])
def test_copies_to_the_host_are_timed_as_what_is_offloaded_goes(
    has_device_memory: bool, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into locked memory, where a device has its own; of so many bytes that a wait for it is a small part of the time."""
    pinned, empty = [], torch.empty

    def made(shape: torch.Size, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append((4 * shape.numel(), pin_memory))
        return empty(shape, **options)  # nothing can be locked here

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(worker, "LARGEST_MATRIX", worker.SMALLEST_MATRIX)
    assert worker.DEVICE_COPIED >= 2**30 and worker.DEVICE_MESSAGES[1] >= 2**28, (
        "a millisecond of a fast device or link"
    )
    monkeypatch.setattr(worker, "DEVICE_COPIED", 2**20)
    monkeypatch.setattr(worker, "HOST_COPIED", 2**18)
    platform = replace(get_platform("cpu"), has_device_memory=has_device_memory)
    raw = worker._raw(platform, Job("cpu", "float32", (), (), 1, 0, 60.0))
    assert raw.host_bytes_s > 0 and pinned == [(copied, has_device_memory)]


def test_products_are_timed_of_numbers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose clock power limits multiplies constant ones faster than those of a model."""
    multiplied, matmul = [], torch.matmul

    def noted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        multiplied.append(float(left.std()))
        return matmul(left, right)

    monkeypatch.setattr(torch, "matmul", noted)
    monkeypatch.setattr(worker, "LARGEST_MATRIX", worker.SMALLEST_MATRIX)
    monkeypatch.setattr(worker, "HOST_COPIED", 2**18)
    worker._raw(get_platform("cpu"), Job("cpu", "float32", (), (), 1, 0, 60.0))
    assert multiplied and min(multiplied) > 0.9


@pytest.mark.slow
def test_two_ranks_time_a_layout_together(ranks: Ranks, tmp_path: Path) -> None:
    """How they are started, and the first one's answer taken: test_ranks."""
    folder = write_reference_model(tmp_path / "model", Size(2, 64, 128))
    layout = Layout(tp=2, sequence_parallel=True, world_size=2)
    job = Job("cpu", "float32", (folder,), (Case(0, layout, 4, 16, 72),), 2, free_port(), 120.0, repeats=1)
    asked, answer = tmp_path / "job", tmp_path / "answer"
    asked.write_bytes(pickle.dumps(job))
    assert ranks.run("tests.profiling.worker_ranks", 2, asked, answer, log=tmp_path / "log") == ""
    measured: Measured = pickle.loads(answer.read_bytes())
    [timed] = measured.timed
    assert timed.score_s > 0 and timed.update_s > 0  # which takes longer, a busy machine decides
    assert measured.raw.flops > 1e8
    assert set(measured.raw.all_gather_s) == set(measured.raw.all_reduce_s) == {2**12, 2**22}
