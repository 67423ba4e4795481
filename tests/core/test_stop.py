"""The request to stop, sent as a scheduler does."""

from __future__ import annotations

import os
import signal

from megarl.core.stop import STOP_SIGNAL, StopRequest


def test_the_signal_asks_and_the_handler_before_comes_back() -> None:
    before = signal.getsignal(STOP_SIGNAL)
    with StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), STOP_SIGNAL)
        assert stop.asked
    assert signal.getsignal(STOP_SIGNAL) == before
