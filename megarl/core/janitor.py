"""Leaves nothing behind: ends every process of a run and removes its shared memory, also after `kill -9` of the driver.

Every process of a run inherits `MEGARL_RUN_ID`. The driver starts one janitor, a small process in a session of its own,
which waits (on a pidfd, without polling) for the driver to end, and then cleans. After an orderly end it finds nothing.
Shared memory that outlives its processes is found by name: servers register their segments in the run's registry file.

Only processes of this user that carry the run's own id are ever signalled. What they have mapped of others stays: what was there
before the run, and what processes that are not the run's have mapped as well. Standard library only: it must start fast.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "MEGARL_RUN_ID"
SHARED_MEMORY = Path("/dev/shm")
ON_ITS_WAY = "sgl_shm_"  # how SGLang's names begin of what one process makes and another opens and removes
TRACKER_S = 3.0
# Beside the registry of shared memory: folders elsewhere; names and inodes of what was there before the run.
FOLDERS, BEFORE = "folders.txt", "before.txt"


@dataclass(frozen=True)
class Cleaned:
    """What a cleaning found and removed."""

    pids: tuple[int, ...]
    segments: tuple[str, ...]


def processes_of(run_id: str, *, but: Iterable[int] = ()) -> list[int]:
    """Pids of this user's processes that were started with this run's id in their environment; zombies are not counted."""
    return processes_with(RUN_ID_VARIABLE, run_id, but=but)


def processes_with(variable: str, value: str, *, but: Iterable[int] = ()) -> list[int]:
    """Pids of this user's other processes that were started with this variable in their environment; no zombies."""
    mark = f"{variable}={value}".encode()
    spared = {os.getpid(), *but}
    found = []
    for pid in everybody():
        if pid in spared:
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is another user's
        if mark in environment.split(b"\0"):
            found.append(pid)
    return found


def everybody() -> Iterator[int]:
    """Pids of all processes that this one sees."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def stat_of(pid: int) -> list[str]:
    """Of `/proc/PID/stat`, from the third on: state, parent, group and so on. Raises OSError where there is no such process."""
    # The name of the program, in brackets, may itself hold spaces and brackets, and half of a character at its end.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def segments_of(pids: Iterable[int]) -> set[str]:
    """Names under /dev/shm of what these processes have mapped.

    Told by inode: the C library makes a semaphore under a passing name, links the lasting one to it and removes the
    first, so that a process's map shows a deleted file where there is one.
    """
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        for line in maps.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                inodes.add(int(fields[4]))
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if entry.inode() in inodes}


def segments_by(pids: Iterable[int]) -> set[str]:
    """Names under /dev/shm of what these processes made for others, who may not have opened it yet.

    SGLang has squares of images on their way there: sgl_shm_<what>_<pid>_<random>.
    """
    makers = {str(pid) for pid in pids}
    parts = {name: name.split("_") for name in os.listdir(SHARED_MEMORY) if name.startswith(ON_ITS_WAY)}
    return {name for name, each in parts.items() if each[-2] in makers}


def mapped_elsewhere(run_id: str, *, but: Iterable[int] = ()) -> set[str]:
    """Names under /dev/shm of what processes have mapped that are neither this run's, nor this one, nor those named."""
    run = {os.getpid(), *but, *processes_of(run_id)}
    return segments_of(pid for pid in everybody() if pid not in run)


def _there() -> dict[str, str]:
    """What is under /dev/shm, by name, with its inode: another of the same name is another."""
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: f"{entry.inode()} {entry.name}" for entry in entries}


def register_segments(registry: Path, names: Iterable[str]) -> None:
    """Append names under /dev/shm to the registry: they are removed when the run ends, however it ends."""
    _append(registry, names)


def register_folder(registry: Path, folder: Path) -> None:
    """Have a folder of the run, wherever it is, removed when the run ends, however it ends. registry: beside the list of them."""
    _append(registry.with_name(FOLDERS), [str(folder.absolute())])


def _append(file: Path, lines: Iterable[str]) -> None:
    # Machines remove what lies in their temporary folder for days; the run's is removed in the end all the same.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(f"{line}\n" for line in lines)


def clean(run_id: str, registry: Path, *, folders: Iterable[Path] = (), but: Iterable[int] = ()) -> Cleaned:
    """Kill what is left of the run, remove its shared memory and its temporary folders; returns what was found.

    but: pids to spare (the driver itself). Takes at most a few seconds: SIGKILL cannot be refused.
    """
    names = _lines(registry)
    killed: set[int] = set()
    deadline = time.monotonic() + 8
    while pids := processes_of(run_id, but=but):
        if found := segments_of(pids) - names:
            names |= found - mapped_elsewhere(run_id, but=but)
        kill_all(pids)
        killed.update(pids)
        if time.monotonic() > deadline:
            break
    return Cleaned(tuple(sorted(killed)), remove(registry, folders, names | segments_by(killed)))


def remove(registry: Path, folders: Iterable[Path], names: Iterable[str] = ()) -> tuple[str, ...]:
    """Remove these folders, and what the registry has, of a run without processes; the names of shared memory that was there.

    names: of more shared memory than the registry has.
    """
    more, others = [Path(line) for line in _lines(registry.with_name(FOLDERS))], _lines(registry.with_name(BEFORE))
    removed, there = [], _there()
    for name in sorted(name for name in {*names, *_lines(registry)} if there.get(name) not in others):
        segment = SHARED_MEMORY / name
        if segment.is_file() and segment.resolve().is_relative_to(SHARED_MEMORY):
            segment.unlink(missing_ok=True)
            removed.append(name)
    for folder in (*folders, *more):
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(removed)


def _lines(file: Path) -> set[str]:
    return set(file.read_text(errors="surrogateescape").split("\n")) - {""} if file.exists() else set()


def start(
    run_id: str, registry: Path, *, folders: Iterable[Path] = (), detached: bool = False
) -> subprocess.Popen[bytes]:
    """Start the janitor of this process's run, in a session of its own, so that no signal to the run's group reaches it.

    No process of the run has made shared memory by then: what is there is somebody else's.

    detached: it is no child of this process either, for whoever's children are ended together with it (a Ray worker's).
    """
    registry.with_name(BEFORE).write_text("\n".join(_there().values()), errors="surrogateescape")
    environment = {key: value for key, value in os.environ.items() if key != RUN_ID_VARIABLE}
    command = [sys.executable, "-m", __name__, "--pid", str(os.getpid()), "--run-id", run_id]
    command += ["--registry", str(registry.resolve())]
    for folder in folders:
        command += ["--folder", str(folder)]
    process = subprocess.Popen(
        [*command, "--detach"] if detached else command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if detached:
        process.wait()
    return process


def kill_all(pids: Iterable[int], raylet_s: float = 2.0) -> None:
    """SIGKILL processes and wait for their end; Ray's raylets come first, and Python's resource trackers last.

    A raylet ends its agents where it is told to end, and they carry no run's id: alone they would stay for a minute and more.
    Where it has not come to that within `raylet_s`, as on a busy machine, they are killed with it.
    A tracker removes the named semaphores and shared memory of the processes that it served as soon as they have ended,
    and then ends by itself: names that no process has mapped any more are known to it alone. It gets TRACKER_S.
    """
    pids = list(pids)
    raylets = [pid for pid in pids if _runs(pid, b"/raylet\0")]
    agents = _children(raylets, but=pids)
    for pid in raylets:
        _kill(pid, signal.SIGTERM)
    await_exit(raylets, raylet_s)
    for handle in agents:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    trackers = [pid for pid in pids if _runs(pid, b"multiprocessing.resource_tracker")]
    others = [pid for pid in pids if pid not in trackers]
    for pid in others:
        _kill(pid)
    await_exit(others, 1.0)
    await_exit(trackers, TRACKER_S)
    for pid in trackers:
        _kill(pid)
    await_exit(trackers, 1.0)


def _children(parents: Collection[int], *, but: Collection[int]) -> list[int]:
    """Pidfds of the children of these processes, which lose their parent with them."""
    found = []
    for pid in everybody() if parents else ():
        with suppress(OSError):  # it ended meanwhile
            if pid not in but and int(stat_of(pid)[1]) in parents:
                found.append(os.pidfd_open(pid))
    return found


def _runs(pid: int, words: bytes) -> bool:
    try:
        return words in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it ended meanwhile


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile


def await_exit(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until all of these have ended, or until the time is over."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable(handle, max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)


def readable(handle: int, timeout_s: float | None = None) -> bool:
    """Wait until there is something to read, or the process of a pidfd has ended; whether that came about.

    Whatever the handle's number: `select` takes none over 1,023, and a driver of many processes has more.
    """
    watched = select.poll()
    watched.register(handle, select.POLLIN)
    return bool(watched.poll(None if timeout_s is None else timeout_s * 1000))


def main() -> None:
    """Wait for the driver to end, then clean; the entry point of the janitor's own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--registry", type=Path, required=True)
    parser.add_argument("--folder", type=Path, action="append", default=[])
    parser.add_argument("--detach", action="store_true")
    options = parser.parse_args()
    if options.detach and os.fork():
        return
    try:
        handle = os.pidfd_open(options.pid)
    except ProcessLookupError:
        handle = None  # the driver has already ended
    if handle is not None:
        readable(handle)
    clean(options.run_id, options.registry, folders=options.folder)


if __name__ == "__main__":
    main()
