"""Arguments of calls as an object, and as the text that some templates want."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.core.errors import TemplateRefusalError
from megarl.data.calls import with_arguments_as_text
from megarl.data.chat import apply_template
from tests.data.conftest import make_tokenizer

ARGUMENTS: dict[str, Any] = {"a": 1, "b": ["é"]}
TEXT = '{"a": 1, "b": ["é"]}'
FUNCTION = {"name": "add", "arguments": ARGUMENTS}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
ASKED = {"role": "user", "content": "1+1"}
# As DeepSeek-V3's: text is joined with text, and arguments have to be some.
JOINS = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}"
    "{% for c in m['tool_calls'] %}{{ c['function']['name'] + '\\n' + c['function']['arguments'] }}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("call", [FUNCTION, {"type": "function", "function": FUNCTION}])
def test_arguments_become_json_whichever_form_a_call_has(call: dict[str, Any]) -> None:
    [asked, called] = with_arguments_as_text([ASKED, {"role": "assistant", "tool_calls": [call]}])
    assert asked == ASKED
    [found] = called["tool_calls"]
    assert found.get("function", found) == {"name": "add", "arguments": TEXT}
    assert FUNCTION["arguments"] is ARGUMENTS, "those that were given are as they were"


def test_a_template_that_takes_no_object_is_given_the_arguments_as_text() -> None:
    tokenizer = make_tokenizer(chat_template=JOINS)
    as_text = {**CALLED, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": TEXT}}]}
    expected = tokenizer.apply_chat_template([ASKED, as_text], tokenize=False)
    assert apply_template(tokenizer, [ASKED, CALLED], generation_prompt=False) == expected
    knows = make_tokenizer(
        chat_template=JOINS.replace("c['function']['arguments']", "c['function']['arguments'].a|string")
    )
    assert apply_template(knows, [ASKED, CALLED], generation_prompt=False).endswith("add\n1"), "an object comes first"


def test_what_a_template_refuses_for_another_reason_is_told_as_before() -> None:
    refuses = make_tokenizer(chat_template="{{ raise_exception('no tools here') }}")
    with pytest.raises(
        TemplateRefusalError, match=r"refuses these messages \(no tools here\); their roles are user, assist"
    ):
        apply_template(refuses, [ASKED, CALLED], generation_prompt=False)
