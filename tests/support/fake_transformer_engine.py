"""A fake `transformer_engine`: names and parameters of the pinned version's source, and plain torch instead of kernels.

`install` before Megatron is imported: its own wrappers then build on this, and every call that they make is held against the
real signature. A name that the source lacks is missing here too, so that Megatron takes the way that it would take. The few
modules and functions that Megarl's layers are made of compute, as their documentation says; what else is asked of them than
Megarl asks is an assertion.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from tests.support.fused_adam import FakeFusedAdam
from tests.support.package_source import Definition, PackageSource

PACKAGE = "transformer_engine"


class Bare(Module):
    """A class of which Megatron here needs the name alone."""

    def __init__(self, **given: Any) -> None:
        super().__init__()


class Extra(Module):
    """What every module with weights keeps beside them in a state: nothing, as long as nothing is computed in FP8."""

    fp8 = fp8_calibration = False

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        """No bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Nothing to take."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing to make."""


class Linear(Extra):
    """Weight [out, in], cut over tp_size by its parallel mode."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.tp, self.parallel_mode = given["tp_size"], given["parallel_mode"]
        self.sequence_parallel = given["sequence_parallel"] and self.tp > 1
        rows = given["out_features"] // (self.tp if self.parallel_mode == "column" else 1)
        columns = given["in_features"] // (self.tp if self.parallel_mode == "row" else 1)
        self.weight = _part(_parameter((rows, columns), given))
        self.bias = _parameter((rows,), given) if given["bias"] else None
        assert not given["return_bias"]

    def apply_to(self, inp: Tensor) -> Tensor:
        """[s, ...]: gathered before a column-cut weight, scattered behind a row-cut one, where the sequence is cut."""
        if self.sequence_parallel and self.parallel_mode == "column":
            inp = torch.cat([inp] * self.tp)
        out = F.linear(inp, self.weight, self.bias)
        return out[: len(out) // self.tp] if self.sequence_parallel and self.parallel_mode == "row" else out

    def forward(self, **given: Any) -> Tensor:
        """Multiplied."""
        return self.apply_to(given["inp"])


class LayerNormLinear(Linear):
    """The same behind a norm, whose output it gives as well where it is asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert given["normalization"] == "RMSNorm"
        self.eps, self.offset = given["eps"], given["zero_centered_gamma"]
        self.layer_norm_weight = _parameter((given["in_features"],), given)
        self.return_layernorm_output = given["return_layernorm_output"]

    def forward(self, **given: Any) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Normalised, then multiplied."""
        seen = _normalised(given["inp"], self.layer_norm_weight, self.eps, self.offset)
        return (self.apply_to(seen), seen) if self.return_layernorm_output else self.apply_to(seen)


class GroupedLinear(Extra):
    """A weight for each group."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = given["num_gemms"], given["bias"]
        assert given["parallel_mode"] is None or given["tp_size"] == 1, "experts are cut by Megatron, not by this"
        for index in range(self.num_gemms):
            weight = _parameter((given["out_features"], given["in_features"]), given)
            self.register_parameter(f"weight{index}", _part(weight))

    def forward(self, **given: Any) -> Tensor:
        """inp: [tokens, in], in groups of m_splits rows."""
        groups = given["inp"].split(given["m_splits"])
        assert len(groups) == self.num_gemms
        return torch.cat([F.linear(rows, self.get_parameter(f"weight{index}")) for index, rows in enumerate(groups)])


class RMSNorm(Module):
    """Weight [hidden]."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        given |= given.pop("kwargs", {})
        self.eps, self.offset = given["eps"], given["zero_centered_gamma"]
        self.weight = _parameter((given["normalized_shape"] or given["hidden_size"],), given)

    def forward(self, **given: Any) -> Tensor:
        """As the input."""
        return _normalised(given["input"], self.weight, self.eps, self.offset)


class DotProductAttention(Module):
    """No parameters; causal, each packed sequence for itself."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        width = given["kv_channels"]
        self.key, self.value = width if isinstance(width, tuple) else (width, width)
        self.heads = given["num_attention_heads"] // given["tp_size"]
        self.scale = self.key**-0.5 if given["softmax_scale"] is None else given["softmax_scale"]

    def forward(self, **given: Any) -> Tensor:
        """[T, heads, key], [T, groups, key], [T, groups, value] -> [T, heads * value]."""
        assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal", given["attn_mask_type"]
        assert given["window_size"] is None
        query, key, value = (given[f"{name}_layer"] for name in ("query", "key", "value"))
        assert query.shape[1:] == (self.heads, self.key) and value.shape[2] == self.value, (query.shape, value.shape)
        sizes = given["cu_seqlens_q"].diff().tolist()
        parts = zip(*(tensor.split(sizes) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._one(*(part.transpose(0, 1) for part in sequence)) for sequence in parts])

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def _parameter(shape: tuple[int, ...], given: dict[str, Any]) -> Parameter:
    return Parameter(torch.empty(shape, dtype=given["params_dtype"], device=given["device"]))


def _part(weight: Parameter) -> Parameter:
    """Marked as a part of a tensor, which the real one says of each weight of a linear, also of those that are whole."""
    for mark, value in (("tensor_model_parallel", True), ("partition_dim", 0), ("partition_stride", 1)):
        setattr(weight, mark, value)
    return weight


def _normalised(inp: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = inp.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)
    return wide.to(inp.dtype)


class FusedAdam(FakeFusedAdam):
    """Of what the real one takes, what Megatron gives."""

    def __init__(self, **given: Any) -> None:
        taken = ("lr", "weight_decay", "betas", "eps", "adam_w_mode")
        super().__init__(given["params"], **{name: given[name] for name in taken})


def rotated(**given: Any) -> Tensor:
    """t: [T, heads, d], by angles [positions, 1, 1, r]; each packed sequence from position 0, halves against each other.

    What of a head is behind r passes as it is.
    """
    assert given["tensor_format"] == "thd" and given["fused"] and not given["interleaved"] and given["cp_size"] == 1
    inp, sizes = given["t"], given["cu_seqlens"].diff()
    angles = torch.cat([given["freqs"][: int(size), 0] for size in sizes])
    width = angles.shape[-1]
    part = inp[..., :width].float()
    first, second = part.chunk(2, dim=-1)
    turned = part * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned.to(inp.dtype), inp[..., width:]], dim=-1)


def permuted(**given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of inp [T, hidden] in the order of experts, their probs, and the way back. probs and routing_map: [T, experts]."""
    inp, chosen = given["inp"], given["routing_map"]
    rows = chosen.t().nonzero()[:, 1]
    assert len(rows) == given["num_out_tokens"], (len(rows), given["num_out_tokens"])
    return inp[rows], given["probs"].t()[chosen.t()], rows


def unpermuted(**given: Any) -> Tensor:
    """`permuted` undone: the sum of each token's rows, in float32."""
    assert given["merging_probs"] is None and given["probs"] is None and given["map_type"] == "mask"
    inp = given["inp"]
    total = torch.zeros(given["restore_shape"]).index_add(0, given["row_id_map"], inp.float())
    return total.to(inp.dtype)


def chunks_sorted(**given: Any) -> Tensor:
    """inp: chunks of split_sizes rows, in another order."""
    chunks = given["inp"].split(given["split_sizes"].tolist())
    return torch.cat([chunks[index] for index in given["sorted_index"].tolist()])


def chunks_sorted_with_probs(**given: Any) -> tuple[Tensor, Tensor]:
    """The same of rows and their probs."""
    probs = given.pop("probs")
    return chunks_sorted(**given), chunks_sorted(**{**given, "inp": probs})


def without_offload(**given: Any) -> tuple[Any, Any]:
    """A context that moves nothing, and what waits for nothing."""
    assert given["enabled"] is False
    return contextlib.nullcontext(), lambda tensor: tensor


def apply_to_lists(operation: Any, noop: Tensor, lists: list[list[Tensor]], *more: Any) -> Any:
    """What `multi_tensor_applier` is: an operation for many tensors at once."""
    return operation(0, noop, lists, *more)


def norm_of_all(chunk: int, noop: Tensor, lists: list[list[Tensor]], each: bool) -> tuple[Tensor, None]:
    """The Euclidean norm over all tensors."""
    assert not each
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().reshape(1), None


def scale_all(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    """The second list becomes the first, times the scale."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


MADE: dict[str, Any] = {
    "Linear": Linear,
    "LayerNormLinear": LayerNormLinear,
    "GroupedLinear": GroupedLinear,
    "RMSNorm": RMSNorm,
    "DotProductAttention": DotProductAttention,
    "FusedAdam": FusedAdam,
    "apply_rotary_pos_emb": rotated,
    "moe_permute_with_probs": permuted,
    "moe_unpermute": unpermuted,
    "moe_sort_chunks_by_index": chunks_sorted,
    "moe_sort_chunks_by_index_with_probs": chunks_sorted_with_probs,
    "get_cpu_offload_context": without_offload,
    "multi_tensor_applier": apply_to_lists,
    "multi_tensor_l2norm": norm_of_all,
    "multi_tensor_scale": scale_all,
}


class FakePackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package's modules, and makes what their names stand for."""

    def __init__(self, source: PackageSource) -> None:
        self.source = source
        self.used: set[str] = set()
        self._made: dict[tuple[str, str], Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Those that the wheel has."""
        if name.partition(".")[0] != PACKAGE or self.source.file(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=self.source.is_package(name))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Names are looked up when they are asked for."""
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: self._named(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""
        if module.__name__ == PACKAGE:
            module.__version__ = self.source.version  # type: ignore[attr-defined]

    def _named(self, module: str, name: str) -> Any:
        found = None if name.startswith("__") else self.source.find(module, name)
        if found is None:
            raise AttributeError(f"module '{module}' of {PACKAGE} {self.source.version} has no attribute '{name}'")
        if found.kind == "module":
            return importlib.import_module(found.module)
        key = (found.module, found.name)
        if key not in self._made:
            self._made[key] = self._make(found)
        return self._made[key]

    def _make(self, found: Definition) -> Any:
        self.used.add(f"{found.module}.{found.name}")
        if found.kind == "class":
            return self._class(found)
        behaviour = MADE.get(found.name, lambda **given: given)
        signature = self.source.signature(found) if found.kind == "function" else None
        return behaviour if signature is None else _bound(signature, behaviour)

    def _class(self, found: Definition) -> type:
        base = MADE.get(found.name, Bare)
        methods: dict[str, Any] = {"__module__": found.module}
        for method in ("__init__", "forward"):
            signature = self.source.signature(found, method)
            if signature is not None and hasattr(base, method):
                methods[method] = _bound(signature, getattr(base, method), own=True)
        return type(found.name, (base,), methods)


def _bound(signature: Any, behaviour: Callable[..., Any], *, own: bool = False) -> Callable[..., Any]:
    """Takes exactly what the signature takes; the behaviour gets all of it by name. own: the first one is `self`."""

    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        me = (arguments.pop(next(iter(arguments))),) if own else ()
        return behaviour(*me, **arguments)

    return call


def install() -> FakePackage:
    """Put the fake where `import transformer_engine` finds it. Raises RuntimeError where the source is not there."""
    assert PACKAGE not in sys.modules, "the real one is here"
    package = FakePackage(PackageSource("transformer-engine", PACKAGE))
    sys.meta_path.insert(0, package)
    return package
