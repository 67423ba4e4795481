"""The pages as a site: it builds without a warning, every link leads somewhere, and what is generated is what is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import measured
from bench.support.measure import RESULTS, write
from megarl.core.metrics import METRICS, row_of
from megarl.recipe.load import load_recipe
from tests.docs.pages import DOCS, ROOT, blocks
from tools.site_pages import LINK, PAGES, apart, linked

OUTSIDE = ("README.md", "CONTRIBUTING.md", "requirements/README.md")
LONGEST_README = 90


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_site_is_built_with_every_link_checked(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")}
    pages |= {str(Path(uri).with_suffix(".html")) for uri in PAGES.values()} | {"messages.html"}
    assert pages <= {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert any("samples_per_prompt" in each["text"] and each["location"].startswith("recipe.html") for each in found)
    assert "<li><code>truncate</code>: w =" in (tmp_path / "algorithms.html").read_text()  # a list right under its text
    start = (tmp_path / "index.html").read_text()
    assert 'href="data.html"' in start and 'src="quickstart.png"' in start


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in DOCS.iterdir():
        (docs / page.name).symlink_to(page)
    (docs / "data.md").unlink()
    (docs / "data.md").write_text("# Data\n[gone](nowhere.md) [lost](recipe.md#no-such-key)\n")
    (docs / "new.md").write_text("# A page without a place\n")
    config = (ROOT / "mkdocs.yml").read_text().replace("tools/site_pages.py", str(ROOT / "tools/site_pages.py"))
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "'nowhere.md'" in done.stderr and "'recipe.md#no-such-key'" in done.stderr
    assert done.stderr.count("WARNING") == 2
    assert "A page without a place" in (tmp_path / "site" / "data.html").read_text()  # in the navigation, under More


@pytest.mark.parametrize("name", [*OUTSIDE, *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))])
def test_links_lead_to_files_of_the_repository(name: str) -> None:
    uri = PAGES.get(name, Path(name).name)
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.finditer(text):
        target = ROOT / linked(uri, link["target"])
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"][1:] in _anchors(target.read_text()), link[0]


def test_a_list_is_told_from_the_text_above_it() -> None:
    page = "Text:\n- one\n  goes on\n- two\n\n```\na\n- b\n```\n"
    assert apart(page) == "Text:\n\n- one\n  goes on\n- two\n\n```\na\n- b\n```\n"


def _anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_says_what_is_not_there(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= LONGEST_README
    assert all(word in text for word in ("Not there yet", "Nothing was ever run on CUDA"))
    [recipe] = [each.text for each in blocks(text) if each.language == "yaml"]
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert load_recipe(tmp_path / "recipe.yaml").recipe.algorithm.preset == "grpo"


def test_the_figures_are_those_of_the_results() -> None:
    assert (DOCS / "measured.md").read_text() == measured.render(), "python -m bench.measured > docs/measured.md"
    assert {row.name for row in measured.ROWS} == {path.stem for path in RESULTS.glob("*.json")}


def test_a_result_has_its_machine_and_date_on_the_page(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "balance.json").unlink()
    write("balance", json.loads((RESULTS / "balance.json").read_text()), tmp_path)
    [line] = [line for line in measured.render(tmp_path).splitlines() if "bench.balance" in line]
    assert re.search(r"cores, load [\d.]+ \| 20\d\d-\d\d-\d\d \|$", line)


def test_metrics_that_a_page_names_are_written() -> None:
    known = set(METRICS)
    groups = {name.partition("/")[0] for name in known}
    for name in ("reading_a_run.md", "errors.md", "data.md", "models.md"):
        named = re.findall(r"`(\w+)/([\w/]+)`", (DOCS / name).read_text())
        assert [
            f"{group}/{rest}" for group, rest in named if group in groups and row_of(f"{group}/{rest}") not in known
        ] == []
