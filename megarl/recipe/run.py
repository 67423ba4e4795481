"""Sections that every kind of run has: where it lives, what it may use, its model, its deadlines and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.section import ImportPath, PositiveFloat, PositiveInt, Section, UserPath


class Run(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("run", description="folder name of the run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: UserPath = Field(Path("runs"), strict=False, description="folder that holds all runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        1, description="seed of the data order and of everything else random"
    )

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.dir / self.name


class Cluster(Section):
    """What the run may use."""

    platform: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto is cuda where a GPU is visible, and torch is no build for CPUs"
    )
    devices: PositiveInt = Field(
        1,
        description="devices of the roles that Megatron holds, over all pools; on cpu, one process counts as one device",
    )
    file: UserPath | None = Field(
        None,
        strict=False,
        description="cluster file to plan and check memory with (`megarl profile` writes one); default: what is known of "
        "this machine",
    )
    max_recoveries: Annotated[int, Field(ge=0)] = Field(
        3,
        description="times, without a further step in between, that a run resumes by itself after the death of a process that "
        "nobody starts again: a rank, the coordinator, Ray's own; 0: such a death ends the run",
    )
    spares: Annotated[int, Field(ge=0)] = Field(
        0,
        description="nodes beyond those that the run needs: one takes the place of a node that is lost, and the run resumes by "
        "itself; counted in `megarl submit --nodes`",
    )
    peak_tflops: PositiveFloat | None = Field(
        None, description="what one device could do in model.dtype, TFLOP/s; gives perf/mfu"
    )


class Model(Section):
    """The policy to train."""

    path: UserPath = Field(
        strict=False,
        description="HF folder (config.json, tokenizer, safetensors), or a name on the Hugging Face hub: Qwen/Qwen3-4B, "
        "Qwen/Qwen3-4B@REVISION",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of the weights in forward, backward and rollout"
    )


class Deadlines(Section):
    """Longest waits, in seconds; when one passes, the run stops with phase, role, ranks and stacks."""

    start_s: PositiveFloat = Field(600.0, description="servers and ranks up and loaded")
    rollout_s: PositiveFloat = Field(3600.0, description="one step's samples, or one evaluation")
    train_s: PositiveFloat = Field(3600.0, description="one log-prob pass or one update")
    sync_s: PositiveFloat = Field(600.0, description="one verified weight sync")
    answer_s: PositiveFloat = Field(
        600.0, description="a server or the router that says nothing for so long is killed, and started again"
    )
    save_s: PositiveFloat = Field(1800.0, description="one checkpoint or export")


class Wandb(Section):
    """Weights & Biases; offline where wandb finds no key."""

    project: str = Field("megarl", description="project name")


class Profiler(Section):
    """torch's profiler on steps of the run: traces and tables in the run's folder, `profile/`."""

    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = Field(
        strict=False,
        description="steps that it watches: some, of which none is the first, which allocates and compiles",
    )
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = Field(
        (0,), strict=False, description="ranks that it watches, of each pool that has them"
    )
    memory: bool = Field(False, description="also what is allocated and freed")


class Report(Section):
    """Where metrics go, beside the console and metrics.jsonl."""

    tensorboard: bool = Field(True, description="event files in the run's folder")
    wandb: Wandb | None = Field(None, description="also to wandb; default: not")
    writer: ImportPath | None = Field(
        None,
        description="also to a class of your own, pkg.module:Class with write(step, metrics) and close(failed), such as one that "
        "tells MLflow",
    )
    profiler: Profiler | None = Field(None, description="torch's profiler on some steps; default: none")
    samples: Annotated[int, Field(ge=0)] = Field(
        16, description="samples of each step written to samples/, for reading"
    )
