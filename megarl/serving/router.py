"""sglang-router in front of the servers: a request goes where its prefix is cached, or to the least busy server.

It starts without servers and they are added as they become ready; a dropped server leaves it. Not for weight updates:
those go to each server.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.ports import kept_port
from megarl.serving.client import ServerEndpoint
from megarl.serving.process import Command, Endpoint, ManagedProcess
from megarl.serving.server import ProcessPlace

CALL_S = 10.0
REGISTER_POLL_S = 0.05


@dataclass(frozen=True)
class RouterSpec:
    """How the router treats requests. request_timeout_s: longest single request. port: a free one where not given.

    adapter: LoRA adapters that requests through it are answered with; none where empty.
    """

    policy: str = "cache_aware"
    request_timeout_s: float = 3600.0
    port: int | None = None
    adapter: str = ""

    def flags(self, host: str, port: int, metrics_port: int) -> list[str]:
        """As flags of sglang_router.launch_router; the API key is not among them."""
        return [
            *("--host", host),
            *("--port", str(port)),
            *("--policy", self.policy),
            *("--request-timeout-secs", str(max(1, round(self.request_timeout_s)))),
            *("--prometheus-host", host),
            *("--prometheus-port", str(metrics_port)),
            # A dead server has to be passed over within seconds, and a living one that was passed over by mistake has
            # to be tried again as soon: by default it would be shut out for a minute.
            *("--health-check-interval-secs", "2"),
            *("--health-check-timeout-secs", "10"),
            *("--cb-failure-threshold", "5"),
            *("--cb-success-threshold", "1"),
            *("--cb-timeout-duration-secs", "2"),
            *("--retry-max-retries", "8"),
            *("--retry-max-backoff-ms", "1000"),
            *("--log-level", "warn"),
        ]


class RouterProcess(ManagedProcess):
    """A running router."""

    def __init__(self, spec: RouterSpec, place: ProcessPlace, name: str = "router") -> None:
        # A port that is given was this router's until now: it is there again within a second or two.
        kept = [kept_port(place.host) for _ in range(1 if spec.port else 2)]
        metrics_port, *own = (each.getsockname()[1] for each in kept)
        port = spec.port or own[0]
        self._api_key = place.api_key
        self._endpoint = ServerEndpoint(name, f"http://{place.host}:{port}", place.api_key, 1, adapter=spec.adapter)
        super().__init__(
            Command(
                name=name,
                argv=(
                    sys.executable,
                    *("-m", "megarl.serving.sglang_router"),
                    *spec.flags(place.host, port, metrics_port),
                ),
                log=place.logs / f"{name}.log",
                endpoint=Endpoint(place.host, port, "/liveness"),
                env=place.env,
                secret=place.api_key,
            ),
            kept,
        )

    @property
    def endpoint(self) -> ServerEndpoint:
        """What a client needs."""
        return self._endpoint

    def workers(self) -> dict[str, str]:
        """Servers that the router knows: URL -> its id for it."""
        answer = json.loads(self._call("GET", "/workers"))
        return {worker["url"]: worker["id"] for worker in answer["workers"]}

    def add(self, server: ServerEndpoint, deadline_s: float = 60.0) -> None:
        """Send requests to this server too; returns once the router has it. Raises DeadlineError."""
        self._call("POST", "/workers", {"url": server.url, **({"api_key": server.api_key} if server.api_key else {})})
        self._await(server.url, True, f"take in {server.name} ({server.url})", deadline_s)

    def remove(self, url: str, deadline_s: float = 10.0) -> None:
        """Send nothing more to the server at this URL; nothing happens where the router does not know it."""
        known = self.workers()
        if url not in known:
            return
        self._call("DELETE", f"/workers/{known[url]}")
        self._await(url, False, f"let go of {url}", deadline_s)

    def _await(self, url: str, known: bool, what: str, deadline_s: float) -> None:
        """Wait until the router knows this server, or knows it no more. Raises DeadlineError."""
        end = time.monotonic() + deadline_s
        while (url in self.workers()) is not known:
            if time.monotonic() > end:
                raise DeadlineError(f"{self.name} did not {what} within {deadline_s:g} s.\n{self.log_tail()}")
            time.sleep(REGISTER_POLL_S)

    def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}
        direct = build_opener(ProxyHandler({}))  # whatever proxy the environment names: the router is the run's own
        request = Request(self.url + path, data, headers, method=method)
        try:
            try:
                with direct.open(request, timeout=CALL_S) as answer:
                    return str(answer.read().decode())
            except HTTPError as error:
                told = error.read().decode(errors="replace")
                raise MegarlError(f"{self.name} {method} {path} answered {error.code}: {told}") from error
        except (OSError, HTTPException) as error:  # one that dies while it answers says half of it, or nothing
            what = str(error) or type(error).__name__
            raise MegarlError(f"{self.name} {method} {path}: {what}. {self.epitaph()}") from error
