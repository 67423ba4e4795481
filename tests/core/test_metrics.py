"""The table of metrics: complete, in the docs, and the only source of names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megarl
from megarl.core.errors import MegarlError
from megarl.core.metrics import METRICS, OUTSIDE, PHASES, check_names, format_value
from megarl.core.metrics_page import render_docs

PACKAGE = Path(megarl.__file__).parent
GROUPS = "reward|rollout|actor|sft|eval|sync|data|perf"


def test_docs_are_up_to_date() -> None:
    written = (PACKAGE.parent / "docs" / "metrics.md").read_text()
    assert written == render_docs(), "run: python -m megarl.core.metrics > docs/metrics.md"


def test_docs_hold_every_name_once() -> None:
    named = re.findall(r"^\| `([^`]+)` \|", render_docs(), flags=re.MULTILINE)
    assert sorted(named) == sorted(METRICS)


def test_every_name_in_the_code_is_in_the_table() -> None:
    name_like = re.compile(rf"({GROUPS})/[a-z0-9_]+")
    strings = {
        (path.name, node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name_like.fullmatch(node.value)
    }
    assert len(strings) > 20, "the search finds the names"
    assert not {(file, name) for file, name in strings if name not in METRICS}


def test_every_spec_formats_a_number() -> None:
    for name, spec in METRICS.items():
        assert spec.unit and spec.meaning
        assert float(format_value(name, 12.0)) == pytest.approx(12.0)
    assert format_value("reward/mean", float("nan")) == "-"


def test_every_phase_of_a_step_has_a_metric_and_no_other() -> None:
    assert set(PHASES) > OUTSIDE
    assert {phase for phase in PHASES if f"perf/{phase}_s" not in METRICS} == OUTSIDE


def test_unknown_names_are_refused_with_the_nearest() -> None:
    check_names(["reward/mean", "perf/step_s", "reward/by/style_2/mean", "reward/by/style_2/acc.strict"])
    with pytest.raises(MegarlError, match=r"reward/meen \(nearest: reward/mean\)"):
        check_names(["reward/mean", "reward/meen"])
    for name in ("reward/by/style/a/b", "reward/by/a b/mean", "reward/by/mean", "x/reward/by/style/mean"):
        with pytest.raises(MegarlError, match=name):
            check_names([name])
    assert format_value("reward/by/style/mean", 0.25) == "0.250"
