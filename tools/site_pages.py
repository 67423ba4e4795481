"""What MkDocs is told beside mkdocs.yml: pages that lie outside of docs/, a list of all messages, and links to both.

Loaded as a hook by `make docs`. The start page is README.md. A link to a file that is no page becomes the file's name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # MkDocs loads a hook by its path

from tools.list_messages import render  # noqa: E402

# Files of the repository, to what they are called on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "requirements/README.md": "requirements.md"}
SOURCES = {uri: path for path, uri in PAGES.items()}
PICTURES = (".png", ".svg")
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """MkDocs: a page that mkdocs.yml gives no place stands under "More"."""
    placed = {uri for section in config["nav"] for uri in _pages(section)}
    rest = sorted(page.name for page in Path(config["docs_dir"]).glob("*.md") if page.name not in placed)
    if rest:
        config["nav"].append({"More": rest})
    return config


def _pages(item: Any) -> list[str]:
    if isinstance(item, dict):
        return [uri for value in item.values() for uri in _pages(value)]
    return [uri for each in item for uri in _pages(each)] if isinstance(item, list) else [item]


def on_files(files: Files, *, config: Any) -> Files:
    """MkDocs: add the pages from outside of docs/, and the pictures that pages show from there."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "messages.md", content=render(ROOT / "megarl")))
    for page in [file for file in files if file.is_documentation_page()]:
        for link in LINK.finditer(page.content_string):
            path = linked(page.src_uri, link["target"])
            outside = path.suffix in PICTURES and not path.is_relative_to("docs") and (ROOT / path).is_file()
            if outside and files.get_file_from_path(str(path)) is None:
                files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """MkDocs: links as the repository has them become those of the site, and lists are told from the text above them."""
    return LINK.sub(lambda link: _on_site(link, page.file.src_uri, files), apart(markdown))


def apart(markdown: str) -> str:
    """A blank line between a paragraph and the list below it: GitHub needs none, and Python's Markdown does."""
    lines: list[str] = []
    fenced = listed = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        item = re.match(r"(- |\d+\. )", line) is not None
        if item and not fenced and not listed and lines and lines[-1].strip():
            lines.append("")
        listed = item or (listed and bool(line.strip()) and not fenced)
        lines.append(line)
    return "\n".join(lines) + "\n"


def linked(uri: str, target: str) -> Path:
    """The path in the repository that a page's link leads to. uri: what the page is called on the site."""
    source = Path(SOURCES.get(uri, f"docs/{uri}"))
    parts: list[str] = []
    for part in (source.parent / target).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def _on_site(link: re.Match[str], uri: str, files: Files) -> str:
    path = linked(uri, link["target"])
    there = PAGES.get(str(path)) or (str(path.relative_to("docs")) if path.is_relative_to("docs") else str(path))
    if files.get_file_from_path(there) is not None:
        return f"{link['picture']}[{link['text']}]({there}{link['anchor'] or ''})"
    # Left as it is, a link that leads nowhere is told of by MkDocs.
    return f"{link['text']} (`{path}`)" if (ROOT / path).exists() else link[0]
