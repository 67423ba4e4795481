"""What a weight sync is verified on: text, and where the tower learns a prompt with its images."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.core.types import Prompt
from megarl.data.images import png
from megarl.rollout.pictures import Pictures
from megarl.rollout.probe import Probe, Prober
from tests.rollout.samples import make_prompt, make_sample
from tests.support.sight import picture, seeing_prompt

TOKEN = 7


def prober(prompts: list[Prompt], *, tower_learns: bool = True) -> Prober:
    return Prober(prompts, lambda prompt: Pictures(prompt, TOKEN), TOKEN, tower_learns=tower_learns)


def asked(found: Prober) -> Probe:
    return asyncio.run(found.probe())


def longer(prompt: Prompt) -> Prompt:
    return replace(prompt, token_ids=np.append(prompt.token_ids, np.array([9, 9], np.int32)))


def test_behind_text_stands_the_shortest_prompt_with_images() -> None:
    prompts = [
        make_prompt("p0"),
        longer(seeing_prompt("p1", picture(12, 12, 1))),
        seeing_prompt("p2", picture(12, 12, 2)),
    ]
    found = asked(prober(prompts))
    assert [TOKEN in row for row in found.rows] == [False, False, False, True]
    assert found.rows[-1] == prompts[2].token_ids.tolist()
    assert found.images is not None and found.images.token == TOKEN
    assert found.images.pngs == (png(prompts[2].images[0], ""),)


def test_a_frozen_tower_and_prompts_of_text_are_asked_of_no_image() -> None:
    prompts = [make_prompt("p0"), seeing_prompt("p1", picture(12, 12))]
    for found in (prober(prompts, tower_learns=False), prober(prompts[:1])):
        assert asked(found).images is None and not any(TOKEN in row for row in asked(found).rows)


def test_it_is_of_the_last_step_and_its_images_are_made_once(tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.png" for seed in (1, 2)]
    for seed, file in enumerate(files):
        file.write_bytes(picture(12, 12, seed))
    first, second = (seeing_prompt(f"p{number}", file) for number, file in enumerate(files))
    found = prober([first, second])
    assert asked(found).rows[-1] == first.token_ids.tolist()
    found.take([replace(make_sample("p1"), prompt=second)])
    wanted = asked(found)
    assert wanted.rows[-1] == second.token_ids.tolist() and wanted.images != asked(prober([first])).images
    for file in files:
        file.unlink()
    assert asked(found) == wanted
    found.take([make_sample("p3")])  # a step without images: that of the step before
    assert asked(found).images == wanted.images
