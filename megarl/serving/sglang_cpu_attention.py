"""Decode attention for SGLang on a CPU, many requests at once: in the place of the loop over requests of `torch_native`.

SGLang keeps keys and values by token, wherever there was room. To attend, `torch_native` collects those of each request anew at
every step and in every layer, which costs more than attention itself. This backend keeps a second copy of the running
requests', a row each, in the order of their tokens: a step appends one token to each row, and neighbouring rows of about the
same length are attended to in one call. SGLang's own pool stays complete: prefill, shared prefixes, and whatever is not
covered here (sliding windows, cross attention, latent attention, other dtypes) read it as before.

A row is of a request as long as each decode step finds it one token longer. Prefill ends it; so does a step without it. The
copy takes no more memory than the pool itself; where it would, the loop serves. Not for deterministic mode: there each
request is computed alone. Written for SGLang 0.5.21, whose other choices go by the name `torch_native`: so this one has it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from megarl.serving.sglang_cpu_rows import Decoder, Step


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's torch_native backend, which decodes all requests of a batch in a few calls a layer."""

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
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """A layer's output, [B, heads x dim of values]. q: [B, heads x dim], k, v: [B, KV heads x dim]. Called by SGLang."""
        step, pool, number = self._step, self.token_to_kv_pool, layer.layer_id
        if step is None or self._decoder is None or not save_kv_cache or not _plain(layer) or k is None or v is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
        self._decoder.append(step, number, keys, values, self.req_to_token_pool.req_to_token, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._decoder.attend(step, number, query, layer.scaling).flatten(1)


def _plain(layer: Any) -> bool:
    """Whether a layer attends to all tokens of its own sequence."""
    window = layer.sliding_window_size
    return not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER and (window is None or window < 0)


def install(prepare: Callable[[Any], Callable[[], None]]) -> None:
    """Let SGLang's own registry answer with this backend.

    prepare: is given the model, which is loaded by then; what it returns is called before each pass.
    """

    def make(runner: Any) -> BatchedAttention:
        return BatchedAttention(runner, prepare(runner.model))

    register_attention_backend("torch_native")(make)
