"""Puts a run's processes together and takes them apart: what stands between a checked recipe and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.critic import LearningCritic, SyncAfterCritic
from megarl.cluster.external import Found
from megarl.cluster.feeder import Feeder
from megarl.cluster.healing import Restarts
from megarl.cluster.kept import KeptPool, keep
from megarl.cluster.ranks import RankGroup
from megarl.cluster.roles import AskedTeacher, Role
from megarl.cluster.rollout import LaunchingRollout, RolloutPool
from megarl.cluster.runtime import Runtime
from megarl.cluster.samples import LaunchingSamples, Samples
from megarl.cluster.server_launch import LaunchingPool
from megarl.cluster.server_start import Launched, Source, Starter
from megarl.cluster.slots import ServerSlot, server_slots, share_no_device
from megarl.cluster.step_profiler import StepProfiler
from megarl.cluster.waits import Waiter
from megarl.cluster.weight_sync import BLAME_S, WeightSync
from megarl.core.errors import MegarlError
from megarl.core.log import get_logger
from megarl.core.pending import Joined
from megarl.core.protocols import Pending
from megarl.core.scratch import Scratch
from megarl.core.timing import PhaseTimer
from megarl.core.types import TEACHER_LOGPROBS, TEACHER_TOP
from megarl.data.rows import data_files
from megarl.hub.fetch import CONFIG
from megarl.models.lora_served import ADAPTER, ServedLora
from megarl.placement.workload import read_model
from megarl.recipe.layouts import SHARED, num_shards, pools_of, role_layouts
from megarl.recipe.reward import Classify
from megarl.recipe.sampling_rules import beside_ranks, check_beside, overlaps
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.scoring import served_columns
from megarl.recipe.supervised import SupervisedRecipe
from megarl.run.cores import server_threads
from megarl.run.ending import writing
from megarl.run.kept import Kept
from megarl.run.preflight import Preflight
from megarl.run.recovery import goes_on
from megarl.run.role_specs import ACTOR, CRITIC, TEACHER, role_specs, supervised_specs
from megarl.run.sending import pool_slots, sending_of
from megarl.run.server_spec import server_spec
from megarl.run.servers_check import keep_mark, lora_at_servers
from megarl.serving.external import ExternalPool
from megarl.serving.router import RouterSpec
from megarl.training.spec import RoleSpec

log = get_logger(__name__)

# What a role's update may read; its loss takes what it needs of these.
_READS = {
    ACTOR: frozenset({"old_logprobs", "advantages", "ref_logprobs", TEACHER_LOGPROBS, TEACHER_TOP}),
    CRITIC: frozenset({"values", "returns"}),
}


@dataclass(frozen=True)
class Session:
    """Everybody in a run, ready. roles: by name, the actor and those that the recipe asks for."""

    roles: dict[str, Role]

    def take_peaks(self) -> Pending[dict[str, int]]:
        """Peak bytes of the fullest rank by `role/operation` since the last call, of all that was asked until now."""
        pools = {id(role.ranks): role for role in self.roles.values()}
        asked = [role.ranks.take_peaks(role.deadlines.train_s) for role in pools.values()]
        return Joined(asked, lambda pools: {name: held for pool in pools for name, held in pool.items()})


@dataclass(frozen=True)
class TrainSession(Session):
    """Of a reinforcement-learning run.

    critic: `roles[CRITIC]`, as the loop talks to it. teacher: one of the roles, or behind an address. None where there is none.
    """

    rollout: RolloutPool
    sync: WeightSync | SyncAfterCritic
    critic: LearningCritic | None
    teacher: Role | AskedTeacher | None


@dataclass(frozen=True)
class ReplaySession(Session):
    """Of a replay. critic, teacher: as of TrainSession."""

    samples: Samples
    critic: LearningCritic | None
    teacher: Role | AskedTeacher | None


@dataclass(frozen=True)
class SupervisedSession(Session):
    """Of a supervised run."""

    feeder: Feeder


def _reads(recipe: AnyRecipe) -> list[Path]:
    """What the run's processes read, on whatever node they are."""
    models, tokenizers = [recipe.model.path], list[Path]()
    if isinstance(recipe, Recipe):
        others = (recipe.critic, recipe.reward_model, recipe.teacher)
        models += (model.path for model in others if model is not None and model.path is not None)
        models += [recipe.sync.folder] if recipe.sync.folder is not None else []
        tokenizers = [each.tokenizer for each in recipe.reward.graders.values() if isinstance(each, Classify)]
    rows = (path for path in (recipe.data.train, recipe.data.eval) if path is not None)
    # Links to files stay links: a cache of the hub is made of them.
    files = [folder.resolve() / CONFIG for folder in tokenizers]
    files += [file.absolute() for path in rows for file in data_files(path)]
    return [path.resolve() for path in models] + files


def _with_critic(
    runtime: Runtime,
    recipe: Recipe,
    critic: Role | None,
    sync: WeightSync,
    servers: Sequence[ServerSlot],
    timer: PhaseTimer,
) -> tuple[LearningCritic | None, WeightSync | SyncAfterCritic]:
    """The critic and the weight sync as the loop talks to them: whoever shares the critic's devices waits for it."""
    learning = _learning(recipe, critic, timer)
    if learning is None or share_no_device(pool_slots(runtime, recipe)[_homes(recipe)[CRITIC]], servers):
        return learning, sync
    return learning, SyncAfterCritic(sync, learning)


def _teacher(recipe: Recipe, roles: dict[str, Role]) -> Role | AskedTeacher | None:
    return AskedTeacher() if served_columns(recipe) else roles.get(TEACHER)


def _learning(recipe: Recipe, critic: Role | None, timer: PhaseTimer) -> LearningCritic | None:
    homes = _homes(recipe)
    return None if critic is None else LearningCritic(critic, timer, at_once=homes[CRITIC] == homes[ACTOR])


def _homes(recipe: Recipe) -> dict[str, str]:
    """The pool of each role."""
    return {role: name for name, pool in pools_of(recipe).items() for role in pool.roles}


def _threads(runtime: Runtime, recipe: AnyRecipe) -> tuple[int, int | None]:
    """Threads of each rank and of each server: all cores' where the others wait meanwhile."""
    ranks = recipe.cluster.devices
    if not isinstance(recipe, Recipe) or recipe.rollout.external is not None:
        return runtime.rank_threads(ranks), None
    servers = recipe.rollout.server_devices
    if overlaps(recipe):
        ranks = servers = ranks + servers
    own = runtime.threads(servers)
    if own is not None and recipe.rollout.deterministic:
        own = 1  # only then do they compute the same bits
    elif own is not None and runtime.asked_threads is None:
        own = server_threads(recipe, read_model(recipe.model.path), own)
    return runtime.rank_threads(ranks), own


def _start_pools(runtime: Runtime, recipe: AnyRecipe, waiter: Waiter) -> dict[str, RankGroup]:
    """The ranks that host each role: one process a device."""
    deadlines, slots, threads = recipe.deadlines, pool_slots(runtime, recipe), _threads(runtime, recipe)[0]
    longest = max(deadlines.start_s, deadlines.train_s, deadlines.save_s)
    if isinstance(recipe, Recipe):
        longest = max(
            longest, deadlines.sync_s + BLAME_S
        )  # the first rank waits for servers, and the others for its word
    pools = pools_of(recipe)
    launching = {
        name: RankGroup.launch(
            runtime,
            slots[name],
            "rank" if name == SHARED else f"{name} rank",
            recipe.run.seed,
            waiter,
            deadlines.start_s,
            threads,
        )
        for name in pools
    }
    groups = {name: ranks.ready(longest) for name, ranks in launching.items()}
    if (profiler := recipe.report.profiler) is not None:
        waiter.timer.around = StepProfiler(
            tuple(groups.values()), profiler, recipe.run.folder.resolve(), deadlines.save_s
        )
    return {role: groups[name] for name, pool in pools.items() for role in pool.roles}


def _server_slots(runtime: Runtime, recipe: Recipe) -> tuple[ServerSlot, ...]:
    """Places of the run's own servers; none where somebody else started them, so that these share no device with a rank."""
    settings = recipe.rollout
    if settings.external is not None:
        return ()
    slots = server_slots(runtime.platform, runtime.nodes.members, runtime.slots, settings.num_servers, settings.tp)
    if any(slot.shared for slot in slots):
        there = sum(node.devices for node in runtime.nodes.members)
        log.info("servers are on the ranks' devices: there are %d, for %d ranks", there, len(runtime.slots))
    return slots


def _source(
    runtime: Runtime,
    recipe: Recipe,
    slots: Sequence[ServerSlot],
    external: ExternalPool | None,
    lora: ServedLora | None,
) -> Source:
    """Where the run's servers come from."""
    answer_s = recipe.deadlines.answer_s
    if external is not None:
        return Found(runtime, external, answer_s)
    spec = server_spec(recipe, lora=lora, threads=_threads(runtime, recipe)[1])
    return Launched(runtime, spec, slots, answer_s)


def _launch_rollout(
    runtime: Runtime,
    recipe: Recipe,
    slots: Sequence[ServerSlot],
    external: ExternalPool | None,
    num_shards: int,
    waiter: Waiter,
    lora: ServedLora | None = None,
    kept: KeptPool | None = None,
) -> LaunchingRollout:
    deadlines, adapter = recipe.deadlines, "" if lora is None else ADAPTER
    source = _source(runtime, recipe, slots, external, lora)
    router = RouterSpec(request_timeout_s=deadlines.rollout_s, adapter=adapter)
    starter = Starter(runtime, source, router, deadlines.start_s, deadlines.answer_s)
    servers = LaunchingPool.launch(starter, waiter, Restarts(recipe.rollout.max_restarts), kept)
    return LaunchingRollout.launch(runtime, recipe, servers, num_shards, waiter, beside=beside(runtime, recipe, slots))


def beside(runtime: Runtime, recipe: Recipe, slots: Sequence[ServerSlot]) -> bool:
    """Whether the servers go on while the ranks train: they share no device with them, and nothing says otherwise."""
    return share_no_device(runtime.slots, slots) and beside_ranks(recipe)


def _build_roles(specs: dict[str, RoleSpec], ranks: dict[str, RankGroup], recipe: AnyRecipe) -> dict[str, Role]:
    roles = {
        name: Role(name, ranks[name], spec.layout, recipe.deadlines, _READS.get(name, frozenset()))
        for name, spec in specs.items()
    }
    for building in [role.build(specs[name]) for name, role in roles.items()]:
        building.wait()
    return roles


def _runtime(recipe: Recipe, checked: Preflight, folder: Path, devices: int, scratch: Scratch | None) -> Runtime:
    hosts = [] if checked.external is None else checked.external.hosts
    if recipe.sync.folder is not None:
        recipe.sync.folder.mkdir(parents=True, exist_ok=True)  # every node is asked whether it sees it
    reads, spares = _reads(recipe), recipe.cluster.spares
    return Runtime.start(checked.platform, folder, devices, reads, scratch, reached_from=hosts, spares=spares)


@contextmanager
def _letting_go(external: ExternalPool | None, rollout: RolloutPool, sync: WeightSync) -> Iterator[None]:
    """Whatever happens within: servers that go on without the run wait for nothing of it.

    The run's own just end with it.
    """
    try:
        yield
    except BaseException:
        if external is not None:
            rollout.servers.close()
        raise
    finally:
        if external is not None:
            sync.leave()


@contextmanager
def _closing(rollout: RolloutPool) -> Iterator[None]:
    """Around all that is asked of collectors: whatever ends it, environments and tools are closed, as they are in the end."""
    try:
        yield
    except BaseException:
        rollout.samples.leave()
        raise


@contextmanager
def _keeping(
    kept: Kept, runtime: Runtime, recipe: Recipe, session: TrainSession, slots: Sequence[ServerSlot]
) -> Iterator[None]:
    """Around all that a life does: where it ends, and the run goes on, its servers are there for the next one."""
    try:
        yield
    except MegarlError as error:
        runtime.judge(error)
        if goes_on(error) and slots and recipe.cluster.max_recoveries:
            samples, pools = session.rollout.samples, {id(role.ranks): role.ranks for role in session.roles.values()}
            others = [*(worker for ranks in pools.values() for worker in ranks.workers), samples.coordinator]
            others += samples.collectors.workers
            kept.pool = keep(session.rollout.servers, slots, others, runtime.nodes)
        raise


def both_ready(
    launching: LaunchingRollout, build: Callable[[], dict[str, Role]], *, shared: bool
) -> tuple[RolloutPool, dict[str, Role]]:
    """Servers, and roles that `build` builds. shared: a device has both.

    A server takes a share of what it finds free, and ends where others take of that meanwhile: it is up before any role. What it
    has then is most of the device: it sleeps until its first weights come.
    """
    if not shared:
        roles = build()
        return launching.ready(), roles
    rollout = launching.ready()
    rollout.make_room()
    return rollout, build()


@contextmanager
def train_session(
    recipe: Recipe, checked: Preflight, timer: PhaseTimer, scratch: Scratch | None = None, kept: Kept | None = None
) -> Iterator[TrainSession]:
    """Start servers, collector and ranks side by side; on leaving, end everything but what another life takes over."""
    layouts, kept = role_layouts(recipe), kept or Kept()
    with kept.life(lambda: _runtime(recipe, checked, recipe.run.folder, recipe.cluster.devices, scratch)) as runtime:
        if checked.external is not None:
            with writing(recipe.run.folder):
                keep_mark(recipe.run)
        waiter, pool = Waiter(timer, runtime.nodes), kept.take()
        slots = pool.slots if pool is not None else _server_slots(runtime, recipe)
        check_beside(recipe, beside=share_no_device(runtime.slots, slots))
        sending = sending_of(runtime, recipe, checked, layouts[ACTOR], slots)
        lora = lora_at_servers(recipe, checked.model)
        launching = _launch_rollout(runtime, recipe, slots, checked.external, num_shards(recipe), waiter, lora, pool)
        ranks = _start_pools(runtime, recipe, waiter)
        shared = runtime.platform.has_device_memory and any(slot.shared for slot in slots)
        specs = role_specs(recipe, checked)
        rollout, roles = both_ready(launching, lambda: _build_roles(specs, ranks, recipe), shared=shared)
        pushing = WeightSync(ACTOR, ranks[ACTOR], layouts[ACTOR], rollout, recipe, sending)
        critic, sync = _with_critic(runtime, recipe, roles.get(CRITIC), pushing, slots, timer)
        session = TrainSession(roles, rollout, sync, critic, _teacher(recipe, roles))
        keeping = _keeping(kept, runtime, recipe, session, slots)
        with _letting_go(checked.external, rollout, pushing), keeping, _closing(rollout):
            yield session
        rollout.close()


@contextmanager
def eval_session(
    recipe: Recipe, checked: Preflight, timer: PhaseTimer, folder: Path, scratch: Scratch | None = None
) -> Iterator[RolloutPool]:
    """Servers and collector only; on leaving, end everything. folder: where logs go."""
    with _runtime(recipe, checked, folder, 0, scratch) as runtime:
        waiter, slots = Waiter(timer, runtime.nodes), _server_slots(runtime, recipe)
        rollout = _launch_rollout(runtime, recipe, slots, checked.external, 1, waiter).ready()
        with _closing(rollout):
            yield rollout
        rollout.close()


@contextmanager
def replay_session(
    recipe: Recipe, checked: Preflight, journal: Path, timer: PhaseTimer, scratch: Scratch | None = None
) -> Iterator[ReplaySession]:
    """Start the ranks, and collectors that read a journal; on leaving, end everything."""
    with Runtime.start(checked.platform, recipe.run.folder, recipe.cluster.devices, _reads(recipe), scratch) as runtime:
        waiter = Waiter(timer, runtime.nodes)
        launching = LaunchingSamples.launch(
            runtime, recipe, None, num_shards(recipe), waiter, beside=beside_ranks(recipe), replay=journal
        )
        roles = _build_roles(role_specs(recipe, checked), _start_pools(runtime, recipe, waiter), recipe)
        samples = launching.ready(Restarts(0))
        yield ReplaySession(roles, samples, _learning(recipe, roles.get(CRITIC), timer), _teacher(recipe, roles))
        samples.close()


@contextmanager
def supervised_session(
    recipe: SupervisedRecipe, checked: Preflight, timer: PhaseTimer, scratch: Scratch | None = None
) -> Iterator[SupervisedSession]:
    """Start the ranks and the feeder; on leaving, end everything."""
    cluster, folder = recipe.cluster, recipe.run.folder
    with Runtime.start(
        checked.platform, folder, cluster.devices, _reads(recipe), scratch, spares=cluster.spares
    ) as runtime:
        waiter = Waiter(timer, runtime.nodes)
        ranks = _start_pools(runtime, recipe, waiter)
        roles = _build_roles(supervised_specs(recipe, checked), ranks, recipe)
        yield SupervisedSession(roles, Feeder.start(runtime, recipe, num_shards(recipe), waiter))
