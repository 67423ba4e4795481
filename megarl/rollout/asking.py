"""Asks the servers for one response: waits for its turn, goes on with what was cut off, and says why there is none.

Whoever plays an episode asks here, once (single_turn.py) or turn by turn (megarl/agents), so that pauses, cuts and deaths are
the same for all. Not for what a response means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megarl.core.errors import DeadlineError, MegarlError, UserError
from megarl.core.types import TokenArray
from megarl.rollout.gate import Gate
from megarl.rollout.pictures import Sends
from megarl.rollout.pieces import Decode, extend, join, joined_text
from megarl.serving.answers import AnswerError, Generation
from megarl.serving.client import ServerClient, ServerError, ServerUnreachableError, nobody_there
from megarl.serving.images import SentImages
from megarl.serving.sampling import Sampling

# Without being asked to, a server may cut a request off a few times; one that always does would be asked for ever.
MOST_CUTS = 8


class RequestFailedError(MegarlError):
    """No server could answer a request. It costs the sample, and not the step."""


@dataclass
class Request:
    """One response in the making: what it is asked with, and what there is of it, in pieces.

    token_ids: [P], all that stands before the response. seconds: that it was at the servers. pictures: of what stands there.
    """

    token_ids: TokenArray
    sampling: Sampling
    pieces: list[Generation] = field(default_factory=list)
    cuts: int = 0  # that nobody here asked for
    seconds: float = 0.0
    pictures: Sends | None = None

    async def go_on(
        self,
        client: ServerClient,
        decode: Decode,
        *,
        deadline_s: float,
        piece_tokens: int | None = None,
        expects_cuts: Callable[[], bool] = lambda: False,
    ) -> Generation | None:
        """Ask for what is missing. None: it was cut off; what there is stays, and it can go on later.

        What comes back ends with `stop` or `length`. piece_tokens: ask for so many tokens at a time. decode: makes the text of
        a response of several pieces. expects_cuts: whether we had requests ended, as it is told of one.

        Raises RequestFailedError where no server answers in time, an image cannot be decoded, or the response cannot go on.
        """
        images = await self._images()
        began = time.monotonic()
        try:
            ended = await extend(
                client,
                self.token_ids,
                self.sampling,
                self.pieces,
                deadline_s=deadline_s,
                piece_tokens=piece_tokens,
                gives_up=expects_cuts,
                images=images,
            )
        except (ServerUnreachableError, ServerError, AnswerError, DeadlineError) as error:
            if nobody_there(error) and expects_cuts():
                return None  # who wants no request at the servers does not wait for one that comes back
            raise RequestFailedError(str(error)) from error
        finally:
            self.seconds += time.monotonic() - began
        if not ended:
            self.cuts += not expects_cuts()
            if self.cuts > MOST_CUTS:
                raise RequestFailedError("the server aborted it, again and again")
            return None
        whole = join(self.pieces)
        if len(self.pieces) > 1 or whole.finish == "abort":
            whole = joined_text(self.token_ids, whole, self.sampling.stop, decode)
        return replace(whole, finish="length") if whole.finish == "abort" else whole  # cut off at its longest

    async def _images(self) -> SentImages | None:
        """What goes with it to the servers. Raises RequestFailedError."""
        try:
            return await self.pictures.sent() if self.pictures is not None else None
        except UserError as error:
            raise RequestFailedError(str(error)) from error


class Asker:
    """Asks for responses, each when it is its turn at the gate: a collector's way to the servers."""

    def __init__(
        self, client: ServerClient, gate: Gate, decode: Decode, *, deadline_s: float, piece_tokens: int | None = None
    ) -> None:
        """deadline_s: of a response, without the time that it waits for its turn. decode, piece_tokens: see Request."""
        self._client, self._gate, self.decode = client, gate, decode
        self._deadline_s, self._piece_tokens = deadline_s, piece_tokens

    async def ask(self, request: Request, *, step: int = 0, expected_tokens: float = 0.0) -> Generation:
        """What the servers answer, however often it is cut off; it ends with `stop` or `length`.

        step, expected_tokens: which requests go first, see Gate. Raises RequestFailedError where no server answers in time.
        """
        answered = None
        while answered is None:
            async with self._gate.request(step, expected_tokens):
                answered = await request.go_on(
                    self._client,
                    self.decode,
                    deadline_s=self._deadline_s,
                    piece_tokens=self._piece_tokens,
                    expects_cuts=lambda: self._gate.closed,
                )
        return answered
