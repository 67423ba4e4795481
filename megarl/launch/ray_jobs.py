"""Jobs on a Ray cluster that runs already, by its own job API. Not for starting a cluster (node.py, launch/k8s).

Who may submit is the cluster's affair: where it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN have to be in
the environment, as for Ray's own commands.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.core.errors import MegarlError, UserError

# What Ray would pack beside the sources; it also leaves out what .gitignore names.
EXCLUDED = [".git", ".venv", "**/__pycache__"]
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
STOPPED_CODE = 143  # as a shell says it of a process that was told to end


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """address: of its dashboard, http://HEAD:8265. Raises UserError where nothing answers or a token is wanted."""
        from ray.job_submission import JobSubmissionClient

        self._address = address
        try:
            self._client: Any = JobSubmissionClient(address)
            self._client.get_version()
        except (OSError, RuntimeError, ValueError) as error:
            raise self._refused(error) from error

    def submit(self, entrypoint: str, working_dir: Path, env: dict[str, str], name: str) -> str:
        """Pack the folder, send it and queue the command, which runs in it; returns the submission's id."""
        runtime_env = {"working_dir": str(working_dir), "excludes": EXCLUDED, "env_vars": env}
        try:
            return str(
                self._client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env, metadata={"megarl_run": name})
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise self._refused(error) from error

    def state(self, job: str) -> tuple[str, int | None]:
        """Ray's word for it, and the driver's exit code once there is one. Raises UserError for a job it does not know."""
        try:
            info = self._client.get_job_info(job)
        except RuntimeError as error:
            raise UserError(
                f"The Ray cluster at {self._address} knows no job {job}: it may have been started anew."
            ) from error
        return str(info.status.value), info.driver_exit_code

    def follow(self, job: str, write: Callable[[str], object]) -> None:
        """Hand on what the job prints until it has ended."""

        async def lines() -> None:
            async for text in self._client.tail_job_logs(job):
                write(text)

        asyncio.run(lines())

    def logs(self, job: str) -> str:
        """What the job has printed so far."""
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
        self._client.stop_job(job)

    def _refused(self, error: Exception) -> UserError:
        text = str(error).strip() or type(error).__name__
        hint = "Is its dashboard there, and reachable from here?"
        if "401" in text or "403" in text or "uthenticat" in text:
            given = "is set" if os.environ.get("RAY_AUTH_TOKEN") else "is not set"
            hint = f"It wants a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's (RAY_AUTH_TOKEN {given})."
        return UserError(
            f"The Ray cluster at {self._address} does not take jobs from here: {text.splitlines()[0]}. {hint}"
        )
