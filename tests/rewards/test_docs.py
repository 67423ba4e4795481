"""docs/rewards.md is true: its recipe loads, its server speaks the protocol, its names and numbers are the code's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml
from aiohttp.test_utils import TestServer

import megarl
from megarl.core.metrics import check_names
from megarl.recipe.reward import Classify, Code, GraderSection, HttpGrader, Judge, Remote, Reward, Rule
from megarl.rewards.grade import Grade, Item
from megarl.rewards.http import GONE, LONGEST_PAUSE_S, JsonClient
from megarl.rewards.patience import SILENT_S
from megarl.rewards.question import TEMPLATE, read_score
from megarl.rewards.remote import GATHER_S, RemoteGrader
from megarl.rewards.resolve import PARAMETERS
from tests.docs.pages import blocks

PAGE = (Path(megarl.__file__).parent.parent / "docs" / "rewards.md").read_text()


def block(name: str) -> str:
    """The file of that name; or the recipe that the page begins with, which has none."""
    return next(each.text for each in blocks(PAGE) if (each.name or each.language) == name)


def test_the_recipe_loads() -> None:
    reward = Reward.model_validate(yaml.safe_load(block("yaml"))["reward"])
    assert {each.kind for each in reward.by_name().values()} == {"rule", "remote", "code", "judge"}


def test_the_server_grades() -> None:
    code = block("grader.py")
    assert code.count("web.run_app(app, port=8000)") == 1
    names: dict[str, Any] = {}
    exec(code.replace("web.run_app(app, port=8000)", ""), names)

    async def go() -> list[Grade]:
        async with TestServer(names["app"]) as server:
            client = JsonClient(str(server.make_url("/grade")), None, timeout_s=10.0, retries=0)
            grader = RemoteGrader(client, batch=8, concurrency=1)
            await grader.start()
            try:
                return [await grader.grade(Item("6*7?", response, "42")) for response in ("It is 42 ", "It is 41")]
            finally:
                await grader.close()

    assert asyncio.run(go()) == [Grade(1.0), Grade(0.0)]


def names(text: str) -> list[str]:
    """What stands in backquotes, blocks of code aside."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def test_each_kind_has_the_keys_of_its_row() -> None:
    table = PAGE.partition("| kind |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    kinds = {"rule": Rule, "remote": Remote, "code": Code, "judge": Judge, "classify": Classify}
    assert {names(kind)[0]: set(names(own)) for kind, _, own in rows} == {
        name: set(model.model_fields)
        - (set(HttpGrader.model_fields if issubclass(model, HttpGrader) else GraderSection.model_fields) | {"kind"})
        for name, model in kinds.items()
    }
    [shared] = re.findall(
        r"^All have a `weight`.*?`remote`, `judge` and `classify` have (.*?)\.$", PAGE, flags=re.MULTILINE | re.DOTALL
    )
    assert set(names(shared)) == set(HttpGrader.model_fields) - set(GraderSection.model_fields)
    assert list(GraderSection.model_fields) == ["weight", "only"]


def test_the_parameters_of_a_function_are_named() -> None:
    assert f"`pkg.module:function({', '.join(PARAMETERS)}) -> float`" in PAGE


def test_defaults_are_those_of_the_code() -> None:
    judge = Judge(kind="judge", url="http://h", model="m")
    assert f"`temperature` ({judge.temperature:g}; `null` leaves it out)" in PAGE
    assert f"The grade is the score over `scale` ({judge.scale:g})" in PAGE
    assert f"the first waits {GATHER_S * 1000:g} ms for others" in PAGE
    assert (
        JsonClient("http://h", None, timeout_s=1.0, retries=1)._backoff_s == 0.5 and "pauses from half a second" in PAGE
    )
    assert f"double, up to {LONGEST_PAUSE_S:g} s" in PAGE and f"After {SILENT_S:g} s a line says" in PAGE
    assert (
        f"(no connection, {', '.join(map(str, GONE))}) is asked again for `retry_for_s` ({judge.retry_for_s:g})" in PAGE
    )
    assert f"up to `retries` ({judge.retries}) times" in PAGE
    assert "`Score: N`, from 0 to 10" in PAGE and "Score: N" in TEMPLATE and "to 10 (" in TEMPLATE
    assert judge.parse is None and read_score("Score: 7", judge.parse, judge.scale).reward == 0.7
    assert Reward().fn == "math" and "`math`\ngrades" in PAGE


def test_metrics_that_are_named_are_written() -> None:
    found = [name for name in names(PAGE) if re.fullmatch(r"(reward|eval|rollout)/[\w/]+", name)]
    check_names({name.replace("NAME", "right"): 0.0 for name in found})
    assert "reward/by/NAME/mean" in found
