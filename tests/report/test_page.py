"""The page of a run: one file, in which no text of a model is anything but text."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.core.errors import UserError
from megarl.report.page import embedded, write_page

EVIL = "</script><script>alert(1)</script><!-- \u2028 ]]> &lt;"


class Elements(HTMLParser):
    """The elements of a page, and what its data is."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_data = dict(attrs).get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def make_run(folder: Path, reward: float = 0.5) -> Path:
    (folder / "samples").mkdir(parents=True)
    rows = [{"step": 1, "reward/mean": reward, "perf/step_s": 2.0}, {"step": 2, "reward/mean": float("nan")}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"reward": reward, "prompt": "p", "response": EVIL, "status": "completed"}
    (folder / "samples" / "step_000002.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "recipe.yaml").write_text(f"run: {{name: {folder.name}}}\nactor: {{optimizer: {{lr: {reward}}}}}\n")
    return folder


def data_of(page: Path) -> tuple[Elements, dict[str, Any]]:
    elements = Elements(page.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(elements.data)
    return elements, found


def test_what_is_embedded_ends_no_element_and_is_read_as_it_was() -> None:
    text = embedded({"said": EVIL})
    assert "<" not in text and json.loads(text) == {"said": EVIL}


def test_a_page_asks_nobody_and_holds_its_runs(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", 0.25)
    write_page([one, two], tmp_path / "new" / "page.html")
    elements, data = data_of(tmp_path / "new" / "page.html")
    assert elements.links == [] and elements.names.count("script") == 2
    assert "url(" not in (tmp_path / "new" / "page.html").read_text()
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    assert data["runs"][1]["lines"]["reward/mean"] == {"steps": [1, 2], "values": [0.25, None]}
    assert data["runs"][0]["samples"][0]["rows"][0]["response"] == EVIL
    assert data["first"] == ["reward/mean"] and data["names"] == ["reward/mean", "perf/step_s"]
    assert data["differences"] == [{"key": "actor.optimizer.lr", "values": ["0.5", "0.25"]}]
    assert os.listdir(tmp_path / "new") == ["page.html"]


def test_every_element_that_the_script_asks_for_is_there(tmp_path: Path) -> None:
    write_page([make_run(tmp_path / "one")], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert {*re.findall(r'by\("(\w+)"\)', text)} <= {*re.findall(r'\bid="(\w+)"', text)}


def test_what_is_wrong_with_the_runs_is_said(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    with pytest.raises(UserError, match=r"named more than once"):
        write_page([one, tmp_path / "two" / ".." / "one"], tmp_path / "page.html")
    with pytest.raises(UserError, match=r"9 runs on one page.*Name fewer"):
        write_page([tmp_path / str(number) for number in range(9)], tmp_path / "page.html")
    with pytest.raises(UserError, match=r"none/metrics\.jsonl does not exist"):
        write_page([one, tmp_path / "none"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_table_curve_and_page(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    shown = CliRunner().invoke(app, ["report", str(one)])
    assert shown.exit_code == 0 and "reward" in shown.output and str(one / "page.html") in shown.output
    assert (one / "curve.png").stat().st_size > 0 and (one / "page.html").exists()
    compared = CliRunner().invoke(app, ["report", str(one), str(two), "--out", str(tmp_path / "both.html")])
    assert compared.exit_code == 0 and not (two / "curve.png").exists()
    assert [run["name"] for run in data_of(tmp_path / "both.html")[1]["runs"]] == ["one", "two"]
    (tmp_path / "file").touch()
    failed = CliRunner().invoke(app, ["report", str(one), "--out", str(tmp_path / "file" / "page.html")])
    assert "cannot be written" in str(failed.exception)
