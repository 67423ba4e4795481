"""The end of a process's log, for an error: what it said last of its own, without what libraries always say.

Left out are warnings, progress bars, lines that are known to mean nothing, and stack traces of what only happens because
the process or its run is ending, or because another process has told in the same log why it ends. A file is never read as a
whole.
"""

from __future__ import annotations

import re
from pathlib import Path

READ_BYTES = 2**18
# A line may be all that a model said, in one: what is looked for takes time in proportion to its length.
WARNING = re.compile(r"^(\[[^\]]*\]\s*)*(/|<|\w).*:\d+: \w*Warning: ")
NOISE = re.compile(
    "|".join(
        (
            r"Ignore import error when loading",  # SGLang, of models that this machine has no kernels for
            r"Cannot detect CUDA architecture",
            r"post-warmup freeze_gc failed",  # a server that is busy with its first weights
            r"Using fallback token IDs",
            r"WARNING:\s+Invalid HTTP request received",
            r"No live scheduler processes found; skipping py-spy",
            r"resource_tracker: There appear to be \d+ leaked",
            r"^\[[WI]\d{4} [\d:. ].*\.(cpp|cc|hpp|h):\d+\]",  # torch's warnings and remarks in C++
            r"^\[(Gloo|W socket|rank\d+)[^\]]*\] .*(is connected to|TCP client failed to connect|Expected number of connected)",
            r"[\d?]it/s\]|\ds/it\]",  # progress bars
            r"^\s*\^+\s*$",
        )
    )
)
TRACE = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
IGNORED = "Exception ignored in"
# What a trace ends with, or has in its frames, that only comes of an ending.
AT_THE_END = re.compile(
    r"^(\w+\.)*(KeyboardInterrupt|SystemExit|CancelledError|BrokenPipeError|GeneratorExit)\b|/freeze_gc", re.MULTILINE
)
FRAMES_AT_THE_END = ("multiprocessing/resource_tracker.py", "multiprocessing/util.py", "weakref.py", "in __del__")
# In the trace of what a process of SGLang ends with: its own words, or Python's frame where nobody caught it. And in that of the
# process that waited for it, which knows only how it was ended, and names the kernel's out-of-memory killer whatever it was.
TOLD = re.compile(r"hit an exception: |, in _bootstrap$", re.MULTILINE)
FRAME_OF_WAITING = ", in _wait_for_scheduler_ready"


def last_lines(path: Path, lines: int) -> str:
    """The last lines of a text file as they are, or a word that there is none."""
    if not path.exists():
        return f"(no {path.name})"
    return "\n".join(_read(path)[-lines:]) or f"({path.name} is empty)"


def own_words(path: Path, lines: int = 15) -> str:
    """The last lines that the process said of its own, or a word that there are none."""
    if not path.exists():
        return f"(no {path.name})"
    said = _read(path)
    if not said:
        return f"({path.name} is empty)"
    own = without_noise(said)
    return "\n".join(own[-lines:]) or f"(only warnings of libraries and the like, {len(said)} lines)"


def lines_with(path: Path, pattern: re.Pattern[str], lines: int = 5) -> list[str]:
    """The last lines of a log in which the pattern is found."""
    return [line for line in _read(path) if pattern.search(line)][-lines:] if path.exists() else []


def without_noise(lines: list[str]) -> list[str]:
    """The lines without those that mean nothing; blank ones go as well."""
    kept: list[str] = []
    index, told = 0, False
    while index < len(lines):
        line = lines[index]
        end = _end_of_trace(lines, index)
        if end > index:
            trace = lines[index:end]
            told = told or bool(TOLD.search("\n".join(trace)))
            if not _is_ending(trace) and not (told and any(line.endswith(FRAME_OF_WAITING) for line in trace)):
                kept += [each for each in trace if each.strip() and not re.fullmatch(r"[\s^~]+", each)]
            index = end
        elif WARNING.match(line):
            index += 1
            # Python shows the line of code below.
            if index < len(lines) and lines[index].startswith("  "):
                index += 1
        else:
            if line.strip() and not NOISE.search(line):
                kept.append(line)
            index += 1
    return kept


def _end_of_trace(lines: list[str], start: int) -> int:
    """Where the stack trace that begins here ends, with those that it is chained to; `start` where none does."""
    end, index = start, start
    while index < len(lines) and (after := _end_of_one(lines, index)) > index:
        end, index = after, _not_blank(lines, after)
        if index < len(lines) and lines[index].strip().startswith(CHAINED):
            end, index = index + 1, _not_blank(lines, index + 1)
        else:
            break
    return min(end, len(lines))


def _end_of_one(lines: list[str], start: int) -> int:
    """Where the one stack trace that begins here ends; `start` where none does."""
    index = start
    if lines[index].startswith(IGNORED) and index + 1 < len(lines):
        index += 1
    if not lines[index].rstrip().endswith(TRACE):
        return start
    # Servers put a name and a time before every line of theirs, but not before those of a trace.
    indent = len(lines[index]) - len(lines[index].lstrip())
    index += 1
    while index < len(lines) and (lines[index].startswith(" " * (indent + 1)) or not lines[index].strip()):
        index += 1
    return index + 1  # the exception itself


def _not_blank(lines: list[str], index: int) -> int:
    """The first line from here on that is not blank."""
    while index < len(lines) and not lines[index].strip():
        index += 1
    return index


def _is_ending(trace: list[str]) -> bool:
    text = "\n".join(trace)
    return trace[0].startswith(IGNORED) or bool(
        AT_THE_END.search(trace[-1]) or any(words in text for words in FRAMES_AT_THE_END)
    )


def _read(path: Path) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - READ_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return lines if size <= READ_BYTES else lines[1:]
