import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.data.exchanges import parse_demonstration
from megarl.data.pairs import check_pairs, load_pairs
from megarl.data.rows import Row
from megarl.data.sft import tokenise
from megarl.recipe.supervised import PairData, SftData
from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer

ASKED = {"role": "user", "content": "1+1?"}
ANSWERED = {"role": "assistant", "content": "two"}
GOOD = {"prompt": "1+1?", "chosen": "two", "rejected": "three"}


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pairs.jsonl"


def test_both_sides_are_the_demonstrations_of_sft(file: Path, model_folder: Path, chat_tokenizer: Any) -> None:
    (pair,) = load_pairs(write(file, GOOD), model_folder, PairData(train=file)).rows
    for side, text in ((pair.chosen, "two"), (pair.rejected, "three")):
        row = Row(file, 1, {"prompt": "1+1?", "response": text})
        (expected,) = tokenise([parse_demonstration(row, SftData(train=file))], chat_tokenizer)
        assert side.token_ids.tolist() == expected.token_ids.tolist()
        assert side.loss_mask.tolist() == expected.loss_mask.tolist()
        assert chat_tokenizer.decode(side.token_ids[side.loss_mask == 1]) == f"{text}<|im_end|>"
    assert pair.margin == 0


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "chosen": "two", "rejected": "three"},
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [{"role": "assistant", "content": "three"}]},
        {"chosen": chat("1+1?", "two"), "rejected": chat("1+1?", "three")},
        {"prompt": "not read", "chosen": chat("1+1?", "two"), "rejected": chat("1+1?", "three")},
    ],
)
def test_the_same_pair_in_other_words(file: Path, model_folder: Path, row: dict[str, Any]) -> None:
    data = PairData(train=file)
    (plain,) = load_pairs(write(file, GOOD), model_folder, data).rows
    (other,) = load_pairs(write(file, row), model_folder, data).rows
    assert other.chosen.token_ids.tolist() == plain.chosen.token_ids.tolist()
    assert other.rejected.loss_mask.tolist() == plain.rejected.loss_mask.tolist()


def test_only_the_last_message_of_a_chat_is_compared(file: Path, model_folder: Path, chat_tokenizer: Any) -> None:
    before = ("1+1?", "two", "sure?")
    row = {"chosen": chat(*before, "yes"), "rejected": chat(*before, "no")}
    (pair,) = load_pairs(write(file, row), model_folder, PairData(train=file)).rows
    assert chat_tokenizer.decode(pair.chosen.token_ids[pair.chosen.loss_mask == 1]) == "yes<|im_end|>"


def test_answers_are_compared_as_whole_messages(file: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    said = {"chosen": [ANSWERED | {"tool_calls": [call]}], "rejected": [ANSWERED]}
    thought = {side: [ASKED, ANSWERED | {"reasoning_content": side}] for side in ("chosen", "rejected")}
    assert check_pairs(write(file, {"prompt": "1+1?", **said}, thought), PairData(train=file)) == 2
    written = call | {"function": call["function"] | {"arguments": '{"a": 1}'}}
    same = {"chosen": [ANSWERED | {"tool_calls": [call]}], "rejected": [ANSWERED | {"tool_calls": [written]}]}
    with pytest.raises(UserError, match="line 1: 'chosen' and 'rejected' are the same answer"):
        check_pairs(write(file, {"prompt": "1+1?", **same}), PairData(train=file))


def test_both_sides_keep_all_of_their_message_and_are_told_of_the_tools(file: Path, tmp_path: Path) -> None:
    template = (
        "{{ (tools or [])|length }}{% for m in messages %}{{ m['role'] + ':' + (m['reasoning_content'] or '') + m['content'] }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.save_pretrained(tmp_path)
    sides = {"chosen": [ASKED, ANSWERED | {"reasoning_content": "hm"}], "rejected": [ASKED, ANSWERED]}
    (pair,) = load_pairs(write(file, {**sides, "tools": [{"a": 1}]}), tmp_path, PairData(train=file)).rows
    assert tokenizer.decode(pair.chosen.token_ids) == "1user:1+1?<|im_end|>assistant:hmtwo<|im_end|>"
    assert tokenizer.decode(pair.rejected.token_ids) == "1user:1+1?<|im_end|>assistant:two<|im_end|>"


def test_margins_are_read_where_present(file: Path, model_folder: Path) -> None:
    pairs = load_pairs(
        write(file, GOOD | {"margin": 2}, GOOD, GOOD | {"margin": None}), model_folder, PairData(train=file)
    )
    assert [pair.margin for pair in pairs.rows] == [2.0, 0.0, 0.0]
    renamed = PairData(train=file, margin_key="gap")
    pairs = load_pairs(write(file, GOOD | {"margin": 2, "gap": 0.5}), model_folder, renamed)
    assert [pair.margin for pair in pairs.rows] == [0.5]


def test_a_pair_with_a_long_side_is_dropped_and_counted(file: Path, model_folder: Path) -> None:
    rows = [GOOD, GOOD | {"chosen": "t" * 50}, GOOD | {"rejected": "t" * 50}]
    data = PairData(train=file, max_tokens=60)
    pairs = load_pairs(write(file, *rows), model_folder, data)
    assert (len(pairs), pairs.num_dropped) == (1, 2)
    with pytest.raises(UserError, match=r"all 3 rows are over data\.max_tokens=3"):
        load_pairs(file, model_folder, PairData(train=file, max_tokens=3))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (GOOD | {"rejected": "two"}, "'chosen' and 'rejected' are the same answer"),
        ({"prompt": "a", "chosen": "b"}, "there is no field 'rejected' (one of the two answers of a pair)"),
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "Did you mean 'choosen'?"),
        ({"chosen": "b", "rejected": "c"}, "there is no field 'prompt' (data.prompt_key)"),
        (GOOD | {"chosen": " "}, "field 'chosen': the response is empty"),
        ({"chosen": chat("a", ""), "rejected": chat("a", "b")}, "field 'chosen': the response is empty"),
        (GOOD | {"rejected": 3}, "field 'rejected': the response is a number"),
        ({"chosen": chat("a", "b"), "rejected": chat("a")}, "field 'rejected': the last message is the user's"),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, "differ before their last message"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}', "field 'margin': the margin is nan"),
        (GOOD | {"chosen": [ASKED]}, "field 'chosen': messages of user; wanted is some text"),
        ({"chosen": [ANSWERED], "rejected": "c"}, "field 'chosen': the assistant's message stands alone"),
        (
            {
                "prompt": [ASKED],
                "chosen": [ANSWERED, *chat("2+2?", "four")],
                "rejected": [ANSWERED, *chat("2+2?", "five")],
            },
            "field 'chosen': the chat does not begin with the row's prompt, field 'prompt'",
        ),
        (GOOD | {"margin": "big"}, "field 'margin': the margin is a string"),
        (GOOD | {"margin": 10**400}, "field 'margin': the margin is a number; wanted is a finite number"),
        (GOOD | {"margin": -1e39}, "field 'margin': the margin is -1e+39; wanted is a finite number"),
        (GOOD | {"margin": True}, "field 'margin': the margin is true or false"),
    ],
)
def test_a_bad_row_is_named_without_a_tokenizer(file: Path, row: object, says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_pairs(write(file, GOOD, row), PairData(train=file))
    assert f"{file}, line 2" in str(caught.value)
    assert says in str(caught.value)


def test_good_rows_are_counted(file: Path) -> None:
    assert check_pairs(write(file, GOOD, GOOD), PairData(train=file)) == 2


def test_answers_that_the_template_makes_the_same_are_refused(file: Path, tmp_path: Path) -> None:
    """They differ in white space alone, which most templates take off: the loss would stay at log 2."""
    trims = CHAT_TEMPLATE.replace("message['content'] +", "(message['content'] | trim) +")
    make_tokenizer(chat_template=trims).save_pretrained(tmp_path / "model")
    write(file, GOOD, GOOD | {"chosen": "two", "rejected": "two\n"})
    with pytest.raises(UserError, match="line 2: the two answers are the same tokens to the model"):
        load_pairs(file, tmp_path / "model", PairData(train=file))
