"""The section that says how a response is graded: rules, remote servers, judges and tests of code, each with its weight.

What the graders do is in megarl/rewards; their protocols are in docs/rewards.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megarl.recipe.section import Fraction, PositiveFloat, PositiveInt, Section, UserPath, Variable, plain_url

JSON_FIELD = "json:"  # what stands before the name of a field, where a score is not found by a pattern


def _parse(text: str) -> str:
    if text.startswith(JSON_FIELD):
        if not text.removeprefix(JSON_FIELD):
            raise ValueError(f"after `{JSON_FIELD}` the name of a field is missing")
        return text
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"{text!r} has {groups} groups; wanted is a regular expression with one, around the score, or "
            f"{JSON_FIELD}FIELD"
        )
    return text


def _named(graders: dict[str, Grader]) -> dict[str, Grader]:
    wrong = [name for name in graders if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    if wrong:
        raise ValueError(f"{', '.join(map(repr, wrong))}: the name of a grader has letters, digits and `_` only")
    return graders


Url = Annotated[str, AfterValidator(plain_url)]


def _several(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _some(values: tuple[str | int | float | bool, ...]) -> tuple[str | int | float | bool, ...]:
    if not values:
        raise ValueError("an empty list is the value of no row. Name a value, or remove the field")
    return values


FieldValues = Annotated[tuple[str | int | float | bool, ...], BeforeValidator(_several), AfterValidator(_some)]


class GraderSection(Section):
    """What every grader has."""

    weight: float = Field(1.0, description="what its score counts for in the reward; 0: it is only measured")
    only: dict[str, FieldValues] = Field(
        {},
        description="the rows that it grades, by their fields, dots into objects: {data_source: [apps, taco]}; default: all",
    )


class Rule(GraderSection):
    """A function, in processes of the run."""

    kind: Literal["rule"] = Field(description="a function")
    fn: str = Field(description="math, exact, or pkg.module:function(prompt, response, answer, metadata) -> float")


class HttpGrader(GraderSection):
    """What graders behind an address have."""

    timeout_s: PositiveFloat = Field(60.0, description="deadline of one attempt of a request, seconds")
    retries: Annotated[int, Field(ge=0)] = Field(3, description="further attempts where the answer is 5xx")
    retry_for_s: Annotated[float, Field(ge=0)] = Field(
        300.0,
        description="how long a server that is gone or busy (no connection, 429, 502, 503, 504) is asked again, seconds; past "
        "it the grades that wait have failed",
    )
    concurrency: PositiveInt = Field(64, description="most requests in flight; others wait, outside of their deadline")
    key_env: Variable | None = Field(
        None, description="environment variable with the key, sent as a bearer token; default: no key"
    )


class Remote(HttpGrader):
    """A server that grades batches; its protocol: docs/rewards.md."""

    kind: Literal["remote"] = Field(description="a server that grades")
    url: Url = Field(description="where batches are posted to")
    batch: PositiveInt = Field(32, description="most responses in one request")


class Judge(HttpGrader):
    """A language model that grades, behind an OpenAI-compatible address."""

    kind: Literal["judge"] = Field(description="a language model that grades")
    url: Url = Field(description="base of the address: /chat/completions is put behind it")
    model: str = Field(description="name of the model, as its server knows it")
    template: str | None = Field(
        None,
        description="what the judge is asked, in Jinja, of prompt, response, answer and metadata; default: built in",
    )
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        0.0, description="sampling temperature; null: the server's own"
    )
    max_tokens: PositiveInt | None = Field(None, description="longest reply, in tokens; default: the server's own")
    parse: Annotated[str, AfterValidator(_parse)] | None = Field(
        None,
        description="regular expression whose one group is the score (the last match counts), or json:FIELD; default: the last "
        "line that is a score and nothing else, such as `Score: 7`",
    )
    scale: PositiveFloat = Field(
        10.0, description="the best score: the grade is score / scale; others than 0 to it fail"
    )


class Classify(HttpGrader):
    """A reward model of any family, which an SGLang server has."""

    kind: Literal["classify"] = Field(description="a reward model that an SGLang server has (--is-embedding)")
    url: Url = Field(description="where the server listens: /classify is put behind it")
    tokenizer: UserPath = Field(
        strict=False,
        description="HF folder of the reward model (its tokenizer and config.json), or its name on the Hugging Face hub; its "
        "chat template renders the conversation",
    )
    output: Annotated[int, Field(ge=0)] = Field(0, description="which of its numbers is the score, from 0 on")


class Code(GraderSection):
    """The row's tests, run on the last block of code of the response, in sandboxes of the run."""

    kind: Literal["code"] = Field(description="the row's tests, run on the code of the response")
    field: str | None = Field(
        None,
        description="the row's field with the tests, dots into objects; default: the first of those that data sets use "
        "(docs/rewards.md)",
    )
    score: Literal["all", "share"] = Field(
        "all", description="all: 1 where every test passes; share: of those that pass"
    )
    max_tests: PositiveInt = Field(32, description="most tests of a row that are run: its first ones")
    timeout_s: PositiveFloat = Field(
        10.0, description="seconds, and CPU seconds, of one input, or of all asserts of a row together"
    )
    memory_mb: Annotated[int, Field(ge=48)] = Field(
        512, description="memory of one sandbox, all its processes and files together, MiB"
    )
    disk_mb: PositiveInt = Field(64, description="what a program may write into its folder, MiB")
    processes: PositiveInt = Field(32, description="most processes and threads of one sandbox")
    output_kb: PositiveInt = Field(256, description="longest output, KiB; with more the test has not passed")
    sandboxes: PositiveInt | None = Field(
        None, description="most programs at once in each collector; default: twice its cores"
    )


Grader = Annotated[Rule | Remote | Judge | Classify | Code, Field(discriminator="kind")]


class Reward(Section):
    """How a response is graded: the reward is the weighted sum of what all graders say."""

    fn: str | None = Field(
        "math",
        description="one rule, in short: math, exact, or pkg.module:function(prompt, response, answer, metadata) -> float; with "
        "agent.environment, environments, command or function by default null: they alone reward",
    )
    graders: Annotated[dict[str, Grader], AfterValidator(_named)] = Field(
        {}, description="graders by name, in the place of fn; each grades every response, or those to some rows (only)"
    )
    workers: PositiveInt = Field(1, description="processes of each rule")
    timeout_s: PositiveFloat = Field(
        10.0, description="deadline of one grade of a rule, seconds; then it is a counted failure"
    )

    max_failed_share: Fraction = Field(
        0.5,
        description="largest share of a step's grades, or of an evaluation's, that may fail; with more the run stops",
    )

    def by_name(self) -> dict[str, Grader]:
        """All graders; none where only an environment rewards. The one that `fn` stands for has the name of its function."""
        if self.graders or self.fn is None:
            return self.graders
        return {self.fn.replace(":", ".").rpartition(".")[2]: Rule(kind="rule", fn=self.fn)}

    def key_of(self, name: str) -> str:
        """The dotted path of a grader's section, or of the short form."""
        return f"reward.graders.{name}" if self.graders else "reward"
