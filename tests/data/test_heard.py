"""What templates leave out of a row is refused; what they write in another way, or may leave out, is not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.data.chat import render
from megarl.data.exchanges import parse_demonstration
from megarl.data.heard import Hearing
from megarl.data.prompts import load_prompts
from megarl.data.rows import Row
from megarl.data.sft import apart, tokenise
from megarl.recipe.schema import Data
from megarl.recipe.supervised import SftData
from tests.data.conftest import make_tokenizer

DATA = SftData(train=Path("sft.jsonl"))
ROW = Row(Path("rows.jsonl"), 1, {})
CALL = {"type": "function", "id": "functions.add:0", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
# Of messages, those of the user and the assistant alone, and their content alone: as Llama 2's and many more.
PLAIN = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}{{ '<|im_start|>' + m['role'] + ':' + m['content'] | trim "
    "+ '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
# Results of tools as JSON, as Llama 3.1's; of a call its id, as Kimi-K2's.
FULL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' }}"
    "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% else %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}{{ c['id'] + (c['function']['arguments'] | tojson) }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
# Parts of a message, as those of processors.
PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# No reasoning, as DeepSeek-R1's.
THOUGHTLESS = PLAIN.replace("m['content'] | trim", "m['content'].split('</think>')[-1]")


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def learn(template: str, messages: list[dict[str, Any]], **fields: Any) -> int:
    """Rows that the chat becomes."""
    tokenizer = make_tokenizer(chat_template=template)
    row = Row(Path("sft.jsonl"), 1, {"messages": messages, **fields})
    return len(tokenise(apart(parse_demonstration(row, DATA), tokenizer), tokenizer))


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (PLAIN, [user("1+1"), assistant("", tool_calls=[CALL])], r"message 2 \(assistant\): .* a call of a tool, 'add'\."),
        (PLAIN, [user("1+1"), assistant("2", reasoning_content="easy")], r"message 2 .* its reasoning_content, 'easy'"),
        (PLAIN, [{"role": "system", "content": "Be brief."}, user("1"), assistant("2")], r"message 1 \(system\): .* its content"),
        (
            PLAIN,
            [user("1"), assistant("I ask."), {"role": "tool", "content": "a result of forty letters"}, assistant("3")],
            r"message 3 \(tool\): .* its content, 'a result of",
        ),
        (THOUGHTLESS, [user("1"), assistant("<think>\nhm, well\n</think>\n\n2")], r"what stands before </think>, 'hm, well'"),
        (PARTS, [user("1+1"), assistant("2")], r"message 1 \(user\): .* its content, '1\+1'"),
        (FULL.replace("{{ m['content'] }}", "{% if not m['tool_calls'] %}{{ m['content'] }}{% endif %}"),
         [user("1+1"), assistant("I look.", tool_calls=[CALL])], r"message 2 \(assistant\): .* its content, 'I look\.'"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(template: str, messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        learn(template, messages)
    assert str(error.value).startswith("sft.jsonl, line 1, message ")


def test_tools_that_a_template_leaves_out_are_refused() -> None:
    with pytest.raises(UserError, match="leaves out the tools that the row offers"):
        learn(PLAIN, [user("1+1"), assistant("2")], tools=TOOLS)
    assert learn(FULL, [user("1+1"), assistant("2")], tools=TOOLS) == 1


def test_what_is_written_in_another_way_is_heard() -> None:
    result = {"role": "tool", "content": 'said "two", in forty letters, or so they say'}
    assert learn(FULL, [user("1+1"), assistant("", tool_calls=[CALL]), result, assistant("2")], tools=TOOLS) == 1
    assert learn(PLAIN, [user("  1+1 \n"), assistant(" 2 ")]) == 1


def test_earlier_turns_may_lose_what_they_were_not_learned_for() -> None:
    """Each turn is a row of its own there, learned with its reasoning."""
    template = PLAIN.replace(
        "m['content'] | trim",
        "(m['content'] if loop.last or m['role'] == 'user' else m['content'].split('</think>')[-1])",
    )
    thinking = [user("1"), assistant("<think>first</think>2"), user("3"), assistant("<think>second</think>4")]
    assert learn(template, thinking) == 2


def test_of_parts_of_a_kind_one_is_asked_for() -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)
    shown = partial(render, tokenizer, row=ROW, generation_prompt=True)
    asked = []

    def counted(messages: Any) -> str:
        asked.append(messages)
        return shown(messages)

    hearing = Hearing()
    for number in range(9):
        messages = [user(f"{number}+1")]
        hearing.check(shown(messages), messages, counted, ROW)
    assert len(asked) == 1


def test_what_one_message_shows_says_nothing_of_another_with_more() -> None:
    """The names stand in the tools and in what the user says; the second call, and words beside a call, are left out."""
    first = FULL.replace("m['tool_calls'] or []", "(m['tool_calls'] or [])[:1]")
    beside = FULL.replace("{{ m['content'] }}", "{% if not m['tool_calls'] %}{{ m['content'] }}{% endif %}")
    asked, again = user("Please add by functions.add:0, the tool add."), {**CALL, "id": "functions.add:1"}
    plain, silent = [user("2+2"), assistant("4")], assistant("", tool_calls=[CALL])
    for template, messages, says in (
        (PLAIN, [asked, silent], "a call of a tool, 'add'"),
        (first, [asked, assistant("", tool_calls=[CALL, again])], "call 2 of a tool, 'add'"),
        (beside, [asked, assistant("Please add", tool_calls=[CALL])], "its content, 'Please add'"),
    ):
        tokenizer = make_tokenizer(chat_template=template)
        rows = [
            parse_demonstration(Row(Path("sft.jsonl"), at, {"messages": each}), DATA)
            for at, each in enumerate((plain, messages), 1)
        ]
        with pytest.raises(UserError, match=rf"line 2, message 2 \(assistant\): .*{says}"):
            tokenise(rows, tokenizer)


def test_text_around_thoughts_is_asked_for_by_itself() -> None:
    split = PLAIN.replace(
        "m['content'] | trim",
        "m['content'].split('</think>')[0].split('<think>')[-1] + '#' + m['content'].split('</think>')[-1]",
    )
    assert learn(split, [user("1+1"), assistant("<think>easy</think>2")]) == 1
    with pytest.raises(UserError, match="what stands before </think>"):
        learn(split, [user("1+1"), assistant("<think>easy</think>MIDDLE</think>2")])
    with pytest.raises(UserError, match=r"what stands before <think>, 'Well\.'"):
        learn(split, [user("1+1"), assistant("Well. <think>easy</think>2")])


def test_reasoning_under_two_keys_is_for_two_templates() -> None:
    shows = PLAIN.replace("m['content'] | trim", "(m['reasoning'] or '') + m['content']")
    assert learn(shows, [user("1+1"), assistant("2", reasoning="easy", thinking="easy")]) == 1
    with pytest.raises(UserError, match="its thinking, 'hard'"):
        learn(shows, [user("1+1"), assistant("2", reasoning="easy", thinking="hard")])
    assert learn(shows, [user("and-more"), assistant(" and-more")]) == 1


def test_a_prompt_of_which_nothing_is_shown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "What is 1+1?", "answer": "2"}))
    with pytest.raises(UserError, match=r"line 1, message 1 \(user\): .*leaves out its content, 'What is 1\+1\?'"):
        load_prompts(path, make_tokenizer(chat_template=PARTS), Data(train=path))
    told = Data(train=path, system_prompt="Be brief.")
    with pytest.raises(UserError, match=r"message 1 \(system\): .*leaves out its content, 'Be brief\.'"):
        load_prompts(path, make_tokenizer(chat_template=PLAIN), told)
    assert len(load_prompts(path, make_tokenizer(chat_template=PLAIN), Data(train=path)).prompts) == 1
