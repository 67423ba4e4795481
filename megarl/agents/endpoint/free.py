"""Requests that are nobody's episode: each by itself, sampled as it asks. What `megarl serve` answers with."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from megarl.agents.endpoint.asking import ask_all
from megarl.agents.endpoint.forms import ChatRequest, CompletionRequest, RewardReport
from megarl.agents.endpoint.model import NO_ROW, Model
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Answered
from megarl.core.errors import UserError
from megarl.core.types import Image, TokenArray
from megarl.rollout.asking import Asker, Request, RequestFailedError
from megarl.rollout.pictures import EpisodePictures
from megarl.serving.answers import Generation
from megarl.serving.sampling import Sampling

SEEDS = 2**62


class FreeSession:
    """Answers whoever has its key. context: tokens that prompt and answer may have together."""

    def __init__(self, asker: Asker, model: Model, context: int) -> None:
        self._asker, self._model, self._context = asker, model, context

    async def chat(self, request: ChatRequest, retried: bytes | None, body: bytes) -> Answered:
        """An answer to a conversation. Raises RefusedError."""
        tools = request.tools if request.tool_choice != "none" else None
        template = self._model.template(tools)
        ids, _, images = self._model.prompt(template, request.messages)
        turn = sum(message.role == "assistant" for message in request.messages) + 1
        logprobs = request.wants_logprobs
        try:
            choices = [
                await self._model.choice(each, logprobs=logprobs, template=template, tools=tools, turn=turn)
                for each in await self._all(ids, request, images)
            ]
        except RequestFailedError as error:
            raise RefusedError(str(error), status=500, kind="server_error") from error
        return Answered(choices, len(ids))

    async def complete(self, request: CompletionRequest, retried: bytes | None, body: bytes) -> Answered:
        """How a text, or token ids, go on. Raises RefusedError."""
        ids = self._model.first_ids(request.text_or_ids)
        if not len(ids):
            raise RefusedError("The prompt has no tokens.", param="prompt")
        self._model.check_without_places(ids)
        logprobs = request.wants_logprobs
        try:
            choices = [await self._model.choice(each, logprobs=logprobs) for each in await self._all(ids, request)]
        except RequestFailedError as error:
            raise RefusedError(str(error), status=500, kind="server_error") from error
        return Answered(choices, len(ids))

    async def reward(self, report: RewardReport, retried: bytes | None, body: bytes) -> None:
        """Raises RefusedError: nothing is trained here."""
        raise RefusedError("Nothing is trained here, and no reward is taken.", code="no_episode")

    async def _all(
        self, ids: TokenArray, request: ChatRequest | CompletionRequest, images: Sequence[Image] = ()
    ) -> list[Generation]:
        """All choices, side by side. Raises RefusedError, RequestFailedError."""
        left = self._context - len(ids)
        if left <= 0:
            raise RefusedError(
                f"The prompt has {len(ids)} tokens, and the model's context is {self._context} with the answer.",
                code="context_length_exceeded",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
        pictures = await self._pictures(images)
        seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS
        asked = [
            Request(
                ids,
                Sampling(
                    min(left, request.most_tokens or left),
                    1.0 if request.temperature is None else request.temperature,
                    1.0 if request.top_p is None else request.top_p,
                    stop=request.stops,
                    seed=seed + choice,
                ),
                pictures=pictures,
            )
            for choice in range(request.count)
        ]
        return await ask_all(self._asker, asked)

    async def _pictures(self, images: Sequence[Image]) -> EpisodePictures | None:
        """What goes to the server with the request, and is kept no longer. Raises RefusedError for one that is damaged."""
        if not images:
            return None
        made = EpisodePictures(self._model.observer.pictures(NO_ROW), prompts=False)
        try:
            return await made.with_more(images, "messages")
        except UserError as error:
            raise RefusedError(str(error), param="messages") from error
