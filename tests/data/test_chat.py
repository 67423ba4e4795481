import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.agents.template import ChatTemplate
from megarl.core.errors import TemplateRefusalError, UserError
from megarl.data.chat import (
    apply_template,
    check_messages,
    encode,
    encode_behind,
    load_tokenizer,
    puts_blanks,
    render,
    turn_end,
    turn_mark,
)
from megarl.data.rows import Row
from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.support.llama2 import llama2_tokenizer
from tests.support.tiny import tiny_config

ROW = Row(Path("a.jsonl"), 7, {})


def test_a_saved_tokenizer_loads_and_renders(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    messages = [{"role": "user", "content": "hi"}]
    text = render(tokenizer, messages, ROW, generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = encode(tokenizer, [text], special_tokens=False)
    assert ids.tolist() == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text


WITHOUT_TORCH = """
import sys
from pathlib import Path
from megarl.data.chat import encode, load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
print(*encode(tokenizer, [text], special_tokens=False)[0])
assert "torch" not in sys.modules
import torch
"""


def test_a_process_that_reads_rows_loads_no_torch_and_reads_the_same(model_folder: Path) -> None:
    argv = [sys.executable, "-c", WITHOUT_TORCH, str(model_folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = load_tokenizer(model_folder).apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert [int(each) for each in done.stdout.split()] == expected


def test_plain_text_gets_the_tokenizers_own_frame(plain_tokenizer: Any) -> None:
    (framed,) = encode(plain_tokenizer, ["ab"], special_tokens=True)
    (bare,) = encode(plain_tokenizer, ["ab"], special_tokens=False)
    assert framed.tolist() == [plain_tokenizer.convert_tokens_to_ids("<s>"), *bare.tolist()]
    assert len(bare) == 2


def test_what_a_tokenizer_puts_behind_plain_text_is_left_out() -> None:
    """One that was saved with `add_eos_token` would end each prompt before its response."""
    tokenizer = make_tokenizer(chat_template=None)
    begin, end = (tokenizer.convert_tokens_to_ids(each) for each in ("<s>", "<|im_end|>"))
    framed = "<s> $A <|im_end|>", [("<s>", begin), ("<|im_end|>", end)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=framed[0], special_tokens=framed[1]
    )
    bare = encode(tokenizer, ["1", "ab"], special_tokens=False)
    found = encode(tokenizer, ["1", "ab"], special_tokens=True)
    assert [ids.tolist() for ids in found] == [[begin, *ids.tolist()] for ids in bare]


def test_no_texts_are_no_ids(plain_tokenizer: Any) -> None:
    assert encode(plain_tokenizer, [], special_tokens=True) == []


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(UserError, match="cannot read a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "classes",
    [{"AutoTokenizer": ["tokenization_own.Own", None]}, ["tokenization_own.Own", None]],
    ids=["now", "before"],
)
def test_a_tokenizer_that_is_code_is_refused_and_no_other_taken(
    classes: object, model_folder: Path, tmp_path: Path
) -> None:
    """transformers knows this model's kind, and takes that kind's tokenizer."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": classes}))
    load_tokenizer(folder)
    (folder / "tokenizer.json").rename(folder / "own.model")
    with pytest.raises(UserError, match=r"its tokenizer is code that came with it .*tokenizer\.json is missing"):
        load_tokenizer(folder)


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ effort }}{% endif %}"
)


@pytest.fixture
def thinking_folder(tmp_path: Path) -> Path:
    """A model's folder whose chat template knows enable_thinking, as Qwen3's does, and effort."""
    make_tokenizer(chat_template=THINKS).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, "assistant: "),
        ({"enable_thinking": True}, "assistant: "),
        ({"enable_thinking": False}, "assistant: <think></think>"),
        ({"enable_thinking": False, "effort": "high"}, "assistant: <think></think>high"),
    ],
)
def test_a_template_is_given_what_the_recipe_says_wherever_it_renders(
    given: dict[str, Any], ends: str, thinking_folder: Path
) -> None:
    tokenizer = load_tokenizer(thinking_folder, given)
    asked = [{"role": "user", "content": "1+1"}]
    assert render(tokenizer, asked, ROW, generation_prompt=True) == f"user: 1+1\n{ends}"
    assert ChatTemplate(tokenizer).prompt(asked)[1] == f"user: 1+1\n{ends}"


def test_what_a_row_gives_the_template_goes_before_what_the_recipe_does(thinking_folder: Path) -> None:
    tokenizer = load_tokenizer(thinking_folder, {"enable_thinking": False, "effort": "high"})
    asked = [{"role": "user", "content": "1+1"}]
    for given, ends in (({"effort": "low"}, "<think></think>low"), ({"enable_thinking": True}, "high"), (None, None)):
        row = Row(ROW.path, 1, {"chat_template_kwargs": given})
        expected = f"user: 1+1\nassistant: {ends or '<think></think>high'}"
        assert render(tokenizer, asked, row, generation_prompt=True) == expected
    for wrong, says in (
        ({"effrt": 1}, r"a\.jsonl, line 1, field 'chat_template_kwargs'\.effrt: .*Did you mean effort\?"),
        ({"tools": []}, r"'chat_template_kwargs'\.tools: this is not yours to give"),
        ("high", r"'chat_template_kwargs': a string; wanted is an object"),
    ):
        with pytest.raises(UserError, match=says):
            render(tokenizer, asked, Row(ROW.path, 1, {"chat_template_kwargs": wrong}), generation_prompt=True)


def test_what_a_template_would_not_read_or_is_not_the_recipes_to_give_is_refused(
    thinking_folder: Path, model_folder: Path
) -> None:
    for given, says in (
        ({"enable_thinkin": False}, r"data\.chat_template_kwargs\.enable_thinkin: .* Did you mean enable_thinking\?"),
        ({"zzz": 1}, r"data\.chat_template_kwargs\.zzz: the chat template of .* does not read that name\. Correct"),
        ({"add_generation_prompt": True}, r"add_generation_prompt: this is not yours to give"),
        ({"messages": []}, r"messages: this is not yours to give"),
        ({"tools": []}, r"tools: this is not yours to give"),
    ):
        with pytest.raises(UserError, match=says):
            load_tokenizer(thinking_folder, given)
    make_tokenizer(chat_template=None).save_pretrained(thinking_folder)
    (thinking_folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="has no chat template that could read enable_thinking"):
        load_tokenizer(thinking_folder, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("hi", "field 'prompt': a string; wanted is a list of messages"),
        ([], "an empty list"),
        (["hi"], "message 1: a string"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 2: 'content' is missing"),
        ([{"role": "user", "content": ["a"]}], "'content' is a list, and must be a string"),
        ([{"content": "a"}], "'role' is missing"),
    ],
)
def test_what_is_not_a_chat_is_named(value: object, says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_messages(value, ROW, "prompt")
    assert says in str(caught.value)
    assert "a.jsonl, line 7" in str(caught.value)


def test_a_template_that_refuses_names_the_row_and_the_roles(chat_tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match=r"line 7: the model's chat template refuses.*unknown role tool.*roles are tool"
    ):
        render(chat_tokenizer, [{"role": "tool", "content": "a"}], ROW, generation_prompt=True)


def test_a_developer_is_the_system_where_the_template_does_not_know_one() -> None:
    """Qwen's templates would leave out all that a developer says, without a word."""
    drops = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    for template, role in ((drops, "system"), (drops.replace("'user'", "'user', 'developer'"), "developer")):
        tokenizer = make_tokenizer(chat_template=template)
        assert render(tokenizer, messages, ROW, generation_prompt=True) == f"{role}: a\nuser: b\n"
    assert messages[0]["role"] == "developer"


def test_what_closes_a_whole_conversation_is_no_part_of_a_turn() -> None:
    """Phi's templates write the end token behind the last message, whose own end is another."""
    marks = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer = make_tokenizer(
        chat_template=marks
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer.eos_token = "<s>"
    asked = [{"role": "user", "content": "1+1"}]
    talk = [*asked, {"role": "assistant", "content": "2"}]
    whole = "<|im_start|>user1+1<|im_end|><|im_start|>assistant2<|im_end|>"
    assert apply_template(tokenizer, talk, generation_prompt=False) == whole
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_mark(tokenizer) == "<|im_start|>assistant"
    # A model that reads a conversation as a whole, as those that score it, has it as its template does.
    assert apply_template(tokenizer, talk, generation_prompt=False, closed=True) == f"{whole}<s>"
    # Where nothing else ends a turn, it does.
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "")
    assert apply_template(tokenizer, talk, generation_prompt=False).endswith("2<s>")
    # Where it ends the assistant's turn it stays; so it does where each message ends by it.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] + (eos_token if m['role'] == 'assistant' else '') }}{% endfor %}"
    )
    assert apply_template(tokenizer, talk, generation_prompt=False) == "1+12<s>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    assert apply_template(tokenizer, talk, generation_prompt=False) == "1+1<s>2<s>"


def test_what_closes_a_conversation_is_known_where_the_template_wants_a_system_message_or_tools() -> None:
    """It refuses a user's message alone, from which the closing is learned otherwise."""
    marks = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    ends = "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% else %}{{ eos_token }}{% endif %}"
    wants = "{% if messages[0]['role'] != 'system' or not tools %}{{ raise_exception('who am I?') }}{% endif %}"
    tokenizer = make_tokenizer(chat_template=wants + marks + ends)
    tokenizer.eos_token = "<s>"
    talk = [{"role": "system", "content": "you"}, {"role": "user", "content": "1+1"}]
    answers = [{"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    begun = "<|im_start|>systemyou<|im_end|><|im_start|>user1+1<|im_end|>"
    said = begun + "<|im_start|>assistant2<|im_end|>"
    for messages, text in (
        (talk, begun),
        ([*talk, answers[0]], said),
        ([*talk, *answers], said + "<|im_start|>assistant3<|im_end|>"),
    ):
        assert apply_template(tokenizer, messages, generation_prompt=False, tools=tools) == text
        assert apply_template(tokenizer, messages, generation_prompt=False, tools=tools, closed=True) == f"{text}<s>"
    with pytest.raises(TemplateRefusalError, match=r"who am I\?"):
        apply_template(tokenizer, talk[1:], generation_prompt=False, tools=tools)


def test_a_role_that_nobody_knows_is_refused_and_one_that_the_template_names_is_not() -> None:
    renders_any = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]
    with pytest.raises(UserError, match=r"line 7, message 2: there is no role 'asistant'. Did you mean 'assistant'\?"):
        render(make_tokenizer(chat_template=renders_any), messages, ROW, generation_prompt=False)
    knows = make_tokenizer(chat_template="{# asistant is a role #}" + renders_any)
    assert render(knows, messages, ROW, generation_prompt=False) == "user: a\nasistant: b\n"


def test_what_a_template_asks_for_by_name_is_set_at_its_head() -> None:
    """As docs/data.md says of keys that others have for it."""
    asks = CHAT_TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    said = [{"role": "user", "content": "a"}]
    for head, thinks in (("", False), ("{%- set enable_thinking = false %}", True)):
        text = apply_template(make_tokenizer(chat_template=head + asks), said, generation_prompt=True)
        assert text.endswith("<think></think>") is thinks and text.startswith("<|im_start|>user")


def test_messages_need_a_template(plain_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"line 7.*no chat template"):
        render(plain_tokenizer, [{"role": "user", "content": "a"}], ROW, generation_prompt=True)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].x }}", "{{ raise_exception('no') }}", "{{ messages() }}"]
)
def test_a_template_that_fails_is_told(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(UserError, match="line 7: the model's chat template refuses these messages"):
        render(tokenizer, [{"role": "user", "content": "a"}], ROW, generation_prompt=True)


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", [], ["x"], {}, {"x": 1}, 10**30)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_files_with_wrong_types_are_refused_or_harmless(name: str, model_folder: Path, tmp_path: Path) -> None:
    """Whatever transformers and its parsers raise, a user reads one paragraph."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict()))
    raw = json.loads((folder / name).read_text())
    keys = [(key, value) for key in raw for value in WRONG]
    texts = [json.dumps(raw | {key: value}) for key, value in keys]
    refused = 0
    for text in ("", "{", "[]", "null", "[" * 100_000, *texts):
        (folder / name).write_text(text)
        try:
            assert encode(load_tokenizer(folder), ["1+1"], special_tokens=True)[0].dtype == "int32"
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(folder) in str(error)
            assert len(str(error)) < 1000
    assert refused > 20


@pytest.mark.parametrize(
    ("before", "text", "tokens"),
    [
        ("tell me: ", "two", ["two"]),  # together the blank is a part of the word
        ("t", "wo", ["w", "o"]),
        ("tell me:", " two", ["▁two"]),
        ("a\n", "two", ["two"]),
        ("", "two", ["▁two"]),
    ],
)
def test_a_text_behind_another_gets_no_blank_whatever_stands_at_the_border(
    before: str, text: str, tokens: list[str]
) -> None:
    tokenizer = llama2_tokenizer()
    [ids] = encode_behind(tokenizer, [(before, text)])
    assert tokenizer.convert_ids_to_tokens(ids) == tokens


def test_byte_level_tokenizers_that_put_blanks_are_known_too() -> None:
    pieces = {piece: number for number, piece in enumerate(["<unk>", "\u0120", *"abc:"])}
    for puts in (True, False):
        made = Tokenizer(models.BPE(pieces, [], unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=puts)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
        assert puts_blanks(tokenizer) == puts
        [ids] = encode_behind(tokenizer, [("a:", "bc")])
        assert tokenizer.convert_ids_to_tokens(ids) == ["b", "c"]
