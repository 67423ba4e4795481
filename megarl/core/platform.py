"""The facts that differ between machines without and with CUDA. The only place that branches on it.

Nothing here imports torch when the module loads: the driver and the recipe check ask for a platform too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from megarl.core.heap import is_little_freed, trim
from megarl.core.versions import installed

PlatformName = Literal["cpu", "cuda"]
TensorHash = Literal["sha256", "tiles"]  # see sync/tensor_hash.py

CPU_SERVER_ARGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--disable-hybrid-swa-memory",  # its attention reads one pool for all layers
    "--skip-server-warmup",
    "--sleep-on-idle",
)
# A prompt that is cut into chunks is computed in other shapes, and where it is cut depends on its neighbours. SGLang would then
# keep memory for whole batches of prompts, more than there is; the cache's size is the recipe's.
CPU_DETERMINISTIC = (
    "--enable-deterministic-inference",
    *("--chunked-prefill-size", "-1"),
    *("--mem-fraction-static", "0.8"),
)


@dataclass(frozen=True)
class Refused:
    """Flags of SGLang, by all their names, with which no server starts or answers on a platform. why: goes on a sentence.

    fine: a value that changes nothing. beside: a word of another flag with which it is well.
    """

    flags: tuple[str, ...]
    why: str
    fine: str = ""
    beside: str = ""

    def found(self, words: Sequence[str]) -> list[str]:
        """Which of a server's words are such a flag, with its value."""
        hits = []
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            value = value if equals else next(iter(words[index + 1 : index + 2]), "")
            if name in self.flags and not (self.fine and value == self.fine):
                hits.append(f"{name} {value}".rstrip() if self.fine else name)
        return [] if self.beside and any(self.beside in word for word in words) else hits


# Seen with SGLang 0.5.21: each of these ends a server, or has it start for ever, with a trace that does not name the flag.
CPU_REFUSED = (
    Refused(
        ("--tokenizer-worker-num",),
        "its workers load SGLang anew, without what stands in for packages that only CUDA has",
        fine="1",
    ),
    Refused(
        ("--dp-size", "--data-parallel-size"),
        "SGLang wants a NUMA node for each copy of the model; rollout.servers has a server for each",
        fine="1",
    ),
    Refused(("--speculative-algorithm",), "tokens are guessed and verified by kernels that only CUDA has"),
    Refused(("--enable-hierarchical-cache",), "what it keeps is copied by CUDA"),
    Refused(("--enable-torch-compile",), "the attention there cannot be compiled"),
    Refused(
        ("--enable-lora", "--lora-paths"),
        "adapters are computed by kernels that only CUDA has; the run's own reach servers by sync.lora: adapters",
        beside="torch_native",
    ),
)
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Its ranks each look at the free memory of the machine, at moments of their own, and refuse to start where it differs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # Of whatever computes little; ranks and servers are told how many (`Platform.threads`).
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait for one another run 5-30 times slower than one beside other busy processes.
    "OMP_WAIT_POLICY": "passive",
    # Threads that sleep at once wait 0.1 ms for each of a pass's thousands of small operations: libgomp's spin as long as that.
    "GOMP_SPINCOUNT": "10000",
    # torch asks for huge pages where the system lets it: a fresh page costs more than arithmetic on it.
    "THP_MEM_ALLOC_ENABLE": "1",
    # For the same reason what is freed is kept to be used again: glibc gives large pieces back to the system at once.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}
MOST_HOST_THREADS = 8
# Entries of CUDA_VISIBLE_DEVICES that are none; the last is SLURM's word in an allocation without GPUs.
NO_DEVICE = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Conflict:
    """An environment variable under which a run would break where it holds the word, in either case. why: goes on a sentence.

    of_ray: it is Ray that reads it, in its workers alone.
    """

    variable: str
    word: str
    why: str
    of_ray: bool = False


_CHOICE = "Megatron builds no model where an attention is switched off by hand, whether it would be taken or not"
# Transformer Engine's, and read by Megatron on every platform (0.16.1).
ATTENTION_CONFLICTS = tuple(Conflict(f"NVTE_{kind}_ATTN", "0", _CHOICE) for kind in ("FLASH", "FUSED", "UNFUSED"))
_HANDLES = "weights reach servers on the same device by handles of memory, of which {} has none"
CUDA_CONFLICTS = (
    *ATTENTION_CONFLICTS,
    *(
        Conflict(variable, word, _HANDLES.format(what))
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        for word, what in (
            ("expandable_segments:True", "an expandable segment"),
            ("backend:cudaMallocAsync", "CUDA's own allocator"),
        )
    ),
    Conflict("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", _HANDLES.format("what torch does not keep")),
    *(
        Conflict(
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
            word,
            "Ray would then show every rank all devices: all take the first",
            of_ray=True,
        )
        for word in ("1", "true")
    ),
)
CUDA_ENV = {
    # Megatron's overlap of tensor-parallel communication relies on kernels that run in the order in which they were launched.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # SGLang's ranks share devices with the run's, each of which holds what it holds.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # NVIDIA's images set it: torch would compute products of float32 in TF32, as of routers, here and at servers.
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
}
# What both sides of a group that weights are broadcast in have to have the same. SGLang 0.5.21 takes these for its servers where
# its environment says nothing, and NCCL others for the ranks: one side's handles of memory are then none to the other.
CUDA_SHARED = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# SGLang's flags that set them to 1 for its servers, whatever the environment says.
SETTING_SHARED = {"--enable-symm-mem": tuple(CUDA_SHARED), "--enable-nccl-nvls": ("NCCL_NVLS_ENABLE",)}


@dataclass(frozen=True)
class Platform:
    """What one kind of machine needs.

    name: cpu or cuda. device: torch's device string for tensors of a rank. backend: torch.distributed's backend.
    ray_resource: the Ray resource that one device is. server_args: extra flags of `sglang.launch_server`; shared_server_args:
    those of a server whose devices are ranks' as well, before the recipe's own; offload_server_args: those of one that
    gives its memory back at times (none on cpu: there SGLang 0.5.21 keeps what it is asked to release).
    deterministic_server_args: those of one whose answers must not depend on what else it answers.
    deterministic_attention: its attention backends; most_deterministic_tp: its largest tensor-parallel size, if there is one.
    draws_by_rank: where one request of a batch is greedy or leaves tokens out, deterministic servers draw all of its tokens by
    their rank among the likeliest instead of by their number.
    lora_server_args: those of one that takes LoRA adapters. refused_server_args: flags with which none comes up.
    env: variables that every rank and server starts with. conflicts: with what a user's own environment may have.
    chunk_elements: float32 elements of a temporary, where work may be cut: enough to keep a device busy; on a CPU, few
    enough to stay in memory that is at hand, since fresh pages cost more than arithmetic.
    micro_batch_tokens: most tokens of a forward pass where the recipe says nothing; None: its own default. On a CPU fewer, for
    the same reason.
    needs_kv_tokens: SGLang cannot size its KV cache from free memory there and has to be told.
    adapts_megatron: Megatron runs there behind megarl's adapter.
    returns_routing: SGLang can say there which experts it chose (0.5.21 captures them in memory registered with CUDA).
    serves_fp8: SGLang can serve FP8 weights there. serves_float32: float32 ones, by the attention that it chooses.
    serves_latents: models with latent attention. serves_delta: models with Gated DeltaNet.
    fuses_shared_experts: SGLang may hold shared experts among the others there. copies_router_scale: it computes with a copy of
    Gemma 4's, which it makes once.
    tensor_hash: the function by which SGLang hashes weights there. pads_weights: its ranks' shares of weights are filled up with
    zeros to even sizes.
    has_device_memory: devices have memory of their own, so that what is offloaded can move to the host's.
    """

    name: PlatformName
    device: str
    backend: Literal["gloo", "nccl"]
    ray_resource: str
    server_module: str
    server_args: tuple[str, ...]
    env: dict[str, str]
    has_transformer_engine: bool
    has_apex: bool
    shared_server_args: tuple[str, ...] = ()
    offload_server_args: tuple[str, ...] = ()
    deterministic_server_args: tuple[str, ...] = ()
    deterministic_attention: tuple[str, ...] = ()
    lora_server_args: tuple[str, ...] = ()
    refused_server_args: tuple[Refused, ...] = ()
    most_deterministic_tp: int | None = None
    draws_by_rank: bool = False
    chunk_elements: int = 16 * 2**20
    micro_batch_tokens: int | None = None
    needs_kv_tokens: bool = False
    adapts_megatron: bool = False
    returns_routing: bool = True
    serves_fp8: bool = True
    serves_float32: bool = False
    serves_latents: bool = True
    serves_delta: bool = True
    fuses_shared_experts: bool = True
    copies_router_scale: bool = True
    tensor_hash: TensorHash = "tiles"
    pads_weights: bool = False
    has_device_memory: bool = True
    conflicts: tuple[Conflict, ...] = ()

    def threads(self, together: int) -> int | None:
        """Threads of each of so many processes that compute at the same time; None where that is no question."""
        if self.name != "cpu":
            return None
        return max(1, len(os.sched_getaffinity(0)) // max(1, together))

    def host_threads(self, together: int) -> int:
        """Threads of each of so many ranks on a machine, where devices compute: checkpoints pass the host's memory and cores."""
        return max(1, min(MOST_HOST_THREADS, len(os.sched_getaffinity(0)) // max(1, together)))

    @property
    def frees_servers(self) -> bool:
        """Whether a server there gives the memory back that it is asked to."""
        return bool(self.offload_server_args)

    def server_env(self, tp: int) -> dict[str, str]:
        """Variables that a server of this tensor-parallel size needs beside `env`."""
        if self.name != "cpu" or tp == 1:
            return {}
        # SGLang's CPU engine wants to be told which core each of its ranks runs on.
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
        return {"SGLANG_CPU_OMP_THREADS_BIND": bound}


def visible_cuda_devices() -> list[str]:
    """The NVIDIA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [entry.strip() for entry in visible.split(",") if entry.strip() not in NO_DEVICE]
    found = [node.name[len("nvidia") :] for node in Path("/dev").glob("nvidia[0-9]*")]
    return [str(index) for index in range(sum(name.isdigit() for name in found))]


@cache
def cuda_device_count() -> int:
    """Number of NVIDIA devices that this process may use, without importing torch."""
    return len(visible_cuda_devices())


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def get_platform(name: Literal["auto", "cpu", "cuda"] = "auto") -> Platform:
    """The platform of that name; `auto` is cuda where an NVIDIA device is visible, unless torch is a build for CPUs."""
    if name == "auto":
        name = "cuda" if cuda_device_count() and not (installed("torch") or "").endswith("+cpu") else "cpu"
    if name == "cpu":
        return Platform(
            name="cpu",
            device="cpu",
            backend="gloo",
            ray_resource="megarl_cpu_device",
            server_module="megarl.serving.sglang_cpu",
            server_args=CPU_SERVER_ARGS,
            deterministic_server_args=CPU_DETERMINISTIC,
            deterministic_attention=("torch_native",),
            # gloo adds the numbers of two ranks in either order alike, and those of more by their place in the batch.
            most_deterministic_tp=2,
            env=CPU_ENV,
            has_transformer_engine=False,
            has_apex=False,
            chunk_elements=2**20,
            micro_batch_tokens=2048,
            needs_kv_tokens=True,
            adapts_megatron=True,
            returns_routing=False,
            serves_fp8=False,
            serves_float32=True,
            serves_latents=False,
            serves_delta=False,
            lora_server_args=("--lora-backend", "torch_native"),
            refused_server_args=CPU_REFUSED,
            fuses_shared_experts=False,
            copies_router_scale=False,
            tensor_hash="sha256",
            pads_weights=True,
            has_device_memory=False,
            conflicts=ATTENTION_CONFLICTS,
        )
    return Platform(
        name="cuda",
        device="cuda",
        backend="nccl",
        ray_resource="GPU",
        server_module="megarl.serving.sglang_server",
        server_args=("--skip-server-warmup",),
        # By default it would take nearly all of the memory, and the ranks find none.
        shared_server_args=("--mem-fraction-static", "0.3"),
        offload_server_args=("--enable-memory-saver",),
        deterministic_server_args=("--enable-deterministic-inference",),
        deterministic_attention=("fa3", "fa4", "triton"),  # those of SGLang 0.5.21's with cached prefixes
        draws_by_rank=True,
        env=CUDA_ENV | {name: os.environ.get(name, value) for name, value in CUDA_SHARED.items()},
        conflicts=CUDA_CONFLICTS,
        has_transformer_engine=_installed("transformer_engine"),
        has_apex=_installed("apex") and _installed("amp_C"),
    )


def num_local_devices(platform: Platform) -> int | None:
    """Devices that a run may use on this machine; None where processes stand for devices and any number will do."""
    return cuda_device_count() if platform.name == "cuda" else None


def compute_capability(platform: Platform) -> tuple[int, int] | None:
    """Of this process's CUDA device, as (9, 0) of an H100; None where there is none."""
    if platform.name == "cuda":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_capability()
    return None


def peak_bytes(platform: Platform) -> int:
    """Most memory that this process has held, since its start or `reset_peak_bytes`: see `held_bytes` for what counts."""
    if platform.name == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    # Not getrusage's: that counts the memory of the process which this one was forked from, too.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def reset_peak_bytes(platform: Platform) -> None:
    """Let `peak_bytes` start again from what this process holds now."""
    if platform.name == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    Path("/proc/self/clear_refs").write_text("5")  # what the kernel calls resetting the peak of the resident set


def held_bytes(platform: Platform) -> int:
    """Memory that this process holds now: of its CUDA device, or resident where the device is the host itself."""
    if platform.name == "cuda":
        import torch

        return int(torch.cuda.memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def finish_copies(platform: Platform) -> None:
    """Wait until every copy between device and host that was started is done."""
    if platform.name == "cuda":
        import torch

        torch.cuda.synchronize()


def return_free_memory(platform: Platform, *, but_little: bool = False) -> None:
    """Give what this process has freed back to the device, or to the system where the device is the host itself.

    but_little: a host's only where it is much (core/heap.py): it is soon taken again.
    """
    if platform.name == "cuda":
        import torch

        torch.cuda.ipc_collect()  # what other processes had opened, and have let go of
        torch.cuda.empty_cache()
    elif not (but_little and is_little_freed()):
        trim()
