"""Functions as tools: their schemas, what they are called with, and what the policy is told where something goes wrong."""

from __future__ import annotations

import ast
import asyncio
import functools
import gc
import importlib.util
import json
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest
from aiohttp import ClientSession, web
from pydantic import AfterValidator

from megarl.agents.check import check_agent
from megarl.agents.template import ChatTemplate
from megarl.agents.tool_sources import open_toolbox
from megarl.agents.tool_use import ToolUse, named
from megarl.agents.tools import Result, Tool, Toolbox, ToolCall, open_tools
from megarl.core.errors import TemplateRefusalError, UserError
from megarl.core.types import Status
from megarl.recipe.agent import PARSERS, Agent
from megarl.serving.call_parser import CallParser, Parsed, ParsedCall
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import QWEN3, ends_of, make_tokenizer
from tests.agents.playing import make_settings, play
from tests.agents.test_episode import counting
from tests.agents.test_tokens import Scripted, assert_exact
from tests.agents.toolkit import count, exits, fails, gives, hangs, look_up, multiply
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang

KIT = "tests.agents.toolkit"


def test_a_schema_is_made_of_type_hints() -> None:
    assert Tool(multiply).schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "left": {"title": "Left", "type": "integer"},
                    "right": {"default": 2, "description": "the other number", "title": "Right", "type": "integer"},
                },
                "required": ["left"],
            },
        },
    }


def called(*calls: tuple[str, Any], timeout_s: float = 5.0) -> list[Result]:
    tools = [Tool(each) for each in (multiply, look_up, count, fails, exits, hangs, gives)]
    asked = [
        ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments), f"c{number}")
        for number, (name, arguments) in enumerate(calls)
    ]
    return asyncio.run(Toolbox(tools, timeout_s).call(asked))


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("multiply", {"left": 3, "right": 4}, "12"),
        ("multiply", {"left": "3"}, "6"),
        ("look_up", {"word": "Haus", "language": "de"}, '{"Haus":"de"}'),
        ("count", {"words": ["a"], "weights": {"a": 1}}, '[1,{"a":1.0}]'),
        ("multiply", {"left": "three"}, "error: wrong arguments: left: Input should be a valid integer"),
        ("multiply", {"left": 1, "rihgt": 2}, "error: wrong arguments: rihgt: Extra inputs are not permitted"),
        ("multiply", "", "error: wrong arguments: left: Field required"),
        ("multiply", "[1]", "error: wrong arguments: arguments: Input should be an object"),
        ("multiply", "{", "error: wrong arguments: arguments: Invalid JSON"),
        (
            "count",
            '{"words": [], "weights": {"a": NaN}}',
            "error: wrong arguments: weights.a: Input should be a finite number",
        ),
        (
            "count",
            {"words": [], "weights": {"a": "-inf"}},
            "error: wrong arguments: weights.a: Input should be a finite number",
        ),
        ("look_up", {"word": "x", "language": "fr"}, "error: wrong arguments: language: Input should be 'en' or 'de'"),
        ("fails", {"why": "no"}, "error: fails raised KeyError: 'no'"),
        ("exits", {"code": 3}, "error: exits raised RuntimeError: it exits (3)"),
        ("hangs", {"seconds": 60}, "error: hangs did not end within 0.3 s"),
        ("divide", {}, "error: there is no tool 'divide'. Tools: multiply, look_up, count, fails, exits, hangs, gives"),
        ("gives", {"what": "bytes"}, "\ufffd5"),
        ("gives", {"what": "cycle"}, "error: gives raised PydanticSerializationError"),
        ("gives", {"what": "half"}, "error: gives raised PydanticSerializationError"),
        ("gives", {"what": "interrupt"}, "error: gives raised RuntimeError: it exits"),
    ],
)
def test_what_a_call_gives_or_what_the_policy_is_told(name: str, arguments: Any, content: str) -> None:
    [result] = called((name, arguments), timeout_s=0.3 if name == "hangs" else 20.0)
    assert result.message["content"].startswith(content)
    assert result.message | {"content": ""} == {"role": "tool", "content": "", "name": name, "tool_call_id": "c0"}
    assert result.failed is content.startswith("error")


def test_a_validator_of_the_users_that_raises_what_pydantic_lets_through_costs_its_call() -> None:
    def share(of: int) -> int:
        return of

    share.__annotations__ = {"of": Annotated[int, AfterValidator(lambda number: 100 // number)]}
    calls = [ToolCall("share", '{"of": 0}', "c0"), ToolCall("share", '{"of": 50}', "c1")]
    bad, good = asyncio.run(Toolbox([Tool(share)], 5.0).call(calls))
    assert bad.failed and bad.message["content"].startswith("error: wrong arguments: ZeroDivisionError: ")
    assert good.message["content"] == "2"


def test_a_coroutine_that_a_decorator_has_made_a_plain_function_of_is_waited_for() -> None:
    @functools.wraps(look_up)
    def logged(*given: Any, **named: Any) -> Any:
        return look_up(*given, **named)

    [result] = asyncio.run(Toolbox([Tool(logged)], 5.0).call([ToolCall("look_up", '{"word": "Haus"}', "c0")]))
    assert result.message["content"] == '{"Haus":"en"}' and not result.failed


def limited(*calls: ToolCall, **limits: int) -> list[Result]:
    return asyncio.run(Toolbox([Tool(each) for each in (look_up, multiply, fails)], 5.0, **limits).call(calls))


def test_a_long_result_loses_its_middle_and_says_how_much() -> None:
    calls = [
        ToolCall("look_up", json.dumps({"word": "0123456789"}), "c0"),
        ToolCall("multiply", '{"left": 123456}', "c1"),
        ToolCall("fails", '{"why": "no"}', "c2"),
    ]
    results = limited(*calls, most_characters=6)
    # Of `{"0123456789":"en"}`, 19 characters, and of `error: fails raised KeyError: 'no'`, 34.
    assert [(each.message["content"], each.failed, each.cut) for each in results] == [
        ('{"0\n[13 characters left out]\nn"}', False, True),
        ("246912", False, False),
        ("err\n[28 characters left out]\nno'", True, True),
    ]
    assert limited(calls[0], most_characters=1)[0].message["content"] == "\n[19 characters left out]\n"
    assert not any(each.cut for each in limited(*calls))


def test_calls_of_a_turn_beyond_the_most_are_not_run_and_the_policy_is_told() -> None:
    calls = [ToolCall("multiply", f'{{"left": {left}}}', f"c{left}") for left in range(3)]
    first, *others = limited(*calls, max_calls=1)
    assert first.message["content"] == "0"
    assert [each.message["tool_call_id"] for each in others] == ["c1", "c2"] and all(each.failed for each in others)
    assert others[0].message["content"] == (
        "error: this call was not run: at most 1 of one turn's calls are run. Call again in the next turn"
    )
    assert [each.failed for each in limited(*calls, max_calls=3)] == [False] * 3


def test_the_recipe_says_how_long_results_and_how_many_calls_may_be() -> None:
    agent = Agent(tools=(f"{KIT}:multiply",), tool_parser="qwen25", tool_result_characters=2, max_calls=1)
    calls = [ToolCall("multiply", '{"left": 1000}', f"c{number}") for number in range(2)]
    results = asyncio.run(open_toolbox(agent).call(calls))
    assert [each.message["content"] for each in results] == [
        "2\n[2 characters left out]\n0",
        "e\n[94 characters left out]\nn",
    ]


def test_calls_run_side_by_side_and_stay_in_order() -> None:
    at_once = threading.Barrier(8, timeout=20)

    def meets(number: int) -> int:
        at_once.wait()
        return number

    asked = [ToolCall("meets", f'{{"number": {number}}}', f"c{number}") for number in range(8)]
    asked += [ToolCall("multiply", '{"left": 2}', "c8"), ToolCall("look_up", '{"word": "x"}', "c9")]
    results = asyncio.run(Toolbox([Tool(each) for each in (meets, multiply, look_up)], 30.0).call(asked))
    assert [result.message["content"] for result in results] == [*"01234567", "4", '{"x":"en"}']


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([f"{KIT}:unhinted"], "parameter 'right' of unhinted has no type hint"),
        ([f"{KIT}:variadic"], "the parameter `*numbers: 'int'`, which a call by names cannot fill"),
        ([f"{KIT}:misspelt"], "the type hints of misspelt cannot be read: NameError: name 'Intt'"),
        ([f"{KIT}:odd"], "of a type that nothing can be read as"),
        ([f"{KIT}:unknown"], "of a type that nothing can be read as"),
        ([f"{KIT}:Thing"], "it is a type; wanted is a function with type hints"),
        ([f"{KIT}:multipl"], "Did you mean 'multiply'"),
        ([f"{KIT}:count", f"{KIT}:multiply", f"{KIT}:count"], "another tool with the name 'count'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_the_recipe_is_checked(paths: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        open_tools(paths)
    assert says in str(caught.value) and "agent.tools" in str(caught.value)


def test_names_of_parsers_are_those_of_sglang() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt/function_call/function_call_parser.py").read_text()
    [table] = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum"
    ]
    assert isinstance(table, ast.Dict)
    assert {ast.literal_eval(key) for key in table.keys if key is not None} == set(PARSERS)


class FakeReader:
    """Reads `multiply(3)` and `?`, as no real parser does."""

    async def parse(self, text: str, tools: Any = None) -> Parsed:
        found = [ParsedCall("multiply", json.dumps({"left": int(digit)})) for digit in text if digit.isdigit()]
        return Parsed(tuple(found), unread=not found and "?" in text)

    async def close(self) -> None:
        return None


def policy(tokenizer: Any, *turns: str) -> FakePolicy:
    """Writes these turns."""
    end, coming = ends_of("qwen3")[0], iter(turns)

    def write(*_: Any) -> list[int]:
        return [*tokenizer(next(coming), add_special_tokens=False)["input_ids"], end]

    return FakePolicy(write, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), ends={end})


def test_a_turn_with_calls_gets_their_results_and_one_without_goes_to_the_environment() -> None:
    tokenizer = make_tokenizer("qwen3")
    fake = policy(tokenizer, "12", "ab", "?", "5", "b")  # "12" is one token, of two calls
    made = counting(5)
    tools = ToolUse(Toolbox([Tool(multiply)], 5.0), FakeReader())
    settings = make_settings(made, tokenizer, tools=tools, template=ChatTemplate(tokenizer, tools.schemas))
    [sample] = play(fake, settings, tokenizer)
    assert sample.status is Status.COMPLETED
    assert_exact(sample, fake)
    said = [(message["role"], message["content"]) for message in sample.metadata["messages"]]
    assert said[1:4] == [("assistant", "12"), ("tool", "2"), ("tool", "4")]
    assert said[4:8] == [("assistant", "ab"), ("user", "a"), ("assistant", "?"), ("tool", said[7][1])]
    assert said[7][1] == "error: this call cannot be read, or names no tool. Tools: multiply"
    assert said[8:] == [("assistant", "5"), ("tool", "10"), ("assistant", "b")]
    assert [response.turn for response in made.made[0].responses] == [1, 4]
    assert (sample.numbers["tool_calls"], sample.numbers["tool_failures"]) == (4.0, 1.0)
    # The model was told of its tools.
    assert '"name": "multiply"' in tokenizer.decode(sample.prompt.token_ids)


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (["functions.multiply:4", "functions.multiply:5"], ["functions.multiply:4", "functions.multiply:5"]),
        (["0", "0"], ["c00020000", "c00020001"]),  # results could not be told apart
        (["0"], ["c00020000", "c00020001"]),  # nobody knows which of the calls has it
    ],
)
def test_results_are_told_by_the_ids_that_a_model_gave_its_calls(ids: list[str], kept: list[str]) -> None:
    """Kimi-K2's template heads a result with the call's id, which the model wrote."""
    parsed = Parsed((ParsedCall("multiply", '{"left": 1}'), ParsedCall("multiply", '{"left": 2}')), unread=False)
    calls = "".join(f"<|tool_call_begin|>{each}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for each in ids)
    text = f"let me see<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    assert [call.id for call in named(parsed, 2, text)] == kept
    results = asyncio.run(Toolbox([Tool(multiply)], 5.0).call(named(parsed, 2, text)))
    assert [result.message["tool_call_id"] for result in results] == kept


def test_a_call_that_the_policy_only_thinks_of_is_not_made() -> None:
    tokenizer = make_tokenizer("qwen3")
    fake = policy(tokenizer, "<think>3</think>5", "<think>7</think>b")
    tools = ToolUse(Toolbox([Tool(multiply)], 5.0), FakeReader())
    settings = make_settings(
        lambda: Scripted([]), tokenizer, tools=tools, template=ChatTemplate(tokenizer, tools.schemas)
    )
    [sample] = play(fake, settings, tokenizer)
    assert_exact(sample, fake)
    said = [message["content"] for message in sample.metadata["messages"][1:]]
    assert said == ["<think>3</think>5", "10", "<think>7</think>b"]


def test_results_that_were_cut_are_counted_and_calls_that_were_not_run_are_failures() -> None:
    tokenizer = make_tokenizer("qwen3")
    fake = policy(tokenizer, "12", "9", "b")
    tools = ToolUse(Toolbox([Tool(multiply)], 5.0, max_calls=1, most_characters=40), FakeReader())
    settings = make_settings(
        lambda: Scripted([]), tokenizer, tools=tools, template=ChatTemplate(tokenizer, tools.schemas)
    )
    [sample] = play(fake, settings, tokenizer)
    assert_exact(sample, fake)
    said = [message["content"] for message in sample.metadata["messages"] if message["role"] == "tool"]
    assert (said[0], said[2]) == ("2", "18") and said[1].startswith("error: this call was\n[")
    numbers = [sample.numbers[f"tool_{name}"] for name in ("calls", "failures", "results_cut")]
    assert numbers == [3.0, 1.0, 1.0]


TOOLLESS = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
# Results stand behind their calls alone, with the calls' own numbers; content beside calls is left out.
STRICT = """\
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
{{- raise_exception('a result without its call') }}{% endif %}
{{- '[R]' + m.tool_call_id + ':' + m.content + '[/R]' }}
{%- elif m.tool_calls %}{% for c in m.tool_calls %}{{- '[C]' + (c.function | tojson) }}{% endfor %}{{- '<|im_end|>' }}
{%- elif m.role == 'user' %}{{- '[U]' + m.content + '[/U]' }}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"""


def test_a_template_that_wants_calls_before_their_results_gets_them() -> None:
    tokenizer = make_tokenizer("qwen3", template=STRICT)
    template = ChatTemplate(tokenizer, [Tool(multiply).schema])
    call = ToolCall("multiply", '{"left": 3}', "c00000000")
    told = [{"role": "tool", "content": "6", "tool_call_id": call.id}]
    with pytest.raises(TemplateRefusalError, match="a result without its call"):
        template.following(told)
    end = ends_of("qwen3")[0]
    assert template.shown(template.following(told, [end], [call])) == "[R]c00000000:6[/R]"
    assert template.shown(template.following(told, [5], [call])) == "<|im_end|>[R]c00000000:6[/R]"


def test_a_call_that_cannot_be_read_is_told_of_by_templates_that_want_ids_and_calls() -> None:
    """As Mistral's do: else an episode would fail in which the policy writes one, and never learn from it."""
    tokenizer = make_tokenizer("qwen3", template=STRICT)
    fake = policy(tokenizer, "?", "b")
    tools = ToolUse(Toolbox([Tool(multiply)], 5.0), FakeReader())
    template = ChatTemplate(tokenizer, tools.schemas)
    settings = make_settings(lambda: Scripted([]), tokenizer, tools=tools, template=template)
    [sample] = play(fake, settings, tokenizer)
    assert sample.metadata.get("failure") is None and sample.numbers["tool_failures"] == 1.0
    said = "[R]c00010000:error: this call cannot be read, or names no tool. Tools: multiply[/R]"
    assert tokenizer.decode(sample.response_ids) == f"?<|im_end|>{said}b<|im_end|>"


SILENT = TOOLLESS.replace("m.content", "(m.content if m.role != 'tool' else '')")
REFUSING = QWEN3.replace("role == 'tool' %}", "role == 'tool' %}{{ raise_exception('no tools') }}", 1)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (TOOLLESS, "tells the model nothing of its tools"),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + SILENT, "leaves out what a tool gave"),
        (REFUSING, "refuses these messages (no tools)"),
    ],
)
def test_a_template_that_does_not_know_tools_is_refused(tmp_path: Path, template: str, says: str) -> None:
    agent = {"tools": [f"{KIT}:multiply"], "tool_parser": "qwen25", "rewritten": "keep"}
    recipe = make_recipe(tmp_path, agent=agent)
    with pytest.raises(UserError) as caught:
        check_agent(recipe, make_tokenizer("qwen3", template=template))
    assert says in str(caught.value) and "agent.tools" in str(caught.value)
    check_agent(recipe, make_tokenizer("qwen3"))


def test_a_template_that_wants_calls_apart_from_texts_cannot_be_split(tmp_path: Path) -> None:
    wants = "{%- if messages[-1].role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('whose?') }}{% endif %}"
    tokenizer = make_tokenizer("qwen3", template=wants + QWEN3)
    agent = {"tools": [f"{KIT}:multiply"], "tool_parser": "qwen25", "rewritten": "split"}
    with pytest.raises(UserError, match=r"agent\.rewritten: split .*\(whose\?\).* Set it to keep"):
        check_agent(make_recipe(tmp_path, agent=agent), tokenizer)
    check_agent(make_recipe(tmp_path, agent={**agent, "rewritten": "keep"}), tokenizer)
    check_agent(make_recipe(tmp_path, agent=agent), make_tokenizer("qwen3"))


def test_tools_that_fill_the_prompt_are_refused(tmp_path: Path) -> None:
    agent = {"tools": [f"{KIT}:multiply"], "tool_parser": "qwen25", "rewritten": "keep"}
    recipe = make_recipe(tmp_path, agent=agent, data={"train": tmp_path, "max_prompt_tokens": 100})
    with pytest.raises(UserError, match=r"takes \d+ tokens of each prompt, and data.max_prompt_tokens is 100"):
        check_agent(recipe, make_tokenizer("qwen3"))


class FakeServers:
    """A router that says who its servers are, and servers that read calls as `reader` does."""

    def __init__(self, reader: Any) -> None:
        self.server, self.router = FakeSglang("server 0"), FakeSglang("router")
        self._reader = reader

    async def __aenter__(self) -> FakeServers:
        plain = self.server.respond

        async def respond(path: str, body: dict[str, Any]) -> web.Response:
            return web.json_response(self._reader(body)) if path == "/parse_function_call" else await plain(path, body)

        async def workers(path: str, body: dict[str, Any]) -> web.Response:
            assert path == "/workers"
            return web.json_response({"workers": [{"url": self.server.endpoint.url, "id": "1"}]})

        self.server.respond, self.router.respond = respond, workers  # type: ignore[method-assign]
        await self.server.__aenter__()
        await self.router.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.router.__aexit__(*error)
        await self.server.__aexit__(*error)


def test_a_server_behind_the_router_reads_calls() -> None:
    def reader(body: dict[str, Any]) -> dict[str, Any]:
        assert body["tool_call_parser"] == "qwen25" and body["tools"] == [Tool(multiply).schema]
        text = body["text"]
        calls = [{"tool_index": 0, "name": "multiply", "parameters": '{"left": 3}'}] if text == "call" else []
        return {"normal_text": "" if text in ("call", "broken") else text, "calls": calls}

    async def go() -> list[Parsed]:
        async with FakeServers(reader) as fakes:
            parser = CallParser(fakes.router.endpoint, "qwen25", [Tool(multiply).schema])
            found = [await parser.parse(text) for text in ("call", "broken", "words")]
            fakes.server.drop_next = 1
            # What a server refuses, and clients send all the same, is left out.
            sent = Tool(multiply).schema["function"] | {"strict": None}
            found.append(await parser.parse("call", [{"type": "function", "function": sent}]))  # found anew
            assert len(fakes.router.calls) == 2
            await parser.close()
            return found

    found = asyncio.run(go())
    assert [(len(each.calls), each.unread) for each in found] == [(1, False), (0, True), (0, False), (1, False)]
    assert found[0].calls[0].arguments == '{"left": 3}'


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ('{"answer": 4}', False),
        ('{"answer": {"name": "Bob"}} it is.', False),
        ('{"name": "divide", "parameters": {}}', True),
        ('{"name": "mult', True),
        ("<|python_tag|>{}", True),
    ],
)
def test_an_answer_in_json_is_no_call_that_cannot_be_read(text: str, unread: bool) -> None:
    """SGLang's parser of Llama 3 takes the object away, and makes no call of it."""

    async def go() -> Parsed:
        async with FakeServers(lambda body: {"normal_text": "", "calls": []}) as fakes:
            parser = CallParser(fakes.router.endpoint, "llama3", [Tool(multiply).schema])
            found = await parser.parse(text)
            await parser.close()
            return found

    assert asyncio.run(go()) == Parsed((), unread, "" if unread else text)


def test_turns_that_end_together_find_servers_once_and_leave_no_connection() -> None:
    """Also where a server goes meanwhile: what the others were asked is still answered."""

    async def go() -> tuple[int, int]:
        async with FakeServers(lambda body: {"normal_text": body["text"], "calls": []}) as fakes:
            parser = CallParser(fakes.router.endpoint, "qwen25", [Tool(multiply).schema])
            await asyncio.gather(*(parser.parse("words") for _ in range(8)))
            found = len(fakes.router.calls)
            fakes.server.drop_next = 1
            await asyncio.gather(*(parser.parse("words") for _ in range(8)))
            asked = len(fakes.server.calls)
            await parser.close()
            assert found == 1 and len(fakes.router.calls) == 2
            return asked, sum(isinstance(each, ClientSession) and not each.closed for each in gc.get_objects())

    asked, opened = asyncio.run(go())
    assert (asked, opened) == (17, 0)


@pytest.mark.parametrize("left", ["no server", "no router"])
def test_servers_that_are_gone_for_a_moment_are_waited_for(left: str) -> None:
    async def go() -> list[Parsed]:
        async with FakeServers(lambda body: {"normal_text": body["text"], "calls": []}) as fakes:
            parser = CallParser(fakes.router.endpoint, "qwen25", [Tool(multiply).schema], backoff_s=0.01)
            found = [await parser.parse("before")]
            plain, asked = fakes.router.respond, 0

            async def workers(path: str, body: dict[str, Any]) -> web.Response:
                nonlocal asked
                asked += 1
                if path != "/workers":
                    return web.json_response({}, status=404)
                return await plain(path, body) if asked > 3 else web.json_response({"workers": []})

            fakes.server.drop_next = 1
            if left == "no server":
                fakes.router.respond = workers  # type: ignore[method-assign]
            else:
                fakes.router.drop_next = 3
            found += [await parser.parse("meanwhile"), await parser.parse("after")]
            await parser.close()
            return found

    assert [each.text for each in asyncio.run(go())] == ["before", "meanwhile", "after"]


@pytest.mark.parametrize(("status", "fails_sample"), [(500, False), (400, False), (401, True)])
def test_a_parser_that_raises_costs_the_call_and_a_server_that_is_gone_the_sample(
    status: int, fails_sample: bool
) -> None:
    tokenizer = make_tokenizer("qwen3")
    end = ends_of("qwen3")[0]
    fake = FakePolicy(lambda *_: [5, end], lambda ids: tokenizer.decode(ids), ends={end})
    fake.refuse["/parse_function_call"] = (status, "no")
    fake.refuse["/workers"] = (404, "not found")

    tools: list[ToolUse] = []

    class Late:
        """The server's address is known once it runs."""

        def __init__(self) -> None:
            self.schemas: list[dict[str, Any]] = []

        async def use(self, text: str, turn: int, environment: Any) -> Any:
            if not tools:
                tools.append(ToolUse(Toolbox([Tool(multiply)], 5.0), CallParser(fake.endpoint, "qwen25", [])))
            return await tools[0].use(text, turn)

        async def close(self) -> None:
            await tools[0].close()

    settings = make_settings(lambda: Scripted([]), tokenizer, tools=Late(), max_turns=2)
    [sample] = play(fake, settings, tokenizer)
    if fails_sample:
        assert sample.status is Status.FAILED and "no server read the calls of tools" in sample.metadata["failure"]
    else:
        assert sample.status is Status.TRUNCATED and sample.numbers["tool_failures"] == 2
