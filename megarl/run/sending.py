"""How a run's weights go to its servers: by what transport, in what order, and where versions are written."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from megarl.cluster.runtime import Runtime
from megarl.cluster.server_start import Launched
from megarl.cluster.slots import ServerSlot, Slot, ranks_beside
from megarl.core.janitor import SHARED_MEMORY, register_folder
from megarl.core.layout import Layout
from megarl.core.log import get_logger
from megarl.core.scratch import mark, sweep
from megarl.models.config import ModelConfig
from megarl.models.fp8_weights import quantised
from megarl.models.parts import first_copy
from megarl.models.rules import expected_tensors
from megarl.recipe.layouts import pools_of
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.sync_rules import quantizing
from megarl.run.preflight import Preflight
from megarl.run.role_specs import ACTOR
from megarl.run.servers_check import lora_at_servers, model_name
from megarl.sync.fetch import mirror_of
from megarl.sync.plan import Receiver
from megarl.sync.price import SCALE_BYTES
from megarl.sync.ring import ring_bytes
from megarl.sync.sending import MIB, Sending, Versions, Where, choose
from megarl.sync.store import Store

log = get_logger(__name__)

ADAPTERS = "adapters"  # in the run's folder: those that servers have


def pool_slots(runtime: Runtime, recipe: AnyRecipe) -> dict[str, list[Slot]]:
    """The slots of each pool's ranks, pool by pool in their order."""
    slots = iter(runtime.slots)
    return {name: list(islice(slots, pool.devices)) for name, pool in pools_of(recipe).items()}


def sending_of(
    runtime: Runtime, recipe: Recipe, checked: Preflight, layout: Layout, servers: Sequence[ServerSlot]
) -> Sending:
    """How weights go to the servers. Raises UserError where the recipe asks for a way that does not reach them."""
    [home] = [name for name, pool in pools_of(recipe).items() if ACTOR in pool.roles]
    ranks, writers = pool_slots(runtime, recipe)[home], first_copy(layout)
    nodes, bucket_bytes = {ranks[rank].node for rank in writers}, recipe.sync.bucket_mb * MIB
    is_quantized = recipe.rollout.quantization is not None
    sizes = _sent_sizes(checked.model, {"float32": 4, "bfloat16": 2}[recipe.model.dtype], is_quantized)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(slot.node for slot in ranks))}
    of_ranks = tuple(numbers[slot.node] for slot in ranks)
    beside = tuple(
        Receiver(f"{Launched.kind} {index}", tuple(of_ranks[rank] for rank in hosts), hosts)
        for index, hosts in enumerate(ranks_beside(ranks, servers))
    )
    where = Where(
        writers={str(node) for node in nodes},
        servers={str(part.node) for slot in servers for part in slot.parts},
        takes_memory=not runtime.platform.has_device_memory,
        needed_bytes=ring_bytes(max(sizes), bucket_bytes),
        free_bytes=shutil.disk_usage(SHARED_MEMORY).free if nodes == {runtime.here} else None,
        external=checked.external is not None,
        quantized=is_quantized,
        beside=bool(beside),
    )
    transport, why = choose(recipe.sync.transport, where)
    adapters = None
    if lora_at_servers(recipe, checked.model) is not None:
        adapters = recipe.run.folder.resolve() / ADAPTERS
        transport, why = "adapters", f"sync.lora asks for them alone; servers read them in {adapters}"
    log.info("weights go to the servers by %s: %s", transport, why)
    versions = _versions(runtime, recipe, servers, sum(sizes)) if transport == "disk" else None
    return Sending(
        transport,
        writers,
        of_ranks,
        tuple(slot.node.registry for slot in ranks),
        bucket_bytes,
        recipe.deadlines.sync_s,
        versions,
        where.quantized,
        adapters,
        beside if transport == "shared_memory" else (),
        # SGLang 0.5.21 fixes how many channels NCCL has in such a server, and NCCL wants as many on both sides.
        through_host=recipe.rollout.deterministic and recipe.rollout.tp > 1,
    )


def _sent_sizes(model: ModelConfig, itemsize: int, is_quantized: bool) -> list[int]:
    """Bytes of each tensor as it is sent, with its scales where it is quantised."""
    scales = quantised(model) if is_quantized else {}
    return [
        math.prod(shape) + SCALE_BYTES * math.prod(scales[name]) if name in scales else math.prod(shape) * itemsize
        for name, shape in expected_tensors(model).items()
    ]


def _remove_former(folders: Path) -> None:
    """Remove the versions of lives before this one, and what this node has made of them: nobody reads them any more."""
    made = mirror_of(Store(folders, ""))
    for path in (*folders.parent.glob(folders.name), *made.parent.glob(made.name)):
        shutil.rmtree(path, ignore_errors=True)


def _versions(runtime: Runtime, recipe: Recipe, servers: Sequence[ServerSlot], whole_bytes: int) -> Versions:
    """Where weight versions go: a folder that is removed with the run."""
    # Each life its own: versions of one that went back may differ from those of the same number before.
    name = f"weights-{runtime.run_id}-{secrets.token_hex(2)}"
    folder = (recipe.sync.folder or runtime.folder).absolute() / name
    _remove_former(folder.parent / f"weights-{runtime.run_id}-*")
    sweep(folder.parent, "weights-")
    register_folder(runtime.scratch.registry, folder)
    folder.mkdir(parents=True)
    mark(folder)
    # A server that is on several nodes, or that somebody else started, is told one path for all of its processes.
    in_place = recipe.rollout.external is not None or any(len(slot.parts) > 1 for slot in servers)
    # SGLang makes all quantised weights ready after each load, those that did not come as well.
    all_files = recipe.rollout.quantization is not None or bool(quantizing(recipe))
    return Versions(Store(folder, model_name(recipe.model.path)), whole_bytes, in_place, all_files)
