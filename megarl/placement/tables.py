"""The choices of every role with their bytes and seconds: what the search looks through.

One row of a role is a layout (or servers), with or without leaving the device while it is not its turn. Rows that do not
fit into a device's memory alone are not there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.cluster import Cluster
from megarl.placement.communicators import exchange_bytes, frozen_bytes
from megarl.placement.compute import Seconds, core_share, score_seconds, update_seconds
from megarl.placement.frontier import COSTS, SLOWEST, Choices, is_least
from megarl.placement.generation import rollout_seconds
from megarl.placement.lengths import Floats
from megarl.placement.memory import (
    OFFLOADED_SHARE,
    Role,
    RoleBytes,
    ServerBytes,
    Shown,
    role_bytes,
    server_bytes,
    top_bytes,
)
from megarl.placement.search import Tables
from megarl.placement.server_share import further_bytes
from megarl.placement.space import Ints, Layouts, Mask, Servers, Space, layouts, servers
from megarl.placement.weight_sync import gather_seconds, sync_seconds
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, TRAINED, Workload

# Shares of a device's memory within which the fastest layout of a role is looked for, by whether it is offloaded.
_BUDGETS = {
    False: (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0),
    True: (1 / 4, 1 / 2, 3 / 4, 13 / 16, 7 / 8, 15 / 16, 1.0),
}


@dataclass(frozen=True)
class RoleTable:
    """A Megatron role's choices. offloaded: [N] whether it leaves the device. choices.rows are indices into `layouts`.

    own_groups: see `held_bytes`.
    """

    layouts: Layouts
    offloaded: Mask
    choices: Choices
    own_groups: bool = True


@dataclass(frozen=True)
class RolloutTable:
    """The rollout's choices, by how it stands to the actor. per_device: servers that share a device with each other."""

    servers: Servers
    offloaded: Mask
    separate: Choices
    shared: Choices
    flowing: Choices
    per_device: int = 1


@dataclass(frozen=True)
class AllTables:
    """Every role's choices. serving: nodes of another kind that the rollout has for itself; None where it has none.

    tied: whether the reference's are the actor's.
    """

    roles: dict[str, RoleTable]
    rollout: RolloutTable
    serving: Cluster | None = None
    tied: bool = False

    def searched(self, *, asynchronous: bool) -> Tables:
        """As the search wants them, in the order of the roles. On nodes of its own the rollout takes nothing of the others'."""
        roles = {role: table.choices for role, table in self.roles.items()}
        first = {ACTOR: roles.pop(ACTOR)} if ACTOR in roles else {}
        separate, shared, flowing = (
            each if self.serving is None else _elsewhere(each)
            for each in (self.rollout.separate, self.rollout.shared, self.rollout.flowing)
        )
        return Tables(
            roles={**first, ROLLOUT: separate, **roles},
            shared=shared,
            flowing=flowing if asynchronous else None,
            tied=len(self.roles[ACTOR].layouts) if self.tied else 0,
        )


def _elsewhere(choices: Choices) -> Choices:
    nothing = np.zeros(len(choices))
    return replace(choices, devices=np.zeros(len(choices), np.int64), rest=nothing, extra=nothing)


def build_tables(
    workload: Workload,
    cluster: Cluster,
    space: Space | None = None,
    serving: Cluster | None = None,
    roles: dict[str, RoleTable] | None = None,
) -> AllTables:
    """All choices of a workload's roles on pools of a cluster. space: default: all. serving: for the rollout.

    roles: those of the Megatron roles, where they were made before.
    """
    space, sizes, host = space or Space(), cluster.pool_sizes(), serving or cluster
    made, roles = roles is not None, roles or {}
    for role in () if made else workload.roles:
        if role == REFERENCE and workload.tied:
            roles[role] = _tied_table(roles[ACTOR], workload, cluster, space)
        elif role != ROLLOUT:
            roles[role] = role_table(role, workload, cluster, space, sizes)
    return AllTables(
        roles=roles,
        rollout=rollout_table(
            workload, host, space, sizes if serving is None else serving.pool_sizes(), across=serving is not None
        ),
        serving=serving,
        tied=workload.tied,
    )


def _tied_table(actor: RoleTable, workload: Workload, cluster: Cluster, space: Space) -> RoleTable:
    """The reference at the layout of every choice of the actor, once for each way that it may wait.

    Under LoRA it has no weights of its own, which could leave the device.
    """
    ways = space.rest if cluster.device.offloads_to_host and workload.lora is None else (False,)
    rows = np.tile(np.arange(len(actor.layouts)), len(ways))
    choice = replace(actor.layouts.take(rows), recompute=np.zeros(len(rows), np.int64))
    return price_role(REFERENCE, choice, np.repeat(ways, len(actor.layouts)), workload, cluster, own_groups=False)


def role_table(role: str, workload: Workload, cluster: Cluster, space: Space, pool_sizes: Sequence[int]) -> RoleTable:
    """The choices of one Megatron role that a device holds; within each budget of memory the fastest."""
    config, trained = workload.models[role], role in TRAINED
    choice = layouts(
        space,
        config,
        pool_sizes,
        cluster.devices_per_node,
        workload.micro_tokens,
        most_dp=workload.most_dp,
        trained=trained,
        head=has_head(role),
    )
    if role in workload.towers and config.vision is not None:
        choice = choice.take(first_layers(choice, config) >= config.vision.deepstack * (choice.pp > 1))
    held = held_bytes(role, choice, workload, cluster)
    choice = choice.take(held.state + held.working <= cluster.usable_bytes)
    held = held_bytes(role, choice, workload, cluster)
    total = _costs(role, choice, workload, cluster)[:, :3].sum(axis=1)
    kept = [
        np.column_stack([rows, np.full(len(rows), offloaded)])
        for offloaded in (space.rest if cluster.device.offloads_to_host else (False,))
        for rows in [within(held.state + held.working, total, choice.devices, cluster, _BUDGETS[offloaded])]
    ]
    rows, offloaded = np.concatenate(kept).T
    return price_role(role, choice.take(rows), offloaded > 0, workload, cluster)


def first_layers(choice: Layouts, config: ModelConfig) -> Ints:
    """[N] layers of the first virtual stage."""
    even = config.num_layers // choice.pp
    return np.where(choice.first_layers > 0, choice.first_layers, even) // choice.vpp


def price_role(
    role: str,
    choice: Layouts,
    offloaded: Mask,
    workload: Workload,
    cluster: Cluster,
    *,
    parts: Collection[str] = ("grads", "params", "optimizer"),
    own_groups: bool = True,
) -> RoleTable:
    """Bytes and seconds of these choices, whether a device holds them or not. parts: what an offloaded role leaves it with.

    own_groups: see `held_bytes`.
    """
    cost = _costs(role, choice, workload, cluster)
    held = held_bytes(role, choice, workload, cluster, own_groups=own_groups)
    kept = {"params": held.weights, "optimizer": held.optimizer}  # on the host: gradients are made anew
    moved = sum(size for part, size in kept.items() if part in parts)
    # A frozen role's weights are on the host anyway: they only come back.
    ways = (2 if role in TRAINED else 1) * offloaded
    cost[:, 0] += moved * ways / (cluster.device.host_bytes_s * cluster.rates.host)
    left = moved + (held.gradients if "grads" in parts else 0.0)
    rest = held.state - left * np.where(offloaded, 1.0 - OFFLOADED_SHARE, 0.0)
    return RoleTable(
        layouts=choice,
        offloaded=offloaded,
        choices=Choices(choice.devices, rest, held.state + held.working - rest, cost, np.arange(len(choice))[:, None]),
        own_groups=own_groups,
    )


def _costs(role: str, choice: Layouts, workload: Workload, cluster: Cluster) -> Floats:
    """[N, 4] or [N, 6] seconds of a role that stays on its devices."""
    cost = _no_costs(len(choice), cluster)
    score, update = stage_seconds(role, choice, workload, cluster)
    cost[:, 1] = 0.0 if score is None else score.work
    cost[:, 2] = 0.0 if update is None else update.work
    if role == ACTOR:
        cost[:, 0] = gather_seconds(workload.models[role], choice, workload, cluster)
    if cost.shape[1] > SLOWEST.stop:
        cost[:, SLOWEST.stop :] = cost[:, 1:3] * core_share(choice.devices, cluster)[:, None]
    return cost


def _no_costs(rows: int, cluster: Cluster) -> Floats:
    """Costs of 0, with the columns of loads only where devices share cores."""
    return np.zeros((rows, len(COSTS) if np.isfinite(cluster.rates.at_once) else SLOWEST.stop))


def stage_seconds(
    role: str, choice: Layouts, workload: Workload, cluster: Cluster
) -> tuple[Seconds | None, Seconds | None]:
    """Seconds of a role's work before the updates, and of its updates; None where it has none."""
    config, head = workload.models[role], has_head(role)
    score = update = None
    of = workload.scores if role == ACTOR else "all"
    if of is not None:
        score = score_seconds(config, choice, workload, cluster, head=head, of=of)
    if role in TRAINED:
        epochs = workload.epochs if role == ACTOR else workload.critic_epochs
        lora = workload.lora if role == ACTOR else None
        update = update_seconds(config, choice, workload, cluster, head=head, epochs=epochs, lora=lora)
    return score, update


def rollout_table(
    workload: Workload, cluster: Cluster, space: Space, pool_sizes: Sequence[int], *, across: bool = False
) -> RolloutTable:
    """The choices of the rollout. across: whether the actor is on nodes of another kind."""
    config, rates = workload.models[ROLLOUT], cluster.rates
    if workload.server_share is not None:
        space = replace(space, memory_shares=(workload.server_share,))
    fewer = bool(np.isfinite(rates.servers_at_once))
    for spanning in (False, True):
        choice = servers(
            space,
            config,
            pool_sizes,
            cluster.devices_per_node,
            spanning=spanning,
            fewer=fewer,
            pads=cluster.device.pads_servers,
        )
        held = served_bytes(choice, workload, cluster)
        seconds = rollout_seconds(config, choice, held, workload, cluster)
        works = np.flatnonzero(np.isfinite(seconds.total))
        if len(works):
            break
    # Servers that are fastest while samples of other steps fill them are others than those of a step by itself.
    ways = (seconds.total, seconds.flow) if workload.staleness else (seconds.total,)
    kept = [
        within(held.total[works], each[works], choice.devices[works], cluster, (*space.memory_shares, 1.0))
        for each in ways
    ]
    rows = works[np.unique(np.concatenate(kept))]
    offloaded = np.repeat([rest for rest in (False, True) if cluster.device.offloads_to_host or not rest], len(rows))
    rows = np.tile(rows, len(offloaded) // max(len(rows), 1))
    return price_rollout(choice.take(rows), offloaded, workload, cluster, across=across)


def price_rollout(
    choice: Servers, offloaded: Mask, workload: Workload, cluster: Cluster, *, across: bool = False, stays: Any = 0.0
) -> RolloutTable:
    """Bytes and seconds of these choices, whether a device holds them or not. stays: bytes that an offloaded server keeps."""
    config, rates = workload.models[ROLLOUT], cluster.rates
    held = served_bytes(choice, workload, cluster)
    seconds = rollout_seconds(config, choice, held, workload, cluster)
    whole, total, flow = held.total, seconds.total, seconds.flow
    separate, shared = sync_seconds(config, workload, cluster, across=across)
    wake = rates.wake_s * offloaded
    stays = stays + rates.offloaded_bytes + further_bytes(choice, cluster)
    rest = np.where(offloaded, np.minimum(stays, whole), whole)

    def choices(add: Any, beside: Any) -> Choices:
        cost = _no_costs(len(rest), cluster)
        cost[:, 0], cost[:, 3] = add, beside
        return Choices(choice.devices, rest, whole - rest, cost, np.arange(len(rest))[:, None])

    return RolloutTable(
        servers=choice,
        offloaded=offloaded,
        separate=choices(total + wake + separate, 0.0),
        shared=choices(total + wake + shared, 0.0),
        flowing=choices(separate, flow + separate),
    )


def within(held: Any, seconds: Any, devices: Ints, cluster: Cluster, budgets: Sequence[float]) -> Ints:
    """The fastest choice of each number of devices within each budget, a share of what a device can hold; each once.

    And the one that holds least: where it does not fit beside the others, nothing does.
    """
    rows = np.lexsort((seconds, held, devices))
    kept = [rows[np.flatnonzero(np.diff(devices[rows], prepend=-1))]] if len(rows) else [rows]
    for budget in budgets:
        rows = np.flatnonzero(held <= budget * cluster.usable_bytes)
        rows = rows[is_least(seconds[rows], devices[rows])]
        rows = rows[np.lexsort((held[rows], devices[rows]))]
        kept.append(rows[np.flatnonzero(np.diff(devices[rows], prepend=-1))])
    return np.unique(np.concatenate(kept))


def held_bytes(
    role: str, choice: Layouts, workload: Workload, cluster: Cluster, *, own_groups: bool = True
) -> RoleBytes:
    """Bytes of a Megatron role of the workload under every choice. Under LoRA the reference is the actor without adapters.

    own_groups: False where another role of its pool has the same layout: they share process groups.
    """
    scored = workload.scores is not None or (workload.lora is not None and REFERENCE in workload.models)
    use = Role(
        trained=role in TRAINED,
        head=has_head(role),
        sharded=workload.shards_optimizer,
        lora=workload.lora if role == ACTOR else None,
        shares=role == REFERENCE and workload.lora is not None,
        sequence=workload.longest_sample,
        mean=workload.prompt_tokens + workload.responses.mean,
        passes=role == CRITIC or (role == ACTOR and scored),
        shown=shown_to(role, workload),
    )
    held = role_bytes(workload.models[role], choice, workload.bytes_each, use, cluster.device.kernels)
    if own_groups and not use.shares:
        exchange = exchange_bytes if role in TRAINED else frozen_bytes
        held = replace(held, exchange=exchange(workload.models[role], choice, cluster))
    if role != ACTOR or not workload.teacher_top:
        return held
    mini_batch = workload.tokens / workload.mini_batches
    return replace(held, activations=held.activations + top_bytes(choice, workload.teacher_top, mini_batch))


def shown_to(role: str, workload: Workload) -> Shown | None:
    """What a role's vision tower learns from, where it learns: an image of the largest size in each prompt."""
    if role not in workload.towers:
        return None
    minis = workload.mini_batches
    return Shown(workload.largest_image, workload.prompts / minis, workload.samples / minis)


def served_bytes(choice: Servers, workload: Workload, cluster: Cluster) -> ServerBytes:
    """Bytes of the workload's servers under every choice."""
    return server_bytes(
        workload.models[ROLLOUT],
        choice,
        cluster,
        workload.bytes_each,
        workload.served_weights,
        workload.kv_tokens,
        workload.states,
    )


def has_head(role: str) -> bool:
    """Whether a role's model ends in a vocabulary matrix: critics and reward models end in one row."""
    return role not in (CRITIC, REWARD)
