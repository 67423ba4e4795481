"""Decode attention for SGLang on a CPU, many requests at once: in the place of the loop over requests of `torch_native`.

SGLang keeps keys and values by token, wherever there was room. To attend, `torch_native` collects those of each request anew at
every step and in every layer, which costs more than attention itself. This backend keeps a second copy of the running
requests', a row each, in the order of their tokens: a step appends one token to each row, and neighbouring rows of about the
same length are attended to in one call. SGLang's own pool stays complete: prefill, shared prefixes, and whatever is not
covered here (sliding windows, cross attention, latent attention, other dtypes) read it as before.

Sinks, which `torch_native` does not know, are computed here request by request, whatever the mode (arXiv 2309.17453, gpt-oss).

A row is of a request as long as each decode step finds it one token longer. Prefill ends it; so does a step without it. The
copy takes no more memory than the pool itself; where it would, the loop serves. Not for deterministic mode: there each
request is computed alone. Written for SGLang 0.5.21, whose other choices go by the name `torch_native`: so this one has it too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from megarl.serving.sglang_cpu_rows import Decoder, Step, attend_with_sinks

OUTPUT_BIAS = "experts.down_proj_bias"


class SinkAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's torch_native backend, which knows sinks too, and layers with heads of their own."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        _fit_layers(self.token_to_kv_pool, runner.model)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """A layer's output, [T, heads x dim]. q: [T, heads x dim], k, v: [T, KV heads x dim]. Called by SGLang."""
        # Hunyuan's comes as [T x heads, dim], in which shape SGLang's backend would answer.
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        if sinks is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        new = forward_batch.extend_seq_lens.tolist()
        return self._with_sinks(q, k, v, layer, forward_batch, new, forward_batch.seq_lens.tolist(), sinks)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `forward_extend`, of one token a request."""
        if sinks is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        one = [1] * forward_batch.batch_size
        return self._with_sinks(q, k, v, layer, forward_batch, one, one, sinks)

    def _with_sinks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        new: list[int],
        rows: list[int],
        sinks: Tensor,
    ) -> Tensor:
        """new: of each request's tokens, its last, those that have queries here. rows: of the products.

        A prompt's products have the shape of all of it, as `torch_native` has them: how much was there before changes no bit.
        """
        pool, number = self.token_to_kv_pool, layer.layer_id
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
        # SGLang counts the tokens before one's own.
        before = layer.sliding_window_size
        window = before + 1 if before is not None and before >= 0 else None
        parts = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(new)
        requests = zip(parts, rows, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        outputs = []
        for part, count, request, length in requests:
            slots = self.req_to_token_pool.req_to_token[request, :length]
            query = torch.nn.functional.pad(part, (0, 0, 0, 0, count - len(part), 0))
            found = attend_with_sinks(query, keys[slots], values[slots], layer.scaling, sinks, window)
            outputs.append(found[-len(part) :])
        return torch.cat(outputs).flatten(1)


class BatchedAttention(SinkAttention):
    """The same, which decodes all requests of a batch in a few calls a layer, where there are no sinks."""

    def __init__(self, runner: Any, begin_pass: Callable[[], None]) -> None:
        super().__init__(runner)
        pool = self.token_to_kv_pool
        self._begin_pass = begin_pass
        self._decoder = Decoder(pool.size) if type(pool) is MHATokenToKVPool else None
        self._step: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called by SGLang before a forward pass."""
        super().init_forward_metadata(forward_batch)
        self._begin_pass()
        self._step = None
        if self._decoder is None or forward_batch.forward_mode.is_idle():
            return
        requests = forward_batch.req_pool_indices.tolist()
        if forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None:
            self._step = self._decoder.begin(requests, forward_batch.seq_lens.tolist())
        else:
            self._decoder.forget(requests)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """A layer's output, [B, heads x dim of values]. q: [B, heads x dim], k, v: [B, KV heads x dim]. Called by SGLang."""
        step, pool, number = self._step, self.token_to_kv_pool, layer.layer_id
        plain = save_kv_cache and sinks is None and _plain(layer)
        if step is None or self._decoder is None or not plain or k is None or v is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
        self._decoder.append(step, number, keys, values, self.req_to_token_pool.req_to_token, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._decoder.attend(step, number, query, layer.scaling).flatten(1)


def _fit_layers(pool: Any, model: torch.nn.Module) -> None:
    """Give each layer room for keys and values of its own heads: where all are in one pool, SGLang makes that of one size.

    Gemma 4's layers with windows have others than those without; by its second pool, which `torch_native` does not read, they
    would have theirs.
    """
    if type(pool) is not MHATokenToKVPool:
        return
    for layer in model.modules():
        if isinstance(layer, RadixAttention):
            place = layer.layer_id - pool.start_layer
            for buffers, heads, width in (
                (pool.k_buffer, layer.tp_k_head_num, layer.qk_head_dim),
                (pool.v_buffer, layer.tp_v_head_num, layer.v_head_dim),
            ):
                if buffers[place].shape[1:] != (heads, width):
                    buffers[place] = buffers[place].new_zeros(len(buffers[place]), heads, width)


def _plain(layer: Any) -> bool:
    """Whether a layer attends to all tokens of its own sequence."""
    window = layer.sliding_window_size
    return not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER and (window is None or window < 0)


def install(prepare: Callable[[Any], Callable[[], None]] | None) -> None:
    """Let SGLang's own registry answer with this backend.

    prepare: is given the model, which is loaded by then; what it returns is called before each pass. None is for deterministic
    mode: nothing is batched.
    """

    def make(runner: Any) -> SinkAttention:
        _norm_one_by_one(runner.model)
        _scale_routers(runner.model)
        return SinkAttention(runner) if prepare is None else BatchedAttention(runner, prepare(runner.model))

    register_attention_backend("torch_native")(make)
    _admit_windows()
    _admit_sinks()


def _norm_one_by_one(model: torch.nn.Module) -> None:
    """Have MiniMax-M2's queries be normed, and then its keys, by what SGLang has for one of them: for both it has CUDA's kernels.

    As it is written, and not compiled, which would be ten seconds of a core at the first request.
    """
    for layer in model.modules():
        if (both := getattr(layer, "qk_norm_impl", None)) is not None:
            both._forward_impl = functools.partial(_normed, layer)


def _normed(attention: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    norms = attention.q_norm, attention.k_norm
    queries, keys = (inspect.unwrap(type(norm).forward)(norm, each) for norm, each in zip(norms, (q, k), strict=True))
    return queries, keys


def _scale_routers(model: torch.nn.Module) -> None:
    """Have the inputs of Gemma 4's routers multiplied by their scale.

    SGLang gives it, at the first request, to a norm that heeds a weight on CUDA alone.
    """
    for layer in model.modules():
        if type(layer).__name__ == "Gemma4Router":
            layer.forward = functools.partial(_scored, layer)


def _scored(router: Any, x: Tensor) -> Tensor:
    logits: Tensor = router.proj(router.norm(x) * router.scale * router.root_size)[0]
    return logits


def _admit_windows() -> None:
    """Have SGLang take EXAONE 4 here: it lists the backends that know windows, which `torch_native` does."""
    hook: Any = importlib.import_module("sglang.srt.arg_groups.model_hook")
    views = hook.resolved_view

    def named(args: Any) -> Any:
        view = views(args)
        return type(view)(view, {"attention_backend": "triton"}) if view.attention_backend == "torch_native" else view

    hook.resolved_view = named


def _admit_sinks() -> None:
    """Have SGLang take gpt-oss here: it lists the backends that know sinks, and gives sinks two bytes whatever the model has.

    All tensor-parallel ranks but the first make the biases of experts' outputs zero where they find them, which on a CPU may be
    memory that the others read.
    """
    hook: Any = importlib.import_module("sglang.srt.arg_groups.model_hook")
    chosen = hook.attention_backends_of
    hook.attention_backends_of = lambda of: tuple("triton" if each == "torch_native" else each for each in chosen(of))
    models: Any = importlib.import_module("sglang.srt.models.gpt_oss")
    attention, model = models.GptOssAttention, models.GptOssForCausalLM
    make, load = attention.__init__, model.load_weights

    def made(self: Any, *positions: Any, params_dtype: torch.dtype, **options: Any) -> None:
        make(self, *positions, params_dtype=params_dtype, **options)
        self.sinks.data = self.sinks.data.to(params_dtype)

    def loaded(self: Any, weights: Iterable[tuple[str, Tensor]], *positions: Any, **options: Any) -> None:
        own = ((name, each.clone() if name.endswith(OUTPUT_BIAS) else each) for name, each in weights)
        load(self, own, *positions, **options)

    attention.__init__, model.load_weights = made, loaded
