"""docs/rewards.md is true: its recipe loads, and its server speaks the protocol."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml
from aiohttp.test_utils import TestServer

import megarl
from megarl.recipe.reward import Reward
from megarl.rewards.grade import Grade
from megarl.rewards.http import JsonClient
from megarl.rewards.remote import RemoteGrader

PAGE = (Path(megarl.__file__).parent.parent / "docs" / "rewards.md").read_text()


def block(language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_recipe_loads() -> None:
    reward = Reward.model_validate(yaml.safe_load(block("yaml"))["reward"])
    assert {each.kind for each in reward.by_name().values()} == {"rule", "remote", "judge"}


def test_the_server_grades() -> None:
    code = block("python")
    assert code.count("web.run_app(app, port=8000)") == 1
    names: dict[str, Any] = {}
    exec(code.replace("web.run_app(app, port=8000)", ""), names)

    async def go() -> list[Grade]:
        async with TestServer(names["app"]) as server:
            client = JsonClient(str(server.make_url("/grade")), None, timeout_s=10.0, retries=0)
            grader = RemoteGrader(client, batch=8, concurrency=1)
            await grader.start()
            try:
                return [await grader.grade("6*7?", response, "42", {}) for response in ("It is 42 ", "It is 41")]
            finally:
                await grader.close()

    assert asyncio.run(go()) == [Grade(1.0), Grade(0.0)]
