"""Servers of tiny models that see images, and transformers' own model beside them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.core.types import FloatArray
from megarl.models.vision import Vision, load_vision, png_size
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.support.forked_servers import Copies
from tests.support.platforms import chosen
from tests.support.served import KEY, ON_DEVICES, START_S
from tests.support.vision import Architecture, write_tiny_vision_model

CHUNK = 16  # tokens of a prompt that a server computes at once: images are cut in two


@dataclass(frozen=True)
class Shown:
    """A prompt. ids: with a token for each square of its images, which are PNG files. sent: with one for each image."""

    ids: list[int]
    sent: list[int]
    images: list[bytes]


class HfVision:
    """A model that sees, under transformers, in float32."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.vision: Vision = load_vision(folder)
        self.model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
        self._squares = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def logprobs(self, ids: Sequence[int], images: Sequence[bytes]) -> FloatArray:
        """Log-probs of tokens 1.. given those before: [L - 1]."""
        tokens, seen = torch.tensor([list(ids)]), {}
        if images:
            pixels = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
            seen = dict(self._squares(images=pixels, return_tensors="pt", do_resize=False))
        marks = (tokens == self.vision.image_token).int()
        with torch.no_grad():
            logits = self.model(input_ids=tokens, mm_token_type_ids=marks, **seen).logits[0, :-1]
        found: FloatArray = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
        return found

    def shown(self, *parts: list[int] | bytes) -> Shown:
        """Tokens and PNG files in their order."""
        ids: list[int] = []
        sent: list[int] = []
        for part in parts:
            if isinstance(part, bytes):
                before, after = [self.vision.start_token], [self.vision.end_token]
                count = self.vision.num_tokens(*png_size(part))
                ids += [*before, *[self.vision.image_token] * count, *after]
                sent += [*before, self.vision.image_token, *after]
            else:
                ids += part
                sent += part
        return Shown(ids, sent, [part for part in parts if isinstance(part, bytes)])


@dataclass(frozen=True)
class Seeing:
    """A running server, its folder, and transformers' model of it."""

    server: ServerProcess
    folder: Path
    reference: HfVision

    @property
    def endpoint(self) -> ServerEndpoint:
        """Of the server."""
        return self.server.endpoint

    async def ask(self, client: ServerClient, shown: Shown, num_tokens: int = 1, first: int | None = None) -> Any:
        """The server's whole answer. first: of whose log-probs it tells, with those of all tokens behind; None: of the response."""
        urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in shown.images]
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 7}
        body: dict[str, Any] = {"input_ids": shown.sent, "sampling_params": sampling, "return_logprob": True}
        body |= {"image_data": urls} if urls else {}
        return await client.ask("/generate", body | ({} if first is None else {"logprob_start_len": first}))

    def off(self, shown: Shown, answer: Any) -> float:
        """How far the log-probs of a response are from transformers', up to where an image's token would begin another."""
        told = answer["meta_info"]["output_token_logprobs"]
        ids = [token for _, token, _ in told]
        marks = [place for place, token in enumerate(ids) if token == self.reference.vision.image_token]
        length = marks[0] if marks else len(ids)
        expected = self.reference.logprobs([*shown.ids, *ids[:length]], shown.images)[len(shown.ids) - 1 :]
        found = np.array([logprob for logprob, _, _ in told[:length]])
        return float(np.abs(found - expected).max(initial=0.0))


@contextmanager
def seeing(copies: Copies, folder: Path, architecture: Architecture, tp: int = 1) -> Iterator[Seeing]:
    """A server of a tiny model."""
    model = write_tiny_vision_model(folder / "model", architecture, seed=3)
    extra = ("--chunked-prefill-size", str(CHUNK), *(ON_DEVICES if chosen().has_device_memory else ()))
    spec = ServerSpec(model, "float32", tp=tp, kv_tokens=4096, context_length=1024, extra=extra)
    server = copies.server("server", spec, chosen(), ProcessPlace(folder / "logs", KEY))
    try:
        start_all([server], START_S)
        yield Seeing(server, model, HfVision(model, architecture))
    finally:
        server.stop()
