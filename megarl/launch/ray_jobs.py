"""Jobs on a Ray cluster that runs already, by its own job API. Not for starting a cluster (node.py, launch/k8s).

Who may submit is the cluster's affair: where it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN have to be in
the environment, as for Ray's own commands.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.core.errors import MegarlError, UserError
from megarl.core.log import get_logger

# What Ray would pack beside the sources; it also leaves out what .gitignore names.
EXCLUDED = [".git", ".venv", "**/__pycache__"]
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
NOT_FOUND = 404
STOPPED_CODE = 143  # as a shell says it of a process that was told to end
ASK_EVERY_S = 5.0  # how often a log is asked for that cannot be followed: each time the whole of it comes

log = get_logger(__name__)


class TokenError(UserError):
    """The cluster is there, and does not answer who has not its token."""

    def __init__(self, address: str) -> None:
        given = "set, and another's" if os.environ.get("RAY_AUTH_TOKEN") else "not set"
        super().__init__(
            f"The Ray cluster at {address} wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (which is {given})."
        )


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """address: of its dashboard, http://HEAD:8265. Raises UserError where nothing answers, TokenError."""
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        self._address = address
        try:
            # It asks for the cluster's version.
            self._client: Any = JobSubmissionClient(address)
        except AuthenticationError as error:
            raise TokenError(address) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"The Ray cluster at {address} does not take jobs from here: {str(error).rstrip('.')}. Its dashboard has to "
                "be there (ray[default]), and to be reachable."
            ) from error

    def submit(self, entrypoint: str, working_dir: Path, name: str) -> str:
        """Pack the folder, send it and queue the command, which runs in it; returns the submission's id."""
        runtime_env = {"working_dir": str(working_dir), "excludes": EXCLUDED}
        try:
            return str(
                self._client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env, metadata={"megarl_run": name})
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"The Ray cluster at {self._address} refuses the job: {error}") from error

    def state(self, job: str) -> tuple[str, int | None]:
        """Ray's word for it, and the driver's exit code once there is one. Raises UserError for a job it does not know."""
        with self._asking(job):
            info = self._client.get_job_info(job)
        return str(info.status.value), info.driver_exit_code

    def follow(self, job: str, write: Callable[[str], object]) -> None:
        """Hand on what the job prints until it has ended.

        Proxies refuse a connection that stays open, or end one on which nothing is said for a minute, and Ray's own goes past
        those that the environment names: from there on, the log is asked for again and again, as everything else is.
        """
        shown = asyncio.run(self._tail(job, write))
        while True:
            ended = self.state(job)[0] in ENDED  # asked first, so that nothing is said after the log
            text = self.logs(job)
            if len(text) > shown:
                write(text[shown:])
                shown = len(text)
            if ended:
                return
            time.sleep(ASK_EVERY_S)

    async def _tail(self, job: str, write: Callable[[str], object]) -> int:
        """Hand on what the job prints for as long as one connection lasts; how many characters that were."""
        from aiohttp import ClientError

        shown = 0
        try:
            async for text in self._client.tail_job_logs(job):
                write(text)
                shown += len(text)
        except (RuntimeError, TimeoutError, ClientError) as error:
            log.info("the log of job %s cannot be followed any more: %s", job, error)
        return shown

    def logs(self, job: str) -> str:
        """What the job has printed so far."""
        with self._asking(job):
            return str(self._client.get_job_logs(job))

    def exit_code(self, job: str) -> int:
        """Of a job that has ended: its driver's; what a shell would say where it was stopped."""
        state, code = self.state(job)
        if state not in ENDED:
            raise MegarlError(f"job {job} has not ended: it is {state}")
        if state == "STOPPED":
            return STOPPED_CODE
        return code if code is not None else int(state == "FAILED")

    def stop(self, job: str) -> None:
        """Have the job ended: its driver gets SIGTERM."""
        with self._asking(job):
            self._client.stop_job(job)

    @contextmanager
    def _asking(self, job: str) -> Iterator[None]:
        """Around what is asked of a job. Raises UserError where the cluster knows none, MegarlError where it fails to answer."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # as Ray has them: of an answer, of none
            if f"status code {NOT_FOUND}" in str(error):
                raise UserError(
                    f"The Ray cluster at {self._address} knows no job {job}: it may have been started anew."
                ) from error
            raise MegarlError(
                f"The Ray cluster at {self._address} does not answer for job {job}: {str(error).rstrip('.')}. "
                "The job may well go on."
            ) from error
