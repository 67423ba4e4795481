"""Reads JSON files: one that ought to hold an object, with a sentence for each way in which it does not; and lines of objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The object that the file holds.

    advice: what to do about a file that is broken, as a sentence. Raises UserError where the file cannot be read, is not
    JSON, or holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing. {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {advice}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply. {advice}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}. {advice}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}, not a JSON object. {advice}")
    return raw


def whole_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file that has one a line, or those in its last bytes; none where there is no file.

    Left out are lines that were not written to their end: a process that is killed leaves one, and the next may begin behind it.
    """
    found = []
    for line in _text(path, last_bytes).splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in found if isinstance(each, dict)]


def _text(path: Path, last_bytes: int | None) -> str:
    """Of a file, or of its last bytes without the line that they begin within."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, 2) - last_bytes) if last_bytes is not None else 0
        file.seek(begin)
        read = file.read()
    return (read.partition(b"\n")[2] if begin else read).decode("utf-8", errors="replace")
