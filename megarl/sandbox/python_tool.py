"""Python as a tool for a model: runs a program in a sandbox, and says in words what came of it."""

from __future__ import annotations

from typing import Protocol

from megarl.sandbox.job import Result

MOST_CHARACTERS = 8000  # of what goes back to the model; a longer text loses its middle


class Sandboxes(Protocol):
    """Who runs programs, such as a SandboxPool."""

    async def run(self, code: str) -> Result:
        """Run a Python program in a sandbox of its own."""


class PythonTool:
    """`python` is the tool: a function with type hints, of which a schema can be made."""

    def __init__(self, pool: Sandboxes, most_characters: int = MOST_CHARACTERS) -> None:
        """pool: started by whoever closes it."""
        self._pool = pool
        self._most_characters = most_characters

    async def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Each call is a new program: nothing is kept from earlier calls. There is no network.

        Args:
            code: The program. Only what it prints is returned.
        """
        return told(await self._pool.run(code), self._most_characters)


def told(result: Result, most_characters: int = MOST_CHARACTERS) -> str:
    """A result as a model reads it: what was printed, errors, and how it ended where that was not well."""
    parts = [result.stdout, result.stderr]
    if result.reason:
        parts.append(f"[ended: {result.reason}]")
    elif result.signal is not None:
        parts.append(f"[ended by {result.signal}]")
    elif result.exit_code and not result.stderr:
        parts.append(f"[exit code {result.exit_code}]")
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))
    return shortened(text, most_characters) or "[nothing was printed]"


def shortened(text: str, most_characters: int) -> str:
    """The text, or its beginning and end with the number of characters that are left out between them."""
    if len(text) <= most_characters:
        return text
    half = most_characters // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
