"""What one step has to do: roles and their models, samples and their lengths, updates. All that a plan needs of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.types import MiniBatches
from megarl.core.words import last_value
from megarl.hub.fetch import config_here, fetch_config
from megarl.models.config import ModelConfig
from megarl.models.context import SAMPLE_PARTS, check_context
from megarl.models.hf_config import parse_model_config
from megarl.placement.lengths import Lengths, assumed_lengths
from megarl.placement.sizes import model_sizes
from megarl.placement.states import StatePool, state_pool
from megarl.recipe.batch import uneven_mini_batch
from megarl.recipe.functions import asked
from megarl.recipe.layouts import tower_roles
from megarl.recipe.roles import Lora
from megarl.recipe.rollout_rules import longest_sample
from megarl.recipe.sampling_rules import beside_ranks
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import scored_first

ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD = "actor", "rollout", "reference", "critic", "reward_model"
TEACHER = "teacher"
ROLES = (ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD, TEACHER)
TRAINED = (ACTOR, CRITIC)
Quantization = Literal["fp8"]
# adapters: LoRA's, alone, as files.
SyncTransport = Literal["auto", "broadcast", "shared_memory", "disk", "adapters"]
FRACTION_FLAG = "--mem-fraction-static"
# Mean prompt, tokens, where nothing is known: of published runs on mathematics 103 (verl, issue 1208) and 159 (DAPO, 14B).
ASSUMED_PROMPT = 150.0


@dataclass(frozen=True)
class Workload:
    """One step of a run.

    models: of every role; the rollout's is the actor's. prompt_tokens: mean of a prompt. mini_batches: optimizer steps
    of one pass over a step's samples. epochs: times that the actor goes through them; critic_epochs: that the critic does.
    longest_sample: tokens of prompt and response at most.
    micro_tokens: sizes of a micro-batch that may be chosen, tokens. max_running: sequences that a server decodes at
    once, at most. in_flight: those that all servers are asked for at once; None: all that they decode. staleness: versions that
    a sample may be old; 0 is synchronous. scores: of which mini-batches the actor's own log-probs are computed before the update.
    shards_optimizer: whether data-parallel ranks share out its state. tied: whether the reference is where the actor is, at
    the actor's layout.
    quantization: of the servers' weights; their KV cache keeps the run's dtype. lora: adapters that alone the actor trains.
    kv_tokens, server_share: what the recipe itself says of a server's cache, and of its share of a device's memory. transport:
    how weights go to servers. async_save: whether checkpoints are written beside the training. teacher_top: of how many of a
    teacher's likeliest tokens at each position the actor is given log-probs; 0: of none.
    states: how servers keep those of linear attention. replays_routing: whether servers tell ranks which experts they chose.
    towers: roles whose vision tower learns. largest_image: squares of an image at most.
    """

    models: Mapping[str, ModelConfig]
    prompts: int
    samples_per_prompt: int
    mini_batches: int
    prompt_tokens: float
    responses: Lengths
    longest_sample: int
    micro_tokens: tuple[int, ...]
    epochs: int = 1
    critic_epochs: int = 1
    max_running: int = 1024
    in_flight: int | None = None
    dtype: str = "bfloat16"
    staleness: int = 0
    scores: MiniBatches | None = "all"
    shards_optimizer: bool = True
    quantization: Quantization | None = None
    lora: Lora | None = None
    kv_tokens: int | None = None
    server_share: float | None = None
    transport: SyncTransport = "auto"
    async_save: bool = False
    tied: bool = False
    teacher_top: int = 0
    states: StatePool = field(default_factory=StatePool)
    replays_routing: bool = False
    towers: frozenset[str] = frozenset()
    largest_image: int = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the run, in the order of ROLES."""
        return tuple(role for role in ROLES if role in self.models)

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.samples_per_prompt

    @property
    def most_dp(self) -> int:
        """Data-parallel ranks that a mini-batch can be shared out to: every one gets a sample."""
        return self.samples // self.mini_batches

    @property
    def tokens(self) -> float:
        """Tokens of one step's samples, prompts and responses."""
        return self.samples * (self.prompt_tokens + self.responses.mean)

    @property
    def bytes_each(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def served_dtype(self) -> str:
        """What a server's products multiply."""
        return self.quantization or self.dtype

    @property
    def served_bytes_each(self) -> int:
        """Bytes of one weight of a server's layers."""
        return 1 if self.quantization == "fp8" else self.bytes_each

    @property
    def served_weights(self) -> float:
        """Bytes of the rollout's weights on one server: its layers as they are served, vocabulary matrices in the run's dtype."""
        sizes = model_sizes(self.models[ROLLOUT])
        ends = sizes.embedding * (1 if sizes.tied else 2)
        return (sizes.total - ends) * self.served_bytes_each + ends * self.bytes_each

    @property
    def sent_tower(self) -> float:
        """Bytes of a vision tower that goes to the servers with each weight sync: the actor's, where it learns."""
        vision = self.models[ROLLOUT].vision
        return 0.0 if vision is None or ACTOR not in self.towers else float(vision.tower_elements * self.bytes_each)


def recipe_workload(
    recipe: Recipe,
    model: ModelConfig,
    responses: Lengths | None = None,
    prompt_tokens: float | None = None,
    *,
    read: Callable[[Path], ModelConfig] | None = None,
) -> Workload:
    """The workload of a recipe. model: the actor's. read: reads those of other folders; default: read_model.

    responses, prompt_tokens: their lengths, and mean, where known; else the likely ones of `assumed_lengths`. Raises UserError
    for samples that are longer than a model's context, and mini-batches that do not divide a step's.
    """
    rollout, actor, read = recipe.rollout, recipe.actor, read or read_model
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = longest_sample(recipe)
    models = {ACTOR: model, ROLLOUT: model} | ({REFERENCE: model} if recipe.algorithm.kl_coef > 0 else {})
    if recipe.critic is not None:
        models[CRITIC] = model if recipe.critic.path is None else read(recipe.critic.path)
    if recipe.reward_model is not None:
        models[REWARD] = read(recipe.reward_model.path)
    if recipe.teacher is not None and recipe.teacher.path is not None:
        models[TEACHER] = read(recipe.teacher.path)
    for role, each in models.items():
        check_context(each, longest, SAMPLE_PARTS, "the model" if each is model else f"{role}.path")
    mini_batch = actor.mini_batch_samples or samples
    if uneven := uneven_mini_batch(rollout.prompts_per_step, rollout.samples_per_prompt, mini_batch):
        raise UserError(uneven)
    taught = recipe.teacher is not None and asked(recipe.algorithm, "may ask for all").teacher_top
    return Workload(
        models=models,
        prompts=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        mini_batches=samples // mini_batch,
        prompt_tokens=prompt_tokens or min(ASSUMED_PROMPT, recipe.data.max_prompt_tokens / 2),
        responses=responses or assumed_lengths(rollout.max_response_tokens).likely,
        longest_sample=longest,
        micro_tokens=micro_sizes(actor.micro_batch_tokens, longest),
        epochs=actor.epochs,
        critic_epochs=1 if recipe.critic is None else recipe.critic.epochs,
        max_running=rollout.max_running_requests,
        in_flight=rollout.most_in_flight if rollout.external is not None else rollout.concurrency,
        dtype=recipe.model.dtype,
        # Groups that are carried over do not make servers work beside the ranks.
        staleness=rollout.max_staleness if beside_ranks(recipe) else 0,
        scores=scored_first(recipe, "may ask for all"),
        shards_optimizer=actor.optimizer.name == "adam",
        lora=actor.lora,
        quantization=rollout.quantization,
        kv_tokens=rollout.kv_tokens,
        server_share=server_share(rollout.server_args),
        transport=transport_of(recipe),
        async_save=recipe.train.async_save,
        tied=REFERENCE in models and is_tied(recipe),
        teacher_top=recipe.algorithm.distill_top_k if taught else 0,
        states=state_pool(rollout.server_args, rollout.max_running_requests),
        replays_routing=actor.routing_replay,
        towers=learning_towers(recipe, models),
        largest_image=largest_image(recipe, model),
    )


def micro_sizes(asked_for: int, longest: int) -> tuple[int, ...]:
    """Sizes of a micro-batch that may be chosen, around the recipe's; each holds the longest sample."""
    given = max(asked_for, longest)
    return tuple(sorted({longest, max(longest, given // 2), given, given * 2}))


def learning_towers(recipe: Recipe, models: Mapping[str, ModelConfig]) -> frozenset[str]:
    """Roles of the recipe whose vision tower learns. Raises UserError for one whose model has none."""
    found = frozenset(tower_roles(recipe)) & frozenset(TRAINED)
    for role in sorted(found):
        if models[role].vision is None:
            raise UserError(
                f"{role}.optimizer.freeze_vision_tower: false lets a vision tower learn, and the {role}'s model sees no images. "
                "Remove the key, or name a model that does."
            )
    return found


def largest_image(recipe: Recipe, model: ModelConfig) -> int:
    """Squares of the largest image that the recipe lets through: of a prompt, or, where episodes may show others, of a sample."""
    vision = model.vision
    if vision is None:
        return 0
    most = min(vision.most_pixels, recipe.data.max_image_pixels or vision.most_pixels) // vision.square**2
    return min(most, recipe.data.max_prompt_tokens if recipe.agent is None else longest_sample(recipe))


def is_tied(recipe: Recipe) -> bool:
    """Whether the reference has to be where the actor is: under LoRA it is the actor, refreshed it takes its weights."""
    return recipe.actor.lora is not None or recipe.reference.refresh_every is not None


def transport_of(recipe: Recipe) -> SyncTransport:
    """How a recipe's weights go to its servers, as far as the recipe says it."""
    alone = recipe.actor.lora is not None and recipe.sync.lora == "adapters"
    return "adapters" if alone else recipe.sync.transport


def server_share(args: Sequence[str]) -> float | None:
    """What a recipe's own flags say of a server's share of the memory, the last word counts. Raises UserError: no share."""
    value = last_value(args, FRACTION_FLAG)
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 < found < 1:
        raise UserError(
            f"rollout.server_args says {FRACTION_FLAG} {value or 'and nothing behind it'}: it is the share of a device's "
            "memory that a server may take, a number above 0 and below 1, such as 0.85."
        )
    return found


def read_model(folder: Path) -> ModelConfig:
    """The model's sizes from its config.json alone: a plan needs neither tokenizer nor weights. Raises UserError.

    folder: or its name on the hub.
    """
    path = config_here(folder) or fetch_config(folder)
    if not path.exists():
        raise UserError(
            f"There is no {path}: a plan needs the model's config.json, and nothing else of it. Set model.path to an HF "
            "folder."
        )
    return parse_model_config(read_object(path, "Export the model again."), path)
