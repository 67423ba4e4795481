"""The real SGLang: a request that is cut off goes on as if nothing had been, and a server says what it serves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megarl.core.types import Prompt, Sample, Status
from megarl.data.chat import load_tokenizer
from megarl.serving.answers import Generation
from megarl.serving.client import ServerClient
from megarl.serving.external import identify, probe_ids
from megarl.serving.sampling import Sampling
from megarl.serving.server_flags import SPARE_TOKENS
from tests.support.sampled import generate_sample
from tests.support.served import CONTEXT, Pool, begun

pytestmark = pytest.mark.slow

PROMPT = Prompt("p:0", np.array([5, 6, 7, 8]), "", "")
LONGEST = 400


def test_a_response_that_was_cut_off_goes_on_as_if_nothing_had_been(served: Pool) -> None:
    """By an abort while it runs, by one after it was taken back to the queue, and by pieces asked for on purpose."""
    tokenizer = load_tokenizer(served.model)

    async def sample(client: ServerClient, pieces: list[Generation], piece_tokens: int | None = None) -> Sample:
        return await generate_sample(
            client,
            PROMPT,
            Sampling(LONGEST, 0.0),
            deadline_s=60.0,
            pieces=pieces,
            piece_tokens=piece_tokens,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )

    async def go() -> None:
        # Requests go through the router, as in a run; it does not pass on what is said to a server.
        async with ServerClient(served.router.endpoint) as client, ServerClient(served.servers[0].endpoint) as server:
            whole = await sample(client, [])
            assert whole.status is Status.TRUNCATED and len(whole.response_ids) == LONGEST
            cut: list[Generation] = []
            for retracted in (False, True):
                running = await begun(server, lambda: sample(client, cut))
                if retracted:
                    await server.pause("retract")
                await server.abort()
                ended = await running
                await server.resume()
                assert ended.status is Status.FAILED and "aborted" in ended.metadata["failure"]
                assert len(cut) == 1 + retracted
            for pieces, piece_tokens in ((cut, None), ([], 150)):
                resumed = await sample(client, pieces, piece_tokens)
                assert len(pieces) == 3
                assert resumed.status is Status.TRUNCATED
                assert resumed.response_ids.tolist() == whole.response_ids.tolist()
                assert resumed.response_text == whole.response_text
                np.testing.assert_allclose(resumed.rollout_logprobs, whole.rollout_logprobs, atol=1e-5)
                assert resumed.versions == whole.versions

    asyncio.run(go())


def test_a_server_says_what_it_serves(served: Pool) -> None:
    facts = asyncio.run(identify(served.servers[0].endpoint))
    assert facts.name == "model" and facts.architectures == ("Qwen3ForCausalLM",)
    assert facts.probe_ids == probe_ids(load_tokenizer(served.model).encode)
    assert (facts.context, facts.weight_version, facts.sglang) == (CONTEXT + SPARE_TOKENS, "0", "0.5.21")
