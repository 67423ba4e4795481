"""The console: plain lines where there is no terminal, a bar where there is one, and the final table."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from megarl.core.progress import Done
from megarl.core.timing import PhaseTimer
from megarl.report import console as console_module
from megarl.report.console import Output, RunConsole

STEP = {
    "reward/mean": 0.5,
    "actor/approx_kl": 1e-3,
    "rollout/response_len_mean": 20.0,
    "actor/grad_norm": 0.25,
    "perf/tokens_per_s": 1000.0,
    "perf/step_s": 4.0,
    "perf/rollout_s": 3.0,
    "perf/update_s": 0.9,
    "perf/advantages_s": 0.01,
}


def console(terminal: bool = False, steps: int = 10) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole("demo", steps, Console(file=out, force_terminal=terminal, width=100)), out


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_a_step_is_one_line() -> None:
    run, out = console()
    with run:
        run.step(1, STEP)
    (line,) = lines(out)
    assert " ".join(line.split()) == (
        "1/10 reward 0.500 kl 1.00e-03 len 20.0 grad 0.25 tok/s 1000 4.00 s (rollout 3.0 update 0.9) left 36.0 s"
    )


def test_what_a_model_wrote_moves_no_cursor() -> None:
    run, out = console(steps=1)
    with run:
        run.step(1, STEP, "the first: ValueError: no answer in \x1b[2J\x1b]0;mine\x07 \u202eevil")
    (line,) = lines(out)
    assert line.endswith(r"ValueError: no answer in \x1b[2J\x1b]0;mine\x07 \u202eevil")


def test_a_run_goes_on_where_nobody_reads_what_it_prints_any_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        run = RunConsole("demo", 10, Output(file=out, width=100))
        with run:
            run.step(1, STEP)
            run.step(2, STEP)
        print("what else is printed goes nowhere, too", file=out, flush=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_goes_on_where_its_output_can_be_written_no_more(
    terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") if terminal else open("/dev/full", "w", encoding="utf-8") as out:
        os.close(master)  # the terminal is closed, and the run was not ended with it
        run = RunConsole("demo", 10, Output(file=out, width=100, force_terminal=terminal))
        with run:
            run.step(1, STEP)
            run.step(2, STEP)
        print("what else is printed goes nowhere, too", file=out, flush=True)
    (told,) = {record.getMessage() for record in caplog.records}
    why = "Input/output error" if terminal else "No space left on device"
    assert told == f"the output cannot be written any more ({why}): the run goes on without it"


def test_a_step_whose_every_gradient_was_left_out_has_no_norm() -> None:
    run, out = console()
    with run:
        run.step(1, STEP)
        run.step(
            2, {name: value for name, value in STEP.items() if name != "actor/grad_norm"} | {"actor/skipped_steps": 2}
        )
    first, second = lines(out)
    assert "grad" in first and "grad" not in second
    assert first.index("tok/s") == second.index("tok/s")


def test_time_left_is_the_mean_of_the_steps_done_here() -> None:
    run, out = console(steps=100)
    with run:
        run.step(41, STEP | {"perf/step_s": 2.0})
        run.step(42, STEP | {"perf/step_s": 4.0})
    assert lines(out)[0].endswith("left 1:58") and lines(out)[1].endswith("left 2:54")


@pytest.mark.parametrize("step_s", [1800.0, 7200.0])
def test_a_terminal_shows_the_time_left_also_of_long_steps(step_s: float) -> None:
    out = Console(force_terminal=True, width=200, file=io.StringIO())
    console = RunConsole("run", 100, out)
    now = [0.0]
    console._progress.get_time = lambda: now[0]
    console.phase(1, "rollout")
    for step in range(1, 4):
        now[0] += step_s
        console.step(step, {"perf/step_s": step_s})
    assert console._progress.tasks[0].time_remaining == 97 * step_s


def test_the_loss_on_the_reference_is_shown_before_the_updates_kl() -> None:
    run, out = console()
    with run:
        run.step(1, STEP | {"actor/kl_loss": 0.02})
    assert "kl 2.00e-02" in out.getvalue() and "1.00e-03" not in out.getvalue()


def test_columns_stay_columns_when_a_value_comes_and_goes() -> None:
    run, out = console()
    with run:
        for step in (0, 1, 2):
            run.step(
                step, {"eval/accuracy": 0.25} if step == 0 else STEP | ({"eval/accuracy": 0.5} if step == 2 else {})
            )
    assert "acc 0.250" in lines(out)[0] and "left" not in lines(out)[0]
    assert lines(out)[1].index("kl") == lines(out)[2].index("kl")


def test_quick_steps_share_a_line() -> None:
    run, out = console()
    with run:
        for step in range(1, 11):
            evaluated = {"rm/eval_accuracy": 0.5, "perf/eval_s": 0.1} if step == 7 else {}
            run.step(step, {"rm/loss": 1.0, "perf/step_s": 0.25} | evaluated)
    # The first, every fourth from there, the evaluated one, and the last.
    assert [int(line.split("/")[0]) for line in lines(out)] == [1, 5, 7, 10]
    assert "acc 0.500" in lines(out)[2]


def test_samples_that_failed_are_at_the_end_of_their_line_also_where_quick_steps_share_one() -> None:
    run, out = console()
    with run:
        for step in range(1, 6):
            failure = f"{step} of 9 samples failed; the first: grader math:\n timeout" if step in (3, 4) else ""
            run.step(step, {"reward/mean": 1.0, "perf/step_s": 0.25}, failure)
        run.step(6, {"reward/mean": 1.0, "perf/step_s": 4.0})
    first, shared, last = lines(out)
    assert shared.endswith("left 1.2 s  at step 3, 3 of 9 samples failed; the first: grader math: timeout")
    assert "failed" not in first + last


def test_a_supervised_step_shows_its_loss() -> None:
    run, out = console()
    with run:
        run.step(3, {"sft/loss": 1.25, "actor/grad_norm": 2.0, "perf/step_s": 1.0})
    assert "loss 1.2500" in out.getvalue() and "reward" not in out.getvalue()


def test_without_a_terminal_only_what_is_outside_of_steps_is_announced() -> None:
    run, out = console()
    timer = PhaseTimer(on_phase=run.phase)
    with run:
        with timer.phase("start"):
            pass
        with timer.step(1), timer.phase("update"):
            pass
    assert lines(out) == ["start begins (servers and ranks started, models loaded)"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_phase_is_seen_while_it_runs() -> None:
    run, out = console(terminal=True)
    with run:
        run.phase(5, "rollout")
        run._progress.refresh()
        assert "rollout" in out.getvalue() and "4/10" in out.getvalue()
        run.step(5, STEP)
        run._progress.refresh()
        assert "5/10" in out.getvalue()


def test_the_terminal_is_restored_after_an_error() -> None:
    run, out = console(terminal=True)
    with pytest.raises(RuntimeError), run:
        run.phase(1, "update")
        raise RuntimeError
    shows_cursor, hides_cursor = "\x1b[?25h", "\x1b[?25l"
    assert out.getvalue().rfind(shows_cursor) > out.getvalue().rfind(hides_cursor) >= 0


def test_final_table(tmp_path: Path) -> None:
    now = [0.0]
    run, out = console()
    timer = PhaseTimer(clock=lambda: now[0])
    with timer.phase("start"):
        now[0] += 30
    with timer.step(1), timer.phase("rollout"):
        now[0] += 60
    now[0] += 10
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {
            "step": 1,
            "reward/mean": 0.3,
            "perf/tokens_per_s": 1000,
            "perf/step_s": 1.0,
            "rollout/logprob_diff_max": 3e-6,
        },
        {
            "step": 2,
            "reward/mean": 0.9,
            "perf/tokens_per_s": 2000,
            "perf/step_s": 3.0,
            "rollout/logprob_diff_max": 2e-6,
        },
        {"step": 2, "eval/accuracy": 0.95, "reward/failures": 3.0, "rollout/failed": 0.0},
        {"step": 3, "reward/failures": 2.0, "eval/failures": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with run:
        run.step(2, {}, "3 of 9 samples failed; the first: [grader] timeout")
        run.finish(timer, file, export=Path("runs/demo/hf"), curve=Path("runs/demo/curve.png"))
    table = [line.split() for line in lines(out)]
    assert ["reward", "0.300", "0.900"] in table
    assert ["held-out", "accuracy", "0.250", "0.950"] in table
    # Weighted by seconds: (1000 * 1 + 2000 * 3) / 4.
    assert ["whole", "step,", "tokens/s", "1,750"] in table
    assert any(line[:2] == ["rollout", "against"] and line[-1] == "3.0e-06" for line in table)
    assert ["start", "30.0", "s", "30.0%"] in table
    assert ["rollout", "1:00", "60.0%"] in table
    assert ["other", "10.0", "s", "10.0%"] in table
    assert ["all", "1:40"] in table
    assert ["samples", "without", "a", "grade,", "all", "steps", "5"] in table
    assert ["held-out", "samples", "without", "a", "grade,", "all", "steps", "1"] in table
    assert "no server answered" not in out.getvalue()
    assert "failures at step 2, 3 of 9 samples failed; the first: [grader] timeout" in out.getvalue()
    assert "runs/demo/hf" in out.getvalue() and "runs/demo/curve.png" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_phase_shows_how_far_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    run, out = console(terminal)
    with run:
        run.phase(3, "rollout")
        now[0] += 30
        run.progress(Done(0, 400, "samples"))
        now[0] += 60
        run.progress(Done(100, 400, "samples"))
        run.progress(Done(101, 400, "samples"))
        if terminal:
            run._progress.refresh()
    text = " ".join(out.getvalue().split())
    assert (
        "rollout: 101 of 400 samples" in text if terminal else "step 3, rollout: 100 of 400 samples, 4:30 left" in text
    )
    assert terminal or text.count("samples") == 1  # a line a minute, not one a look


def test_what_was_done_before_a_phase_does_not_make_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes samples of older weights begins with nearly all of its own."""
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    run, out = console()
    with run:
        run.phase(3, "rollout")
        run.progress(Done(900, 1000, "samples"))
        now[0] += 60
        run.progress(Done(960, 1000, "samples"))
    assert "step 3, rollout: 960 of 1,000 samples, 40.0 s left" in " ".join(out.getvalue().split())
