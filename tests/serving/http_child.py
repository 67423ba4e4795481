"""A small HTTP process to supervise: `http_child.py PORT [FLAG...]`. Prints the secret's length, never the secret.

Flags: die (exit 3 at once), signal=NUMBER (sent to itself), name (call itself by half a character), silent (listen, never
answer), child (start a child that ignores SIGTERM), stubborn (ignore
SIGTERM), segment=NAME (hold shared memory of that name), semaphore (hold one of multiprocessing's).
"""

from __future__ import annotations

import http.server
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def hold_segment(name: str) -> mmap.mmap:
    """Make and map a segment."""
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def main() -> None:
    port, flags = int(sys.argv[1]), sys.argv[2:]
    print(f"secret of {len(sys.stdin.readline().strip())} characters", flush=True)
    if "die" in flags:
        print("died on purpose", flush=True)
        sys.exit(3)
    for flag in flags:
        if flag.startswith("signal="):
            os.kill(os.getpid(), int(flag.partition("=")[2]))
    if "name" in flags:
        Path("/proc/self/comm").write_bytes(b"caf\xc3")
    if "stubborn" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    segments = [hold_segment(flag.partition("=")[2]) for flag in flags if flag.startswith("segment=")]
    semaphore = multiprocessing.get_context("spawn").Semaphore() if "semaphore" in flags else None
    if "child" in flags:
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    print(f"pid {os.getpid()}, {len(segments)} segments, {semaphore}", flush=True)
    if "silent" in flags:
        time.sleep(600)
    server.serve_forever()


if __name__ == "__main__":
    main()
