import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.core.errors import UserError
from megarl.data.chat import check_messages
from megarl.data.exchanges import parse_demonstration
from megarl.data.prompts import load_prompts
from megarl.data.rows import Row, read_rows
from megarl.data.sft import (
    Demonstration,
    apart,
    check_demonstrations,
    load_demonstrations,
    tokenise,
)
from megarl.recipe.schema import Data
from megarl.recipe.supervised import SftData
from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.support.llama2 import llama2_tokenizer

DATA = SftData(train=Path("sft.jsonl"))
# Shows no turn of the assistant's but the last.
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}"
    "{{ message['role'] + ':' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}


def demonstrate(tokenizer: Any, fields: dict[str, Any]) -> Demonstration:
    (demonstration,) = tokenise([parse_demonstration(Row(Path("sft.jsonl"), 1, fields), DATA)], tokenizer)
    return demonstration


def spoken(tokenizer: Any, demonstration: Demonstration) -> tuple[str, str]:
    """(the whole text, the text that is trained on)."""
    ids, mask = demonstration.token_ids, demonstration.loss_mask
    return tokenizer.decode(ids), tokenizer.decode(ids[mask == 1])


def test_only_the_response_and_its_end_are_trained_on(chat_tokenizer: Any) -> None:
    whole, trained = spoken(chat_tokenizer, demonstrate(chat_tokenizer, {"prompt": "1+1?", "response": "two"}))
    assert whole == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    assert trained == "two<|im_end|>"


def test_a_prompt_that_is_rendered_already_is_not_rendered_again(chat_tokenizer: Any, plain_tokenizer: Any) -> None:
    row = {"prompt": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", "response": "two"}
    with pytest.raises(UserError, match=r"line 1: .*rendered already"):
        demonstrate(chat_tokenizer, row)
    assert spoken(plain_tokenizer, demonstrate(plain_tokenizer, row))[0] == f"<s>{row['prompt']}two<|im_end|>"


def test_what_a_template_opens_behind_each_turn_is_not_learned() -> None:
    """Some pass over add_generation_prompt; or end a conversation that the assistant ends, as InternLM 2's."""
    opens = CHAT_TEMPLATE.partition("{% if add_generation_prompt %}")[0] + "{{ '<|im_start|>assistant\n' }}"
    closes = CHAT_TEMPLATE + "{% if messages[-1]['role'] == 'assistant' %}{{ '<s>' }}{% endif %}"
    for template in (opens, closes):
        tokenizer = make_tokenizer(chat_template=template)
        tokenizer.eos_token = "<s>"
        assert spoken(tokenizer, demonstrate(tokenizer, {"prompt": "1+1?", "response": "two"}))[1] == "two<|im_end|>"


def test_the_prompts_tokens_are_those_that_generation_begins_with(tmp_path: Path, chat_tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": "2"}')
    (prompt,) = load_prompts(path, chat_tokenizer, Data(train=path)).prompts
    demonstration = demonstrate(chat_tokenizer, {"prompt": "1+1?", "response": "two"})
    count = len(prompt.token_ids)
    assert demonstration.token_ids[:count].tolist() == prompt.token_ids.tolist()
    assert demonstration.loss_mask[:count].sum() == 0
    assert demonstration.loss_mask[count:].all()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [USER], "response": "two"},
        {"prompt": [USER], "response": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT], "prompt": "not read"},
    ],
)
def test_the_same_exchange_in_other_words(chat_tokenizer: Any, fields: dict[str, Any]) -> None:
    plain = demonstrate(chat_tokenizer, {"prompt": "1+1?", "response": "two"})
    other = demonstrate(chat_tokenizer, fields)
    assert other.token_ids.tolist() == plain.token_ids.tolist()
    assert other.loss_mask.tolist() == plain.loss_mask.tolist()


def test_an_end_of_turn_that_is_only_marked_as_special_ends_the_turn() -> None:
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.eos_token = "<s>"  # as Gemma 3's, whose <end_of_turn> no part of the tokenizer is named after
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer.all_special_ids
    whole, trained = spoken(tokenizer, demonstrate(tokenizer, {"prompt": "1+1?", "response": "two"}))
    assert whole.endswith("two<|im_end|>")
    assert trained == "two<|im_end|>"


def test_where_no_token_ends_a_turn_all_of_an_answer_is_learned() -> None:
    """As of GLM, whose turns end where the next one is opened: special tokens that an answer spells end nothing."""
    bare = "{% for m in messages %}<|im_start|>{{ m.role + ' ' + m.content }}{% endfor %}"
    opened = "{% if add_generation_prompt %}<|im_start|>{{ 'assistant ' }}{% endif %}"
    tokenizer = make_tokenizer(chat_template=bare + opened)
    answer = "<s> begins a text, <|im_end|> ends it"
    whole, trained = spoken(tokenizer, demonstrate(tokenizer, {"prompt": "1+1?", "response": answer}))
    assert whole == f"<|im_start|>user 1+1?<|im_start|>assistant {answer}"
    assert trained == answer


def test_a_chat_is_learned_where_the_template_closes_it_and_wants_a_system_message() -> None:
    ends = "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% else %}{{ eos_token }}{% endif %}"
    wants = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('who am I?') }}{% endif %}"
    marks = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer = make_tokenizer(chat_template=wants + marks + ends)
    tokenizer.eos_token = "<s>"
    chat = [{"role": "system", "content": "you"}, USER, ASSISTANT, USER, ASSISTANT]
    whole, trained = spoken(tokenizer, demonstrate(tokenizer, {"messages": chat}))
    turns = f"<|im_start|>user {USER['content']}<|im_end|><|im_start|>assistant {ASSISTANT['content']}<|im_end|>"
    assert whole == f"<|im_start|>system you<|im_end|>{turns * 2}"
    assert trained == f"{ASSISTANT['content']}<|im_end|>" * 2


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = (
    "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% if m['reasoning_content'] %}{{ '(' + m['reasoning_content'] + ')' }}{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments']['a'] + 1 }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def calling_tokenizer() -> Any:
    return make_tokenizer(chat_template=CALLING)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ({"content": "two", "reasoning_content": "hm"}, "(hm)two"),
        ({"content": "", "tool_calls": [CALL]}, "add2"),
        ({"content": None, "tool_calls": [CALL]}, "add2"),
        ({"tool_calls": [CALL], "reasoning_content": None}, "add2"),
        ({"content": "so ", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}, "so add2"),
        ({"content": "so ", "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}, "so add2"),
        ({"content": "two", "tool_calls": []}, "two"),
    ],
)
def test_a_response_is_the_assistants_whole_message(
    calling_tokenizer: Any, whole: bool, answer: dict[str, Any], trained: str
) -> None:
    message = {"role": "assistant", **answer}
    if "name" in (answer.get("tool_calls") or [{}])[0]:  # for templates that look for no function
        calling_tokenizer = make_tokenizer(chat_template=CALLING.replace("c['function']", "c"))
    fields = {"messages": [USER, message]} if whole else {"prompt": [USER], "response": [message]}
    assert spoken(calling_tokenizer, demonstrate(calling_tokenizer, fields))[1] == f"{trained}<|im_end|>"


def test_a_row_gives_the_template_what_it_reads(tmp_path: Path, plain_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(chat_template="{% if mood %}{{ '(' + mood + ')' }}{% endif %}" + CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    row, glad = {"messages": [USER, ASSISTANT]}, {"chat_template_kwargs": {"mood": "glad"}}
    path, digests = tmp_path / "rows.jsonl", []
    for more in ({}, glad):
        path.write_text(json.dumps(row | more))
        found = load_demonstrations(path, tmp_path, SftData(train=path))
        (shown,) = (spoken(tokenizer, each)[0] for each in found.rows)
        assert shown.startswith("(glad)<|im_start|>" if more else "<|im_start|>")
        digests.append(found.digests["texts"])
    assert digests[0] != digests[1]  # a run that goes on would have other tokens
    with pytest.raises(UserError, match="has no chat template that could read mood"):
        demonstrate(plain_tokenizer, {"prompt": "1+1?", "response": "two", **glad})


@pytest.mark.parametrize("form", [list, json.dumps])
@pytest.mark.parametrize("row", [{"messages": [USER, ASSISTANT]}, {"prompt": "1+1?", "response": "two"}])
def test_the_template_is_told_of_a_rows_tools(calling_tokenizer: Any, form: Any, row: dict[str, Any]) -> None:
    tools = form([{"type": "function", "function": {"name": "add"}}])
    told, trained = spoken(calling_tokenizer, demonstrate(calling_tokenizer, {**row, "tools": tools}))
    plain, _ = spoken(calling_tokenizer, demonstrate(calling_tokenizer, {**row, "tools": form([])}))
    assert told == f"[add]{plain}" and trained == "two<|im_end|>"


def test_a_parquet_row_says_nothing_of_the_keys_of_other_calls_and_tools(tmp_path: Path) -> None:
    """A column has one type: each of its objects has the keys of all, null where it has none."""
    schemas = [{"name": name, "properties": {key: {"type": "string"}}} for name, key in (("a", "city"), ("b", "unit"))]
    asked = [
        {"function": {"name": "a", "arguments": {"city": "Rome"}}},
        {"function": {"name": "b", "arguments": {"unit": "C"}}},
    ]
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": asked}], "tools": schemas}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for name in ("a.parquet", "a.jsonl"):
        (read,) = read_rows(tmp_path / name)
        found = parse_demonstration(read, DATA)
        assert found.prompt[1]["tool_calls"] == asked and found.tools == schemas
    null = {**ASSISTANT, "tool_calls": [{"name": "a", "arguments": {"city": None}}]}  # JSON means what it says
    assert check_messages([null], Row(Path("a.jsonl"), 1, {}), "messages")[0]["tool_calls"] == null["tool_calls"]


@pytest.mark.parametrize(
    "more", [{"tools": [{"type": "function"}]}, {"response": [{**ASSISTANT, "reasoning_content": "hm"}]}]
)
def test_without_a_template_neither_tools_nor_reasoning_are_left_out_unsaid(
    plain_tokenizer: Any, more: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="no chat template"):
        demonstrate(plain_tokenizer, {"prompt": "1+1=", "response": "2", **more})


def test_every_turn_of_the_assistant_in_a_chat_is_trained_on(chat_tokenizer: Any) -> None:
    chat = [USER, ASSISTANT, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    whole, trained = spoken(chat_tokenizer, demonstrate(chat_tokenizer, {"messages": chat}))
    rendered = chat_tokenizer.apply_chat_template(chat, tokenize=False)
    assert whole == rendered.removesuffix("\n")
    assert trained == "two<|im_end|>yes<|im_end|>"


def test_only_the_response_after_a_prompt_with_assistant_turns_is_trained_on(chat_tokenizer: Any) -> None:
    prompt = [USER, ASSISTANT, {"role": "user", "content": "sure?"}]
    _, trained = spoken(chat_tokenizer, demonstrate(chat_tokenizer, {"prompt": prompt, "response": "yes"}))
    assert trained == "yes<|im_end|>"


def test_without_a_template_text_ends_with_the_end_token(plain_tokenizer: Any) -> None:
    whole, trained = spoken(plain_tokenizer, demonstrate(plain_tokenizer, {"prompt": "1+1=", "response": "2"}))
    assert (whole, trained) == ("<s>1+1=2<|im_end|>", "2<|im_end|>")


def test_an_end_token_that_the_response_has_is_not_written_twice(plain_tokenizer: Any) -> None:
    """TRL's rule: it is put behind a completion that does not end with it."""
    whole, trained = spoken(
        plain_tokenizer, demonstrate(plain_tokenizer, {"prompt": "1+1=", "response": "2<|im_end|>"})
    )
    assert (whole, trained) == ("<s>1+1=2<|im_end|>", "2<|im_end|>")


def test_a_chat_without_a_template_is_refused(plain_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        demonstrate(plain_tokenizer, {"messages": [USER, ASSISTANT]})


def test_turns_that_a_template_rewrites_are_learned_one_by_one(tmp_path: Path, chat_tokenizer: Any) -> None:
    """As Qwen3's does: reasoning is left out of all turns before the last question."""
    reasoning = (
        "{%- set ns = namespace(last=0) -%}"
        "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{%- if m['role'] == 'assistant' and loop.index0 > ns.last -%}"
        "{{ '<think>' + (m['reasoning_content'] or '') + '</think>' }}"
        "{%- endif -%}{{ m['content'] + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    chat = [USER, {**ASSISTANT, "reasoning_content": "so"}, {"role": "user", "content": "2+2?"}, ASSISTANT]
    kept, chat_tokenizer.chat_template = chat_tokenizer.chat_template, reasoning
    try:
        [first, second] = apart(parse_demonstration(Row(Path("a"), 1, {"messages": chat}), DATA), chat_tokenizer)
        found = [spoken(chat_tokenizer, one) for one in tokenise([first, second], chat_tokenizer)]
        told = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        assert found[0] == (f"{told}<think>so</think>two<|im_end|>", "<think>so</think>two<|im_end|>")
        more = f"{told}two<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        assert found[1] == (f"{more}<think></think>two<|im_end|>", "<think></think>two<|im_end|>")
    finally:
        chat_tokenizer.chat_template = kept
    whole = parse_demonstration(Row(Path("a"), 1, {"messages": chat}), DATA)
    assert apart(whole, chat_tokenizer) == [whole]


def test_an_answer_is_learned_behind_the_reasoning_of_calls_that_a_template_drops_as_it_follows() -> None:
    """As gpt-oss' does; Kimi-K2-Thinking's drops the answer's own reasoning, too, which is refused."""
    marked = "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}"
    drops = (
        f"{{%- set ns = namespace(last=-1) %}}{marked}{{% endif %}}{{% endfor %}}"
        "{% for m in messages %}<|im_start|>{{ m.role + ' ' }}"
        "{% if m.reasoning_content and loop.index0 >= ns.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    call = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    answer = {**ASSISTANT, "reasoning_content": "so"}
    chat = [USER, call, {"role": "tool", "content": "2"}, answer]
    whole = parse_demonstration(Row(Path("a"), 1, {"messages": chat}), DATA)
    tokenizer = make_tokenizer(chat_template=drops)
    found = [spoken(tokenizer, one) for one in tokenise(apart(whole, tokenizer), tokenizer)]
    seen = "<|im_start|>user 1+1?<|im_end|><|im_start|>assistant (hm)add<|im_end|>"
    assert found == [
        (seen, "(hm)add<|im_end|>"),
        (f"{seen}<|im_start|>tool 2<|im_end|><|im_start|>assistant (so)two<|im_end|>", "(so)two<|im_end|>"),
    ]
    tokenizer.chat_template = drops.replace(">=", ">")
    with pytest.raises(UserError, match=r"message 4 \(assistant\): .*leaves out its reasoning_content, 'so'"):
        tokenise(apart(whole, tokenizer), tokenizer)


def test_a_file_has_a_row_for_each_turn_that_is_learned_alone(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    path = tmp_path / "rows.jsonl"
    chats = [[USER, ASSISTANT], [USER, ASSISTANT, USER, ASSISTANT, USER, ASSISTANT]]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    found = load_demonstrations(path, tmp_path, SftData(train=path, max_tokens=40))
    # The third turn of the second chat is too long.
    assert [row.id for row in found.rows] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:2"]
    assert (len(found), found.num_dropped, check_demonstrations(path, DATA)) == (3, 1, 2)


def test_a_template_that_writes_otherwise_than_it_asks_is_refused(chat_tokenizer: Any) -> None:
    kept, chat_tokenizer.chat_template = chat_tokenizer.chat_template, FORGETFUL
    try:
        demonstrate(chat_tokenizer, {"messages": [USER, ASSISTANT]})
        with pytest.raises(UserError, match="message 2: the model's chat template renders this turn otherwise"):
            demonstrate(chat_tokenizer, {"messages": [USER, ASSISTANT, USER, ASSISTANT]})
        chat_tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\\n'", "assistant\\n<think>\\n'")
        row = {"prompt": "1+1?", "response": "two"}
        with pytest.raises(UserError, match="Mend the template in the model's folder; or leave it out there"):
            demonstrate(chat_tokenizer, row)
        chat_tokenizer.chat_template = None
        assert spoken(chat_tokenizer, demonstrate(chat_tokenizer, row)) == ("1+1?two<|im_end|>", "two<|im_end|>")
    finally:
        chat_tokenizer.chat_template = kept


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [USER]}, "field 'messages': the last message is the user's"),
        ({"messages": [ASSISTANT]}, "the assistant's message stands alone"),
        ({"messages": "hi"}, "field 'messages': a string"),
        ({"response": "b"}, "there is no field 'prompt'"),
        ({"prompt": "a"}, "there is no field 'response'"),
        ({"prompt": "", "response": "b"}, "field 'prompt': the prompt is empty"),
        ({"prompt": 3, "response": "b"}, "field 'prompt': the prompt is a number"),
        ({"prompt": "a", "response": " "}, "field 'response': the response is empty"),
        ({"prompt": "a", "response": 4}, "field 'response': the response is a number"),
        ({"prompt": "a", "response": [USER]}, "field 'response': messages of user; wanted is some text"),
        ({"prompt": "a", "response": [{**ASSISTANT, "content": ""}]}, "field 'response': the response is empty"),
        ({"messages": [USER, {**ASSISTANT, "content": " "}]}, "field 'messages': the response is empty"),
        (
            {"messages": [USER, {**ASSISTANT, "content": "\n"}, USER, ASSISTANT]},
            "field 'messages', message 2: the assistant says nothing",
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "message 2: 'content' is missing"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}, "message 2: 'tool_calls' is a string"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [3]}]}, "message 2: 'tool_calls' has a number"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"arguments": "{"}]}]}, "a call are no JSON object (EOF"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"arguments": "3"}]}]}, "(they are a number)"),
        ({"messages": [USER, ASSISTANT], "tools": "[,"}, "field 'tools': a string that is not JSON"),
        ({"messages": [USER, ASSISTANT], "tools": {"a": 1}}, "field 'tools': an object; wanted is a list"),
        ({"messages": [USER, ASSISTANT], "tools": '["a"]'}, "field 'tools': a string in the list"),
        ({"prompt": "a", "response": [ASSISTANT, USER]}, "messages of assistant, user; wanted is some text"),
    ],
)
def test_a_bad_row_is_named_without_a_tokenizer(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError) as caught:
        check_demonstrations(path, SftData(train=path))
    assert f"{path}, line 2" in str(caught.value)
    assert says in str(caught.value)


def test_long_demonstrations_are_dropped_and_counted(tmp_path: Path, model_folder: Path, chat_tokenizer: Any) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "response": "b" * n}) + "\n" for n in (1, 9, 2, 8)))
    limit = len(demonstrate(chat_tokenizer, {"prompt": "a", "response": "bb"}).token_ids)
    loaded = load_demonstrations(path, model_folder, SftData(train=path, max_tokens=limit))
    assert [item.id for item in loaded.rows] == ["sft.jsonl:1", "sft.jsonl:3"]
    assert loaded.num_dropped == 2
    with pytest.raises(UserError, match=r"all 4 rows are over data\.max_tokens=5"):
        load_demonstrations(path, model_folder, SftData(train=path, max_tokens=5))


@pytest.fixture
def blanks_tokenizer() -> Any:
    return llama2_tokenizer()


def test_no_blank_comes_between_the_pieces_of_a_chat(blanks_tokenizer: Any) -> None:
    chat = [USER, ASSISTANT, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    found = demonstrate(blanks_tokenizer, {"messages": chat})
    whole = blanks_tokenizer.apply_chat_template(chat, tokenize=False)
    assert found.token_ids.tolist() == blanks_tokenizer(whole, add_special_tokens=False)["input_ids"]
    prompt = blanks_tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    begin = len(blanks_tokenizer(prompt, add_special_tokens=False)["input_ids"])
    answer = found.token_ids[begin : begin + 3]
    assert blanks_tokenizer.convert_ids_to_tokens(answer) == ["▁two", "▁", "</s>"]
    assert not found.loss_mask[:begin].any() and found.loss_mask[begin : begin + 3].all()


def test_a_response_stands_behind_its_prompt_as_it_is_written(blanks_tokenizer: Any) -> None:
    blanks_tokenizer.chat_template = None
    for response, first in (("two", "two"), (" two", "▁two")):
        found = demonstrate(blanks_tokenizer, {"prompt": "Q: 1+1?", "response": response})
        [answer, end] = found.token_ids[found.loss_mask == 1].tolist()
        assert blanks_tokenizer.convert_ids_to_tokens([answer, end]) == [first, "</s>"]
