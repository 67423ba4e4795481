"""The rollout pool as the driver sees it: server processes, the router, and the collector that talks to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.roles import Batch, ColumnRefs
from megarl.cluster.runtime import Runtime
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.errors import WorkerDiedError
from megarl.core.janitor import register_segments
from megarl.core.log import get_logger
from megarl.core.types import BatchInfo, Column, EvalResult, Shard
from megarl.recipe.schema import Deadlines, Recipe
from megarl.rollout.collector import Collector
from megarl.rollout.router import RouterProcess, RouterSpec
from megarl.rollout.server import ServerProcess, ServerSpec
from megarl.sync.broadcast import ServerEndpoint

log = get_logger(__name__)


class ServerActor:
    """Starts and supervises one SGLang server, as a subprocess."""
