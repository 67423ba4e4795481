"""Every message that megarl refuses or fails with, read from its source: python -m tools.list_messages > messages.md

The site has it as a page to search in. What a newcomer meets, and why, is told in docs/errors.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import megarl.core.errors
from megarl.core.errors import MegarlError

CLASSES: dict[str, type[MegarlError]] = {
    name: value
    for name, value in vars(megarl.core.errors).items()
    if isinstance(value, type) and issubclass(value, MegarlError)
}
HEAD = """# All messages

What megarl refuses or fails with, as its source has it; `<...>` stands for what is filled in. Search for a few words of the
message. Each says what is wrong, where, and what to do; [errors](errors.md) has the common ones with their causes.

A `UserError` is yours to mend, and ends a command with exit code 2 before anything has started. The others end a run.
"""


@dataclass(frozen=True)
class Message:
    """One place that raises. text: the message, `<...>` in the place of values."""

    module: str
    line: int
    error: str
    text: str


def messages(package: Path) -> Iterator[Message]:
    """The messages of a package's files, in their order; those that are put together elsewhere are left out."""
    for path in sorted(package.rglob("*.py")):
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in sorted(found, key=lambda call: call.lineno):
            if isinstance(call.func, ast.Name) and call.func.id in CLASSES and call.args:
                text = " ".join(_text(call.args[0]).split())
                if text.replace("<...>", "").strip():
                    module = str(path.relative_to(package.parent))
                    yield Message(module, call.lineno, call.func.id, text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "<...>"


def render(package: Path) -> str:
    """The page."""
    lines = [HEAD]
    rooms: dict[str, list[Message]] = {}
    for message in messages(package):
        rooms.setdefault(message.module, []).append(message)
    for module, found in rooms.items():
        lines += [f"## {module}\n", "| error | message |", "|---|---|"]
        lines += [f"| {each.error} | {_cell(each.text)} |" for each in found]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    return escaped.replace("*", "\\*").replace("_", "\\_").replace("[", "\\[").replace("`", "\\`")


if __name__ == "__main__":
    print(render(Path(megarl.__file__).parent), end="")
