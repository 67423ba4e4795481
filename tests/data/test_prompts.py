import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken

from megarl.core.errors import UserError
from megarl.data.digests import TEMPLATE
from megarl.data.prompts import check_rows, digests_of, load_prompts
from megarl.recipe.schema import Data
from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer


def write(folder: Path, *rows: object) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(path: Path, **keys: Any) -> Data:
    return Data(train=path, **keys)


def test_a_string_becomes_a_user_message_under_a_chat_template(tmp_path: Path, chat_tokenizer: Any) -> None:
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2", "level": 3, "tags": ["sum"]})
    loaded = load_prompts(path, chat_tokenizer, data(path))
    (prompt,) = loaded.prompts
    assert prompt.id == "train.jsonl:1"
    assert prompt.text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.token_ids.dtype == np.int32
    assert prompt.answer == "2"
    asked = [{"role": "user", "content": "1+1?"}]
    assert prompt.metadata == {"level": 3, "tags": ["sum"], "prompt_messages": asked}
    assert (len(loaded), loaded.num_dropped) == (1, 0)


@pytest.mark.parametrize(
    ("opened", "special", "ends"),
    [
        ("<think>\n", False, "</think>"),
        ("[THINK]", False, "[/THINK]"),
        ("<think>\n\n</think>\n\n", False, None),
        ("<think>\n", True, None),  # no response shows it
        ("", False, None),
    ],
)
def test_a_prompt_that_opens_the_thinking_says_what_ends_it(
    opened: str, special: bool, ends: str | None, tmp_path: Path
) -> None:
    opens = CHAT_TEMPLATE.replace("assistant\\n", f"assistant\\n{opened}")
    assert (opens == CHAT_TEMPLATE) == (not opened)
    tokenizer = make_tokenizer(chat_template=opens)
    tokenizer.add_tokens([AddedToken("</think>", special=special)])
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"})
    (prompt,) = load_prompts(path, tokenizer, data(path)).prompts
    assert prompt.text.endswith(f"assistant\n{opened}") and prompt.metadata.get("thinking_ends") == ends


def test_a_string_stands_as_it_is_without_a_chat_template(tmp_path: Path, plain_tokenizer: Any) -> None:
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"})
    (prompt,) = load_prompts(path, plain_tokenizer, data(path)).prompts
    assert prompt.text == "1+1?"
    assert plain_tokenizer.decode(prompt.token_ids) == "<s>1+1?"


def test_messages_and_strings_give_the_same_prompt(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "1+1?"}]
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"}, {"prompt": chat, "answer": "2"})
    first, second = load_prompts(path, chat_tokenizer, data(path)).prompts
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.metadata["prompt_messages"] == second.metadata["prompt_messages"] == chat


def test_a_row_gives_the_template_what_it_reads_but_not_in_episodes(tmp_path: Path, plain_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(chat_template="{% if mood %}{{ '(' + mood + ')' }}{% endif %}" + CHAT_TEMPLATE)
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2", "chat_template_kwargs": {"mood": "glad"}})
    (prompt,) = load_prompts(path, tokenizer, data(path)).prompts
    assert prompt.text.startswith("(glad)<|im_start|>")
    with pytest.raises(
        UserError, match=r"line 1, field 'chat_template_kwargs'.*Set data\.chat_template_kwargs for all rows"
    ):
        load_prompts(path, tokenizer, data(path), answered=False)
    with pytest.raises(UserError, match="has no chat template that could read mood"):
        load_prompts(path, plain_tokenizer, data(path))


@pytest.mark.parametrize("suffix", ["", "\n"])
def test_a_template_that_is_rendered_already_is_not_rendered_again(
    tmp_path: Path, chat_tokenizer: Any, plain_tokenizer: Any, suffix: str
) -> None:
    """As templates for inputs are written where nobody applies the chat template."""
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"})
    rendered = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant"
    given = data(path, prompt_template=rendered, prompt_suffix=suffix)
    with pytest.raises(
        UserError, match=r"^data\.prompt_template, .* ends with '<\|im_start\|>assistant', as the model's chat"
    ):
        load_prompts(path, chat_tokenizer, given)
    assert load_prompts(path, plain_tokenizer, given).prompts[0].text.endswith(f"<|im_start|>assistant{suffix}")


QWEN3 = CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN3])
@pytest.mark.parametrize("end", ["", "\n", "\n<think>\n", "\n<think>\n\n</think>\n\n"])
def test_a_prompt_that_is_rendered_already_is_not_rendered_again(tmp_path: Path, template: str, end: str) -> None:
    rendered = f"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant{end}"
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"}, {"prompt": rendered, "answer": "2"})
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(UserError, match=r"line 2: .* ends with '<\|im_start\|>assistant'.*rendered already"):
        load_prompts(path, tokenizer, data(path, prompt_suffix="\nBe brief."))


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace("<|im_start|>", "> "),  # no special token: somebody may say so
        CHAT_TEMPLATE.partition("{% if add")[0],  # nothing opens the assistant's turn
        "{{ raise_exception('not this') if messages[0]['content'] == '1+1' }}" + CHAT_TEMPLATE,
    ],
)
def test_what_a_user_says_is_not_taken_for_a_rendering(tmp_path: Path, template: str) -> None:
    says = ["What is behind <|im_start|>assistant here?", "> assistant"]
    path = write(tmp_path, *({"prompt": each, "answer": "2"} for each in says))
    assert len(load_prompts(path, make_tokenizer(chat_template=template), data(path))) == 2


@pytest.mark.parametrize("dump", [json.dumps, repr])
def test_messages_that_a_table_has_made_text_are_refused(
    tmp_path: Path, chat_tokenizer: Any, plain_tokenizer: Any, dump: Callable[[object], str]
) -> None:
    messages = dump([{"role": "user", "content": "1+1?\n[2]"}])
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"}, {"prompt": messages, "answer": "2"})
    for tokenizer in (chat_tokenizer, plain_tokenizer):
        with pytest.raises(
            UserError, match=r"line 2: the prompt is text that holds a list of chat messages, .*list itself"
        ):
            load_prompts(path, tokenizer, data(path))
    says = ['[{"name": "x"}] has which role?', '["role"]', f"What is in {messages}?", '[{"role": "x"}] is [{"a": 1}]']
    path = write(tmp_path, *({"prompt": each, "answer": "2"} for each in says))
    assert len(load_prompts(path, chat_tokenizer, data(path))) == 4
    path = write(tmp_path, {"prompt": messages, "answer": "2"})  # what a template speaks of
    assert len(load_prompts(path, chat_tokenizer, data(path, prompt_template="Is this rude? {prompt}"))) == 1


CALLING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)


def test_calls_in_a_prompt_are_rendered_as_a_demonstrations_are(tmp_path: Path) -> None:
    """OpenAI's API has arguments as a JSON string, and no content beside a call; templates want objects, and a text."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "user", "content": "1+1?"}
    called = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    told = {"role": "tool", "content": "2"}
    path, tokenizer = (
        write(tmp_path, {"prompt": [asked, called, told], "answer": "2"}),
        make_tokenizer(chat_template=CALLING),
    )
    (prompt,) = load_prompts(path, tokenizer, data(path, prompt_suffix="!")).prompts
    shown = ["user 1+1?", 'assistant {"a": 1}', "tool 2!"]
    assert prompt.text == "".join(f"<|im_start|>{each}<|im_end|>" for each in shown)
    parsed = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "", "tool_calls": [parsed]}
    assert prompt.metadata["prompt_messages"] == [asked, said, {**told, "content": "2!"}]


VERL = {"ground_truth": "c", "style": "rule"}


@pytest.mark.parametrize(
    ("row", "keys", "wanted"),
    [
        ({"answer": "a", "label": "b"}, {}, ("a", {"label": "b"})),
        ({"label": 7}, {}, ("7", {})),
        ({"answer": None, "label": 1.5}, {}, ("1.5", {"answer": None})),
        ({"reward_model": VERL}, {}, ("c", {"reward_model": VERL})),
        ({"answer": "a", "gold": "d"}, {"answer_key": "gold"}, ("d", {"answer": "a"})),
        ({"extra": {"gold": "e"}}, {"answer_key": "extra.gold"}, ("e", {"extra": {"gold": "e"}})),
        # Several are right: numbers in digits alone, as one is. What is none of these is the row's own affair.
        ({"answer": ["four", 4, 0.00001, "4"]}, {}, (["four", "4", "0.00001", "4"], {})),
        ({"answer": []}, {}, ([], {})),
        ({"answer": [["a"], 1]}, {}, ([["a"], 1], {})),
        ({"answer": [1, True, None]}, {}, ([1, True, None], {})),
        (
            {"reward_model": {"ground_truth": {"target": 24}}},
            {},
            ({"target": 24}, {"reward_model": {"ground_truth": {"target": 24}}}),
        ),
        # slime's rows: what is in their `metadata` reaches a reward as if it stood in the row.
        ({"label": "f", "metadata": {"level": 3}, "id": 9}, {}, ("f", {"level": 3, "id": 9})),
        ({"label": "f", "metadata": "as text"}, {}, ("f", {"metadata": "as text"})),
    ],
)
def test_the_answer_is_found_under_the_names_people_use(
    tmp_path: Path, plain_tokenizer: Any, row: dict[str, Any], keys: dict[str, Any], wanted: tuple[Any, dict[str, Any]]
) -> None:
    path = write(tmp_path, {"prompt": "q", **row})
    (prompt,) = load_prompts(path, plain_tokenizer, data(path, **keys)).prompts
    answer, metadata = wanted
    assert (prompt.answer, prompt.metadata) == (
        answer,
        {**metadata, "prompt_messages": [{"role": "user", "content": "q"}]},
    )


def test_an_object_of_a_parquet_column_is_without_the_nulls_that_other_rows_put_there(
    tmp_path: Path, plain_tokenizer: Any
) -> None:
    """A column has one type: {"a": 1} beside {"b": [2]} is read as {"a": 1, "b": None}."""
    answers: list[Any] = [{"a": 1}, {"b": [2]}]
    path = tmp_path / "train.parquet"
    rows = [{"prompt": "q", "answer": each} for each in answers]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [each.answer for each in load_prompts(path, plain_tokenizer, data(path)).prompts] == answers


def test_what_is_empty_is_no_answer(tmp_path: Path, plain_tokenizer: Any) -> None:
    answers: list[Any] = ["", " ", [], ["", " "], {}, "a", ["", "a"], {"a": ""}]
    path = write(tmp_path, *({"prompt": "q", "answer": each} for each in answers))
    empty = load_prompts(path, plain_tokenizer, data(path)).without_answer
    assert [each.answer for each in empty] == answers[:5]


def test_the_end_of_a_text_is_not_taken_of_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "q", "answer": ["so #### 4"]})
    with pytest.raises(UserError, match=r"the answer is a list, and data.final_answer takes the end of a text"):
        check_rows(path, data(path, final_answer=True))


def test_a_parquet_row_as_verl_writes_it(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat = [{"content": "1+1?", "role": "user"}]
    rest = {
        "data_source": "sums",
        "ability": "math",
        "reward_model": VERL,
        "extra_info": {"index": 7, "split": "train"},
    }
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, **rest}]), path)
    (prompt,) = load_prompts(path, chat_tokenizer, data(path)).prompts
    assert (prompt.answer, prompt.metadata) == ("c", {**rest, "prompt_messages": chat})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"level": 1, "metadata": {"level": 2}}, "the field 'level' stands in the row and in its 'metadata' as well"),
        ({"prompt_messages": []}, "the field 'prompt_messages' is what a reward gets the prompt's messages under"),
        ({"metadata": {"prompt_messages": []}}, "the field 'prompt_messages' is what a reward gets"),
    ],
)
def test_two_fields_of_one_name_are_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path, {"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "a", **row})
    with pytest.raises(UserError, match=f"line 2: {says}"):
        check_rows(path, data(path))


def test_parquet_gives_the_same_prompts(tmp_path: Path, chat_tokenizer: Any) -> None:
    rows = [{"question": f"{index}+1?", "reward_model": {"ground_truth": str(index + 1)}} for index in range(5)]
    jsonl, parquet = write(tmp_path, *rows), tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    loaded = [
        load_prompts(path, chat_tokenizer, data(path, prompt_key="question")).prompts for path in (jsonl, parquet)
    ]
    from_jsonl, from_parquet = ([(prompt.text, prompt.answer) for prompt in prompts] for prompts in loaded)
    assert from_jsonl == from_parquet
    assert loaded[1][4].id == "train.parquet:5"


def test_prompts_over_the_limit_are_dropped_and_counted_or_refused(tmp_path: Path, plain_tokenizer: Any) -> None:
    # With its `<s>`, a prompt of n letters has n + 1 tokens.
    path = write(tmp_path, *({"prompt": "a" * length, "answer": ""} for length in (3, 4, 5, 2)))
    loaded = load_prompts(path, plain_tokenizer, data(path, max_prompt_tokens=4))
    assert [prompt.id for prompt in loaded.prompts] == ["train.jsonl:1", "train.jsonl:4"]
    assert loaded.num_dropped == 2
    with pytest.raises(UserError, match=r"line 2: the prompt has 5 tokens, over data.max_prompt_tokens=4"):
        load_prompts(path, plain_tokenizer, data(path, max_prompt_tokens=4, over_length="error"))
    with pytest.raises(UserError, match=r"all 4 prompts are over data.max_prompt_tokens=2"):
        load_prompts(path, plain_tokenizer, data(path, max_prompt_tokens=2))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "a"}, "there is no field 'prompt'"),
        ({"prompt": "  ", "answer": "a"}, "field 'prompt': the prompt is empty"),
        ({"prompt": 5, "answer": "a"}, "field 'prompt': the prompt is a number"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "field 'prompt', message 1: 'content' is missing"),
        ({"prompt": [{"role": "assistant", "content": "b"}], "answer": "a"}, "the last message is the assistant's"),
        ({"prompt": "q", "solution": "a"}, "none of the fields 'answer', 'label', 'reward_model.ground_truth'"),
        ({"prompt": "q", "answer": [1.0, float("inf")]}, "field 'answer': the answer is inf, which is no number"),
        ({"prompt": "q", "answer": True}, "field 'answer': the answer is true or false"),
    ],
)
def test_a_bad_row_is_named_without_a_tokenizer(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path, {"prompt": "q", "answer": "a"}, row)
    with pytest.raises(UserError) as caught:
        check_rows(path, data(path))
    assert f"{path}, line 2" in str(caught.value)
    assert says in str(caught.value)


def test_a_template_and_a_system_prompt_stand_around_every_prompt(tmp_path: Path, chat_tokenizer: Any) -> None:
    """Braces are text: a template may ask for an answer in LaTeX."""
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "2+2"}]
    path = write(tmp_path, {"prompt": "1+1", "answer": "2"}, {"prompt": chat, "answer": "4"})
    given = data(path, prompt_template="Solve {prompt} in \\boxed{}.", prompt_suffix="!", system_prompt="Be brief.")
    first, second = (each.text for each in load_prompts(path, chat_tokenizer, given).prompts)
    assert first == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve 1+1 in \\boxed{}.!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second == (
        "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\nSolve 2+2 in \\boxed{}.!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_has_one_place_for_the_prompt_and_the_system_needs_a_chat_template(
    tmp_path: Path, plain_tokenizer: Any
) -> None:
    path = write(tmp_path, {"prompt": "1+1", "answer": "2"})
    assert (
        load_prompts(path, plain_tokenizer, data(path, prompt_template="Q: {prompt}\nA:")).prompts[0].text
        == "Q: 1+1\nA:"
    )
    for text, count in (("Solve", 0), ("{prompt} {prompt}", 2)):
        with pytest.raises(ValueError, match=rf"`{{prompt}}` is in it {count} times"):
            data(path, prompt_template=text)
    with pytest.raises(UserError, match=r"data\.system_prompt: the model's tokenizer has no chat template"):
        load_prompts(path, plain_tokenizer, data(path, system_prompt="Be brief."))


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ({"prompt": "1+1?", "answer": "2", "level": 3}, []),
        ({"prompt": "1+1?", "answer": "3"}, ["answers"]),
        ({"prompt": "1+2?", "answer": "2"}, ["prompts"]),
    ],
)
def test_digests_tell_what_of_the_rows_is_another(
    row: dict[str, Any], other: list[str], tmp_path: Path, plain_tokenizer: Any
) -> None:
    def of(*rows: dict[str, Any]) -> dict[str, str]:
        path = write(tmp_path, *rows)
        return digests_of(load_prompts(path, plain_tokenizer, data(path)).prompts, data(path))

    last = {"prompt": "2+2?", "answer": "4"}
    before, after = of({"prompt": "1+1?", "answer": "2"}, last), of(row, last)
    assert list(before) == ["ids", "prompts", "answers", TEMPLATE]
    assert [name for name in before if before[name] != after[name]] == other


def test_rows_rendered_with_other_options_are_others(tmp_path: Path, plain_tokenizer: Any) -> None:
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"})
    prompts = load_prompts(path, plain_tokenizer, data(path)).prompts
    before, after = (
        digests_of(prompts, data(path).model_copy(update={"chat_template_kwargs": {"enable_thinking": each}}))
        for each in (True, False)
    )
    assert [name for name in before if before[name] != after[name]] == [TEMPLATE]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (0.00001, "0.00001"),
        (-0.0, "0"),
        (5.0, "5"),
        (-50.0, "-50"),
        (5.05, "5.05"),
        (1e16, "10000000000000000"),
        (-2.5e-7, "-0.00000025"),
        (2.0, "2"),
        (0.1, "0.1"),
        (10**20, "1" + "0" * 20),
    ],
)
def test_a_number_is_written_in_digits_alone(answer: float, text: str, tmp_path: Path, plain_tokenizer: Any) -> None:
    path = write(tmp_path, {"prompt": "?", "answer": answer})
    assert load_prompts(path, plain_tokenizer, data(path)).prompts[0].answer == text


def test_a_decimal_of_parquet_is_an_answer_without_the_zeros_of_its_column(
    tmp_path: Path, plain_tokenizer: Any
) -> None:
    path = tmp_path / "train.parquet"
    for given in (["5.00000", "0.10000", "100.00000", "0.00001"], ["5", "100"]):
        answers = pyarrow.array([Decimal(each) for each in given])
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["?"] * len(given), "answer": answers}), path)
        found = [prompt.answer for prompt in load_prompts(path, plain_tokenizer, data(path)).prompts]
        assert found == (["5", "0.1", "100", "0.00001"] if len(given) == 4 else ["5", "100"])


def test_the_final_answer_is_taken_from_a_worked_one(tmp_path: Path, plain_tokenizer: Any) -> None:
    worked = ["48/2 = 24\n#### 1,072 ", r"so \boxed{\frac{1}{2}}", "#### 1\nno: #### 2"]
    path = write(tmp_path, *({"prompt": "?", "answer": answer} for answer in worked))
    answers = [prompt.answer for prompt in load_prompts(path, plain_tokenizer, data(path, final_answer=True)).prompts]
    assert answers == ["1,072", r"\frac{1}{2}", "2"]
    path = write(tmp_path, {"prompt": "?", "answer": "#### 3"}, {"prompt": "?", "answer": "3"})
    with pytest.raises(UserError, match=r"train\.jsonl, line 2, field 'answer': the answer has no `####`"):
        load_prompts(path, plain_tokenizer, data(path, final_answer=True))


def test_a_suffix_stands_behind_the_prompt_or_behind_the_last_message(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
    path = write(tmp_path, {"prompt": "1+1?", "answer": "2"}, {"prompt": chat, "answer": "2"})
    first, second = load_prompts(path, chat_tokenizer, data(path, prompt_suffix=" Now!")).prompts
    assert first.text.startswith("<|im_start|>user\n1+1? Now!<|im_end|>")
    assert "system\ns<|im_end|>" in second.text and "user\n1+1? Now!<|im_end|>" in second.text


def test_a_row_bounds_its_own_response(tmp_path: Path, plain_tokenizer: Any) -> None:
    path = write(tmp_path, {"prompt": "1?", "answer": "1", "max_response_tokens": 7}, {"prompt": "2?", "answer": "2"})
    first, second = load_prompts(path, plain_tokenizer, data(path)).prompts
    assert (first.max_response_tokens, second.max_response_tokens) == (7, None)
    path = write(tmp_path, {"prompt": "1?", "answer": "1", "metadata": {"max_response_tokens": 7}})
    assert load_prompts(path, plain_tokenizer, data(path)).prompts[0].max_response_tokens == 7


@pytest.mark.parametrize("bound", [0, -3, 1.5, "7", True])
def test_a_bound_that_is_no_number_of_tokens_is_named(tmp_path: Path, bound: Any) -> None:
    path = write(tmp_path, {"prompt": "1?", "answer": "1", "max_response_tokens": bound})
    with pytest.raises(
        UserError, match=r"train.jsonl, line 1.*'max_response_tokens'.*whole number of tokens, at least 1"
    ):
        check_rows(path, data(path))
