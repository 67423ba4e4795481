"""What is said of a cluster's answers, without a cluster: a small server answers as its dashboard does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.launch.ray_jobs import RayJobs


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
