"""A step of demonstrations with images, from a file to a gradient: what transformers computes of the same files by itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from megarl.data.pack import assemble
from megarl.data.pack_rows import pack_sft
from megarl.data.row_images import RowImages
from megarl.data.sft import load_demonstrations
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import names_of_text
from megarl.recipe.supervised import SftData
from megarl.training.rank import Rank
from tests.support.tolerances import Tolerance
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_MOE, experts_apart, png, write_tiny_vision_model
from tests.training.seeing import seeing_spec, transformers_model

PLACE = {"type": "image"}
USER, ASSISTANT = "<|im_start|>user ", "<|im_end|><|im_start|>assistant "
END = "<|im_end|>"
# Each row of the file, and by hand its text, with what of it is learned in every second place.
ROWS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"prompt": "<image>+<image>", "response": "12", "images": ["a.png", "b.png"]},
        [f"{USER}<>+<>{ASSISTANT}", f"12{END}"],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [PLACE, {"type": "text", "text": "1+1"}]},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "+<image>"},
                {"role": "assistant", "content": "34"},
            ],
            "images": ["b.png", "c.png"],
        },
        [f"{USER}<>1+1{ASSISTANT}", f"2{END}", f"{USER}+<>{ASSISTANT}", f"34{END}"],
    ),
    ({"prompt": "1+2", "response": "3"}, [f"{USER}1+2{ASSISTANT}", f"3{END}"]),
    ({"prompt": "5+6", "response": "11", "images": "c.png"}, [f"{USER}<>5+6{ASSISTANT}", f"11{END}"]),
]
SIZES = {"a": (60, 90), "b": (130, 50), "c": (64, 64)}


def reference(folder: Path, images: Path) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over what is learned, and its gradients by the text part's names; images are resized by transformers."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model, process = transformers_model(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    mark = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    losses = []
    for row, texts in ROWS:
        names = row.get("images", [])
        opened = [Image.open(images / name) for name in ([names] if isinstance(names, str) else names)]
        pictures: dict[str, Any] = dict(process(images=opened, return_tensors="pt")) if opened else {}
        squares = iter([int(grid.prod()) // process.merge_size**2 for grid in pictures.get("image_grid_thw", ())])
        ids: list[int] = []
        learned: list[int] = []
        for place, text in enumerate(texts):
            first, *others = text.split("<>")
            whole = first + "".join(
                f"<|vision_start|>{'<|image_pad|>' * next(squares)}<|vision_end|>{o}" for o in others
            )
            ids += tokenizer(whole, add_special_tokens=False)["input_ids"]
            learned += [place % 2] * (len(ids) - len(learned))
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens, mm_token_type_ids=(tokens == mark).int(), **pictures).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        losses.append(each[torch.tensor(learned[1:]) == 1])
    loss = torch.cat(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {text: grad for text, name in names_of_text(named, folder).items() if (grad := named[name]) is not None}
    return float(loss), experts_apart(found)


@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3, QWEN3_MOE])
def test_loss_and_gradients_of_rows_are_those_of_transformers(
    rank: Rank, architecture: Any, tmp_path: Path, bounds: Tolerance
) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", architecture, seed=5)
    for name, size in SIZES.items():
        (tmp_path / f"{name}.png").write_bytes(png(*size, seed=ord(name)))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row, _ in ROWS))
    rows = load_demonstrations(file, folder, SftData(train=file), load_model_config(folder).vision).rows
    sizes = [Image.open(io.BytesIO(each)).size for each in RowImages().of(rows)[0]]
    assert sizes != [SIZES["a"], SIZES["b"]], "these are resized"
    [(plan, block)] = pack_sft(rows, RowImages().of(rows), num_shards=1, micro_batch_tokens=96)
    shard = assemble(plan, [block])
    assert len(shard.mini_batches[0].micro_batches) > 1
    rank.build("actor", seeing_spec(folder))
    metrics = rank.update("actor", shard, {})
    found = {name: tensor.cpu() for bucket in rank.engine("actor").gradients(1 << 16) for name, tensor in bucket}
    loss, gradients = reference(folder, tmp_path)
    assert metrics["sft/loss"] == pytest.approx(loss, rel=bounds.loss)
    assert found.keys() == gradients.keys()
    apart = {
        name: (found[name] - each).abs().max() / each.abs().max().clamp(min=1e-12) for name, each in gradients.items()
    }
    assert {name: each for name, each in apart.items() if not each < bounds.gradient} == {}
