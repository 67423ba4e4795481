import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.data.exchanges import parse_demonstration
from megarl.data.rows import Row
from megarl.data.sft import Demonstration, tokenise
from megarl.data.supervised import demonstrations_of
from megarl.data.unpaired import Unpaired, check_unpaired, load_unpaired, mismatched
from megarl.recipe.supervised import SftData, UnpairedData

ASKED = {"role": "user", "content": "1+1?"}
GOOD = {"prompt": "1+1?", "completion": "two", "label": True}
BAD = {"prompt": "1+1?", "completion": "three", "label": False}
MORE = [{"role": role, "content": "and?"} for role in ("assistant", "user", "assistant")]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "labelled.jsonl"


def test_an_answer_is_the_demonstration_of_sft(file: Path, model_folder: Path, chat_tokenizer: Any) -> None:
    rows = load_unpaired(write(file, GOOD, BAD), model_folder, UnpairedData(train=file)).rows
    assert [row.desirable for row in rows] == [True, False]
    for row, text in zip(rows, ("two", "three"), strict=True):
        demonstration = parse_demonstration(Row(file, 1, {"prompt": "1+1?", "response": text}), SftData(train=file))
        (expected,) = tokenise([demonstration], chat_tokenizer)
        assert row.answer.token_ids.tolist() == expected.token_ids.tolist()
        assert row.answer.loss_mask.tolist() == expected.loss_mask.tolist()
        assert demonstrations_of(row) == (row.answer,)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "completion": "two", "label": 1},
        {"prompt": [ASKED], "completion": [{"role": "assistant", "content": "two"}], "label": 1.0},
        {"completion": [ASKED, {"role": "assistant", "content": "two"}], "label": True},
        {"prompt": "1+1?", "completion": [ASKED, {"role": "assistant", "content": "two"}], "label": True},
        {"prompt": [ASKED], "completion": [ASKED, {"role": "assistant", "content": "two"}], "label": True},
    ],
)
def test_the_same_answer_in_other_words(file: Path, model_folder: Path, row: dict[str, Any]) -> None:
    plain, other = load_unpaired(write(file, GOOD, row), model_folder, UnpairedData(train=file)).rows
    assert other.answer.token_ids.tolist() == plain.answer.token_ids.tolist() and other.desirable


def test_fields_have_the_names_that_the_recipe_says(file: Path, model_folder: Path) -> None:
    rows = [GOOD | {"label": False, "reply": "six", "good": good} for good in (1, 0)]
    data = UnpairedData(train=file, response_key="reply", label_key="good")
    assert [row.desirable for row in load_unpaired(write(file, *rows), model_folder, data).rows] == [True, False]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "line 1: there is no field 'label' (whether the answer is desirable, data.label_key)",
        ),
        ({"prompt": "a", "label": True}, "there is no field 'completion' (the answer, data.response_key)"),
        ({"completion": "a", "label": True}, "there is no field 'prompt' (data.prompt_key)"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "line 1: the row is a pair, 'chosen' and 'rejected'"),
        (GOOD | {"label": None}, "the field 'label' (whether the answer is desirable, data.label_key) is null"),
        (
            GOOD | {"label": "good"},
            "field 'label': the label is 'good'; wanted is true or 1 where the answer is desirable",
        ),
        (GOOD | {"label": -1}, "field 'label': the label is -1; wanted"),
        (GOOD | {"label": [True]}, "field 'label': the label is a list; wanted"),
        (GOOD | {"completion": " "}, "field 'completion': the response is empty"),
        (
            GOOD | {"completion": [ASKED]},
            "messages of user; wanted is some text, or one message of the assistant's. A longer chat stands whole there, its "
            "prompt in it.",
        ),
        (
            GOOD | {"completion": MORE},
            "field 'completion': the chat does not begin with the row's prompt, field 'prompt'.",
        ),
        (
            GOOD | {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [ASKED, *MORE]},
            "field 'completion': the chat does not begin with the row's prompt",
        ),
    ],
)
def test_what_is_refused(file: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_unpaired(write(file, row), UnpairedData(train=file))
    assert says in str(caught.value)
    assert check_unpaired(write(file, GOOD, BAD), UnpairedData(train=file)) == 2


def test_a_row_alone_has_no_other_answers(file: Path, model_folder: Path) -> None:
    """One of two is too long."""
    data = UnpairedData(train=file, max_tokens=60)
    rows = load_unpaired(write(file, GOOD, BAD, GOOD | {"completion": "t" * 50}), model_folder, data)
    assert (len(rows), rows.num_dropped) == (2, 1)
    with pytest.raises(UserError, match=r"has 1 row within data\.max_tokens=60.*give at least 2"):
        load_unpaired(write(file, GOOD, GOOD | {"completion": "t" * 50}), model_folder, data)


def test_a_label_is_part_of_what_rows_say(file: Path, model_folder: Path) -> None:
    """A run does not go on with others."""
    data = UnpairedData(train=file)
    one = load_unpaired(write(file, GOOD, BAD), model_folder, data).digests
    assert one != load_unpaired(write(file, GOOD, BAD | {"label": True}), model_folder, data).digests


def test_each_prompt_stands_before_the_next_answer() -> None:
    def row(prompt: list[int], answer: list[int], *, desirable: bool = True) -> Unpaired:
        ids, mask = np.array(prompt + answer, np.int32), np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
        return Unpaired(Demonstration(f"rows:{prompt[0]}", ids, mask), desirable)

    rows = [row([1, 1], [11, 12, 13]), row([2], [21], desirable=False), row([3, 3, 3, 3], [31])]
    found = mismatched(rows, 5)
    assert [each.answer.token_ids.tolist() for each in found] == [[1, 1, 21], [2, 31], [3, 3, 3, 3, 11]]
    assert [each.answer.loss_mask.tolist() for each in found] == [[0, 0, 1], [0, 1], [0, 0, 0, 0, 1]]
    assert [each.answer.id for each in found] == ["rows:1", "rows:2", "rows:3"]
