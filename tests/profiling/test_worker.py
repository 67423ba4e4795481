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


@pytest.mark.parametrize("has_device_memory", [True, False])
def test_copies_to_the_host_are_timed_as_what_is_offloaded_goes(
    has_device_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into locked memory, where a device has its own."""
    pinned, empty = [], torch.empty

    def made(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **options)  # nothing can be locked here

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(worker, "LARGEST_MATRIX", worker.SMALLEST_MATRIX)
    platform = replace(get_platform("cpu"), has_device_memory=has_device_memory)
    raw = worker._raw(platform, Job("cpu", "float32", (), (), 1, 0, 60.0))
    assert raw.host_bytes_s > 0 and pinned == [has_device_memory]


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
