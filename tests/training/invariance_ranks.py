"""What each rank of a world does for test_invariance.

Its arguments: <rank> <ranks> <port> <root> tests|thorough
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.layout import Layout
from megarl.core.progress import Progress
from megarl.core.types import Column, Shard
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.recipe.supervised import Dpo, Kto
from megarl.training.rank import Rank
from megarl.training.spec import (
    DpoObjective,
    KtoObjective,
    Objective,
    PolicyObjective,
    RewardObjective,
    ValueObjective,
)
from tests.support.platforms import chosen
from tests.training.harness import OPTIMIZER, actor_spec, weights
from tests.training.invariance import (
    CRITIC,
    DISTILLED,
    LABELLED,
    PERTURBED,
    PERTURBED_FROM,
    PREFERENCE,
    REWARD,
    Case,
    Kind,
    Result,
    Tensors,
    append,
    difference,
)
from tests.training.invariance_cases import (
    ADAM_EPS,
    BALANCE_COEF,
    BALANCE_MICRO_BATCHES,
    BALANCE_MINI,
    CONTROLS,
    EVERYDAY,
    SCORED,
    THOROUGH,
    TOGETHER_MICRO_BATCHES,
    Extent,
    scored_shard,
    together_name,
)
from tests.training.labelled import labelled_shards
from tests.training.pairs import pair_shards
from tests.training.samples import TOP_K, Example, shards

# Gradients stay whole on each rank, and the weights as they are: the step is far below rounding.
STANDSTILL = Optimizer(name="sgd", lr=1e-30, clip_grad=1e9)
# A bias that decides which experts are chosen, and numbers of an activation or behind a layer: no gradient reaches them.
UNTRAINED = ("e_score_correction_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
ADAM = OPTIMIZER.model_copy(update={"eps": ADAM_EPS})
# What is learned in the place of the policy loss.
OBJECTIVES: dict[str, Objective] = {
    CRITIC: ValueObjective(0.2),
    REWARD: RewardObjective(center_coef=0.05),
    DISTILLED: PolicyObjective(Algorithm(policy_loss="distill_top", distill_beta=0.3, entropy_coef=0.01)),
    PREFERENCE: DpoObjective(Dpo(beta=0.3, label_smoothing=0.1, sft_coef=0.2)),
    LABELLED: KtoObjective(Kto(beta=0.3, desirable_weight=1.5)),
}
Reference = dict[str, Result]


def balance_of(micro_batches: int) -> str:
    """Name of the reference with the loss that balances experts: one rank with so many micro-batches."""
    return f"balance over {micro_batches} micro-batches"


class Exact(Progress):
    """Holds each operation to the number of forward passes that it announced."""

    @contextmanager
    def of(self, total: int, unit: str) -> Iterator[None]:
        """One operation."""
        with super().of(total, unit):
            yield
        assert self._done.count == total, (self._done.count, total)


class World:
    """One rank's view of the world that goes through the cases."""

    def __init__(self, rank: Rank, root: Path, extent: Extent) -> None:
        self.rank, self.root, self.extent = rank, root, extent
        self.models: dict[str, str] = {}  # of each role

    def build(
        self, role: str, case: Case, *, optimizer: Optimizer = ADAM, frozen: bool = False, balance: float = 0.0
    ) -> None:
        """The role with the weights of the case's model."""
        spec = actor_spec(self.root / case.model, case.layout)
        spec = replace(spec, recompute=case.recompute, aux_loss_coef=balance)
        if case.model in OBJECTIVES:
            spec = replace(spec, objective=OBJECTIVES[case.model])
        if case.model in (CRITIC, REWARD):
            spec = replace(spec, head="score")
        self.models[role] = case.model
        self.rank.build(role, replace(spec, optimizer=None if frozen else optimizer))

    def read(self, role: str, shard: Shard) -> Column | None:
        """What the role says of each label; of the likeliest, log-probs alone: equal ones come in any order."""
        if self.models[role] == DISTILLED:
            column = self.rank.top(role, shard, TOP_K)
            return None if column is None else [[part[:, TOP_K:] for part in mini] for mini in column]
        scores = self.rank.engine(role).config.head == "score"
        return self.rank.values(role, shard) if scores else self.rank.logprobs(role, shard)

    def layout(self, role: str) -> Layout:
        """Of a role that was built."""
        return self.rank.engine(role).groups.layout

    def step(self, role: str, mini: list[Example], micro_batches: int, *, same_shard: bool = False) -> dict[str, float]:
        """One update; checks that all ranks report the same. same_shard: every rank wrongly takes the first."""
        model, dp = self.models[role], self.layout(role).dp
        if model in (REWARD, PREFERENCE):
            parts, columns = pair_shards(mini, dp, micro_batches, scored=model == REWARD)
        elif model == LABELLED:
            parts, columns = labelled_shards(mini, dp, micro_batches, further=0.3)
        else:
            parts, columns = shards([mini], dp=dp, micro_batches=micro_batches)
        mine = 0 if same_shard else self.rank.engine(role).groups.place.dp
        given = columns[mine]
        if model == CRITIC:
            # Old values near the critic's own, so that the clip does not decide everything.
            given = {"values": given["advantages"], "returns": given["old_logprobs"]}
        kl = max(0.0, self.rank.evaluate(role, parts[mine], given)["kto/log_ratio"]) if model == LABELLED else 0.0
        metrics = self.rank.update(role, parts[mine], given, kl)
        assert self.gather(metrics) == [metrics] * self.rank.world_size
        return metrics

    def logprobs(self, role: str) -> list[list[np.ndarray]]:
        """Of each shard, in the order of SCORED. Each shard begins with another micro-batch: no two ranks do the same."""
        dp = self.rank.engine(role).groups.place.dp
        for empty in (
            Shard(()),
            Shard(tuple(replace(mini, micro_batches=()) for mini in scored_shard(0).mini_batches)),
        ):
            column = self.read(role, empty)
            assert column in (None, [], [[]]), column
        answers: list[tuple[int, Column | None]] = self.gather((dp, self.read(role, scored_shard(dp))))
        leads = [(index, column) for index, column in answers if column is not None]
        assert sorted(index for index, _ in leads) == list(range(self.layout(role).dp)), "one lead a shard"
        found = []
        for index, [mini] in leads:
            found.append([mini[(position - index) % len(SCORED)] for position in range(len(SCORED))])
        return found

    def gradients(self, role: str) -> Tensors:
        """A copy of the whole gradients, at rank 0."""
        buckets = self.rank.engine(role).gradients(1 << 16)
        found = {name: tensor.cpu().clone() for bucket in buckets for name, tensor in bucket}
        without = [name for name, tensor in found.items() if not tensor.any() and not name.endswith(UNTRAINED)]
        assert not without, f"no gradient: {without}"
        return found

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks, by rank."""
        if self.rank.world_size == 1:
            return [value]
        values = [None] * self.rank.world_size
        dist.all_gather_object(values, value)
        return values

    def alone(self, case: Case, *, same_shard: bool = False) -> dict[int, Result]:
        """A case by itself, by the number of micro-batches."""
        self.build("actor", case, optimizer=STANDSTILL)
        logprobs, minis = self.logprobs("actor"), self.extent.minis
        results = {}
        for micro_batches in self.extent.micro_batches(case):
            metrics = self.step("actor", minis[0], micro_batches, same_shard=same_shard)
            results[micro_batches] = Result(logprobs, self.gradients("actor"), [metrics])
        for micro_batches, result in results.items() if self.extent.learns(case) else ():
            self.build("actor", case)
            steps = [self.step("actor", mini, micro_batches, same_shard=same_shard) for mini in minis]
            results[micro_batches] = replace(result, steps=steps, weights=weights(self.rank, "actor"))
        return results

    def together(self, cases: tuple[Case, ...]) -> list[Result]:
        """Roles of several layouts, all built first and then called in turn; the last is frozen, and scores after each step.

        Gradients are not read: Adam's are cut.
        """
        roles = [f"role {index}" for index in range(len(cases))]
        for role, case in zip(roles, cases, strict=True):
            self.build(role, case, frozen=role == roles[-1])
        *trained, frozen = roles
        logprobs = {role: self.logprobs(role) for role in roles}
        steps: dict[str, list[dict[str, float]]] = {role: [] for role in roles}
        for mini in self.extent.minis:
            for role in trained:
                steps[role].append(self.step(role, mini, TOGETHER_MICRO_BATCHES))
                logprobs[frozen] += self.logprobs(frozen)
        ends = {role: weights(self.rank, role) for role in trained}
        return [Result(logprobs[role], steps=steps[role], weights=ends.get(role, {})) for role in roles]

    def balance(self, case: Case, micro_batches: int) -> Result:
        """One step with the loss that balances experts."""
        self.build("actor", case, optimizer=STANDSTILL, balance=BALANCE_COEF)
        metrics = self.step("actor", BALANCE_MINI, micro_batches)
        return Result(gradients=self.gradients("actor"), steps=[metrics])


def run_cases(world: World, reference: Reference) -> None:
    """Everything that is for a world of this size. A model's first case, on one rank, becomes its reference."""
    size, path = world.rank.world_size, world.root / f"world{world.rank.world_size}.jsonl"

    def report(kind: Kind, name: str, case: Case, micro_batches: int, found: Result) -> None:
        if world.rank.rank == 0:
            model = PERTURBED_FROM if case.model == PERTURBED else case.model
            expected = reference[balance_of(micro_batches * case.layout.dp) if kind == "balance" else model]
            append(path, difference(kind, name, case, micro_batches, found, expected))

    # Process groups are made anew for each other layout.
    for case in sorted(world.extent.cases, key=lambda case: str(case.layout)):
        for micro_batches, found in world.alone(case).items() if case.layout.world_size == size else ():
            reference.setdefault(case.model, found)
            report("alone", str(case), case, micro_batches, found)
    for cases in world.extent.together:
        for case, found in zip(cases, world.together(cases), strict=True) if cases[0].layout.world_size == size else ():
            report("together", together_name(cases), case, TOGETHER_MICRO_BATCHES, found)
    for case in world.extent.balanced:
        if size == 1:
            num = BALANCE_MICRO_BATCHES * case.layout.dp
            reference[balance_of(num)] = world.balance(replace(case, layout=Layout()), num)
        elif size == case.layout.world_size:
            report("balance", str(case), case, BALANCE_MICRO_BATCHES, world.balance(case, BALANCE_MICRO_BATCHES))
    for control in CONTROLS:
        if control.case.layout.world_size == size:
            for micro_batches, found in world.alone(control.case, same_shard=control.same_shard).items():
                report("control", control.mistake, control.case, micro_batches, found)


def main() -> None:
    """Go through the cases of one world; the world of one rank leaves the reference for the others."""
    index, size, port, root = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    rank = Rank(index, size, chosen().name, seed=1, progress=Exact(None))
    rank.rendezvous("127.0.0.1", port, timeout_s=120)
    stored = root / "reference.pt"
    reference: Reference = {} if size == 1 else torch.load(stored, weights_only=False)
    run_cases(World(rank, root, THOROUGH if sys.argv[5] == "thorough" else EVERYDAY), reference)
    if size == 1:
        torch.save(reference, stored)
    rank.close()
