"""Sections and recipes of supervised runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.recipe.roles import Lora, Optimizer, Parallel, Part
from megarl.recipe.run import Cluster, Deadlines, Model, Report, Run
from megarl.recipe.section import PositiveInt, Recompute, Section, UserPath


class SftData(Section):
    """Demonstrations: rows with `messages`, or with a prompt and a response."""

    train: UserPath = Field(strict=False, description="JSONL or Parquet")
    prompt_key: str = Field("prompt", description="field with a string or chat messages")
    response_key: str = Field("response", description="field with the assistant's text")
    messages_key: str = Field(
        "messages", description="field with whole chats, the last message the assistant's; used where present"
    )
    max_tokens: PositiveInt = Field(2048, description="longest demonstration; longer ones are counted and dropped")
    shuffle: bool = Field(True, description="a new order every epoch, from run.seed")


class SftTrain(Section):
    """Length and batch of supervised training."""

    steps: PositiveInt = Field(description="optimizer steps")
    batch_samples: PositiveInt = Field(description="demonstrations in one optimizer step")
    save_every: PositiveInt | None = Field(None, description="steps between checkpoints; default: only at the end")
    keep_last: PositiveInt = Field(2, description="newest checkpoints kept")
    async_save: bool = Field(
        False, description="write checkpoints while training goes on; each is committed one step later"
    )
    keep_every: PositiveInt | None = Field(None, description="also keep those of every so many steps, for good")


class SftActor(Section):
    """The model under supervised training, on Megatron."""

    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    micro_batch_tokens: PositiveInt = Field(
        16384, description="most tokens of one forward pass, on one data-parallel rank"
    )
    recompute: Recompute = Field(
        "none", description="activations computed again in backward: none, selective (attention), full (every layer)"
    )
    aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of the load-balancing loss of a mixture of experts"
    )
    lora: Lora | None = Field(None, description="train low-rank adapters alone; default: the whole model")
    resting: tuple[Part, ...] = Field(
        (), strict=False, description="what leaves the device while nothing needs it: grads, params, optimizer"
    )


class SftRecipe(Section):
    """One supervised run: `megarl sft`."""

    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: SftData
    actor: SftActor = SftActor()
    train: SftTrain
    deadlines: Deadlines = Deadlines()
    report: Report = Report()
