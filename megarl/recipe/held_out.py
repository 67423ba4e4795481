"""The section that says how held-out rows are asked, of all of them and of one set of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from megarl.core.types import Prompt
from megarl.recipe.section import PositiveInt, Section

Temperature = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class EvalSet(Section):
    """How the rows of one set are asked where that is not as of all."""

    temperature: Temperature | None = Field(None, description="0 is greedy; default: eval.temperature")
    top_p: Share | None = Field(None, description="nucleus sampling; default: eval.top_p")
    top_k: int | None = Field(None, description="top-k sampling; default: eval.top_k")
    max_response_tokens: PositiveInt | None = Field(
        None, description="longest answer, in tokens; default: eval.max_response_tokens"
    )
    samples_per_prompt: PositiveInt | None = Field(
        None, description="answers to each prompt; default: eval.samples_per_prompt"
    )
    max_prompts: PositiveInt | None = Field(
        None, description="only the first so many rows of the set, beside those that eval.max_prompts counts"
    )
    grader: str | None = Field(None, description="grader whose score says what is right; default: eval.grader")


class Eval(Section):
    """Held-out answers, before, during and after; needs data.eval."""

    before: bool = Field(True, description="evaluate before the first step, too")
    every: PositiveInt | None = Field(None, description="steps between evaluations; default: only before and after")
    temperature: Temperature = Field(0.0, description="0 is greedy")
    top_p: Share = Field(1.0, description="nucleus sampling; 1.0: off")
    top_k: int = Field(-1, description="top-k sampling; -1: off")
    max_response_tokens: PositiveInt | None = Field(
        None, description="longest held-out answer, in tokens; default: rollout.max_response_tokens"
    )
    samples_per_prompt: PositiveInt = Field(
        1, description="answers to each prompt; above 1 there is eval/pass_at_K, too: right where one of K is"
    )
    max_prompts: PositiveInt | None = Field(
        None, description="only the first so many rows, but for sets with a number of their own"
    )
    overlap: bool = Field(
        False,
        description="training goes on meanwhile, up to the next weight sync; the figures are written one step later",
    )
    grader: str | None = Field(
        None, description="grader whose score says what is right (at least 0.5); default: the whole reward does"
    )
    set_key: str | None = Field(
        None,
        description="field of a held-out row that names its set: each set has figures of its own beside those of all",
    )
    sets: dict[str, EvalSet] = Field({}, description="by a set's name: how its rows are asked where not as all others")

    def of_set(self, name: str) -> Eval:
        """How the rows of that set are asked."""
        own = self.sets.get(name)
        return self if own is None else self.model_copy(update=own.model_dump(exclude_none=True))

    def asked(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Those of the rows that are asked: the first of each set that has a number of its own, and of all others together."""
        own = {name: each.max_prompts for name, each in self.sets.items() if each.max_prompts is not None}
        if not own:
            return prompts[: self.max_prompts]
        kept: list[Prompt] = []
        counts: Counter[str | None] = Counter()
        for prompt in prompts:
            said = prompt.metadata.get(self.set_key) if self.set_key is not None else None
            name = said if isinstance(said, str) and said in own else None
            most = self.max_prompts if name is None else own[name]
            if most is None or counts[name] < most:
                kept.append(prompt)
                counts[name] += 1
        return kept

    def of_row(self, fields: Mapping[str, Any]) -> Eval:
        """How a row is asked. fields: its own, which name its set where set_key says so."""
        return self if self.set_key is None or not self.sets else self.of_set(fields[self.set_key])

    def by_key(self) -> dict[str, Eval]:
        """All ways in which a row may be asked, each by the section of the recipe that says it."""
        return {"eval": self, **{f"eval.sets.{name}": self.of_set(name) for name in self.sets}}
