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
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.core.types import FloatArray
from megarl.models.multimodal import MULTIMODALS
from megarl.models.vision import Vision, load_vision, png_size
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.sync.held_piece import MLP_PADDING, VOCAB_PADDING
from tests.support.forked_servers import Copies
from tests.support.platforms import chosen
from tests.support.served import KEY, ON_DEVICES, START_S
from tests.support.vision import QWEN2_5, Architecture, experts_apart, write_tiny_vision_model

WIDE_COLUMNS = (".down_proj.weight", ".linear_fc2.weight")
CHUNK = 16  # tokens of a prompt that a server computes at once: images are cut in two


def filled(tensor: Tensor, multiple: int) -> Tensor:
    """With rows of zeros behind it, up to a multiple."""
    rows = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])


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
        self._multimodal = MULTIMODALS[architecture]
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

    def perturb(self, seed: int, *, tower: bool = False) -> None:
        """Move every weight of the text part, or of the tower, a little, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, tensor in self.sent_tower() if tower else self.text():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.03)

    def text(self) -> list[tuple[str, Tensor]]:
        """The text part's weights, by the names of a folder of its own."""
        named = ((self._multimodal.text_name(name), tensor) for name, tensor in self.model.named_parameters())
        return list(experts_apart({name: tensor for name, tensor in named if name is not None}).items())

    def sent_tower(self) -> list[tuple[str, Tensor]]:
        """The tower's weights, by the names by which a trainer sends those of one that learns."""
        named = self.model.named_parameters()
        return [(name.removeprefix("model."), tensor) for name, tensor in named if ".visual." in name]

    def tower(self) -> dict[str, Tensor]:
        """The tower's, by SGLang's names, as one rank holds them: gate and up in one, filled up as text's are."""
        multiple = MLP_PADDING if chosen().pads_weights else 1
        named = {
            name.removeprefix("model."): each for name, each in self.model.state_dict().items() if ".visual." in name
        }
        found = {}
        for name, tensor in named.items():
            if ".up_proj." in name:
                continue
            if ".blocks." in name and name.endswith(WIDE_COLUMNS):
                tensor = filled(tensor.T, multiple).T
            elif ".blocks." in name and any(each in name for each in (".gate_proj.", ".linear_fc1.")):
                tensor = filled(tensor, multiple)
            elif name == "visual.pos_embed.weight":
                tensor = filled(tensor, VOCAB_PADDING)
            if ".gate_proj." in name:
                tensor = torch.cat([tensor, filled(named[name.replace("gate_proj", "up_proj")], multiple)])
            found[name.replace(".gate_proj.", ".gate_up_proj.").replace(".attn.qkv.", ".attn.qkv_proj.")] = tensor
        return found

    def buckets(self, *, tower: bool = False) -> list[list[tuple[str, Tensor]]]:
        """The text part's weights in three buckets, as a trainer sends them. tower: the tower's in front of them."""
        items = [*(self.sent_tower() if tower else ()), *self.text()]
        size = -(-len(items) // 3)
        return [items[start : start + size] for start in range(0, len(items), size)]

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
        """The server's whole answer. first: the first token whose log-prob it tells; None: of the response."""
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
def seeing(
    copies: Copies, folder: Path, architecture: Architecture, tp: int = 1, *, tower_learns: bool = False
) -> Iterator[Seeing]:
    """A server of a tiny model."""
    model = write_tiny_vision_model(folder / "model", architecture, seed=3, published=architecture == QWEN2_5)
    extra = ("--chunked-prefill-size", str(CHUNK), *(ON_DEVICES if chosen().has_device_memory else ()))
    spec = ServerSpec(
        model, "float32", tp=tp, kv_tokens=4096, context_length=1024, tower_learns=tower_learns, extra=extra
    )
    server = copies.server("server", spec, chosen(), ProcessPlace(folder / "logs", KEY))
    try:
        start_all([server], START_S)
        yield Seeing(server, model, HfVision(model, architecture))
    finally:
        server.stop()
