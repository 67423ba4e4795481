"""A fake server that really receives: over gloo, or from shared memory, in this process. It keeps what it was sent."""

from __future__ import annotations

import asyncio
import base64
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.support.fake_sglang import FakeSglang


class Receiver(FakeSglang):
    """Serves the endpoints of a weight update. `refuse` and `hang` of the fake server script its failures."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.weights: dict[str, Tensor] = {}
        self.version: str | None = None
        self.session = False
        self.refuse_bucket: int | None = None
        self.hang_bucket: int | None = None
        self.refuse_group: int | None = None
        self.join_after_s = 0.0  # how long it takes until it looks for the others
        self._buckets = 0
        self.groups: dict[str, Any] = {}

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        """As SGLang answers, with a real group behind it."""
        if path == "/init_weights_update_group":
            await asyncio.sleep(self.join_after_s)
            return await self._try(self._join, body)
        if path == "/begin_weight_update":
            if self.session:
                return self._error("a weight-update session is already open; call end_weight_update() first")
            self.session = True
        elif path == "/end_weight_update":
            if not self.session:
                return self._error("no weight-update session is open; call begin_weight_update() first")
            self.session = False
        elif path in ("/update_weights_from_distributed", "/update_weights_from_tensor"):
            assert body["selector"] == "target", "a draft has weights of its own"
            self._buckets += 1
            if self._buckets == self.refuse_bucket:
                return self._error("out of memory")
            if self._buckets == self.hang_bucket:
                await self._forever.wait()
            return await self._try(self._receive if path.endswith("distributed") else self._load, body)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/destroy_weights_update_group":
            self.groups.pop(body["group_name"], None)
        return await super().respond(path, body)

    async def _try(self, work: Any, body: dict[str, Any]) -> web.Response:
        try:
            await asyncio.to_thread(work, body)
        except RuntimeError as error:
            return self._error(f"Failed: {error}")
        return web.json_response({"success": True, "message": "Success"})

    def _error(self, message: str) -> web.Response:
        return web.json_response({"success": False, "message": message}, status=400)

    def _join(self, body: dict[str, Any]) -> None:
        """What init_custom_process_group does, without registering the group with this process."""
        if len(self.groups) + 1 == self.refuse_group:
            raise RuntimeError("no such group")
        timeout = timedelta(seconds=20)
        name, size = body["group_name"], body["world_size"]
        place = TCPStore(body["master_address"], body["master_port"], size, False, timeout, wait_for_workers=False)
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, place)))
        self.groups[name] = dist.ProcessGroupGloo(store, body["rank_offset"], size, timeout)

    def _receive(self, body: dict[str, Any]) -> None:
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        group = self.groups[body["group_name"]]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if body["load_format"] is None:
            for work in [group.broadcast([tensor], options) for tensor in empty]:
                work.wait()
            self.weights.update(zip(body["names"], empty, strict=True))
            return
        assert body["load_format"] == "flattened_bucket"
        flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
        group.broadcast([flat], options).wait()
        for name, tensor in zip(body["names"], empty, strict=True):
            part, flat = flat[: tensor.nbytes], flat[tensor.nbytes :]
            self.weights[name] = part.view(tensor.dtype).reshape(tensor.shape)

    def _load(self, body: dict[str, Any]) -> None:
        """As each tensor-parallel rank does: SGLang's own unpickler is pickle's, with a list of what it lets through."""
        assert body["load_format"] == "flattened_bucket"
        for payload in body["serialized_named_tensors"]:
            found = pickle.loads(base64.b64decode(payload))
            for meta in found["metadata"]:
                part = found["flattened_tensor"][meta.start_idx : meta.end_idx]
                self.weights[meta.name] = part.view(meta.dtype).reshape(meta.shape).clone()
