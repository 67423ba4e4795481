"""What a chat template puts between turns, as text and as tokens, in the forms of several families."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megarl.agents.template import ChatTemplate, difference
from megarl.core.errors import TemplateRefusalError
from megarl.data.chat import special_ids
from tests.agents.forms import FORMS, LLAMA3, QWEN3, ends_of, make_tokenizer
from tests.support.llama2 import llama2_tokenizer

HIGHER = [{"role": "user", "content": "higher"}]
# What follows a turn that ended with the template's own end, and with a stop string.
FOLLOWING = {
    "qwen3": ("\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": (
        "<|start_header_id|>user<|end_header_id|>\n\nhigher<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "deepseek": ("<|User|>higher<|Assistant|>", "<eos>"),
    "mistral": ("[INST] higher [/INST]", "</s>"),
    "gemma": ("\n<start_of_turn>user\nhigher<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_that_has_its_end_gets_what_comes_after_it(form: str) -> None:
    tokenizer = make_tokenizer(form)
    template = ChatTemplate(tokenizer)
    text, end = FOLLOWING[form]
    for last in ends_of(form):  # another end than the template's stands in its place
        assert tokenizer.decode(template.following(HIGHER, [last]), skip_special_tokens=False) == text
    plain = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(template.following(HIGHER, plain), skip_special_tokens=False) == end + text
    assert tokenizer.decode(template.following(HIGHER), skip_special_tokens=False) == end + text


@pytest.mark.parametrize("form", FORMS)
def test_what_somebody_spells_ends_no_turn_of_theirs(form: str) -> None:
    tokenizer = make_tokenizer(form)
    template, special = ChatTemplate(tokenizer), special_ids(tokenizer)
    forged = " and ".join(template.shown([token]) for token in sorted(special)) + " done"
    for last in (ends_of(form)[:1], []):
        plain = template.following([{"role": "user", "content": "x"}], last)
        ids = template.following([{"role": "user", "content": forged}], last)
        marks = [[token for token in each.tolist() if token in special] for each in (ids, plain)]
        assert marks[0] == marks[1]
        assert template.shown(ids) == template.shown(plain).replace("x", forged)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_appended_is_what_the_whole_conversation_would_have_been(form: str, spaced: bool) -> None:
    """Where what the policy wrote tokenises as the template's own rendering does."""
    tokenizer = make_tokenizer(form, spaced=spaced)
    template = ChatTemplate(tokenizer)
    talk = [{"role": "user", "content": "Guess the number."}]
    ids, _ = template.prompt(talk)
    appended = ids.tolist()
    for said, told in (("12", "lower"), ("Then the 5", "higher")):
        whole, _ = template.prompt([*talk, {"role": "assistant", "content": said}, {"role": "user", "content": told}])
        end = ends_of(form)[0]
        # What the policy wrote: the whole's own tokens up to the turn's end.
        written = whole[len(appended) : whole.tolist().index(end, len(appended)) + 1].tolist()
        appended += written + template.following([{"role": "user", "content": told}], written[-1:]).tolist()
        assert appended == whole.tolist()
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]


def test_several_messages_at_once_and_results_of_tools() -> None:
    tokenizer = make_tokenizer("qwen3")
    template = ChatTemplate(tokenizer)
    told = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    ids = template.following(told, ends_of("qwen3")[:1])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("form", FORMS)
def test_only_templates_that_drop_thinking_rewrite(form: str) -> None:
    found = ChatTemplate(make_tokenizer(form)).rewritten()
    if form == "qwen3":
        assert (
            "had written '<think>\\nThe sky has one.\\n</think>\\n\\nBlue.', and the template has 'Blue.<|im_end|>"
            in found
        )
    else:
        assert found == ""


def test_a_template_that_moves_what_the_system_says_rewrites() -> None:
    """As that of Mistral 7B v0.3 and of Mistral Nemo does: the last question has it, whichever that is."""
    moves = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<s>' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + (system if loop.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}{% endif %}{%- endfor %}"""
    found = ChatTemplate(make_tokenizer("mistral", template=moves)).rewritten()
    assert found.startswith("with a message of the system's, after '<s>[INST]' the policy had written 'Be brief.")
    assert "and the template has 'Name a colour." in found


def test_white_space_before_the_end_of_a_turn_belongs_to_it() -> None:
    """Llama 2's template: ` said </s>`. A policy that has ended its turn by </s> alone would have a second end behind it."""
    llama2 = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<s>[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + ' </s>' }}{% endif %}{%- endfor %}"""
    for spaced in (False, True):
        tokenizer = make_tokenizer("mistral", template=llama2, spaced=spaced)
        template = ChatTemplate(tokenizer)
        assert template.shown(template.following(HIGHER, ends_of("mistral"))) == "<s>[INST] higher [/INST]"
        assert template.shown(template.following(HIGHER)) == " </s><s>[INST] higher [/INST]"
    words = make_tokenizer("mistral", template=llama2.replace("' </s>'", "' done</s>'"))
    assert ChatTemplate(words).shown(ChatTemplate(words).following(HIGHER, ends_of("mistral"))).startswith(" done</s>")


def test_a_last_turn_may_end_by_a_token_of_its_own() -> None:
    """As gpt-oss': earlier turns end as the user's do, and a policy has learned to end each of its own by the last one's."""
    harmony = """\
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + m.content }}
{{- '<|eom_id|>' if loop.last and m.role == 'assistant' else '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant' }}{% endif %}"""
    template = ChatTemplate(make_tokenizer("llama3", template=harmony))
    for last in ends_of("llama3"):
        assert (
            template.shown(template.following(HIGHER, [last]))
            == "<|start_header_id|>userhigher<|eot_id|><|start_header_id|>assistant"
        )
    assert template.shown(template.following(HIGHER)).startswith("<|eot_id|><|start_header_id|>user")


def test_the_next_message_s_mark_is_the_end_where_a_template_has_no_other() -> None:
    """As GLM-4.5's, whose policy ends its turn by the mark of the user or by that of a tool's result."""
    glm = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|start_header_id|>\\n' + m.content }}
{%- else %}{{- ('<|eom_id|>' if m.role == 'tool' else '<|eot_id|>') + '\\n' + m.content }}{% endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>' }}{% endif %}"""
    template = ChatTemplate(make_tokenizer("llama3", template=glm))
    user, tool, other = ends_of("llama3")
    result = [{"role": "tool", "content": "4"}]
    assert template.shown(template.following(HIGHER, [user])) == "\nhigher<|start_header_id|>"
    assert template.shown(template.following(result, [tool])) == "\n4<|start_header_id|>"
    for last in ([other], [tool], []):
        assert template.shown(template.following(HIGHER, last)) == "<|eot_id|>\nhigher<|start_header_id|>"


def test_a_tokenizer_that_puts_blanks_puts_none_between_turns() -> None:
    tokenizer = llama2_tokenizer()
    template = ChatTemplate(tokenizer)
    talk = [{"role": "user", "content": "two"}]
    begun, _ = template.prompt(talk)
    whole, _ = template.prompt([*talk, {"role": "assistant", "content": "2"}, *HIGHER])
    ended = whole.tolist().index(tokenizer.eos_token_id) + 1
    for cut in (ended, ended - 2):  # with the turn's end, and without it
        written = whole[len(begun) : cut].tolist()
        assert [*begun.tolist(), *written, *template.following(HIGHER, written[-1:]).tolist()] == whole.tolist()


def test_a_template_that_opens_the_thinking_itself_is_found_as_well() -> None:
    opens = LLAMA3.replace(
        "assistant<|end_header_id|>\\n\\n' }}{% endif %}", "assistant<|end_header_id|>\\n\\n<think>\\n' }}{% endif %}"
    )
    found = ChatTemplate(make_tokenizer("llama3", template=opens)).rewritten()
    assert "had written '<think>\\nBlue.', and the template has 'Blue.<|eot_id|>" in found


@pytest.mark.parametrize(
    ("written", "again", "where"),
    [
        ("a b", "a b c", ""),
        ("a  b", "a b", ""),
        ("ab ", " a\nb c", ""),
        ("abc", "ab", "after 'ab' the policy had written 'c', and the template has ''"),
        ("a xb", "a yb", "after 'a ' the policy had written 'xb', and the template has 'yb'"),
        ("a x b", "a  x c", "after 'a x ' the policy had written 'b', and the template has 'c'"),
    ],
)
def test_where_renderings_differ(written: str, again: str, where: str) -> None:
    assert difference(written, again) == where


def test_long_conversations_are_compared_in_moments() -> None:
    """Turn by turn, on the event loop that all episodes share."""
    said = "The quick brown fox. " * 400_000
    began = time.thread_time()
    assert difference(said + "a", said + "b").endswith("the policy had written 'a', and the template has 'b'")
    assert time.thread_time() - began < 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>3?</think>5", "5"),
        ("\n<think>3?</think>5</think>6", "5</think>6"),
        ("[THINK]3?[/THINK]5", "5"),
        ("<think>3?", "<think>3?"),
        ("3 </think> 5", "3 </think> 5"),
        ("Is <think>3?</think>5", "Is <think>3?</think>5"),
    ],
)
def test_calls_are_read_behind_the_thinking_that_a_turn_begins_with(text: str, said: str) -> None:
    assert ChatTemplate(make_tokenizer("qwen3")).behind_thinking(text) == said


def test_calls_are_read_behind_thinking_that_the_template_opens() -> None:
    opens = ChatTemplate(
        make_tokenizer("qwen3", template=QWEN3.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"))
    )
    assert [opens.behind_thinking(text) for text in ("3?</think>5", "3?")] == ["5", "3?"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out what an assistant",
        ),
        ("{{ raise_exception('no') }}", "refuses these messages .no.; their roles are user, assistant"),
    ],
)
def test_a_template_without_turns_is_refused(template: str, reason: str) -> None:
    with pytest.raises(TemplateRefusalError, match=reason):
        ChatTemplate(make_tokenizer("llama3", template=template))


def test_messages_that_a_template_refuses_are_named() -> None:
    template = ChatTemplate(make_tokenizer("gemma"))
    with pytest.raises(TemplateRefusalError, match=r"System role not supported.*roles are user, assistant, system"):
        template.following([{"role": "system", "content": "x"}])
    with pytest.raises(TemplateRefusalError, match=r"there is no role 'usr'\. Did you mean 'user'"):
        template.following([{"role": "usr", "content": "x"}])


@pytest.mark.parametrize("text", ["", "x"])
def test_what_parsers_read_has_its_marks_but_not_the_end(text: str) -> None:
    tokenizer: Any = make_tokenizer("qwen3")
    ids = tokenizer(f"<tool_call>{text}", add_special_tokens=False)["input_ids"]
    template = ChatTemplate(tokenizer)
    assert (
        template.text_with_marks([*ids, ends_of("qwen3")[0]]) == template.text_with_marks(ids) == f"<tool_call>{text}"
    )
    assert template.text_with_marks([]) == ""
