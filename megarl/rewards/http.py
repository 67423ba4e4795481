"""Posts JSON to one address: a deadline for each attempt, attempts again where that may help, the key in no message.

A server that is gone or busy is asked again for minutes: somebody may start it again. An answer that says that something is
wrong with the request is not. Not for what is posted: that is remote.py's and judge.py's.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.core.log import HIDDEN, get_logger
from megarl.rewards.patience import Outage

if TYPE_CHECKING:
    import aiohttp  # where a call is made: loading it takes a moment, and most rewards call nobody

log = get_logger(__name__)

ANSWER_SHOWN = 300  # characters of an answer that a failure shows
MOST_BYTES = 2**26  # of an answer: a stream that never ends would fill the memory until the deadline
LONGEST_PAUSE_S = 10.0
CONNECT_S = 10.0  # a machine that is gone refuses nothing: it says nothing
GONE = (429, 502, 503, 504)  # what a server, or the proxy before one, answers that is busy, starts or is not there


class CallError(Exception):
    """A call that failed for good: the reason, in words for a failure's text. late: nothing came within a deadline."""

    late = False


class LateError(CallError):
    """A call whose deadline passed."""

    late = True


class _AgainError(CallError):
    """One attempt failed in a way that may pass. gone: the server is gone or busy. pause_s: what it asked to wait."""

    def __init__(self, reason: str, *, gone: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.gone, self.pause_s = gone, pause_s


class JsonClient:
    """Posts to one address. Belongs to the event loop that it is first used in; `close` ends its connections."""

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        timeout_s: float,
        retries: int,
        retry_for_s: float = 0.0,
        known: bool = False,
        section: str = "",
        tell: Callable[[str], None] = log.warning,
        backoff_s: float = 0.5,
    ) -> None:
        """key: sent as a bearer token. timeout_s: of one attempt. retries: further attempts.

        retry_for_s: how long a server that is gone or busy is asked again, whatever `retries` says. known: it was there before,
        so that this holds of a probe as well. section: where the recipe says so, for messages. tell: takes a line for people.
        """
        self.url = url
        self._key = key
        self._timeout_s = timeout_s
        self._retries = retries
        self._known = known
        self._outage = Outage(retry_for_s, f"{section}.retry_for_s", tell)
        self._backoff_s = backoff_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def well_since(self) -> float:
        """When an outage that people were told of ended, by `time.monotonic`; infinity while there is one."""
        return self._outage.over_at

    async def post(self, body: object, *, probes: bool = False) -> Any:
        """What the server answers. Values that JSON does not know (dates, bytes, numbers that are not finite) travel as text.

        probes: it only asks whether the server is there: one that is not known may have a wrong address, and is not waited for.
        Raises CallError: no answer in time, no connection, a status other than 200, or an answer that is not JSON or too long.
        """
        try:
            data = _encoded(body)
        except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, or a value that holds itself
            raise CallError(f"error: what would be sent is not JSON: {error}") from None
        last = ""  # what came of the attempt before
        since = math.inf  # when this request first found the server gone or busy
        attempt = 0
        while True:
            try:
                return await self._in_time(data, last)
            except _AgainError as error:
                left_s = 0.0
                if error.gone and (self._known or not probes):
                    since = min(since, time.monotonic())
                    left_s = self._outage.left_s(since)
                if attempt >= self._retries and left_s <= 0:
                    ended = self._outage.ended(since)
                    raise (LateError if ended else CallError)(f"{error}{ended}") from None
                pause_s = max(self._pause_s(attempt), min(error.pause_s, max(left_s, LONGEST_PAUSE_S)))
                if left_s > 0:
                    pause_s = min(pause_s, left_s)
                    self._outage.tell(since, pause_s, str(error))
                last = f"; before that: {error}"
                await asyncio.sleep(pause_s)
                attempt += 1

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _pause_s(self, attempt: int) -> float:
        """Longer each time, and not the same for all who wait."""
        longest: float = min(self._backoff_s * 2.0 ** min(attempt, 30), LONGEST_PAUSE_S)
        return longest * random.uniform(0.5, 1.0)

    async def _in_time(self, data: bytes, last: str) -> Any:
        """One attempt. last: what came of the one before."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._once(data)
        except TimeoutError:
            late = f"timeout: no answer from {self.url} within {self._timeout_s:g} s"
            if self._outage.lasts:  # others are told that it is gone: so are those that it had taken before
                raise _AgainError(late) from None
            raise LateError(f"{late}{last}") from None

    async def _once(self, data: bytes) -> Any:
        import aiohttp

        try:
            # A redirect could take the key elsewhere: it is an answer like any other that is not 200.
            async with self._open().post(self.url, data=data, allow_redirects=False) as answer:
                # JSON is UTF-8, whatever the header says: some of the character sets that it may name are no text's.
                status, text = answer.status, self._clean((await self._body(answer)).decode(errors="replace"))
                pause_s = _seconds(answer.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError) as error:
            reason = self._clean(f"{type(error).__name__}: {error}")
            raise _AgainError(f"error: no answer from {self.url}: {reason[:ANSWER_SHOWN]}") from None
        if status in GONE:
            raise _AgainError(self._said(status, text), pause_s=pause_s)
        self._outage.over(self.url)
        if status >= 500:
            raise _AgainError(self._said(status, text), gone=False, pause_s=pause_s)
        if status != 200:
            raise CallError(self._said(status, text))
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise CallError(f"error: {self.url} answered what is not JSON: {text[:ANSWER_SHOWN]!r}") from None

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise CallError(f"error: {self.url} answered more than {MOST_BYTES // 2**20} MiB")
        return b"".join(parts)

    def _said(self, status: int, text: str) -> str:
        return f"error: {self.url} answered {status}: {text[:ANSWER_SHOWN]}"

    def _clean(self, text: str) -> str:
        """What somebody else wrote, without the key."""
        return text.replace(self._key, HIDDEN) if self._key else text

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={
                    "Content-Type": "application/json",
                    **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                },
                # The caller bounds what is in flight and how long it may take.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                trust_env=True,  # graders may be outside of the cluster, behind its proxy
            )
        return self._session


def _encoded(body: object) -> bytes:
    """As JSON. Few bodies hold numbers that are not finite, so it is written a second time for those alone."""
    try:
        return json.dumps(body, default=str, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(body), default=str, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """With text (nan, inf, -inf) for numbers that are not finite, however deep: a strict server would refuse the whole batch."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_finite(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _seconds(retry_after: str | None) -> float:
    """The header's seconds; 0 where there is none, or a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
