"""Models beside the policy: what each role needs of its folder, refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.role_check import check_roles
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Critic, Parallel, RewardModel, Teacher
from megarl.recipe.run import Cluster, Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from tests.support.tiny import write_tiny_model
from tests.support.vision import with_score, write_tiny_vision_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def scorer(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of the policy's family, with its tokenizer."""
    folder = tmp_path_factory.mktemp("scorer") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((policy / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another vocabulary and a short context."""
    folder = tmp_path_factory.mktemp("stranger") / "model"
    return write_tiny_model(folder, vocab_size=256, max_position_embeddings=32, num_hidden_layers=2)


def check(policy: Path, **sections: Any) -> None:
    recipe = Recipe(
        cluster=Cluster(devices=2),
        model=Model(path=policy),
        data=Data(train=Path("t")),
        rollout=Rollout(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8),
        train=Train(steps=1),
        **sections,
    )
    check_roles(recipe, load_model_config(policy))


def test_models_that_suit_their_roles_pass(policy: Path, scorer: Path) -> None:
    check(policy, critic=Critic(), reward_model=RewardModel(path=scorer), teacher=Teacher(path=policy))
    check(policy, critic=Critic(path=scorer, parallel=Parallel(tp=2)))


def test_a_reward_model_has_a_score_head_and_a_teacher_has_none(policy: Path, scorer: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"reward_model.path .* is a language model.*Train one by `megarl rm`"):
        check(policy, reward_model=RewardModel(path=other))
    with pytest.raises(UserError, match=r"teacher.path .* has a score head and no vocabulary"):
        check(policy, teacher=Teacher(path=scorer))


def test_the_policy_is_no_reward_model_of_its_own(policy: Path) -> None:
    with pytest.raises(UserError, match=r"reward_model.path .* is a language model"):
        check(policy, reward_model=RewardModel(path=policy))


@pytest.mark.parametrize("role", ["critic", "reward_model", "teacher"])
def test_weights_that_are_not_their_config_s_are_refused_for_every_role(
    role: str, policy: Path, scorer: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(scorer if role == "reward_model" else policy, tmp_path / "other"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.zeros(3)}, folder / "model.safetensors")
    section = {"critic": Critic, "reward_model": RewardModel, "teacher": Teacher}[role]
    with pytest.raises(UserError, match=r"of another shape: model\.norm\.weight is \[3\]") as error:
        check(policy, **{role: section(path=folder)})
    assert str(folder) in str(error.value)


def test_other_tokens_are_refused(policy: Path, stranger: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"teacher.path .* vocabulary of 256, the policy of 128"):
        check(policy, teacher=Teacher(path=stranger))
    same_size = write_tiny_model(tmp_path / "same", seed=1)
    tokenizer = same_size / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"A"', 1))
    with pytest.raises(UserError, match=r"critic.path .* has another tokenizer than model.path"):
        check(policy, critic=Critic(path=same_size))


def test_a_teacher_has_as_many_likeliest_tokens_as_are_asked_for(policy: Path) -> None:
    teacher, most = Teacher(path=policy), load_model_config(policy).vocab_size
    says = rf"distill_top_k: {most + 1} is more than the vocabulary of teacher.path .* has {most} tokens"
    check(policy, algorithm=Algorithm(policy_loss="distill_top", distill_top_k=most), teacher=teacher)
    with pytest.raises(UserError, match=says):
        check(policy, algorithm=Algorithm(policy_loss="distill_top", distill_top_k=most + 1), teacher=teacher)


def test_a_context_that_is_too_short_is_refused(policy: Path, tmp_path: Path) -> None:
    short = write_tiny_model(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(
        UserError, match=r"sample of up to 1032 tokens .* longer than the context of 32 tokens of critic.path"
    ):
        check(policy, critic=Critic(path=short))


def test_each_role_answers_for_its_own_layout(policy: Path, tmp_path: Path) -> None:
    two_layers = write_tiny_model(tmp_path / "two", num_hidden_layers=2)
    check(policy, critic=Critic(path=two_layers, parallel=Parallel(pp=2)))
    with pytest.raises(UserError, match=r"critic.parallel"):
        check(policy, critic=Critic(parallel=Parallel(pp=2)))  # three layers


def test_a_damaged_folder_is_named(policy: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken", seed=1)
    (broken / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="is not a safetensors file"):
        check(policy, critic=Critic(path=broken))


def test_roles_that_score_may_see_what_the_policy_does(tmp_path: Path) -> None:
    seeing = write_tiny_vision_model(tmp_path / "seeing")
    scored = with_score(seeing, tmp_path / "scored")
    check(seeing, teacher=Teacher(path=seeing), critic=Critic(), reward_model=RewardModel(path=scored))
    check(seeing, critic=Critic(path=scored))
    with pytest.raises(
        UserError, match=r"reward_model.path .*seeing is a language model, and a reward model has a head"
    ):
        check(seeing, reward_model=RewardModel(path=seeing))


@pytest.mark.parametrize("role", ["teacher", "critic"])
def test_a_role_is_shown_images_as_the_policy_is(tmp_path: Path, role: str) -> None:
    seeing, section = write_tiny_vision_model(tmp_path / "seeing"), {"teacher": Teacher, "critic": Critic}[role]
    shutil.copytree(seeing, tmp_path / "other")
    sizes = tmp_path / "other" / "preprocessor_config.json"
    sizes.write_text(sizes.read_text().replace('"max_pixels": 9408', '"max_pixels": 19408'))
    check(seeing, **{role: section(path=tmp_path / "other")})  # it is given images of the policy's sizes
    said = tmp_path / "other" / "config.json"
    said.write_text(said.read_text().replace('"image_token_id": 82', '"image_token_id": 83'))
    with pytest.raises(
        UserError, match=rf"{role}.path .*other has another token for a square of an image than model.path"
    ):
        check(seeing, **{role: section(path=tmp_path / "other")})
