"""One SGLang server as a supervised subprocess. Not for talking to it (client.py) nor for a pool (megarl/cluster)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.core.log_tail import lines_with
from megarl.core.platform import Platform
from megarl.core.ports import kept_port
from megarl.models.fp8_weights import quantization_settings
from megarl.models.lora_served import ADAPTER, ServedLora
from megarl.serving import server_models
from megarl.serving.client import ServerEndpoint
from megarl.serving.process import Command, Endpoint, ManagedProcess
from megarl.serving.server_flags import OVERRIDES, SPARE_TOKENS, split_overrides
from megarl.serving.sglang_kv_scales import LOADER

# SGLang closes a connection after 5 idle seconds by default. The router and the clients keep theirs for longer than
# that, and a training step lasts longer: the first requests of the next step would be sent into closed connections.
KEEP_ALIVE_S = 3600
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's own: without it a server refuses a context beyond the model's

# How SGLang begins to say that a rank did not load weights. Its answer is its first rank's alone.
FAILED_LOAD = re.compile(r"Failed to (update|receive) (weights|parameter)|weight updates are not supported")
# SGLang's own: it ends a server that has a batch and for so long computes none, as one that is paused with its requests in place
# (0.5.21, managers/scheduler_components/invariant_checker.py: cur_batch_for_debug).
WATCHDOG_S = 300.0
# SGLang's own: a server in FP8 compiles DeepGEMM's kernels for fewer lengths while it starts. For all of them it takes "typically
# 10-20 mins" where none lie in its cache (0.5.21, layers/deep_gemm_wrapper/compile_utils.py), and `deadlines.start_s` is 10.
FEWER_KERNELS = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"


@dataclass(frozen=True)
class Span:
    """One node's part of a server over several nodes. meet: host:port on the first node, where the parts find each other."""

    num_nodes: int
    node_rank: int
    meet: str


@dataclass(frozen=True)
class ServerSpec:
    """What one server serves and how.

    model: HF folder. tp: over all of its nodes. kv_tokens: KV cache in tokens; None lets SGLang decide. context_length:
    longest prompt with its response; None is the model's own. weight_version: of the weights in `model`. span: where the
    server is over several nodes; only the first answers requests. shares_devices: with ranks, and so their memory. offloaded:
    it gives memory back at times. deterministic: an answer depends on its request alone. quantized: it begins with random
    weights, and waits for a sync in FP8 (models/fp8_weights.py). held_s: longest that it holds requests as they are, while it is
    paused; None where it never does. lora: adapters that it takes as they are. tower_learns: syncs send weights of its vision
    tower, too. threads: of each of its tensor-parallel ranks; None is what suits the platform. extra: flags of
    sglang.launch_server.
    """

    model: Path
    dtype: Literal["float32", "bfloat16"]
    tp: int = 1
    max_running_requests: int = 64
    kv_tokens: int | None = None
    context_length: int | None = None
    seed: int = 1
    weight_version: int = 0
    span: Span | None = None
    shares_devices: bool = False
    offloaded: bool = False
    deterministic: bool = False
    quantized: bool = False
    held_s: float | None = None
    lora: ServedLora | None = None
    tower_learns: bool = False
    threads: int | None = None
    extra: tuple[str, ...] = ()

    def flags(self, host: str, port: int) -> list[str]:
        """As flags of sglang.launch_server; the API key is not among them."""
        flags = [
            *("--model-path", str(self.model)),
            *("--dtype", self.dtype),
            *("--tp-size", str(self.tp)),
            *("--max-running-requests", str(self.max_running_requests)),
            *("--random-seed", str(self.seed)),
            *("--weight-version", str(self.weight_version)),
            *("--host", host),
            *("--port", str(port)),
            *("--log-level", "warning"),
        ]
        if self.kv_tokens is not None:
            flags += ["--max-total-tokens", str(self.kv_tokens + SPARE_TOKENS)]
        if self.context_length is not None:
            flags += ["--context-length", str(self.context_length + SPARE_TOKENS)]
        if self.held_s is not None:
            flags += ["--watchdog-timeout", f"{WATCHDOG_S + self.held_s:g}"]
        if self.span is not None:
            flags += ["--nnodes", str(self.span.num_nodes), "--node-rank", str(self.span.node_rank)]
            flags += ["--dist-init-addr", self.span.meet]
        extra, own = split_overrides(self.extra)
        settings = server_models.missing_settings(self.model)
        if self.quantized:
            # The folder's weights are of another form than those that come.
            flags += ["--load-format", "dummy", "--custom-weight-loader", LOADER]
            settings |= quantization_settings()
        if settings | own:
            flags += [OVERRIDES, json.dumps(settings | own)]
        if self.lora is not None:
            flags += self.lora.flags()
        flags += server_models.image_flags(self.model)
        return [*flags, *extra]

    def env(self) -> dict[str, str]:
        """Variables for what is served: a context that is no longer than the model's but for what SGLang keeps of it, kernels
        that are compiled before, and of SGLang's own models those that it need not load.
        """
        own, asked = server_models.max_positions(self.model), self.context_length
        found = {LONGER: "1"} if asked is not None and asked <= own < asked + SPARE_TOKENS else {}
        found |= server_models.image_env(self.model, tower_learns=self.tower_learns)
        if self.quantized:
            found[FEWER_KERNELS] = os.environ.get(FEWER_KERNELS, "1")
        # Flags of a user's own may ask for others: a second model that guesses ahead, another implementation.
        if self.extra or server_models.VARIABLE in os.environ:
            return found
        return {**found, server_models.VARIABLE: ",".join(server_models.unused_models(self.model))}

    def words(self, platform: Platform, host: str, port: int) -> list[str]:
        """All that the launcher is told on a platform; of a flag that comes twice the last counts."""
        return [
            *platform.server_args,
            *(platform.shared_server_args if self.shares_devices else ()),
            *(self._offload_flags(platform) if self.offloaded else ()),
            *(platform.deterministic_server_args if self.deterministic else ()),
            *(platform.lora_server_args if self.lora is not None else ()),
            *(self._kernel_flags() if platform.has_device_memory else ()),
            *self.flags(host, port),
        ]

    def _offload_flags(self, platform: Platform) -> tuple[str, ...]:
        """Where weights are given back, those that nobody sends, as a vision tower's, have to be kept somewhere."""
        kept = platform.frees_servers and server_models.sees_images(self.model)
        return (*platform.offload_server_args, *((server_models.KEPT_WEIGHTS,) if kept else ()))

    def _kernel_flags(self) -> tuple[str, ...]:
        """By which kernels a device's server computes, where SGLang's own choice does not do.

        It captures decode steps of up to 32, 256 or 512 sequences, as a device has memory, and runs larger ones without a graph
        (0.5.21, arg_groups/memory_hook.py): here as many as may run.
        """
        graphs = ("--cuda-graph-max-bs-decode", str(self.max_running_requests))
        experts = server_models.expert_flags(self.model, self.extra, quantized=self.quantized)
        return (*graphs, *server_models.attention_flags(self.model), *experts)


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of the run listens and writes.

    logs: folder of the run's logs. env: added to the environment (the run's id among it). temp: folder for sockets and
    temporary files, kept short because paths of sockets are; a process makes a folder of its own in it.
    """

    logs: Path
    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    env: Mapping[str, str] = field(default_factory=dict)
    temp: Path | None = None


def load_segment(temp: Path) -> str:
    """Name under /dev/shm of what a server publishes its load in, by its temporary folder (`launcher.name_instance`).

    As SGLang 0.5.21 makes it of an instance's id (managers/load_snapshot.py).
    """
    digest = hashlib.blake2s(temp.name.encode(), digest_size=4).hexdigest()
    return f"sglang_loads_{temp.name}_{digest}.shm"


class ServerProcess(ManagedProcess):
    """A running SGLang server."""

    def failed_loads(self) -> str:
        """What its log last says of weights that a rank of it could not load; empty where nothing."""
        found = lines_with(self.command.log, FAILED_LOAD)
        return "\n".join([f"--- of weights that were not loaded, in {self.command.log}:", *found]) if found else ""

    def __init__(self, name: str, spec: ServerSpec, platform: Platform, place: ProcessPlace) -> None:
        self.spec = spec
        # Its own two, of which one is where its ranks meet: several servers of a node choose theirs at once.
        kept = [kept_port(place.host), kept_port(place.host)]
        port, meet = (each.getsockname()[1] for each in kept)
        self._temp = Path(tempfile.mkdtemp(prefix="server-", dir=place.temp))
        adapter = ADAPTER if spec.lora is not None else ""
        self._endpoint = ServerEndpoint(
            name,
            f"http://{place.host}:{port}",
            place.api_key,
            spec.tp,
            spec.shares_devices,
            adapter=adapter,
            loader=LOADER if spec.quantized else "",
        )
        super().__init__(
            Command(
                name=name,
                argv=(
                    sys.executable,
                    *("-m", platform.server_module),
                    *("--nccl-port", str(meet)),
                    *spec.words(platform, place.host, port),
                ),
                log=place.logs / f"{name.replace(' ', '_')}.log",
                endpoint=Endpoint(place.host, port, "/health", "/health_generate"),
                env={
                    **platform.env,
                    **({} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}),
                    **platform.server_env(spec.tp),
                    **spec.env(),
                    # The router asks every two seconds. A token that is made for it while weights arrive ends SGLang: it is to
                    # forget what it computed with the old ones, and asserts that nothing is computed.
                    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                    # With DETAIL torch makes a second group beside each, and waits there for ranks, which join the first alone.
                    "TORCH_DISTRIBUTED_DEBUG": "OFF",
                    # With 1 SGLang refuses to capture graphs of prompts where memory is given back at times; nobody asks for
                    # that of graphs.
                    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0",
                    **place.env,
                    "TMPDIR": str(self._temp),
                    "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
                },
                secret=place.api_key,
                segments=(load_segment(self._temp),),
            ),
            kept,
        )

    @property
    def endpoint(self) -> ServerEndpoint:
        """What a client and the weight sync need."""
        return self._endpoint

    def stop(self, term_s: float = 0.5) -> None:
        """End the server; no process, port, shared memory or temporary file of it remains.

        Its orderly end takes SGLang more than five seconds and saves nothing, so it is not waited for.
        """
        super().stop(term_s)
        shutil.rmtree(self._temp, ignore_errors=True)
