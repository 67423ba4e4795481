"""Which references a rank is given of a step that lies in several processes, and whose the columns are that come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.ranks import RankGroup, RankShards, merged
from megarl.cluster.roles import Batch, Role
from megarl.cluster.waits import Call, Worker
from megarl.core.layout import Layout
from megarl.core.types import Block, Column, Shard
from megarl.data.blocks import sample_block
from megarl.data.deal import deal_step
from megarl.data.pack import merge_shards, pack
from megarl.recipe.run import Deadlines
from tests.rollout.samples import make_sample

SHARDS, OWNERS = 4, 3
BATCH = Batch(
    tuple(f"plan {shard}" for shard in range(SHARDS)),
    tuple(tuple(f"block {shard}/{owner}" for owner in range(OWNERS)) for shard in range(SHARDS)),
    SimpleNamespace(),  # type: ignore[arg-type]
)
ALL = [word for plan, blocks in zip(BATCH.plans, BATCH.blocks, strict=True) for word in (plan, *blocks)]


class AtOnce:
    """A waiter of calls that have been answered already."""

    def wait(self, calls: list[Call], **_: Any) -> list[Any]:
        return [call.result for call in calls]


class FakeRank:
    """In the place of Ray's handle of one: writes down what it is given; its columns are `column <rank>.<number>`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.given: list[tuple[Any, ...]] = []
        self.logprobs = self.values = SimpleNamespace(options=self._columns)
        self.update = self.evaluate = SimpleNamespace(remote=self._metrics)

    def _columns(self, num_returns: int) -> Any:
        def remote(*arguments: Any) -> list[str]:
            self.given.append(arguments)
            return ["done", *(f"column {self.rank}.{number}" for number in range(num_returns - 1))]

        return SimpleNamespace(remote=remote)

    def _metrics(self, *arguments: Any) -> dict[str, float]:
        self.given.append(arguments)
        return {"rank": float(self.rank)}


def role_on(layout: Layout) -> tuple[Role, list[FakeRank]]:
    ranks = [FakeRank(rank) for rank in range(layout.world_size)]
    spec: ProcessSpec = SimpleNamespace(name="rank")  # type: ignore[assignment]
    workers = tuple(Worker(rank, spec, ProcessFacts(0, "?")) for rank in ranks)
    group = RankGroup(workers, AtOnce())  # type: ignore[arg-type]
    return Role("actor", group, layout, Deadlines(), frozenset({"advantages", "old_logprobs"})), ranks


def test_data_parallel_ranks_are_given_plans_with_all_their_blocks() -> None:
    role, ranks = role_on(Layout(world_size=2))
    columns = role.logprobs(BATCH).wait()
    assert [rank.given for rank in ranks] == [
        [("actor", None, "all", OWNERS, *ALL[: len(ALL) // 2])],
        [("actor", None, "all", OWNERS, *ALL[len(ALL) // 2 :])],
    ]
    assert columns == tuple(
        tuple(f"column {rank}.{OWNERS * shard + owner}" for owner in range(OWNERS))
        for rank in range(2)
        for shard in range(2)
    )


def test_ranks_of_one_shard_work_on_the_same_and_one_answers() -> None:
    role, ranks = role_on(Layout(tp=2, world_size=2))
    columns = role.values(BATCH).wait()
    assert [rank.given for rank in ranks] == [[("actor", OWNERS, *ALL)]] * 2
    assert columns == tuple(
        tuple(f"column 0.{OWNERS * shard + owner}" for owner in range(OWNERS)) for shard in range(SHARDS)
    )


@pytest.mark.parametrize("method", ["update", "evaluate"])
def test_columns_that_are_read_follow_the_shards(method: str) -> None:
    role, ranks = role_on(Layout(world_size=2))
    names = ("advantages", "returns", "old_logprobs")
    columns = {
        name: tuple(tuple(f"{name} {shard}/{owner}" for owner in range(OWNERS)) for shard in range(SHARDS))
        for name in names
    }
    assert getattr(role, method)(BATCH, columns, 0.25).wait() == {"rank": 0.0}
    read = ("advantages", "old_logprobs")
    given = [f"{name} {shard}/{owner}" for name in read for shard in (2, 3) for owner in range(OWNERS)]
    assert ranks[1].given == [("actor", read, 0.25, 2, OWNERS, *ALL[len(ALL) // 2 :], *given)]


def step_of_three_owners() -> tuple[list[Any], Shard]:
    """What a rank is given of two shards, as RankActor gets it, and the same packed in one process."""
    samples = [make_sample(f"1/p{index // 2}") for index in range(7)]
    lengths = np.array([sample.num_tokens for sample in samples])
    options: dict[str, Any] = {
        "num_shards": 2,
        "mini_batch_samples": 4,
        "micro_batch_tokens": 10,
        "reduction": "token-mean",
        "max_response_tokens": 4,
    }
    owners = np.arange(7) % 3
    dealt = deal_step(lengths, np.full(7, 2), np.arange(7) // 2, owners, num_owners=3, **options)
    parts: list[Any] = []
    for plan, mine in zip(dealt.plans, zip(*dealt.parts, strict=True), strict=True):
        parts += [plan, *(sample_block([samples[i] for i in part], part, dealt.weights[part]) for part in mine)]
    return parts, merge_shards(pack(samples, **options))


def numbered(shard: Shard) -> Column:
    """No two positions are the same; fillers have 0."""
    count = iter(range(1, 1000))
    return [
        [
            np.array([next(count) if micro.sample_index[0] >= 0 else 0 for _ in micro.tokens], np.float32)
            for micro in mini.micro_batches
        ]
        for mini in shard.mini_batches
    ]


def test_a_rank_sends_what_it_is_given_back() -> None:
    parts, whole = step_of_three_owners()
    shards, column = RankShards.of(3, parts), numbered(whole)
    sent = shards.parts(column)
    blocks: list[Block] = [block for block in parts if isinstance(block, Block)]
    assert [len(part) for part in sent if part is not None] == [block.num_tokens for block in blocks]
    shard, columns = merged(
        ("advantages", "values"), 2, 3, [*parts, *sent, *(-part for part in sent if part is not None)]
    )
    for mini, expected, advantages, values, wanted in zip(
        shard.mini_batches, whole.mini_batches, columns["advantages"], columns["values"], column, strict=True
    ):
        for micro, other in zip(mini.micro_batches, expected.micro_batches, strict=True):
            assert np.array_equal(micro.tokens, other.tokens) and np.array_equal(micro.weights, other.weights)
        assert [part.tolist() for part in advantages] == [part.tolist() for part in wanted]
        assert [(-part).tolist() for part in values] == [part.tolist() for part in wanted]
    assert shards.parts(None) == [None] * 6, "a rank that is no lead returns as many"


def test_parts_that_are_missing_are_asserted() -> None:
    parts, whole = step_of_three_owners()
    with pytest.raises(AssertionError, match="7, 3"):
        RankShards.of(3, parts[:-1])
    with pytest.raises(AssertionError, match="'values'"):
        merged(("values",), 2, 3, [*parts, *RankShards.of(3, parts).parts(numbered(whole))[1:]])
