"""Fits of rates: they find the rates that made the measurements, and stay within what a share of a peak can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.placement.calibrate import Pairs, error, fit, with_rates
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.compute import score_seconds, update_seconds
from tests.placement.samples import QWEN_7B, workload
from tests.placement.test_models_of_cost import choice

CLUSTER = make_cluster("H100", 2)


def test_rates_that_made_the_measurements_are_found() -> None:
    true = replace(CLUSTER, rates=replace(CLUSTER.rates, matmul=0.3, layer_s=1e-3, update_s=0.2))
    work = workload(QWEN_7B)

    def seconds(cluster: Cluster) -> list[float]:
        shapes = [choice(8, tp=2), choice(16, tp=4, micro=2048), choice(16, pp=2), choice(8, tp=8, again=2)]
        return [
            float(kind(QWEN_7B, shape, work, cluster).total[0])
            for kind in (score_seconds, update_seconds)
            for shape in shapes
        ]

    def pairs(cluster: Cluster) -> Pairs:
        return list(zip(seconds(cluster), seconds(true), strict=True))

    assert error(pairs(CLUSTER)) > 0.2
    assert error(pairs(fit(CLUSTER, ["matmul", "layer_s", "update_s"], pairs, rounds=20))) < 0.02


def test_a_share_of_a_peak_stays_one() -> None:
    fitted = fit(CLUSTER, ["matmul"], lambda cluster: [(1 / cluster.rates.matmul, 0.1)])
    assert fitted.rates.matmul == 1.0


def test_the_error_by_hand() -> None:
    assert error([(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)]) == pytest.approx(2 * 0.6931 / 3, rel=1e-3)


def test_what_nothing_was_measured_of_stays_where_it_was() -> None:
    def pairs(cluster: Cluster) -> Pairs:
        return [(cluster.rates.layer_s, 1e-3)]

    fitted = fit(with_rates(CLUSTER, {"update_s": 0.5}), ["layer_s", "update_s"], pairs)
    assert fitted.rates.layer_s == pytest.approx(1e-3, rel=0.1)
    assert fitted.rates.update_s == pytest.approx(0.5)
