from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tools.make_arithmetic import Problem
from tools.make_tiny_model import END, VOCAB_MULTIPLE, WORDS, main, make_tiny_model, make_tokenizer

SHAPE = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2}
QUESTION = [{"role": "user", "content": "What is 482 + 973?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=5, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_the_folder_and_answers(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert ids["input_ids"].shape[1] < answer.shape[1] <= ids["input_ids"].shape[1] + 4


def test_the_default_is_a_model_of_over_a_million_parameters(tmp_path: Path) -> None:
    assert 1_000_000 < make_tiny_model(tmp_path) < 4_000_000


def test_generation_ends_where_a_turn_ends(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert tokenizer.pad_token_id == model.config.pad_token_id != end


def test_the_vocabulary_covers_the_tokenizer_and_divides_among_ranks(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    vocab_size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    assert vocab_size % VOCAB_MULTIPLE == 0
    assert len(tokenizer) <= vocab_size < len(tokenizer) + VOCAB_MULTIPLE


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    for seed in (5, 6):
        make_tiny_model(tmp_path / str(seed), seed=seed, **SHAPE)
    assert sorted(path.name for path in (tmp_path / "5").iterdir()) == names
    assert filecmp.cmpfiles(folder, tmp_path / "5", names, shallow=False)[0] == names
    assert filecmp.cmpfiles(folder, tmp_path / "6", names, shallow=False)[1] == ["model.safetensors"]


def test_the_random_state_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny_model(tmp_path, **SHAPE)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_chat_template_frames_turns_and_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [*QUESTION, {"role": "assistant", "content": Problem(482, 973).worked()}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.startswith("<|im_start|>user\nWhat is 482 + 973?<|im_end|>\n<|im_start|>assistant\nones 2+3+0=05\n")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prompt_is_the_start_of_its_chat_token_for_token(tokenizer: PreTrainedTokenizerFast) -> None:
    response = Problem(482, 973).direct()
    chat = [*QUESTION, {"role": "assistant", "content": response}]
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    end = tokenizer.encode(END)
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) :] == tokenizer.encode(response) + end + tokenizer.encode("\n")


@pytest.mark.parametrize("word", WORDS)
def test_a_known_word_is_one_token(tokenizer: PreTrainedTokenizerFast, word: str) -> None:
    assert len(tokenizer.encode(word)) == 1


def test_every_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("#### 1455")] == ["#### ", "1", "4", "5", "5"]


TOKENIZER = make_tokenizer()


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads=3 is not a multiple of kv_heads=2"):
        make_tiny_model(tmp_path / "model", heads=3)
    assert not (tmp_path / "model").exists()


def test_the_command_writes_the_model_and_exits_with_2_on_a_bad_option(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    out = ["--out", str(tmp_path / "model"), "--hidden-size", "64", "--layers", "1"]
    done = CliRunner().invoke(app, out)
    assert done.exit_code == 0
    assert "random parameters, 1 layers, vocabulary 320, seed 1" in done.output
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert CliRunner().invoke(app, [*out, "--heads", "3"]).exit_code == 2
