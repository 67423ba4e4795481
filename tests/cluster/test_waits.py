"""Waits end: with results, with the first failure at once, or with a deadline that names who and shows where."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import ray

from megarl.cluster import look, waits
from megarl.cluster.checks import Broken, BrokenLinkError
from megarl.cluster.nodes import Nodes
from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.waits import Call, Pending, Waiter, Worker
from megarl.core.errors import DeadlineError, MegarlError, UserError, WorkerDiedError
from megarl.core.progress import Done, Progress
from megarl.core.timing import PhaseTimer
from tests.core.test_endings import TELLS

pytestmark = pytest.mark.slow

# Ray's workers cannot import test modules: what is defined here travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Helper:
    """An actor that can answer, hang, raise and be killed."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._facts = configure_process(spec)
        self._progress = Progress(spec.progress)

    def facts(self) -> ProcessFacts:
        return self._facts

    def answer(self, value: int) -> int:
        print("answering", value, flush=True)
        return value

    def hang_in_this_function(self) -> None:
        print("hanging", flush=True)
        time.sleep(600)

    def count_to_three(self, seconds: float) -> str:
        with self._progress.of(3, "samples"):
            for _ in range(3):
                time.sleep(seconds)
                self._progress.advance()
        return "done"

    def raise_user_error(self) -> None:
        raise UserError("the heads do not divide")

    def end_soon(self) -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def raise_bug(self) -> None:
        raise ZeroDivisionError("a bug")


@pytest.fixture(scope="module")
def started(runtime: Runtime) -> Iterator[dict[int, Worker]]:
    """Those that are there for the next test."""
    made: dict[int, Worker] = {}
    yield made
    for worker in made.values():
        ray.kill(worker.handle)


@pytest.fixture
def workers(runtime: Runtime, started: dict[int, Worker]) -> Iterator[list[Worker]]:
    """Two that are at nothing; a test may leave them dead, or at something."""
    for index in {0, 1} - started.keys():
        spec = ProcessSpec(f"helper {index} {time.time_ns()}", runtime.logs)
        handle = ray.remote(Helper).options(num_cpus=0).remote(spec)
        started[index] = Worker(handle, spec, ray.get(handle.facts.remote()))
    yield [started[index] for index in (0, 1)]
    for index, worker in list(started.items()):
        if not answers(worker):
            ray.kill(worker.handle)
            del started[index]


def answers(worker: Worker) -> bool:
    """Whether it is at nothing else."""
    try:
        return bool(ray.get(worker.handle.facts.remote(), timeout=0.5))
    except ray.exceptions.RayError:
        return False


@pytest.fixture
def waiter(runtime: Runtime) -> Waiter:
    return Waiter(PhaseTimer(), runtime.nodes)


def test_results_come_in_the_order_of_the_calls(workers: list[Worker], waiter: Waiter) -> None:
    calls = [Call(workers[index % 2], workers[index % 2].handle.answer.remote(index)) for index in range(6)]
    assert waiter.wait(calls, phase="answer", role="helpers", deadline_s=30) == list(range(6))
    assert "answering 5" in workers[1].spec.log.read_text()


def test_a_pending_operation_can_be_asked_whether_it_has_ended(workers: list[Worker], waiter: Waiter) -> None:
    counting, quick = workers
    calls = [
        Call(counting, counting.handle.count_to_three.remote(0.5)),
        Call(quick, quick.handle.answer.remote(1)),
    ]
    both: Pending[list[object]] = Pending(waiter, calls, "counting", "helper", 30, list)
    ray.wait([calls[1].result])
    assert both.poll() is None
    assert both.wait() == ["done", 1] == both.poll()
    failed = [Call(quick, quick.handle.raise_user_error.remote())]
    ray.wait([failed[0].result])
    with pytest.raises(UserError, match=r"counting \(helper\), helper 1"):
        Pending(waiter, failed, "counting", "helper", 30, list).poll()


def test_what_is_waited_for_says_how_far_it_is(workers: list[Worker], runtime: Runtime) -> None:
    seen: list[Done] = []
    waiter = Waiter(PhaseTimer(on_progress=seen.append), runtime.nodes)
    calls = [Call(workers[0], workers[0].handle.count_to_three.remote(2 * waits.LOOK_EVERY_S))]
    assert waiter.wait(calls, phase="rollout", role="rollout", deadline_s=60) == ["done"]
    assert seen and all(done.total == 3 for done in seen)
    slow = [Call(workers[0], workers[0].handle.count_to_three.remote(30.0))]
    with pytest.raises(DeadlineError, match="had done 0 of 3 samples"):
        waiter.wait(slow, phase="rollout", role="rollout", deadline_s=2)


def test_deadline_names_phase_role_and_rank_and_shows_the_stack(workers: list[Worker], waiter: Waiter) -> None:
    calls = [
        Call(workers[0], workers[0].handle.answer.remote(1)),
        Call(workers[1], workers[1].handle.hang_in_this_function.remote()),
    ]
    with pytest.raises(DeadlineError) as caught:
        waiter.wait(calls, phase="update", role="actor", deadline_s=1.5)
    message = str(caught.value)
    assert "update (actor) did not finish within 1.5 s" in message
    assert f"Still waiting for: {workers[1].name}." in message
    assert "hang_in_this_function" in message


def test_a_killed_worker_is_reported_while_another_hangs(workers: list[Worker], waiter: Waiter) -> None:
    calls = [
        Call(workers[0], workers[0].handle.hang_in_this_function.remote()),
        Call(workers[1], workers[1].handle.hang_in_this_function.remote()),
    ]
    waiter.deaths.watch(workers[1].facts)
    os.kill(workers[1].facts.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        waiter.wait(calls, phase="update", role="actor", deadline_s=60)
    assert time.monotonic() - started < 20
    how = r"It was ended by SIGKILL: somebody's kill -9.*" if TELLS else "It ended without a word: .*"
    name = re.escape(f"{workers[1].name} (pid {workers[1].facts.pid} on ")
    held = r"It held 0\.\d GB when it was last looked at\. Now \S+ of this machine's \S+ GB are free\."
    assert re.match(rf"{name}\S+ died during update \(actor\)\. {how}{held}\n--- end of ", str(caught.value))


def test_a_death_comes_before_what_its_peers_say_of_it(workers: list[Worker], waiter: Waiter) -> None:
    calls = [
        Call(workers[0], workers[0].handle.raise_bug.remote()),
        Call(workers[1], workers[1].handle.end_soon.remote()),
    ]
    with pytest.raises(WorkerDiedError, match=rf"{workers[1].name} \(pid {workers[1].facts.pid} on .*update \(actor\)"):
        waiter.wait(calls, phase="update", role="actor", deadline_s=60)


def test_errors_keep_their_kind_and_name_the_worker(workers: list[Worker], waiter: Waiter) -> None:
    with pytest.raises(UserError, match=rf"build \(actor\), {workers[0].name}: the heads do not divide"):
        waiter.wait(
            [Call(workers[0], workers[0].handle.raise_user_error.remote())], phase="build", role="actor", deadline_s=30
        )
    with pytest.raises(MegarlError, match="ZeroDivisionError: a bug") as caught:
        waiter.wait([Call(workers[0], workers[0].handle.raise_bug.remote())], phase="x", role="y", deadline_s=30)
    assert "in raise_bug" in str(caught.value)


def test_a_watched_process_that_ends_is_noticed_during_another_wait(workers: list[Worker], waiter: Waiter) -> None:
    seen: list[str] = []
    waiter.watches[workers[1].handle.hang_in_this_function.remote()] = seen.append
    os.kill(workers[1].facts.pid, signal.SIGKILL)
    with pytest.raises(DeadlineError):
        waiter.wait(
            [Call(workers[0], workers[0].handle.hang_in_this_function.remote())], phase="x", role="y", deadline_s=3
        )
    assert len(seen) == 1
    assert waiter.watches == {}


def test_what_is_followed_goes_on_during_another_wait(workers: list[Worker], waiter: Waiter) -> None:
    first, second = workers
    done: list[tuple[list[int], str]] = []

    def then(results: list[int], failure: str) -> None:
        """Goes on with another call, whose failure does not wait for what hangs beside it."""
        done.append((results, failure))
        if not failure:
            calls = [second.handle.hang_in_this_function.remote(), first.handle.raise_user_error.remote()]
            waiter.follow([Call(first, calls[0]), Call(second, calls[1])], then)

    waiter.follow([Call(each, each.handle.answer.remote(index)) for index, each in enumerate(workers)], then)
    waiter.until(lambda: len(done) == 2, "two ends", 30)
    assert done == [([0, 1], ""), ([], "the heads do not divide")]
    assert waiter.followed == {}
    with pytest.raises(DeadlineError, match="a third end did not come about within"):
        waiter.until(lambda: len(done) == 3, "a third end", 30)  # nothing can bring it about any more


def test_a_call_may_be_followed_and_waited_for_at_once(workers: list[Worker], waiter: Waiter) -> None:
    first, second = workers
    done: list[list[int]] = []
    call = Call(first, first.handle.answer.remote(7))
    waiter.follow([call], lambda results, failure: done.append(results))
    assert waiter.wait([call], phase="p", role="r", deadline_s=30) == [7]
    waiter.wait([Call(second, second.handle.answer.remote(8))], phase="p", role="r", deadline_s=30)
    waiter.until(lambda: bool(done), "an end", 30)
    assert done == [[7]] and waiter.followed == {}


def test_who_is_patient_hears_of_a_failure_once_all_have_ended(workers: list[Worker], waiter: Waiter) -> None:
    done: list[str] = []
    calls = [Call(workers[0], workers[0].handle.raise_user_error.remote())]
    calls.append(Call(workers[1], workers[1].handle.count_to_three.remote(0.1)))
    waiter.follow(calls, lambda results, failure: done.append(failure), patient=True)
    os.kill(workers[1].facts.pid, signal.SIGKILL)
    waiter.until(lambda: bool(done), "the end of both", 30)
    assert done == ["the heads do not divide"] and waiter.followed == {}


def test_a_stopped_process_is_called_so_and_its_stack_is_read_from_outside(
    workers: list[Worker], waiter: Waiter
) -> None:
    hanging = workers[1]
    call = Call(hanging, hanging.handle.hang_in_this_function.remote())
    while "hanging" not in hanging.spec.log.read_text():
        time.sleep(0.05)
    os.kill(hanging.facts.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError) as caught:
            waiter.wait([call], phase="update", role="actor", deadline_s=1)
    finally:
        os.kill(hanging.facts.pid, signal.SIGCONT)
    message = str(caught.value)
    # Not always first: tests beside this one may have run out of memory, which would be told before.
    assert re.search(rf"^Stopped, .*\(pid {hanging.facts.pid}, stopped by a signal\)", message, re.MULTILINE)
    assert "its own handler did not answer" in message and "hang_in_this_function" in message


def test_who_has_not_said_its_pid_gets_no_signal(workers: list[Worker], waiter: Waiter) -> None:
    """Pid 0 is the driver's own process group: it would stop the run."""
    unknown = Worker(workers[0].handle, workers[0].spec, ProcessFacts(0, "?"))
    heard: list[int] = []
    before = signal.signal(look.STACK_SIGNAL, lambda number, frame: heard.append(number))
    try:
        assert "has not said yet" in look.stacks_of(unknown.spec, unknown.facts, waiter.nodes)
    finally:
        signal.signal(look.STACK_SIGNAL, before)
    assert heard == []


class Cut(Nodes):
    """Nodes of which one link is broken."""

    def broken(self) -> list[Broken]:
        return [Broken("n1 (10.0.0.1)", "n2 (10.0.0.2)", "eth0", "no answer")]


LINK = r"n1 \(10\.0\.0\.1\) cannot reach n2 \(10\.0\.0\.2\) on interface eth0"


def test_a_wait_over_a_broken_link_ends_and_names_it(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LINKS_EVERY_S", 0.2)
    calls = [Call(workers[1], workers[1].handle.hang_in_this_function.remote())]
    with pytest.raises(BrokenLinkError, match=LINK) as caught:
        Waiter(PhaseTimer(), Cut()).wait(calls, phase="x", role="y", deadline_s=60)
    assert str(caught.value).count("cannot reach") == 1


def test_a_failure_is_explained_by_the_network(workers: list[Worker]) -> None:
    calls = [Call(workers[0], workers[0].handle.raise_bug.remote())]
    with pytest.raises(MegarlError, match=f"(?s){LINK}.*ZeroDivisionError"):
        Waiter(PhaseTimer(), Cut()).wait(calls, phase="x", role="y", deadline_s=60)
