"""What a rank waits for: its last collectives, from torch's flight recorder, written down when a signal asks for them.

A rank that waits in a collective runs no Python in its main thread; a thread of its own answers. The recorders are torch's own,
one for gloo and one for NCCL, and always on; NCCL was never run. This module imports torch only where it answers: the driver
reads here what to ask with.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ASK_SIGNAL = signal.SIGUSR2
MOST = 4  # collectives that are told


def answer(file: Path) -> None:
    """From now on, write the last collectives to this file whenever ASK_SIGNAL arrives. For the main thread; once a process.

    The file is there as soon as this process answers.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Python's own handler would run in the main thread; the byte in the pipe is written at once, whatever that thread does.
    signal.signal(ASK_SIGNAL, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_answer, args=(read, file), daemon=True, name="collectives").start()
    file.write_text("")


def _answer(read: int, file: Path) -> None:
    recorder: Any = importlib.import_module("torch._C._distributed_c10d")  # its stubs leave the recorder out
    while True:
        if ASK_SIGNAL in os.read(read, 64):
            file.write_text("\n".join(told(recorded(recorder), time.time_ns())) + "\n")


def recorded(recorder: Any) -> list[dict[str, Any]]:
    """What both recorders have, oldest first. recorder: torch's module, which lacks NCCL's where torch was built without."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(recorder, name, None):
            found += json.loads(dump()).get("entries", [])
    return sorted(found, key=lambda entry: int(entry["time_created_ns"]))


def told(entries: Sequence[Mapping[str, Any]], now_ns: int) -> list[str]:
    """Lines on the last collectives, newest last; those that have not ended come at the end, whatever came after them.

    entries: of the recorder, oldest first. now_ns: since 1970.
    """
    ordered = [*(each for each in entries if _ended(each)), *(each for each in entries if not _ended(each))]
    return [_line(each, now_ns) for each in ordered[-MOST:]] or ["no collective so far"]


def _ended(entry: Mapping[str, Any]) -> bool:
    # Gloo's works are retired as they end, and keep their state.
    return bool(entry["retired"]) or entry["state"] == "completed"


def _line(entry: Mapping[str, Any], now_ns: int) -> str:
    number, name = entry["process_group"]
    group = f"group {number}" if name in ("", "undefined") else f"group {number} ({name})"
    types = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    what = ", ".join(f"{dtype} {size}" for dtype, size in types)
    ago = (now_ns - int(entry["time_created_ns"])) / 1e9
    ended = "ended" if _ended(entry) else "not ended"
    return (
        f"{entry['profiling_name']} of {what or 'nothing'}, number {entry['collective_seq_id']} in {group}, begun {ago:.0f} s "
        f"ago, {ended}"
    )
