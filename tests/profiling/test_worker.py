"""The ranks of a profile: a reference model is one that everything else reads, and two ranks time it together."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.rules import expected_tensors
from megarl.profiling.job import Case, Job
from megarl.profiling.ranks import measure_ranks
from megarl.profiling.reference_model import Size, write_reference_model
from megarl.serving.process import free_port


def test_a_reference_model_is_whole_and_has_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_reference_model(tmp_path / "model", Size(2, 64, 128))
    config = load_model_config(folder)
    check_weights(expected_tensors(config), folder, config)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 64, 128)
    assert AutoTokenizer.from_pretrained(folder).encode("5 17") == [5, 17]


@pytest.mark.slow
def test_two_ranks_time_a_layout_together(tmp_path: Path) -> None:
    folder = write_reference_model(tmp_path / "model", Size(2, 64, 128))
    layout = Layout(tp=2, sequence_parallel=True, world_size=2)
    job = Job("cpu", "float32", (folder,), (Case(0, layout, 4, 16, 72),), 2, free_port(), 120.0, repeats=1)
    measured = measure_ranks(job)
    [timed] = measured.timed
    assert timed.score_s > 0 and timed.update_s > 0  # which takes longer, a busy machine decides
    assert measured.raw.flops > 1e8
    assert set(measured.raw.all_gather_s) == set(measured.raw.all_reduce_s) == {2**12, 2**22}
