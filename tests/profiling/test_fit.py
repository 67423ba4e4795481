"""Figures out of measurements: those that a known cluster would have given are described by what is fitted to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.core.scratch import Scratch
from megarl.placement.calibrate import with_rates
from megarl.placement.cluster import Cluster, make_cluster, read_cluster
from megarl.placement.devices import GIB
from megarl.profiling.command import cases, cluster_file, run_profile
from megarl.profiling.fit import Findings, Fitted, error_words, fit_cluster, serving_pairs, training_pairs
from megarl.profiling.job import Case, Measured, Raw, Timed
from megarl.profiling.servers import CASES, Generated
from tests.placement.samples import model

CONFIGS = (model(4, 128, 4, 2, 384, 512), model(4, 256, 8, 4, 768, 1024))
TRUE = with_rates(
    make_cluster("cpu", 1, 4),
    {"matmul": 0.5, "layer_s": 2e-3, "hop_s": 1e-3, "at_once": 2.0, "servers_at_once": 1.6, "decode_s": 5e-3},
)


def raw(world_size: int, cluster: Cluster) -> Raw:
    crowd = max(1.0, world_size / cluster.rates.at_once)
    times = {4096: cluster.rates.hop_s, 2**22: cluster.rates.hop_s + 2**21 / 1e9} if world_size > 1 else {}
    return Raw(cluster.device.fp32_flops / crowd, 4e10, 3e9, times, times)


def findings(cluster: Cluster) -> Findings:
    """What a profile would measure on a cluster that is just as the model says."""
    ranks = []
    for count in (1, 2, 4):
        timed = [Timed(case, 1.0, 1.0) for case in cases(count, 32)]
        one = Findings("float32", CONFIGS, (Measured(count, raw(count, cluster), tuple(timed)),))
        seconds = [predicted for predicted, _ in training_pairs(cluster, one)]
        timed = [replace(t, score_s=seconds[2 * i], update_s=seconds[2 * i + 1]) for i, t in enumerate(timed)]
        ranks.append(Measured(count, raw(count, cluster), tuple(timed), 0.03 if count == 1 else None))
    asked = tuple(Generated(servers, *case, 1.0) for servers in (1, 2) for case in CASES)
    found = Findings("float32", CONFIGS, tuple(ranks), asked)
    seconds = [predicted for predicted, _ in serving_pairs(cluster, found)]
    return replace(found, generated=tuple(replace(g, seconds=s) for g, s in zip(asked, seconds, strict=True)))


def test_a_known_cluster_is_found_again() -> None:
    found = findings(TRUE)
    fitted = fit_cluster(make_cluster("cpu", 1, 4), found)
    assert fitted.training_error < 0.03
    assert fitted.serving_error is not None and fitted.serving_error < 0.03
    assert fitted.cluster.rates.sync_s == 0.03
    assert fitted.cluster.rates.at_once == pytest.approx(2.0, rel=0.1)


def test_devices_that_are_devices_do_not_share_cores() -> None:
    alone = with_rates(TRUE, {"at_once": np.inf, "servers_at_once": np.inf})
    fitted = fit_cluster(make_cluster("cpu", 1, 4), replace(findings(alone), generated=()))
    assert np.isinf(fitted.cluster.rates.at_once)
    assert fitted.serving_error is None
    assert len(error_words(fitted)) == 1


def test_the_file_reads_back_as_the_cluster(tmp_path: Path) -> None:
    base = make_cluster("cpu", 1, 4)
    cluster = with_rates(
        replace(base, device=replace(base.device, memory_bytes=3 * GIB)), {"layer_s": 0.123456, "at_once": 1.5}
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_file(Fitted(cluster, 0.1, None)))
    read = read_cluster(file)
    assert read.rates.layer_s == 0.1235
    assert read.rates == replace(cluster.rates, layer_s=0.1235)
    assert read.device == cluster.device
    assert read.num_devices == 4


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_cases_are_layouts_of_all_ranks_and_fill_their_micro_batches(count: int) -> None:
    found = cases(count, 32)
    assert {case.layout.world_size for case in found} == {count}
    assert all(case.sequences >= case.layout.dp and case.micro_tokens >= case.tokens for case in found)
    assert Case(0, Layout(world_size=count), 64, 32, 64 * 32 + 16) in found


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: cpu\n")
    with pytest.raises(UserError, match="is there already"):
        run_profile(file, 0, 1.0, Scratch("r", file.parent, None, None))  # type: ignore[arg-type]
    assert file.read_text() == "device: cpu\n"
