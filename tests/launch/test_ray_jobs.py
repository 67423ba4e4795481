"""What is said of a cluster's answers, without a cluster: a small server answers as its dashboard does."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.launch import ray_jobs, watch
from megarl.launch.ray_jobs import RayJobs, TokenError
from megarl.launch.record import Submission


class Dashboard(BaseHTTPRequestHandler):
    """Knows its version, and answers whatever is asked of jobs with `code`."""

    code = 404

    def answer(self) -> None:
        version = self.path == "/api/version"
        body = json.dumps({"version": "4", "ray_version": "2.50.0", "ray_commit": "x"} if version else "said").encode()
        self.send_response(200 if version else self.code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ASKED: list[Callable[[RayJobs], Any]] = [
    lambda jobs: jobs.state("job_1"),
    lambda jobs: jobs.logs("job_1"),
    lambda jobs: jobs.follow("job_1", print),
    lambda jobs: jobs.stop("job_1"),
]


@pytest.mark.parametrize("ask", ASKED)
def test_a_job_that_the_cluster_does_not_know_is_told_from_a_cluster_that_fails(
    dashboard: str, ask: Callable[[RayJobs], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = RayJobs(dashboard)
    with pytest.raises(UserError, match=f"{dashboard} knows no job job_1: it may have been started anew"):
        ask(jobs)
    monkeypatch.setattr(Dashboard, "code", 500)
    with pytest.raises(MegarlError, match=r"does not answer for job job_1: .*500") as caught:
        ask(jobs)
    assert not isinstance(caught.value, UserError)


class WantsToken(Dashboard):
    """Ray's answer to whoever has not the token of its cluster."""

    def answer(self) -> None:
        self.send_error(401, "Unauthorized: Missing authentication token")

    do_GET = do_POST = answer


def test_a_job_of_a_cluster_that_wants_its_token_is_not_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run could be submitted a second time, while the first job wrote to its folder."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), WantsToken) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(TokenError, match=r"wants its token: set .* \(which is not set\)\."):
            watch.is_alive(Submission("ray", "job_1", address=f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()


class BehindProxy(Dashboard):
    """A job that prints a part at each look at its log, and has ended after the last; what stays open is refused."""

    parts: ClassVar[list[str]] = []
    said = ""

    def answer(self) -> None:
        about = {"type": "SUBMISSION", "entrypoint": "x", "status": "RUNNING" if self.parts else "SUCCEEDED"}
        if self.path.endswith("/logs/tail"):
            return self.send_error(403)
        if self.path.endswith("/logs"):
            type(self).said += self.parts.pop(0) if self.parts else ""
            about = {"logs": self.said}
        if self.path == "/api/version":
            about = {"version": "4", "ray_version": "2.50.0", "ray_commit": "x"}
        body = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.wfile.write(body)

    do_GET = answer


def test_a_log_is_followed_to_its_end_through_a_proxy_that_lets_no_connection_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_jobs, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(BehindProxy, "parts", ["one\n", "", "two\n", "three\n"])
    shown: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), BehindProxy) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        RayJobs(f"http://127.0.0.1:{server.server_port}").follow("job_1", shown.append)
        server.shutdown()
    assert shown == ["one\n", "two\n", "three\n"]


def test_a_followed_log_goes_on_where_a_proxy_ended_its_connection(
    dashboard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = RayJobs(dashboard)

    async def tail_job_logs(job: str) -> AsyncIterator[str]:
        yield "one\n"
        raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    monkeypatch.setattr(jobs._client, "tail_job_logs", tail_job_logs)
    monkeypatch.setattr(jobs, "state", lambda job: ("SUCCEEDED", 0))
    monkeypatch.setattr(jobs, "logs", lambda job: "one\ntwo\n")
    shown: list[str] = []
    jobs.follow("job_1", shown.append)
    assert shown == ["one\n", "two\n"]
