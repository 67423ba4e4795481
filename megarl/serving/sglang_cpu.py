"""`python -m megarl.serving.sglang_cpu <flags of sglang.launch_server>`: SGLang's real server without a GPU.

SGLang imports packages that exist only with CUDA, though its torch-native CPU path calls next to nothing of them.
Before SGLang loads, this adapter answers those imports: `sgl_kernel` with a small module, `triton` and `torchvision`
with packages whose names resolve and do nothing. Nothing of SGLang is changed. Written for SGLang 0.5.21; it refuses
any other. In deterministic mode SGLang's batch-invariant kernels have a stand-in, too (sglang_cpu_invariant.py). Parts of torch
that are only named while SGLang loads are stood in for meanwhile.

SGLang's scheduler and detokenizer start as copies of the process that has loaded it. Never used where CUDA is available:
the launcher there is megarl/serving/sglang_server.py.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megarl.core.loading import as_if_missing, distributions_as_asked, without_collection
from megarl.core.stand_in import StandInFinder, standing_in
from megarl.core.transformers_models import models_as_remembered

WRITTEN_FOR = "0.5.21"
LORA = "--enable-lora"
IMAGES = "--enable-multimodal"  # as `server_models` tells servers of models that see
DISABLE = "TORCH_COMPILE_DISABLE"  # torch's own: 1 for nothing is compiled
# What is to be compiled and never is, by SGLang's names: in the first two torch's compiler meets the stand-in for triton, and
# ends. In the third, which masks token ids where the vocabulary is sharded, it finds nothing to save, and each rank of a server
# would spend ten seconds of a core on it at its first request. So would whoever first asks for a repetition penalty, for the
# fourth: one product or quotient of each logit, to the same bits.
UNCOMPILED = (
    "biased_grouped_topk_impl",
    "swiglu_gpt_oss_sigmoid_alpha",
    "get_masked_input_and_mask",
    "apply_scaling_penalties",
)
# Packages of torch of which SGLang and transformers name decorators and classes as they load, for what no server here does:
# compile, shard by DTensor, attend by FlexAttention. They take more than half a second of each start, with sympy below them.
ONLY_NAMED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.nn.attention.flex_attention",
)
# Serves OpenAI's Responses API, and loads a tool protocol for it before the server answers anybody: SGLang goes on without.
RESPONSES = "sglang.srt.entrypoints.openai.serving_responses"


def _triton_names(module: ModuleType) -> None:
    """What is computed with while SGLang and torch load, in triton's own modules."""
    names: dict[str, dict[str, Any]] = {
        "triton": {
            "__version__": "3.0.0",
            "cdiv": lambda value, divisor: -(value // -divisor),
            "next_power_of_2": lambda value: 1 << max(value - 1, 0).bit_length(),
            "Config": type("Config", (), {"__init__": lambda self, *_, **__: None}),
        },
        # Used as annotations of kernels that are never compiled.
        "triton.language": {"constexpr": type("constexpr", (), {"__init__": lambda self, value=None: None})},
    }
    for name, value in names.get(module.__name__, {}).items():
        setattr(module, name, value)


def _missing(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def check_version() -> None:
    """Refuse to adapt an SGLang that this file was not written for."""
    found = importlib.metadata.version("sglang")
    if found != WRITTEN_FOR:
        sys.exit(
            f"megarl's CPU adapter was written for sglang {WRITTEN_FOR} and found {found}. Install the pinned version "
            "(requirements/), or check megarl/serving/sglang_cpu.py against the new one and change WRITTEN_FOR."
        )


def install(*, deterministic: bool = False) -> None:
    """Make SGLang's imports succeed in this process; packages that are installed are left alone."""
    check_version()
    cpu_matmul: Any = importlib.import_module("megarl.models.cpu_matmul")
    cpu_matmul.keep_few_kernels(cpu_matmul.KERNELS_OF_A_SERVER)
    if deterministic:
        _install_invariant()
    else:
        cpu_matmul.install()
    if _missing("sgl_kernel"):
        kernels = importlib.import_module("megarl.serving.sglang_cpu_kernels")
        kernels.register_operators()
        kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
        sys.modules["sgl_kernel"] = kernels
    if _missing("triton"):
        sys.meta_path.append(StandInFinder("triton", _triton_names))
    if _missing("torchvision"):
        _install_torchvision()


def _install_invariant() -> None:
    """Before SGLang looks for its batch-invariant kernels."""
    if not _missing("sgl_kernel"):
        sys.exit(
            "rollout.deterministic is not for a CPU with the package sgl_kernel: its kernels are chosen by the size of the "
            "batch. Uninstall it, or set rollout.deterministic to false."
        )
    # The seeded sampler is compiled otherwise, anew for each size of a batch, and not to the same bits.
    os.environ[DISABLE] = "1"
    sys.modules["sglang.srt.batch_invariant_ops"] = importlib.import_module("megarl.serving.sglang_cpu_invariant")


def _install_torchvision() -> None:
    """Import transformers first: it asks whether torchvision is there and must hear that it is not."""
    importlib.import_module("sglang")
    transformers = importlib.import_module("transformers")
    auto = importlib.import_module("transformers.models.auto")
    image = importlib.import_module("transformers.models.auto.image_processing_auto")
    # Without torchvision the class itself refuses to be touched; SGLang only registers vision models' processors in it.
    processor = type("AutoImageProcessor", (), {"register": staticmethod(lambda *_, **__: None)})
    for module in (transformers, auto, image):
        module.AutoImageProcessor = processor  # type: ignore[attr-defined]
    sys.meta_path.append(StandInFinder("torchvision"))


def _allow_attention() -> None:
    """Name the attention backend as a deterministic one, where SGLang has others name theirs.

    It computes each request alone. Cached prefixes are the same bits for requests of the same tokens, and the client sees to it
    that no others share them.
    """
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def draw_by_row() -> None:
    """Have SGLang's seeded sampler draw each row's token whatever the others of its batch ask for."""
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    drawn_by_row = importlib.import_module("megarl.serving.sglang_cpu_invariant").drawn_by_row
    setattr(sampler, name, drawn_by_row(sampler.sampling_from_probs_torch, getattr(sampler, name)))


def _finish_kernels() -> None:
    """Answer who waits for CUDA's kernels: there are none. SGLang does before and after it hashes its weights."""
    importlib.import_module("torch").cuda.synchronize = _nothing_to_wait_for


def _gate_by_torch() -> None:
    """Gate the shared expert of Qwen2-MoE without triton. SGLang has loaded the model's module by then, for others of Qwen."""
    model: Any = importlib.import_module("sglang.srt.models.qwen2_moe")
    model.fused_gate_sigmoid_mul_add = importlib.import_module("megarl.serving.sglang_cpu_kernels").gate_and_add


def _activate_in_the_models_dtype() -> None:
    """Hold the numbers of Apertus' activation in the model's dtype, as training does: SGLang has them in bfloat16."""
    torch: Any = importlib.import_module("torch")
    activation: Any = importlib.import_module("sglang.srt.layers.activation").XIELU
    begin = activation.__init__

    def made(module: Any, *values: Any, **options: Any) -> None:
        begin(module, *values, **{"dtype": torch.get_default_dtype(), **options})

    activation.__init__ = made


def _nothing_to_wait_for(device: Any = None) -> None:
    """What `torch.cuda.synchronize` does, where it would raise."""


def keep_mapped() -> None:
    """Keep the memory that the last bucket of weights came in mapped, for the next bucket comes in the same.

    torch forgets it with the bucket's last tensor; mapping it anew for each costs more than loading what is in it.
    """
    reductions: Any = importlib.import_module("torch.multiprocessing.reductions")
    rebuild = reductions.rebuild_storage_filename
    kept: list[Any] = []

    def rebuild_and_keep(*arguments: Any, **more: Any) -> Any:
        kept[:] = [rebuild(*arguments, **more)]
        return kept[0]

    reductions.rebuild_storage_filename = rebuild_and_keep


def _without_nccl() -> None:
    """Have ranks of a server exchange by gloo alone: SGLang takes NCCL on every device, where torch is a build for CUDA."""
    wrapper: Any = importlib.import_module("sglang.srt.distributed.device_communicators.pynccl_wrapper")

    def none() -> str:
        raise ValueError("there is no NCCL between ranks on CPUs")  # SGLang goes on without

    wrapper.find_nccl_library = none


def _forget_pinning() -> None:
    """Answer who wants memory that CUDA copies from at once: all memory is as good. SGLang's LoRA does, on every device."""
    torch: Any = importlib.import_module("torch")

    def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*values: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*values, **options)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def compile_late() -> None:
    """Have functions that torch is to compile compiled when they are first called.

    torch otherwise loads its compiler as soon as one is named. SGLang names dozens, and calls few of them here, if any. Where
    torch is told to compile nothing, it would load its compiler at the first call all the same, for two seconds of a core.
    """
    torch: Any = importlib.import_module("torch")
    at_once = torch.compile

    def late(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(late, **options)
        if isinstance(model, torch.nn.Module):
            return at_once(model, **options)
        if os.environ.get(DISABLE) == "1" or getattr(model, "__name__", "") in UNCOMPILED:
            return model
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(model)
        def call(*values: Any, **named: Any) -> Any:
            if not compiled:
                compiled.append(at_once(model, **options))
            return compiled[0](*values, **named)

        return call

    torch.compile = late


def load(*, deterministic: bool = False, lora: bool = False, images: bool = False) -> None:
    """Import the server. What is there then stays: nobody looks for garbage in it, and its copies share it.

    SGLang has a debugger that looks into Megatron wherever that is installed, and transformers losses for pictures that take
    scipy: without the two a server is up seconds earlier.
    """
    with (
        without_collection(),
        distributions_as_asked(),
        models_as_remembered(),
        as_if_missing("megatron"),
        as_if_missing("scipy"),
        as_if_missing("sklearn"),
        standing_in(ONLY_NAMED),
    ):
        sys.modules[RESPONSES] = None  # type: ignore[assignment]  # how Python writes down that there is none
        compile_late()
        install(deterministic=deterministic)
        importlib.import_module("sglang.srt.entrypoints.http_server")
        importlib.import_module("sglang.srt.model_executor.model_runner")
        _finish_kernels()
        _gate_by_torch()
        _activate_in_the_models_dtype()
        _without_nccl()
        if lora:
            _forget_pinning()
        if images:
            load_images()
        keep_mapped()
        if deterministic:
            _allow_attention()
            draw_by_row()
        attention = importlib.import_module("megarl.serving.sglang_cpu_attention")
        attention.install(None if deterministic else _prepare)
        gc.freeze()


def load_images() -> None:
    """Import what SGLang makes of images, behind the server itself."""
    importlib.import_module("megarl.serving.sglang_cpu_images").load(ONLY_NAMED)


def _prepare(model: Any) -> Callable[[], None]:
    """Have a loaded model's layers computed as suits a CPU; what is returned has to be called when a pass begins."""
    importlib.import_module("megarl.serving.sglang_cpu_linear").pack(model)
    begin: Callable[[], None] = importlib.import_module("megarl.serving.sglang_cpu_layers").shorten(model)
    return begin


def fork_children() -> None:
    """Have SGLang's own processes start as copies of this one, which has no threads yet.

    SGLang asks for spawned ones, which CUDA needs: each would import everything anew, some 15 s of a core.
    """
    start_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        start_method(method and "fork", force)

    multiprocessing.set_start_method = fork


if __name__ == "__main__":
    from megarl.serving.launcher import DETERMINISTIC, read_api_key, run_sglang_server

    api_key = read_api_key()
    load(deterministic=DETERMINISTIC in sys.argv, lora=LORA in sys.argv, images=IMAGES in sys.argv)
    fork_children()
    run_sglang_server(sys.argv[1:], api_key)
