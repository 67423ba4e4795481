"""Sandboxes for the tool `python`: started when the first program comes, and again where their keeper has died."""

from __future__ import annotations

import asyncio

from megarl.core.errors import UserError, WorkerDiedError
from megarl.core.log import get_logger
from megarl.sandbox.job import Limits, Result
from megarl.sandbox.pool import SandboxPool

log = get_logger(__name__)


class ToolSandboxes:
    """What PythonTool asks. timeout_s: of one program, wall-clock and CPU."""

    def __init__(self, timeout_s: float) -> None:
        self._limits = Limits(timeout_s=timeout_s, cpu_s=timeout_s)
        self._pool: SandboxPool | None = None
        self._starting = asyncio.Lock()

    async def run(self, code: str) -> Result:
        """Run a program. Raises as SandboxPool does; where the keeper has died, the next call starts another."""
        pool = await self._started()
        try:
            return await pool.run(code)
        except WorkerDiedError as error:
            log.warning("%s; the next call starts another", error)
            if self._pool is pool:
                await self.close()
            raise

    async def close(self) -> None:
        """End all sandboxes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _started(self) -> SandboxPool:
        async with self._starting:
            if self._pool is None:
                pool = SandboxPool(self._limits)
                await pool.start()
                self._pool = pool
            return self._pool


def check_sandboxes(timeout_s: float, key: str) -> None:
    """Raises UserError where this machine makes no sandboxes, and what to do. Starts one. key: for messages."""

    async def once() -> None:
        async with SandboxPool(Limits(timeout_s=timeout_s, cpu_s=timeout_s), size=1):
            return

    try:
        asyncio.run(once())
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
