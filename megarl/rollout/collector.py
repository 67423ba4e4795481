"""Makes samples, in a process of its own: asks the servers, grades as samples finish, keeps them until they are trained on.

There may be several of these. Each is told which groups to make, tells numbers of those that are finished, and hands the
tokens of a step to the ranks as blocks. Who decides what is asked for and trained on is the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.core.types import Block, FloatArray, Prompt, Sample, Status
from megarl.data.chat import Tokenizer, load_tokenizer
from megarl.data.images import Sight
from megarl.data.prompts import PromptSet, load_prompts
from megarl.models.hf_config import load_model_config
from megarl.models.recipe_vision import sight_of
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rewards.combine import Graders
from megarl.rewards.grade import Item
from megarl.rollout import filters
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt, Player
from megarl.rollout.batcher import Part
from megarl.rollout.facts import GroupFacts
from megarl.rollout.gate import Gate
from megarl.rollout.handed import blocks_of, columns_of
from megarl.rollout.journal import JOURNAL, Journal, Written, steps_of
from megarl.rollout.notices import Notices
from megarl.rollout.pictures import Pictures
from megarl.rollout.pieces import Decode
from megarl.rollout.probe import Probe, Prober
from megarl.rollout.requests import held_out_sampling, train_sampling
from megarl.rollout.sample_facts import eval_facts, group_facts
from megarl.rollout.samples_file import shown, write_samples
from megarl.rollout.seeds import Purpose
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.tasks import DataFacts, EvalFacts, GroupTask, Load, News
from megarl.rollout.teacher import ServedTeacher
from megarl.rollout.turns import by_turn
from megarl.serving.client import ATTEMPTS, LONGEST_BACKOFF_S, ServerClient, ServerEndpoint
from megarl.serving.sampling import Sampling

log = get_logger(__name__)

CUT_S, CUT_AGAIN_S = 10.0, 0.5
# That a group which has finished waits for others before it is written down, where the step waits for these anyway.
PATIENCE_S = 0.5


@dataclass
class _Group:
    """A group that is here: its samples once they are finished, and what makes them until then."""

    task: GroupTask
    making: asyncio.Task[None]
    samples: list[Sample]


class Collector:
    """Generates and grades groups; hands over what a step takes of them; answers held-out prompts."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        prompts: PromptSet,
        eval_prompts: Sequence[Prompt],
        client: ServerClient,
        graders: Graders,
        decode: Decode,
        player: Player | None = None,
        num_collectors: int = 1,
        notices: Notices | None = None,
        teacher: ServedTeacher | None = None,
        image_token: int | None = None,
        video_token: int | None = None,
    ) -> None:
        """player: plays an attempt; default: asks for one response. teacher: says what it thinks of what is trained on.

        image_token, video_token: of a model that sees images.
        """
        self._image_token, self._video_token = image_token, video_token
        self._recipe = recipe
        self._journal = Journal(recipe.run.folder / JOURNAL, _patience_s(recipe)) if recipe.train.journal else None
        self._prompts = prompts
        self._eval_prompts = tuple(eval_prompts)
        self._client = client
        self._graders = graders
        self._teacher = teacher
        self._player = player or SingleTurn()
        concurrency = max(1, recipe.rollout.most_in_flight // num_collectors)
        self._gate = Gate(concurrency, recipe.rollout.num_servers / num_collectors)
        self._asker = Asker(
            client,
            self._gate,
            decode,
            deadline_s=recipe.deadlines.rollout_s,
            piece_tokens=recipe.rollout.piece_tokens,
        )
        self._groups: dict[int, _Group] = {}
        self._under_way: set[int] = set()  # of these, those whose samples are still being made
        self._finished: asyncio.Queue[GroupFacts | int | BaseException] = asyncio.Queue()
        self._prober = Prober(
            prompts.prompts, self._pictures, image_token, tower_learns=not recipe.actor.optimizer.freeze_vision_tower
        )
        self.notices = notices or Notices()
        self._environment_failed = False

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        router: ServerEndpoint,
        num_collectors: int = 1,
        open_player: Callable[[Tokenizer, Sight | None], Player] | None = None,
    ) -> Collector:
        """Read the recipe's data and get ready to start its graders; `start` starts them. open_player: makes what plays.

        Raises UserError where the data cannot be used.
        """
        tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template_kwargs)
        sight = sight_of(load_model_config(recipe.model.path), recipe.data)
        load = partial(load_prompts, tokenizer=tokenizer, data=recipe.data, answered=recipe.agent is None, sight=sight)
        held_out: Sequence[Prompt] = ()
        if recipe.data.eval is not None:
            held_out = recipe.eval.asked(load(recipe.data.eval).prompts)
        notices = Notices()
        # Where there are samples, a grader that is gone now was there, at this address.
        begun = bool(steps_of(recipe.run.folder / JOURNAL)) or any(recipe.run.folder.glob("samples/step_*"))
        return cls(
            recipe,
            prompts=load(recipe.data.train),
            eval_prompts=held_out,
            # As long as a router or the only server takes to come back.
            client=ServerClient(router, attempts=ATTEMPTS + math.ceil(recipe.deadlines.start_s / LONGEST_BACKOFF_S)),
            graders=Graders.open(recipe.reward, notices.tell, episodes=recipe.agent is not None, known=begun),
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            player=open_player(tokenizer, sight) if open_player is not None else None,
            num_collectors=num_collectors,
            notices=notices,
            teacher=ServedTeacher.open(recipe, notices.tell),
            image_token=sight.image_token if sight is not None else None,
            video_token=sight.video_token if sight is not None else None,
        )

    async def start(self) -> DataFacts:
        """Start the graders; those behind an address have to answer."""
        await self._graders.start()
        return DataFacts.of(self._prompts, self._recipe.data, len(self._eval_prompts))

    async def close(self) -> None:
        """End what is being made, the graders and the connections."""
        await self.cancel(list(self._groups))
        await self._player.close()
        await self._graders.close()
        await self._client.close()
        if self._teacher is not None:
            await self._teacher.close()
        if self._journal is not None:
            await self._journal.close()

    async def begin(self, tasks: Sequence[GroupTask]) -> None:
        """Begin to make these groups."""
        for task in tasks:
            making = asyncio.create_task(self._make(task))
            making.add_done_callback(partial(self._made, task.group))
            self._under_way.add(task.group)
            self._groups[task.group] = _Group(task, making, [])

    async def news(self) -> News:
        """Groups that have finished since, once there is one. Raises what ended the making of one."""
        return await News.of(self._finished)

    async def load(self) -> Load:
        """What its requests do at the servers, as of now."""
        written_s = self._journal.spent_s if self._journal is not None else 0.0
        return Load(self._gate.busy_s(), self._gate.queued, written_s)

    async def cancel(self, groups: Collection[int]) -> None:
        """Stop making these groups and forget what there is of them."""
        gone = [self._groups.pop(group) for group in groups if group in self._groups]
        for group in gone:
            group.making.cancel()
        await asyncio.gather(*(group.making for group in gone), return_exceptions=True)

    async def forget(self, groups: Collection[int]) -> None:
        """Groups that have been trained on."""
        for group in groups:
            self._groups.pop(group, None)

    async def hold(self) -> None:
        """Begin no further request; those that run go on. What ends them meanwhile cuts them off, and they go on later."""
        self._gate.close()

    async def idle(self) -> None:
        """Returns once no request runs."""
        await self._gate.idle()

    async def cut(self, servers: Sequence[ServerEndpoint]) -> None:
        """End the requests at these servers, and begin none until `release`; returns once none runs.

        Asked again and again: a request that was on its way may arrive after the first time. What servers have of the
        responses stays here, and goes on later.
        """
        self._gate.close()
        while self._gate.running:
            await asyncio.gather(*(_abort(server) for server in servers))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle(), CUT_AGAIN_S)

    async def release(self) -> None:
        """Begin requests again."""
        self._gate.open()

    async def write(self, step: int, groups: Collection[int]) -> None:
        """The first samples of these groups, for reading."""
        here = [self._groups[group] for group in groups if group in self._groups]  # not all, where this one is new
        self._write(f"step_{step:06d}.jsonl", [sample for group in here for sample in group.samples])

    async def part(self, part: Part) -> tuple[Block, ...]:
        """This collector's block of each shard of a step."""
        samples = [self._groups[group].samples[at] for group, at in part.samples]
        if samples:
            self._prober.take(samples)
        return blocks_of(part, samples, by_turn=by_turn(self._recipe))

    async def columns(self, part: Part) -> tuple[FloatArray, ...]:
        """The columns that came with its samples: of each name of `served_columns` one array a shard."""
        samples = [self._groups[group].samples[at] for group, at in part.samples]
        return columns_of(part, samples, served_columns(self._recipe))

    async def evaluate(self, rows: Sequence[int], step: int) -> EvalFacts:
        """Answer and grade these held-out prompts."""
        recipe, settings = self._recipe, self._recipe.eval
        making: list[asyncio.Task[Sample]] = []
        asked: list[int] = []  # the row of each
        try:
            async with asyncio.TaskGroup() as tasks:
                for row in rows:
                    prompt = self._eval_prompts[row]
                    own = settings.of_row(prompt.metadata)
                    sampling, pictures = held_out_sampling(recipe, prompt), self._pictures(prompt)
                    making += [
                        tasks.create_task(self._sample(prompt, sampling, step, index, "eval", pictures))
                        for index in range(own.samples_per_prompt)
                    ]
                    asked += [row] * own.samples_per_prompt
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        samples = [task.result() for task in making]
        if 0 in rows:
            self._write(f"eval_{step:06d}.jsonl", samples)
        return eval_facts(asked, samples, settings)

    async def probe(self) -> Probe:
        """What a weight sync is verified on."""
        return await self._prober.probe()

    def _pictures(self, prompt: Prompt) -> Pictures:
        return Pictures(prompt, self._image_token, self._video_token)

    def _made(self, group: int, making: asyncio.Task[None]) -> None:
        """Whoever waits for news is told of what nobody foresaw: a group that never finishes would be waited for in vain."""
        self._under_way.discard(group)
        if not making.cancelled() and (error := making.exception()) is not None:
            self._finished.put_nowait(_first(error))

    async def _make(self, task: GroupTask) -> None:
        """A group's samples, as the journal has them, or made and written down."""
        prompt, found = self._prompts.prompts[task.row], None
        if self._journal is not None and task.recorded:
            found = await self._journal.find(task, prompt)
            if found is None:
                self._finished.put_nowait(task.group)
        pictures = self._pictures(prompt)
        made = found or await self._generated(task, prompt, pictures)
        await pictures.put(made.samples)
        self._under_way.discard(task.group)
        if self._journal is not None and found is None:
            await self._journal.add(task, prompt, made, shares=bool(self._under_way))
        group = self._groups[task.group]
        group.samples = filters.learned(made.samples, self._recipe.algorithm.truncated)
        recorded = found is not None
        self._finished.put_nowait(
            group_facts(task.group, made.samples, made.greedy, recorded=recorded, learned=group.samples)
        )

    async def _generated(self, task: GroupTask, prompt: Prompt, pictures: Pictures) -> Written:
        """A group's samples; grading one overlaps with generating others."""
        sampling, expected = train_sampling(self._recipe, prompt), task.expected_tokens
        async with asyncio.TaskGroup() as tasks:
            making = [
                tasks.create_task(
                    self._sample(prompt, sampling, task.step, task.first + index, "train", pictures, expected)
                )
                for index in range(task.count)
            ]
            if task.greedy:
                plain = replace(sampling, temperature=0.0)
                making.append(tasks.create_task(self._sample(prompt, plain, task.step, task.first, "greedy", pictures)))
        samples = [each.result() for each in making]
        return Written(samples[: task.count], samples[task.count :])

    async def _sample(
        self,
        prompt: Prompt,
        sampling: Sampling,
        step: int,
        index: int,
        purpose: Purpose,
        pictures: Pictures,
        expected: float = 0.0,
    ) -> Sample:
        """One sample, graded."""
        attempt = Attempt(prompt, sampling, self._recipe.run.seed, purpose, step, index, expected, pictures)
        sample = await self._player.play(attempt, self._asker)
        # A training and a held-out file of one name have rows of the same ids.
        held_out = " (held out)" if purpose == "eval" else ""
        if sample.status is not Status.FAILED:
            await self._judged(sample, prompt, held_out, taught=purpose == "train")
        elif sample.numbers.get("environment_failures") and not self._environment_failed:
            self._environment_failed = True  # people are told of the first: the step's line comes late
            self.notices.tell(f"the episode {sample.id}{held_out} failed: {sample.metadata['failure']}")
        else:
            log.warning("sample %s%s failed: %s", sample.id, held_out, sample.metadata["failure"])
        return sample

    async def _judged(self, sample: Sample, prompt: Prompt, held_out: str, *, taught: bool) -> None:
        """Grade a sample; and where it is trained on, ask the teacher meanwhile."""
        item = Item(
            sample.prompt.text,
            sample.response_text,
            prompt.answer,
            prompt.metadata | sample.metadata,
            row=f"{prompt.id}{held_out}",
            truncated=sample.status is Status.TRUNCATED,
        )
        async with asyncio.TaskGroup() as tasks:
            said = tasks.create_task(self._teacher.say(sample)) if self._teacher is not None and taught else None
            grade = await self._graders.grade(item, prompt.metadata)
        sample.reward += grade.reward
        sample.reward_parts = sample.reward_parts | grade.parts
        sample.grade_failure = grade.failure
        sample.numbers = sample.numbers | grade.figures
        if said is not None:
            said.result().put(sample)

    def _write(self, name: str, samples: Sequence[Sample]) -> None:
        """The first samples, for reading: one JSON object a line, whole or not at all."""
        count = self._recipe.report.samples
        if count:
            write_samples(self._recipe.run.folder / "samples" / name, shown(samples, count))


def _first(error: BaseException) -> BaseException:
    """What went wrong; of samples that failed side by side the first's reason, which all have in common."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _patience_s(recipe: Recipe) -> float:
    """How long a finished group may wait for others before it is written down: at all where nobody waits for less than all."""
    return 0.0 if recipe.rollout.max_staleness or recipe.algorithm.refill_rounds else PATIENCE_S


async def _abort(server: ServerEndpoint) -> None:
    """End all requests of a server; one that does not answer has none, or is found dead by those that watch it."""
    async with ServerClient(server) as client:
        try:
            await client.abort(CUT_S)
        except MegarlError as error:
            log.warning("%s", error)
