"""Turns prompts into shards of graded samples, in a process of its own: the driver never sees a token.

prompts -> requests to the router -> Sample -> grade, as each sample finishes -> filters -> shards. Who starts the
servers and where the shards go is megarl/cluster's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.core.progress import Progress
from megarl.core.types import BatchInfo, EvalResult, FloatArray, Prompt, Sample, Shard, Status
from megarl.data.chat import load_tokenizer
from megarl.data.pack import pack
from megarl.data.prompts import PromptSet, PromptSource, load_prompts
from megarl.models.config import ModelConfig
from megarl.models.flops import train_flops
from megarl.models.hf_config import load_model_config
from megarl.recipe.schema import Recipe
from megarl.rewards.combine import Graders, part_metrics
from megarl.rollout import filters
from megarl.rollout.advantages import Advantages, Columns, Learnable
from megarl.rollout.notices import Notices
from megarl.rollout.samples_file import write_samples
from megarl.rollout.seeds import Purpose, request_seed
from megarl.rollout.single_turn import generate_sample
from megarl.serving.client import ATTEMPTS, LONGEST_BACKOFF_S, ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling

log = get_logger(__name__)

PROBE_SEQUENCES = 4
PROBE_TOKENS = 128
CORRECT = 0.5  # a reward, or the score of eval.grader's grader, of at least this counts as a right answer


@dataclass(frozen=True)
class _Step:
    """The samples that a step trains on, kept until the next."""

    step: int
    samples: list[Sample]
    shards: list[Shard]
    greedy_rewards: FloatArray  # [G], of the greedy answer to each group's prompt; empty where nothing asks for them


@dataclass(frozen=True)
class _Generated:
    """Graded samples in the order they were asked for, and how long the servers took."""

    samples: list[Sample]
    generation_s: float


class Collector:
    """Generates, grades, filters and packs; evaluates. One step at a time."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: ModelConfig,
        prompts: PromptSet,
        eval_prompts: Sequence[Prompt],
        client: ServerClient,
        graders: Graders,
        num_shards: int,
        notices: Notices | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._recipe = recipe
        self._progress = progress or Progress(None)
        self._model = model
        self._prompts = prompts
        self._eval_prompts = tuple(eval_prompts)
        self._source = PromptSource(prompts, recipe.run.seed, shuffle=recipe.data.shuffle)
        self._client = client
        self._graders = graders
        self._num_shards = num_shards
        self._advantages = Advantages(recipe)
        self._last: _Step | None = None
        self.notices = notices or Notices()

    @classmethod
    def open(
        cls, recipe: Recipe, router: ServerEndpoint, num_shards: int, progress: Progress | None = None
    ) -> Collector:
        """Read the recipe's data and get ready to start its graders; `start` starts them.

        Raises UserError where the data cannot be used.
        """
        tokenizer = load_tokenizer(recipe.model.path)
        held_out: Sequence[Prompt] = ()
        if recipe.data.eval is not None:
            held_out = load_prompts(recipe.data.eval, tokenizer, recipe.data).prompts[: recipe.eval.max_prompts]
        notices = Notices()
        return cls(
            recipe,
            model=load_model_config(recipe.model.path),
            prompts=load_prompts(recipe.data.train, tokenizer, recipe.data),
            eval_prompts=held_out,
            # All servers may be gone for as long as one takes to start in their place.
            client=ServerClient(router, attempts=ATTEMPTS + math.ceil(recipe.deadlines.start_s / LONGEST_BACKOFF_S)),
            graders=Graders.open(recipe.reward, notices.tell),
            num_shards=num_shards,
            notices=notices,
            progress=progress,
        )

    async def start(self) -> None:
        """Start the graders; those behind an address have to answer."""
        await self._graders.start()

    async def close(self) -> None:
        """End the graders and the connections."""
        await self._graders.close()
        await self._client.close()

    def state(self) -> dict[str, Any]:
        """The place in the data and the weight of the KL, for a checkpoint."""
        return {**self._source.state(), **self._advantages.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._source.load_state(state)
        self._advantages.load_state(state)

    async def generate(self, step: int, weight_version: int) -> tuple[list[Shard], BatchInfo]:
        """The samples of one step, one shard for each data-parallel rank.

        Raises MegarlError where no sample can be trained on, or where a sample came from other weights.
        """
        settings, algorithm = self._recipe.rollout, self._recipe.algorithm
        prompts = self._source.take(settings.prompts_per_step)
        sampling = Sampling(
            settings.max_response_tokens,
            settings.temperature,
            settings.top_p,
            settings.top_k,
            settings.stop,
            self._recipe.actor.routing_replay,
            alone=settings.deterministic,
        )
        generated = await self._collect(step, prompts, settings.samples_per_prompt, sampling)
        if algorithm.refill_rounds:
            generated = await self._refill(step, generated, sampling)
        greedy: list[Sample] = []
        if self._advantages.needs_greedy:
            asked = {sample.group_id: sample.prompt for sample in generated.samples}
            plain = replace(sampling, temperature=0.0)
            greedy = (await self._collect(step, [*asked.values()], 1, plain, "greedy")).samples
        self._write(f"step_{step:06d}.jsonl", generated.samples)
        _check_versions([*generated.samples, *greedy], weight_version)
        self._check_grades(f"Step {step}", [*generated.samples, *greedy])
        kept = filters.usable(generated.samples)
        if self._advantages.needs_greedy:
            kept = filters.with_greedy(kept, greedy)
        if not kept:
            raise MegarlError(f"Step {step}: no sample can be used. {_first_failure(generated.samples)}")
        metrics = self._metrics(generated, kept)
        if algorithm.drop_zero_variance_groups:
            kept = filters.drop_zero_variance(kept)
        shards = self._pack(kept)
        self._last = _Step(step, kept, shards, filters.greedy_rewards(kept, greedy))
        info = self._info(step, weight_version, kept, shards, metrics)
        return shards, replace(info, failure=_first_failure([*generated.samples, *greedy]))

    async def _refill(self, step: int, generated: _Generated, sampling: Sampling) -> _Generated:
        """Ask further prompts in the place of groups that teach nothing, up to algorithm.refill_rounds times (DAPO)."""
        settings = self._recipe.rollout
        for _ in range(self._recipe.algorithm.refill_rounds):
            teaching = filters.num_teaching_groups(filters.usable(generated.samples))
            if teaching >= settings.prompts_per_step:
                break
            prompts = self._source.take(settings.prompts_per_step - teaching)
            asked = {sample.group_id for sample in generated.samples}
            fresh = [prompt for prompt in prompts if f"{step}/{prompt.id}" not in asked]
            more = await self._collect(step, fresh, settings.samples_per_prompt, sampling)
            seconds = generated.generation_s + more.generation_s
            generated = _Generated([*generated.samples, *more.samples], seconds)
        return generated

    def advantages(self, step: int, columns: Columns) -> Learnable:
        """What the update learns from, of a step's samples and the roles' columns, one column for each shard."""
        if self._last is None or self._last.step != step:
            have = "none" if self._last is None else str(self._last.step)
            raise MegarlError(f"Advantages of step {step} were asked for; the samples at hand are of step {have}.")
        last = self._last
        return self._advantages.of_step(last.samples, last.shards, columns, last.greedy_rewards)

    async def evaluate(self, step: int, weight_version: int) -> EvalResult:
        """Answer and grade the held-out prompts. Raises MegarlError where the recipe names none."""
        if not self._eval_prompts:
            raise MegarlError("There is nothing to evaluate on: the recipe has no data.eval.")
        settings = self._recipe.eval
        sampling = Sampling(
            self._recipe.rollout.max_response_tokens,
            settings.temperature,
            stop=self._recipe.rollout.stop,
            alone=self._recipe.rollout.deterministic,
        )
        generated = await self._collect(step, self._eval_prompts, settings.samples_per_prompt, sampling, "eval")
        samples = generated.samples
        self._write(f"eval_{step:06d}.jsonl", samples)
        _check_versions(samples, weight_version)
        self._check_grades(f"Evaluation at step {step}", samples)
        if all(sample.status is Status.FAILED for sample in samples):
            raise MegarlError(f"Evaluation at step {step}: no prompt was answered. {_first_failure(samples)}")
        # A prompt without an answer or a grade is not a right answer: held-out figures count every prompt.
        reward = float(filters.rewards(samples).mean())
        accuracy = float((filters.scores(samples, settings.grader) >= CORRECT).mean())
        return EvalResult(
            num_prompts=len(self._eval_prompts),
            num_samples=len(samples),
            accuracy=accuracy,
            reward=reward,
            metrics={
                "eval/accuracy": accuracy,
                "eval/reward": reward,
                "eval/response_len_mean": float(np.mean([len(sample.response_ids) for sample in samples])),
                "eval/truncated": _share(samples, Status.TRUNCATED),
                "eval/failures": float(len(samples) - len(filters.usable(samples))),
            },
            failure=_first_failure(samples),
        )

    def probe(self) -> list[list[int]]:
        """A few short token sequences, of the last step where there was one: what a weight sync is verified on."""
        if self._last is not None:
            sequences = [[*sample.prompt.token_ids, *sample.response_ids] for sample in self._last.samples]
        else:
            sequences = [list(prompt.token_ids) for prompt in self._prompts.prompts]
        usable = [sequence[-PROBE_TOKENS:] for sequence in sequences if len(sequence) > 1]
        # Neighbours are of the same group and say much the same: spread over the step.
        chosen = usable[:: max(1, len(usable) // PROBE_SEQUENCES)][:PROBE_SEQUENCES]
        return [[int(token) for token in sequence] for sequence in chosen]

    async def _collect(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        purpose: Purpose = "train",
    ) -> _Generated:
        """All samples of all prompts, in their order; grading a sample overlaps with generating others."""
        room = asyncio.Semaphore(self._recipe.rollout.concurrency)
        began = time.monotonic()
        finished = began

        async def one(prompt: Prompt, index: int) -> Sample:
            nonlocal finished
            group = f"{step}/{prompt.id}"
            seed = request_seed(self._recipe.run.seed, purpose, step, prompt.id, index)
            async with room:
                sample = await generate_sample(
                    self._client,
                    prompt,
                    replace(sampling, seed=seed),
                    sample_id=f"{group}/{index}",
                    group_id=group,
                    deadline_s=self._recipe.deadlines.rollout_s,
                )
            finished = time.monotonic()
            if sample.status is not Status.FAILED:
                grade = await self._graders.grade(
                    prompt.text, sample.response_text, prompt.answer, prompt.metadata, prompt.id
                )
                sample.reward, sample.reward_parts, sample.grade_failure = grade.reward, grade.parts, grade.failure
            self._progress.advance()
            return sample

        # A prompt that comes twice, where the data starts over, makes its group larger.
        asked: Counter[str] = Counter()
        tasks = []
        with self._progress.of(len(prompts) * samples_per_prompt, "samples"):
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    first = asked[prompt.id]
                    asked[prompt.id] += samples_per_prompt
                    tasks += [group.create_task(one(prompt, first + index)) for index in range(samples_per_prompt)]
        samples = [task.result() for task in tasks]
        if any(sample.status is Status.FAILED for sample in samples):
            log.warning("step %d: %s", step, _first_failure(samples))
        return _Generated(samples, max(finished - began, 1e-9))

    def _check_grades(self, where: str, samples: Sequence[Sample]) -> None:
        """Raises MegarlError where more of the answered samples have no grade than the recipe allows."""
        most = self._recipe.reward.max_failed_share
        answered = [sample for sample in samples if sample.status is not Status.FAILED]
        failures = [sample.grade_failure for sample in answered if sample.grade_failure is not None]
        if len(failures) > most * len(answered):
            raise MegarlError(
                f"{where}: {len(failures)} of {len(answered)} grades failed, and reward.max_failed_share is {most:g}. "
                f"The first: {failures[0]}. Mend the grader, or raise the bound: samples without a grade are left out."
            )

    def _pack(self, samples: list[Sample]) -> list[Shard]:
        recipe = self._recipe
        return pack(
            samples,
            num_shards=self._num_shards,
            mini_batch_samples=recipe.actor.mini_batch_samples
            or recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
            micro_batch_tokens=recipe.actor.micro_batch_tokens,
            reduction=recipe.algorithm.reduction,
            max_response_tokens=recipe.rollout.max_response_tokens,
        )

    def _metrics(self, generated: _Generated, kept: list[Sample]) -> dict[str, float]:
        samples = generated.samples
        lengths = [len(sample.response_ids) for sample in kept]
        rewards = filters.rewards(kept)
        place = self._source.state()
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/failures": float(sum(sample.grade_failure is not None for sample in samples)),
            **part_metrics(samples, kept),
            "rollout/prompt_len_mean": float(np.mean([len(sample.prompt.token_ids) for sample in kept])),
            "rollout/response_len_mean": float(np.mean(lengths)),
            "rollout/response_len_max": float(max(lengths)),
            "rollout/truncated": _share(samples, Status.TRUNCATED),
            "rollout/failed": float(sum(sample.status is Status.FAILED for sample in samples)),
            "rollout/zero_variance_groups": filters.zero_variance_share(kept),
            "data/epoch": place["epoch"] + place["position"] / len(self._prompts),
            "data/dropped_prompts": float(self._prompts.num_dropped),
            "perf/rollout_tokens_per_s": sum(len(sample.response_ids) for sample in samples) / generated.generation_s,
        }

    def _info(
        self, step: int, weight_version: int, kept: list[Sample], shards: list[Shard], metrics: dict[str, float]
    ) -> BatchInfo:
        return BatchInfo(
            step=step,
            weight_version=weight_version,
            num_samples=len(kept),
            num_groups=len({sample.group_id for sample in kept}),
            num_mini_batches=len(shards[0].mini_batches),
            prompt_tokens=sum(len(sample.prompt.token_ids) for sample in kept),
            response_tokens=sum(len(sample.response_ids) for sample in kept),
            metrics={
                **metrics,
                "rollout/num_samples": float(len(kept)),
                "perf/train_flops": self._recipe.actor.epochs * self._flops([sample.num_tokens for sample in kept]),
            },
        )

    def _flops(self, lengths: list[int]) -> float:
        return train_flops(self._model, lengths, weight_gradients=self._recipe.actor.lora is None)

    def _write(self, name: str, samples: Sequence[Sample]) -> None:
        """The first samples, for reading: one JSON object a line, whole or not at all."""
        count = self._recipe.report.samples
        if count:
            write_samples(self._recipe.run.folder / "samples" / name, samples[:count])


def _check_versions(samples: Sequence[Sample], weight_version: int) -> None:
    for sample in samples:
        for span in sample.versions:
            if span.version != weight_version:
                raise MegarlError(
                    f"Sample {sample.id}: tokens {span.start} to {span.end} were generated by weight version "
                    f"{span.version}; all servers should serve version {weight_version}."
                )


def _share(samples: Sequence[Sample], status: Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)


def _first_failure(samples: Sequence[Sample]) -> str:
    """How many failed, and the first one's reason."""
    reasons = [sample.metadata["failure"] for sample in samples if sample.status is Status.FAILED]
    reasons += [f"grader {sample.grade_failure}" for sample in samples if sample.grade_failure is not None]
    return f"{len(reasons)} of {len(samples)} samples failed; the first: {reasons[0]}" if reasons else ""
