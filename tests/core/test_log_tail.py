"""What a process said last of its own is kept; what libraries always say, and what only comes of the ending, is not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megarl.core import log_tail
from megarl.core.log_tail import last_lines, lines_with, own_words

# As the logs of real runs have them.
NOISE = """\
/venv/megatron/core/optimizer/clip_grads.py:29: UserWarning: Transformer Engine and Apex are not installed.
  warnings.warn(
/venv/torch/distributed/c10d_logger.py:83: FutureWarning: `torch.distributed.all_gather_into_tensor` is deprecated.
  return func(*args, **kwargs)
[2026-11-22 15:27:59] Ignore import error when loading sglang.srt.models.mamba: No module named 'vllm'
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 238.07it/s]
[2026-11-22 15:28:01] WARNING:  Invalid HTTP request received.
[W1122 15:28:01.201 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to [localhost]:29500
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
/venv/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphores
  warnings.warn('resource_tracker: There appear to be %d '
"""
ENDING = """\
Traceback (most recent call last):
  File "/venv/sglang/srt/entrypoints/http_server.py", line 2440, in _freeze_gc_after_server_warmup
    res = requests.post(
          ^^^^^^^^^^^^^^
requests.exceptions.ConnectionError: HTTPConnectionPool(port=24042): Max retries exceeded with url: /health

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/venv/requests/adapters.py", line 729, in send
    raise ConnectionError(e, request=request)
requests.exceptions.ConnectionError: HTTPConnectionPool(port=24042): Max retries exceeded with url: /freeze_gc
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 271, in __del__
    self._change_notifier.put(None)
OSError: [Errno 9] Bad file descriptor
Traceback (most recent call last):
  File "/venv/server.py", line 3, in <module>
    run()
KeyboardInterrupt
"""
FAULT = """\
[2026-11-22 15:30:16] Scheduler hit an exception: Traceback (most recent call last):
  File "/venv/sglang/srt/managers/scheduler.py", line 5953, in _dispatch_event_loop_once
    scheduler.event_loop_normal()
AssertionError: Cache flush failed after updating weights
"""


def test_the_fault_is_kept_and_what_is_around_it_is_not(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text(f"loading\n{NOISE}{FAULT}\n{ENDING}{NOISE}Fatal Python error: Segmentation fault\n")
    assert own_words(log) == "loading\n" + FAULT + "Fatal Python error: Segmentation fault"
    assert (
        own_words(log, 2)
        == "AssertionError: Cache flush failed after updating weights\nFatal Python error: Segmentation fault"
    )


def test_a_trace_chained_to_another_stays_whole(tmp_path: Path) -> None:
    chained = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'x'\n"
    second = 'Traceback (most recent call last):\n  File "b.py", line 2, in g\nValueError: no x\n'
    middle = "The above exception was the direct cause of the following exception:\n"
    log = tmp_path / "log"
    log.write_text(f"{chained}\n{middle}\n{second}")
    assert own_words(log) == (chained + middle + second).rstrip()


# Of a server whose scheduler failed as it started: the process that waited for it speaks last.
WAITED = """\
[2026-11-29 08:41:35] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/venv/sglang/srt/entrypoints/engine.py", line 1922, in _wait_for_scheduler_ready
    data = scheduler_pipe_readers[i].recv()
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/venv/sglang/srt/entrypoints/engine.py", line 953, in wait_for_ready
    infos = _wait_for_scheduler_ready(scheduler_pipe_readers, scheduler_procs)
  File "/venv/sglang/srt/entrypoints/engine.py", line 1924, in _wait_for_scheduler_ready
    raise _scheduler_died_error(i, scheduler_procs[i])
RuntimeError: Rank 0 scheduler died (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.
"""


UNCAUGHT = """\
Process Process-1:
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
RuntimeError: opentelemetry package is not installed!!!
"""


@pytest.mark.parametrize("fault", [FAULT, UNCAUGHT])
def test_who_waited_for_a_process_that_told_why_it_ends_says_nothing(tmp_path: Path, fault: str) -> None:
    log = tmp_path / "server_0.log"
    log.write_text(f"{NOISE}{fault}{WAITED}")
    assert own_words(log) == fault + WAITED.splitlines()[0]
    # One that is killed tells nothing, and how it was ended is all that there is.
    log.write_text(f"{NOISE}{WAITED}")
    assert own_words(log, 1) == WAITED.splitlines()[-1]


@pytest.mark.parametrize("said", ["7", "[1] a:1: ", "[W1122 1 1"])
def test_a_line_that_a_model_has_filled_is_read_as_fast_as_others(tmp_path: Path, said: str) -> None:
    """It took minutes to hours, just when somebody wanted to know what had failed."""
    log = tmp_path / "log"
    line = said * (200_000 // len(said)) if said[-1] != "1" else said + " 1" * 100_000
    log.write_text(f"{line}\nValueError: no x\n")
    began = time.process_time()
    assert own_words(log) == f"{line}\nValueError: no x"
    assert time.process_time() - began < 2


def test_a_trace_of_a_thousand_attempts_is_read_to_its_end(tmp_path: Path) -> None:
    attempt = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: no answer\n'
    middle = "During handling of the above exception, another exception occurred:\n"
    log = tmp_path / "log"
    log.write_text(f"{attempt}\n{middle}\n" * 1200 + attempt + "after\n")
    assert own_words(log, 2) == "OSError: no answer\nafter"


def test_a_word_where_there_is_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    assert own_words(log) == last_lines(log, 3) == "(no rank_0.log)"
    log.touch()
    assert own_words(log) == last_lines(log, 3) == "(rank_0.log is empty)"
    log.write_text(NOISE)
    assert own_words(log) == f"(only warnings of libraries and the like, {len(NOISE.splitlines())} lines)"
    assert last_lines(log, 1) == NOISE.splitlines()[-1]


def test_a_long_log_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "READ_BYTES", 100)
    log = tmp_path / "log"
    log.write_text("".join(f"line {index}\n" for index in range(1000)))
    assert own_words(log, 50).splitlines() == [f"line {index}" for index in range(989, 1000)]


def test_lines_that_are_looked_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert lines_with(log, re.compile("no")) == []
    log.write_text("yes 1\nno\nyes 2\nno\nyes 3\n")
    assert lines_with(log, re.compile("^yes"), 2) == ["yes 2", "yes 3"]
