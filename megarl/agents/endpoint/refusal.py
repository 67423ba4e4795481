"""What the endpoint answers where it does not do what it is asked: OpenAI's form of an error."""

from __future__ import annotations

from typing import Any

from megarl.core.errors import MegarlError

INVALID = "invalid_request_error"


class RefusedError(MegarlError):
    """A request that is refused. status: HTTP's. code, param: OpenAI's, for programs.

    The openai package raises 400 as BadRequestError and 404 as NotFoundError, and asks again at 408, 409, 429 and from 500 on:
    what would be refused again is 400.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None, kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
