"""What a run with images is refused for before a device is taken, and that a good one is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megarl.core.errors import UserError
from megarl.core.types import Image, Prompt
from megarl.data.chat import load_tokenizer
from megarl.recipe.load import load_recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe
from megarl.run.epochs import with_steps
from megarl.run.preflight import Preflight, preflight, preflight_eval, preflight_supervised
from megarl.run.rows_check import check_seen
from tests.support.bad_input import Place, good_place
from tests.support.sight import picture
from tests.support.tiny import write_tiny_qwen
from tests.support.vision import QWEN2_5, QWEN3, with_score, write_tiny_vision_model

SFT = """\
run: {{dir: {root}/runs, name: s}}
cluster: {{platform: cpu}}
model: {{path: {root}/model, dtype: float32}}
data: {{train: {root}/train.jsonl, max_tokens: 64, response_key: answer}}
train: {{steps: 2, batch_samples: 4}}
"""


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def place(tmp_path: Path, model_folder: Path) -> Place:
    place = good_place(tmp_path, model_folder)
    (tmp_path / "a.png").write_bytes(picture(64, 64))
    place.write_rows(*(row(n) for n in range(6)))
    return place


def row(number: int, **fields: Any) -> dict[str, Any]:
    """Every other one has an image."""
    return {"prompt": f"{number}+1", "answer": str(number + 1), **({"images": "a.png"} if number % 2 else {}), **fields}


def checked(place: Place, *overrides: str) -> Preflight:
    return preflight(load_recipe(place.recipe, overrides).recipe)


def test_a_run_with_images_is_described_and_knows_its_rows_again(place: Place) -> None:
    found = checked(place, f"data.eval={place.data}")
    assert (found.rows, found.dropped, found.eval_rows) == (6, 0, 6) and found.model.vision is not None
    # 64 x 64 pixels are four squares of both models, between two tokens.
    text = len(load_tokenizer(place.model)("<|im_start|>user 0+1<|im_end|><|im_start|>assistant ")["input_ids"])
    dropped = [
        checked(place, "rollout.prompts_per_step=3", f"data.max_prompt_tokens={text + more}").dropped
        for more in (0, 5, 6)
    ]
    assert dropped == [3, 3, 0]
    evaluation = load_recipe(place.recipe, [f"data.eval={place.data}"]).recipe
    assert preflight_eval(evaluation).eval_rows == 6
    (place.root / "a.png").write_bytes(picture(64, 64, 1) + b"longer")
    assert checked(place).digests["prompts"] != found.digests["prompts"]
    (place.root / "a.png").write_bytes(picture(64, 128))
    smaller = checked(place, f"data.max_image_pixels={found.model.vision.least_pixels}")
    assert smaller.digests["prompts"] != checked(place).digests["prompts"]
    loaded = load_recipe(place.recipe, ["train.steps=0", "train.epochs=2"])
    assert with_steps(loaded).recipe.train.steps == 3


def test_episodes_show_the_images_of_rows(place: Place) -> None:
    room = ["data.max_prompt_tokens=300", "rollout.max_response_tokens=100"]
    assert checked(place, "agent.environment=guess_number", *room).rows == 6
    shown = ("data.images_key=null", f"data.max_image_pixels={2**20}")  # by the environment
    assert checked(place, "agent.environment=guess_number", *room, *shown).rows == 6
    # A harness shows them by itself.
    players = '{"a": {"environment": "guess_number"}, "b": {"command": ["true"]}}'
    several = [f"agent.environments={players}", "agent.environment_key=kind", *room]
    place.write_rows(*(row(n, kind="ab"[n % 2]) for n in range(6)))
    assert checked(place, *several).rows == 6
    split = load_recipe(place.recipe, ["agent.environment=guess_number", "agent.rewritten=split", *room]).recipe
    shown = Prompt("train.jsonl:2", np.zeros(1, np.int32), "", "", images=(Image(b"", 4, 4),))
    with pytest.raises(
        UserError, match=r"line 2: the row has images, and episodes with agent.rewritten: split show none"
    ):
        check_seen(split, place.data, [shown])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.policy_loss=distill", "teacher.servers={urls: ['http://127.0.0.1:1']}"],
            "line 2: the row has images, and a teacher behind an address is asked about text alone",
        ),
        (
            ["algorithm.policy_loss=distill", "teacher.path={root}/text"],
            "line 2: the row has images, and teacher.path {root}/text is a model that sees none",
        ),
        (["data.max_image_pixels=10"], "data.max_image_pixels 10: no image comes to the model with less than"),
    ],
    ids=["teacher behind an address", "teacher of text", "too small"],
)
def test_refused_recipes(place: Place, overrides: list[str], says: str) -> None:
    write_tiny_qwen(place.root / "text")
    (place.root / "text" / "tokenizer.json").write_bytes((place.model / "tokenizer.json").read_bytes())
    given = [each.format(root=place.root) if "{root}" in each else each for each in overrides]
    with pytest.raises(UserError) as caught:
        checked(place, *given)
    assert says.format(root=place.root) in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(1, images="b.png")], "line 1, field 'images', image 1: there is no file {root}/b.png. Did you mean"),
        ([row(0), row(0, prompt="<image>1")], "line 2: the prompt has 1 places of images (<image>), and the row 0"),
        (
            [row(0, prompt=[{"role": "user", "content": [{"type": "audio"}]}])],
            "it is of type 'audio'; wanted are parts",
        ),
    ],
    ids=["missing", "places", "parts"],
)
def test_refused_rows(place: Place, rows: list[dict[str, Any]], says: str) -> None:
    place.write_rows(*rows)
    with pytest.raises(UserError) as caught:
        checked(place)
    assert says.format(root=place.root) in str(caught.value)
    assert not place.run.exists()


def test_a_model_that_is_shown_nothing_is_told_of(place: Place) -> None:
    """Rows with their images in another field are read as text, and look like a run of text."""
    place.write_rows(*(row(n, images=None, image="a.png") for n in range(6)))
    [note] = [each for each in checked(place).notes if "images_key" in each]
    assert note == (
        f"no row of {place.data} has an image in its field 'images' (data.images_key): the model sees none of them. Further "
        "fields of the first row: image"
    )
    for key in ("image", "null"):
        assert not [each for each in checked(place, f"data.images_key={key}").notes if "images_key" in each]


def supervised(place: Place, *overrides: str, kind: Any = SftRecipe, text: str = SFT) -> Any:
    recipe = place.root / "supervised.yaml"
    recipe.write_text(text.format(root=place.root))
    return load_recipe(recipe, overrides, kind)


@pytest.mark.parametrize("kind", [SftRecipe, DpoRecipe])
def test_supervised_training_takes_rows_whose_list_of_images_is_empty(place: Place, kind: Any) -> None:
    rows = {"images": [], "chosen": "1", "rejected": "2"}
    place.write_rows(*(row(n, **rows) for n in range(6)))
    text = SFT if kind is SftRecipe else SFT.replace(", response_key: answer", "") + "dpo: {{}}\n"
    assert (
        preflight_supervised(supervised(place, "actor.micro_batch_tokens=256", kind=kind, text=text).recipe).rows == 6
    )


def test_demonstrations_with_images_are_checked_as_prompts_are(place: Place) -> None:
    found = preflight_supervised(supervised(place, f"data.eval={place.data}").recipe)
    assert (found.rows, found.dropped, found.eval_rows) == (6, 0, 6) and found.model.vision is not None
    # 64 x 64 pixels are four squares of both models, between two tokens; the response's are two.
    text = len(load_tokenizer(place.model)("<|im_start|>user 0+1<|im_end|><|im_start|>assistant ")["input_ids"]) + 2
    limits = [supervised(place, f"data.max_tokens={text + more}").recipe for more in (0, 5, 6)]
    assert [preflight_supervised(each).dropped for each in limits] == [3, 3, 0]
    assert with_steps(supervised(place, "train.steps=0", "train.epochs=2")).recipe.train.steps == 3
    (place.root / "a.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"line 2, field 'images', image 1: .* cannot be decoded as an image"):
        preflight_supervised(supervised(place).recipe)
    with pytest.raises(UserError, match=r"data.max_image_pixels 10: no image comes to the model with less than"):
        preflight_supervised(supervised(place, "data.max_image_pixels=10").recipe)
    assert preflight_supervised(supervised(place, "data.images_key=null").recipe).rows == 6


def test_a_critic_sees_what_the_policy_does(place: Place) -> None:
    found = checked(place, "algorithm.advantage=gae")
    assert found.rows == 6 and load_recipe(place.recipe, ["algorithm.advantage=gae"]).recipe.critic is not None


def test_adapters_of_a_reward_model_that_sees_are_refused(place: Place) -> None:
    with_score(place.model, place.root / "scored")
    place.write_rows(*(row(n, chosen="1", rejected="22") for n in range(6)))
    text = SFT.replace(", response_key: answer", "").replace("/model,", "/scored,") + "rm: {{}}\n"
    words = ("actor.micro_batch_tokens=256", "actor.lora={rank: 2}")
    with pytest.raises(UserError, match=r"scored is a reward model that sees images, .* Remove actor.lora"):
        preflight_supervised(supervised(place, *words, kind=RmRecipe, text=text).recipe)


@pytest.mark.parametrize(
    ("kind", "section", "fields"),
    [
        (RmRecipe, "rm", {"chosen": "1", "rejected": "22"}),
        (DpoRecipe, "dpo", {"chosen": "1", "rejected": "22"}),
        (KtoRecipe, "kto", {"completion": "22", "label": True}),
    ],
)
def test_pairs_and_labelled_answers_with_images_are_checked_as_demonstrations_are(
    place: Place, kind: Any, section: str, fields: dict[str, Any]
) -> None:
    place.write_rows(*(row(n, **fields) for n in range(6)))
    text = SFT.replace(", response_key: answer", "") + f"{section}: {{{{}}}}\n"

    def found(*overrides: str) -> Preflight:
        given = ("actor.micro_batch_tokens=256", *overrides)
        return preflight_supervised(supervised(place, *given, kind=kind, text=text).recipe)

    assert (found().rows, found().dropped) == (6, 0)
    # The longer answer is three tokens; 64 x 64 pixels are four squares of both models, between two tokens.
    longest = len(load_tokenizer(place.model)("<|im_start|>user 0+1<|im_end|><|im_start|>assistant ")["input_ids"]) + 3
    assert [found(f"data.max_tokens={longest + more}").dropped for more in (0, 5, 6)] == [3, 3, 0]
    assert found("data.images_key=null", f"data.max_tokens={longest}").dropped == 0
    (place.root / "a.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"line 2, field 'images', image 1: .* cannot be decoded as an image"):
        found()


def test_a_tower_that_is_not_the_configs_is_found_before_a_device_is_taken(place: Place) -> None:
    tower = place.root / "tower"
    shutil.copytree(place.model, tower)
    said = json.loads((tower / "config.json").read_text())
    said["vision_config"]["depth"] += 1
    (tower / "config.json").write_text(json.dumps(said))
    found = r"The vision tower in .*tower is not that of its config.json: its \d+ tensors have [\d,]+ numbers, and vision_config"
    with pytest.raises(UserError, match=found):
        checked(place, f"model.path={tower}")
    with pytest.raises(UserError, match=found):
        preflight_supervised(supervised(place, f"model.path={tower}").recipe)


@pytest.mark.parametrize("learns", [False, True])
def test_weights_of_a_tower_under_other_names_are_found_before_a_device_is_taken(place: Place, learns: bool) -> None:
    """Of as many numbers as the config's tower has."""
    tower = shutil.copytree(place.model, place.root / "tower")
    tensors = load_file(tower / "model.safetensors")
    wrong = {name.replace("attn.proj", "attn.out"): each for name, each in tensors.items()}
    save_file(wrong, tower / "model.safetensors", {"format": "pt"})
    found = r"tower's weights in .* do not match its config.json. missing: visual.blocks.0.attn.proj.*not in the config: visual.b"
    given = (f"model.path={tower}", f"actor.optimizer.freeze_vision_tower={str(not learns).lower()}")
    with pytest.raises(UserError, match=found):
        checked(place, *given)
    with pytest.raises(UserError, match=found):
        preflight_supervised(supervised(place, *given).recipe)


def test_a_model_of_text_is_trained_on_rows_that_have_images_besides(tmp_path: Path) -> None:
    place = good_place(tmp_path, write_tiny_qwen(tmp_path / "text"))
    place.write_rows(*(row(n, images="gone.png") for n in range(4)))
    assert checked(place).rows == 4
    parts = [{"type": "image"}, {"type": "text", "text": "1+1"}]
    place.write_rows(row(0, prompt=[{"role": "user", "content": parts}]))
    with pytest.raises(UserError, match=r"'content' is a list, and must be a string; wanted is .* that sees images"):
        checked(place)
    for key in ("images_key=pictures", "max_image_pixels=9000"):
        with pytest.raises(UserError, match=rf"data.{key.partition('=')[0]}: the model sees no images"):
            checked(place, f"data.{key}")


def test_rows_of_supervised_training_without_images_are_a_models_that_could_see_them(place: Place) -> None:
    rows = [json.loads(line) for line in place.data.read_text().splitlines()]
    place.write_rows(*({name: each[name] for name in ("prompt", "answer")} for each in rows))
    assert preflight_supervised(supervised(place).recipe).rows == 6
