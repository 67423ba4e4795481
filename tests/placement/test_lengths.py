"""Distributions of lengths, the band where nothing is known, and every form of file that lengths are read from."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.placement.length_files import COUNTS, IDS, METRICS, TEXTS, Read, read_lengths
from megarl.placement.lengths import (
    HIGH_MEAN,
    LIKELY_MEAN,
    LOW_MEAN,
    assumed_lengths,
    counted,
    cut,
    cut_lognormal,
    lognormal,
    with_cut_share,
)

PUBLISHED = Path("bench/published/lengths.csv")
LIMIT = 1000.0


def test_lengths_keep_their_mean_and_their_limit() -> None:
    lengths = lognormal(1000, 1.0, 4096)
    assert lengths.mean == pytest.approx(1000, rel=1e-3)
    assert max(lengths.values) <= 4096
    assert float(np.diff(lengths.knots) @ lengths.running) == pytest.approx(1000, rel=0.02)
    assert counted([10, 20, 30, 40], 100).mean == pytest.approx(25, rel=0.02)
    with pytest.raises(UserError, match="mean response"):
        lognormal(5000, 1.0, 4096)


@settings(max_examples=30)
@example(mean=86.0, share=0.25, more=1.0)
@given(mean=st.floats(10, 900), share=st.floats(0.01, 0.4), more=st.floats(1.0, 4.0))
def test_a_share_that_the_limit_cuts_is_kept(mean: float, share: float, more: float) -> None:
    lengths = with_cut_share(mean, share, 1000.0, 1000.0 * more)
    assert max(lengths.values) <= 1000.0 * more
    # The same lengths under the limit that they were met with: a share that the mean leaves room for is there.
    there = np.minimum(lengths.grid, 1000.0)
    assert float(np.mean(there)) == pytest.approx(mean, rel=1e-6)
    if share * 1000 < 0.5 * mean:
        assert float(np.mean(lengths.grid >= 1000.0)) == pytest.approx(share, abs=0.06)


def test_what_is_assumed_is_what_was_published() -> None:
    with PUBLISHED.open() as file:
        means = [float(row["mean"]) for row in csv.DictReader(file)]
    assert tuple(np.quantile(means, [0.1, 0.5, 0.9], method="inverted_cdf")) == (LOW_MEAN, LIKELY_MEAN, HIGH_MEAN)


def test_known_lengths_are_cut_at_a_lower_limit_alone() -> None:
    known = lognormal(600, 0.9, 4096)
    assert cut(known, 8192) is known
    lower = cut(known, 500)
    assert lower.longest == max(lower.values) == 500
    assert lower.mean == pytest.approx(float(np.minimum(known.grid, 500).mean()), rel=0.01)


@given(limit=st.floats(16, 40_000))
def test_a_band_is_in_order_and_cut_where_the_limit_is(limit: float) -> None:
    band = assumed_lengths(limit)
    assert band.low.mean <= band.likely.mean <= band.high.mean <= limit * (1 + 1e-9)
    if limit > 20 * HIGH_MEAN:
        assert band.likely.mean == pytest.approx(LIKELY_MEAN, rel=0.03)
    # Short limits cut nearly all answers; a tenth of the runs had answers that are short beside theirs.
    assert (limit > 100) or band.likely.mean > 0.9 * limit


def words(text: str) -> int:
    return len(text.split())


def read(path: Path) -> Read:
    return read_lengths(path, LIMIT, words)


def rows(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_samples(tmp_path: Path, name: str) -> None:
    found = read(rows(tmp_path / "a.jsonl", *({name: length, "reward": 1.0} for length in (10, 20, 30, 40))))
    assert found.responses.mean == pytest.approx(25, rel=0.02)
    assert found.words == "4 samples"


@pytest.mark.parametrize("name", IDS)
def test_ids_of_samples(tmp_path: Path, name: str) -> None:
    found = read(rows(tmp_path / "a.jsonl", *({name: [7] * length} for length in (10, 30))))
    assert found.responses.mean == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_samples_are_tokenised(tmp_path: Path, name: str) -> None:
    found = read(rows(tmp_path / "a.jsonl", *({"prompt": "a b", name: "x " * length} for length in (10, 30))))
    assert found.responses.mean == pytest.approx(20, rel=0.02)


def test_samples_in_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "response_length": [10, 30]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").responses.mean == pytest.approx(20, rel=0.02)


def test_the_folder_of_a_run_and_of_its_samples(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for step in (1, 2):
        rows(
            tmp_path / "samples" / f"step_{step}.jsonl", {"response_tokens": 10 * step}, {"response_tokens": 30 * step}
        )
    alone = read(tmp_path).responses.mean
    # Evaluations are of other prompts, at another temperature.
    rows(tmp_path / "samples" / "eval_000001.jsonl", {"response_tokens": 900})
    assert read(tmp_path).responses.mean == read(tmp_path / "samples").responses.mean == alone
    assert read(tmp_path).words == "4 samples of 2 files"
    assert read(tmp_path).responses.mean == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize("text", ["10\n20\n30\n", "tokens\n10\n20\n30\n", "10.0\n2e1\n\n30\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "lengths"])
def test_a_column_of_numbers(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name).responses.mean == pytest.approx(20, rel=0.02)


VERL = (
    "(TaskRunner pid=1) step:{step} - actor/pg_loss:0.01 - critic/score/mean:0.3 - response_length/mean:{mean} - "
    "response_length/max:512.0 - response_length/min:4.0 - response_length/clip_ratio:{cut} - "
    "response_length_non_aborted/mean:1.0 - prompt_length/mean:{prompt} - prompt_length/max:99.0 - timing_s/gen:74.0\n"
)
SLIME = (
    "(RolloutManager pid=2) rollout.py:1193 - perf {step}: {{'rollout/response_len/mean': {mean}, "
    "'rollout/response_len/median': 1.0, 'rollout/response_len/max': 512, 'rollout/truncated_ratio': {cut}}}\n"
)
TRL = "{{'loss': 0.1, 'completions/mean_length': {mean}, 'completions/max_length': 512.0, 'completions/clipped_ratio': {cut}}}\n"
STEPS = [{"step": 1, "mean": 150.0, "cut": 0.1, "prompt": 60.0}, {"step": 2, "mean": 250.0, "cut": 0.3, "prompt": 80.0}]


@pytest.mark.parametrize("line", [VERL, SLIME, TRL], ids=["verl", "slime", "trl"])
def test_a_console_log_of_a_peer(tmp_path: Path, line: str) -> None:
    log = tmp_path / "run.log"
    log.write_text("starting\n" + "".join(line.format(**step) + "other words\n" for step in STEPS))
    found = read(log)
    # The mean of both steps, of which a fifth was cut at 512; a limit of 1,000 lets these go on.
    assert found.words == "2 steps of metrics"
    assert float(np.mean(np.minimum(found.responses.grid, 512))) == pytest.approx(200, rel=0.03)
    assert float(np.mean(found.responses.grid >= 512)) == pytest.approx(0.2, abs=0.03)
    assert found.responses.mean > 210
    assert found.prompt_tokens == (70.0 if line is VERL else None)


def test_metrics_of_megarl_verl_and_trl_in_json(tmp_path: Path) -> None:
    megarl = [
        {"step": 1, "rollout/response_len_mean": 150.0, "rollout/prompt_len_mean": 60.0},
        {"step": 2, "rollout/response_len_mean": 250.0, "rollout/truncated": 0.0},
    ]
    found = read(rows(tmp_path / "metrics.jsonl", *megarl))
    assert found.responses.mean == pytest.approx(200, rel=0.01) and found.prompt_tokens == 60.0
    verl = [{"step": 1, "data": {"response_length/mean": 200.0, "timing_s/gen": 3}}]
    assert read(rows(tmp_path / "verl.jsonl", *verl)).responses.mean == pytest.approx(200, rel=0.01)
    state = {"epoch": 1.0, "log_history": [{"step": 1, "completions/mean_length": 200.0, "loss": 0.1}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state, indent=2))
    assert read(tmp_path / "trainer_state.json").responses.mean == pytest.approx(200, rel=0.01)


def test_metrics_of_a_long_run_are_read_in_time_that_grows_with_their_number(tmp_path: Path) -> None:
    row = json.dumps({"response_length/mean": 200.0} | {f"timing_s/{index}": 0.5 for index in range(50)})
    (tmp_path / "verl.jsonl").write_text(f"{row}\n" * 10_000)
    began = time.process_time()
    assert read(tmp_path / "verl.jsonl").responses.mean == pytest.approx(200, rel=0.01)
    assert time.process_time() - began < 5


def test_lengths_beyond_the_recipes_limit_are_cut(tmp_path: Path) -> None:
    found = read(rows(tmp_path / "a.jsonl", *({"response_tokens": length} for length in (500, 5000))))
    assert max(found.responses.values) == LIMIT
    (tmp_path / "run.log").write_text("response_length/mean:3000.0 - response_length/max:8192.0\n")
    assert read(tmp_path / "run.log").responses.mean <= LIMIT


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.jsonl", '{"prompt": "x", "reward": 1}\n', "none of these"),
        ("a.jsonl", "not json\n", "none of these"),
        ("a.txt", "[" * 100_000, "none of these"),
        ("a.txt", "10\ntwenty\n30\n", "none of these"),
        ("a.txt", "", "none of these"),
        ("a.log", "step:1 - actor/pg_loss:0.1\n", "none of these"),
        ("a.csv", "tokens,reward\n10,1\n", "none of these"),
        ("a.jsonl", '{"response_tokens": -3}\n', "-3 tokens"),
        ("a.txt", "0\n0\n", "no length above 0"),
        ("a.jsonl", '{"response_tokens": NaN}\n', "nan tokens"),
        ("a.jsonl", f'{{"response_tokens": 1{"0" * 400}}}\n', "inf tokens"),
        ("a.txt", f"1{'0' * 400}\n", "inf tokens"),
        ("a.log", "response_length/mean:500.0 - response_length/clip_ratio:7.0\n", "share of 7"),
        ("none.txt", None, "no file or folder"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(tmp_path: Path, name: str, text: str | None, part: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert part in str(caught.value)
    if part in ("none of these", "no file or folder"):
        assert all(word in str(caught.value) for word in ("response_tokens", METRICS[1].mean, "one number a line"))


def test_a_folder_without_samples_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder has no"):
        read(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="not text"):
        read(tmp_path / "a.bin")


def test_a_row_without_a_length_among_others_is_passed_over(tmp_path: Path) -> None:
    some = [{"failure": "x"}, {"response_tokens": 10}, {"failure": "x"}, {"response_tokens": 30}]
    for values in (some, some[1:]):
        assert read(rows(tmp_path / "a.jsonl", *values)).words == "2 samples"


def test_a_byte_order_mark_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("10\n30\n", encoding="utf-8-sig")
    assert read(tmp_path / "a.csv").words == "2 samples"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_counted_lengths_are_those_of_the_file(lengths: list[int]) -> None:
    found = counted(lengths, 4096)
    assert min(min(lengths), 4096) <= found.mean <= min(max(lengths), 4096) + 1e-9
    assert cut_lognormal(100.0, 0.0, 50.0).mean == 50.0
