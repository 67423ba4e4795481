"""The recipe: every key that a run understands, its type, default and meaning. Frozen; unknown keys are errors.

This room imports no torch: a recipe is read and refused in milliseconds. Sections that several kinds of runs share, and
those of the models, are in the files beside this one; all are known by this module's name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from megarl.recipe.agent import Agent
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.dataset import DataSet, ImagesKey, MaxImagePixels, Mix, MixKey
from megarl.recipe.held_out import Eval
from megarl.recipe.keep import KeptBest
from megarl.recipe.placement import Placement
from megarl.recipe.reward import Reward
from megarl.recipe.roles import Actor, Critic, Reference, RewardModel, ServerPart, Teacher
from megarl.recipe.run import Cluster, Deadlines, Model, Report, Run
from megarl.recipe.section import (
    AsyncSave,
    Epochs,
    KeepEvery,
    KeepLast,
    PositiveFloat,
    PositiveInt,
    SaveEvery,
    Section,
    Steps,
    UserPath,
)
from megarl.recipe.servers import ExternalServers, Servers
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe, SupervisedRecipe

PROMPT_PLACE = "{prompt}"


def _with_one_place(text: str) -> str:
    if (count := text.count(PROMPT_PLACE)) != 1:
        raise ValueError(
            f"`{PROMPT_PLACE}` is in it {count} times; wanted is a text with it once, where the prompt goes"
        )
    return text


class Data(DataSet):
    """Prompts and answers; JSONL or Parquet."""

    prompt_key: str = Field("prompt", description="field with a string or a list of chat messages")
    answer_key: str | None = Field(
        None, description="field with the answer; default: answer, label, reward_model.ground_truth"
    )
    final_answer: bool = Field(
        False,
        description="the answer is not the whole field but its end: what follows the last `####`, as in GSM8K, or stands in "
        "the last \\boxed{}",
    )
    prompt_suffix: str = Field("", description="put behind every prompt, or behind the last message of a chat")
    prompt_template: Annotated[str, AfterValidator(_with_one_place)] | None = Field(
        None, description="text with `{prompt}` in it once, for which every prompt, or a chat's last message, is put in"
    )
    system_prompt: str | None = Field(
        None, description="a first message of the system's, where a row has none; needs a chat template"
    )
    images_key: ImagesKey = "images"
    max_image_pixels: MaxImagePixels = None
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt, in tokens")
    over_length: Literal["drop", "error"] = Field(
        "drop", description="what happens to a prompt over the limit; drops are counted"
    )
    shuffle: bool = Field(True, description="a new order every epoch, from run.seed")
    mix: Mix = Field({})
    mix_key: MixKey = "data_source"


InFlight = Literal["finish", "in_place", "abort"]
Late = Literal["wait", "drop", "resume"]
JournalKeep = Literal["needed", "all"]
IN_FLIGHT = 512


class Rollout(Section):
    """Generation with a pool of SGLang servers."""

    servers: Servers = Field(
        1,
        description="number of SGLang servers that the run starts; a section: those that somebody else started. On a CPU, where "
        "it is not given and ranks and servers take turns, `megarl train` starts one a core, up to 4, where that pays",
    )
    tp: PositiveInt = Field(1, description="tensor parallel size of one server")
    prompts_per_step: PositiveInt = Field(description="groups in one step")
    samples_per_prompt: PositiveInt = Field(description="samples in one group")
    max_response_tokens: PositiveInt = Field(description="longest response, in tokens")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature; the trainer applies the same")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="nucleus sampling; 1.0 alone: the trainer's log-probs are of the whole distribution"
    )
    top_k: int = Field(-1, description="top-k sampling; -1 (off) alone, as with top_p")
    stop: tuple[str, ...] = Field(
        (),
        strict=False,
        description="strings that end a response, or a turn, beside the end-of-sequence token; its text leaves them out",
    )
    max_running_requests: PositiveInt = Field(64, description="most sequences that one server decodes at once")
    kv_tokens: PositiveInt | None = Field(
        None, description="KV cache of one server, in tokens; default: SGLang decides; needed on cpu"
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="fp8: servers hold the linears of layers in FP8, in blocks of 128 x 128 that the trainer makes at each sync; "
        "default: all of it in model.dtype; not on cpu",
    )
    deterministic: bool = Field(
        False,
        description="the same run gives the same samples twice, bit for bit, by SGLang's deterministic mode; what that costs: "
        "docs/determinism.md",
    )
    concurrency: PositiveInt | None = Field(
        None,
        description="most requests in flight from the collectors; default: 512, or as many as the run's servers decode at once "
        "where that is more",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        8,
        description="most times within an hour that servers, router and collectors, together, are started again where one "
        "dies or hangs; one more death ends the run. 0: a server that dies is gone for good",
    )
    offload: tuple[ServerPart, ...] = Field(
        (),
        strict=False,
        description="what servers give back while nothing needs it: weights, kv_cache; for servers on ranks' devices",
    )
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        0,
        description="weight versions that a sample may be behind when it is trained on; 0: synchronous; above: servers with "
        "devices of their own generate while the ranks train",
    )
    in_flight: InFlight = Field(
        "abort",
        description="what a weight sync does to running requests: finish: waits for them; in_place: pauses them, and they go "
        "on with the new weights; abort: ends them, and what they have is continued afterwards, token for token",
    )
    keep_kv: bool = Field(
        False, description="with in_flight: in_place, the KV cache of the old weights is kept; off: computed anew"
    )
    oversample: Annotated[float, Field(ge=1)] = Field(
        1.0,
        description="groups asked for over groups that a step takes, for servers on ranks' devices; the rest is carried over",
    )
    late: Late = Field(
        "wait",
        description="a group that runs although it could be trained on in this step at the latest: wait for it, drop it, or "
        "resume: it goes on, and tokens that are too old by then are not trained on",
    )
    longest_first: bool = Field(
        True, description="requests start with the prompts whose earlier groups took the most tokens"
    )
    collectors: PositiveInt | None = Field(
        None, description="processes that ask, grade and keep the samples; default: one for every 32 servers"
    )
    piece_tokens: PositiveInt | None = Field(
        None,
        description="ask for a response in pieces of so many tokens: a server that dies loses one piece; default: whole",
    )
    server_args: tuple[str, ...] = Field(
        (), strict=False, description="extra flags of sglang.launch_server, word by word"
    )

    @property
    def external(self) -> ExternalServers | None:
        """Servers that somebody else started; None where the run starts its own."""
        return self.servers if isinstance(self.servers, ExternalServers) else None

    @property
    def num_servers(self) -> int:
        """How many servers generate, whoever started them."""
        return len(self.servers.urls) if isinstance(self.servers, ExternalServers) else self.servers

    @property
    def most_in_flight(self) -> int:
        """Most requests that are asked at once."""
        if self.concurrency is not None:
            return self.concurrency
        return IN_FLIGHT if self.external is not None else max(IN_FLIGHT, self.num_servers * self.max_running_requests)

    @property
    def server_devices(self) -> int:
        """Devices of the run's that servers are on: none of external ones."""
        return 0 if isinstance(self.servers, ExternalServers) else self.servers * self.tp


class Sync(Section):
    """Weights from the actor to the servers."""

    transport: Literal["auto", "broadcast", "shared_memory", "disk"] = Field(
        "auto",
        description="shared_memory: ranks write weights into memory of the node, or the devices, that its servers load from; "
        "broadcast: every "
        "rank that holds a part sends it, to any node; disk: ranks write versions into a folder that servers read; auto takes "
        "shared memory where it can, else broadcast, and the log says why",
    )
    folder: UserPath | None = Field(
        None,
        strict=False,
        description="with transport: disk, the folder that weight versions go into; ranks and servers see it under this path; "
        "default: the run's",
    )
    bucket_mb: PositiveInt = Field(
        512,
        description="most megabytes gathered and sent at once; over shared memory at most 128, and broadcast by gloo at most 64",
    )
    lora: Literal["merged", "adapters"] = Field(
        "merged",
        description="with actor.lora: merged: the whole weights are sent, adapters in them; adapters: they alone, through the "
        "run's folder, and servers keep the model as it is",
    )
    verify: Literal["probe", "hash"] = Field(
        "probe",
        description="probe: each server's log-probs of a few sequences against the trainer's; hash: and beside it the hash of "
        "every tensor that each server holds, bit for bit, for which the trainer gathers its weights once more",
    )
    tolerance: PositiveFloat | None = Field(
        None,
        description="largest |log-prob| difference, server to trainer; default 1e-3 in float32, 0.3 in bfloat16, "
        "2 with rollout.quantization",
    )


class Train(Section):
    """How long, and what is kept."""

    steps: Steps = Field(0, description="rollout-and-update steps; 0: as train.epochs says")
    epochs: Epochs = None
    save_every: SaveEvery = None
    keep_last: KeepLast = 2
    async_save: AsyncSave = False
    keep_every: KeepEvery = None
    keep_best: KeptBest = None
    max_rewinds: PositiveInt = Field(
        3,
        description="times that a run goes back to the same checkpoint, where on_bad_gradient or on_logprob_diff is rewind",
    )
    journal: bool = Field(
        True,
        description="finished samples are written down before they count, in journal/ of the run's folder: a run that goes on "
        "trains on them, and samples nothing twice",
    )
    journal_keep: JournalKeep = Field(
        "needed",
        description="needed: samples that no kept checkpoint needs are removed; all: every step's stay, about 15 bytes a token, "
        "and `megarl replay` can train on the whole run again",
    )


class Recipe(Section):
    """One reinforcement-learning run: `megarl train`, `megarl eval`."""

    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: Data
    rollout: Rollout
    agent: Agent | None = Field(
        None, description="episodes of several turns, with an environment, tools or a harness; default: none"
    )
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    actor: Actor = Actor()
    reference: Reference = Reference()
    critic: Critic | None = Field(None, description="the value model; there by itself where the advantage is gae")
    reward_model: RewardModel | None = Field(
        None, description="a model that scores responses, beside the graders; default: none"
    )
    teacher: Teacher | None = Field(None, description="the model to distill from; default: none")
    placement: Placement = Placement()
    sync: Sync = Sync()
    eval: Eval = Eval()
    train: Train
    deadlines: Deadlines = Deadlines()
    report: Report = Report()

    @model_validator(mode="before")
    @classmethod
    def _rewarded_by_environment(cls, values: Any) -> Any:
        """Where an environment or a harness rewards, a rule grades beside it only if the recipe names one."""
        agent = values.get("agent") if isinstance(values, dict) else None
        players = ("environment", "environments", "command", "function")
        if not isinstance(agent, dict) or not any(agent.get(key) for key in players):
            return values
        reward = values.get("reward", {})
        if not isinstance(reward, dict) or "fn" in reward:
            return values
        return {**values, "reward": {"fn": None, **reward}}


AnyRecipe = Recipe | SupervisedRecipe
# One of them, of functions that give back the kind that they take.
RecipeT = TypeVar("RecipeT", Recipe, SftRecipe, RmRecipe, DpoRecipe, KtoRecipe)
