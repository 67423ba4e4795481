"""A local Ray for one run: started with a secret, on a temporary folder of its own, and ended with everything in it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import ray

from megarl.core import janitor
from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.core.platform import Platform

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass
class Runtime:
    """What every process of the run needs to know. Use as a context manager: leaving it leaves nothing behind.

    folder: the run's folder. run_id: marks every process of the run. api_key: the servers' and the router's.
    """

    platform: Platform
    folder: Path
    run_id: str
    api_key: str
    temp: Path
    guard: subprocess.Popen[bytes]

    @property
    def logs(self) -> Path:
        """Folder of the log of every process."""
        return self.folder / "logs"

    @property
    def registry(self) -> Path:
        """File with the names of shared memory to remove when the run ends."""
        return self.folder / "shared_memory.txt"

    @classmethod
    def start(cls, platform: Platform, folder: Path, num_devices: int) -> Runtime:
        """Start Ray on this machine with `num_devices` of the platform's resource, and the janitor that outlives it.

        Raises MegarlError when Ray does not start; nothing is left behind then.
        """
        run_id = secrets.token_hex(8)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        # Ray's sockets live here and their paths must stay short.
        temp = Path(tempfile.mkdtemp(prefix="megarl-"))
        os.environ.update(platform.env)
        os.environ[janitor.RUN_ID_VARIABLE] = run_id
        registry = folder / "shared_memory.txt"
        registry.unlink(missing_ok=True)
        log.info("run id %s: every process of the run carries it as %s", run_id, janitor.RUN_ID_VARIABLE)
        guard = janitor.start(run_id, registry, folders=[temp])
        runtime = cls(platform, folder, run_id, secrets.token_hex(32), temp, guard)
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, 1),
                # GPUs are a resource that Ray finds by itself; virtual CPU devices are not.
                resources={} if platform.ray_resource == "GPU" else {platform.ray_resource: float(num_devices)},
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(temp),
                _node_ip_address=LOOPBACK,
                namespace=run_id,
            )
        except Exception as error:
            runtime.close()
            raise MegarlError(f"Ray did not start on this machine: {error}") from error
        finally:
            # Ray puts a handler of its own there, which ends the process with an exit code of its own.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_terminate)
        return runtime

    def close(self) -> None:
        """End Ray and every process of the run; remove its shared memory and temporary files."""
        if ray.is_initialized():
            ray.shutdown()
        cleaned = janitor.clean(self.run_id, self.registry, but=[self.guard.pid])
        if cleaned.pids:
            log.info("ended %d processes that were still there", len(cleaned.pids))
        shutil.rmtree(self.temp, ignore_errors=True)
        os.environ.pop(janitor.RUN_ID_VARIABLE, None)
        self.guard.kill()
        self.guard.wait()
        self.registry.unlink(missing_ok=True)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
