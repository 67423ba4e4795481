"""Sequences with images, and what transformers computes of them with its own model, of PNG files and tokens alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.layout import Layout
from megarl.core.types import Column, MiniBatch, Shard
from megarl.models.hf_files import names_of_text
from megarl.models.multimodal import tower_names
from megarl.models.vision import Vision
from megarl.recipe.roles import Optimizer
from megarl.recipe.supervised import Dpo
from megarl.training.spec import RoleSpec, SftObjective
from tests.support.vision import experts_apart, png
from tests.training.pairs import margin_of, pair_shards, preference_loss
from tests.training.samples import Example, to_micro_batch

# Gradients stay whole, and weights as they are.
STANDSTILL = Optimizer(name="sgd", lr=1e-30, clip_grad=1e9)
WITH_TOWER = STANDSTILL.model_copy(update={"freeze_vision_tower": False})
WORDS = 80  # of the vocabulary, before the tokens of images


@dataclass(frozen=True)
class Pictured:
    """A sequence with its images."""

    example: Example
    images: tuple[bytes, ...]


def pictured(vision: Vision, pieces: list[int | tuple[int, int]], seed: int, *, written: bool = False) -> Pictured:
    """A sequence of random words, and of images of columns x rows of squares; its last words are the response.

    written: the model has written a token that stands for a square of an image, and it is none.
    """
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens += random.integers(4, WORDS, piece).tolist()
        else:
            columns, rows = piece
            images.append(png(columns * vision.square, rows * vision.square, seed + len(images)))
            tokens += [vision.start_token, *[vision.image_token] * (columns * rows), vision.end_token]
    if written:
        tokens[-2] = vision.image_token
    ids = np.array(tokens)
    mask = np.zeros(len(ids), np.float32)
    last = pieces[-1]
    assert isinstance(last, int)
    mask[-last:-1] = 1
    zeros = np.zeros(len(ids), np.float32)
    return Pictured(Example(ids, np.append(ids[1:], 0), mask, zeros, {}), tuple(images))


def some_pictured(vision: Vision) -> list[Pictured]:
    """Of several images, of one, of none, and of an image in front of everything."""
    return [
        pictured(vision, [5, (2, 3), 4, (3, 1), 9], 1),
        pictured(vision, [14], 2),
        pictured(vision, [(2, 2), 6], 3, written=True),
        pictured(vision, [2, (4, 2), 11], 4),
    ]


def pictured_shards(made: list[Pictured], dp: int = 1, micro_batches: int = 1) -> list[Shard]:
    """One mini-batch, dealt to dp shards, each cut into micro-batches; weights are the token-mean."""
    total = float(sum(each.example.mask.sum() for each in made))
    shards = []
    for index in range(dp):
        mine = made[index::dp]
        cuts = [mine[first::micro_batches] for first in range(micro_batches) if mine[first::micro_batches]]
        micros = []
        for cut in cuts:
            images = tuple(each.images for each in cut)
            micro = to_micro_batch([each.example for each in cut], total)
            micros.append(replace(micro, images=images if any(images) else None))
        shards.append(Shard((MiniBatch(tuple(micros)),)))
    return shards


def seeing_spec(folder: Path, layout: Layout = Layout(), *, tower: bool = False, **others: Any) -> RoleSpec:  # noqa: B008
    """A policy that learns nothing and keeps its gradients. tower: those of its vision tower too."""
    optimizer = WITH_TOWER if tower else STANDSTILL
    return RoleSpec(
        folder, "float32", optimizer=optimizer, objective=SftObjective(), layout=layout, total_steps=4, **others
    )


def transformers_model(folder: Path) -> Any:
    """The whole model in float32."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_logits(model: Any, folder: Path, vision: Vision, each: Pictured) -> Tensor:
    """[L, vocabulary]: of one sequence, from PNG files and tokens alone."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ids = torch.tensor(each.example.tokens)[None]
    options: dict[str, Any] = {}
    if each.images:
        process = Qwen2VLImageProcessorPil.from_pretrained(folder)  # which leaves sizes that fit as they are
        pictures = process(images=[Image.open(io.BytesIO(one)) for one in each.images], return_tensors="pt")
        kinds = torch.tensor(vision.squares(each.example.tokens, [Image.open(io.BytesIO(i)).size for i in each.images]))
        if kinds.sum() < (ids == vision.image_token).sum():
            # It takes every token for an image's square: what a model wrote goes in as its embedding.
            embedded = model.get_input_embeddings()(ids)
            return _by_embeddings(model, ids, kinds, embedded, pictures)
        options = {**pictures, "mm_token_type_ids": kinds.int()[None]}
    logits: Tensor = model(input_ids=ids, **options).logits[0]
    return logits


def _by_embeddings(model: Any, ids: Tensor, kinds: Tensor, embedded: Tensor, pictures: Any) -> Tensor:
    seen = model.model.get_image_features(pictures["pixel_values"], pictures["image_grid_thw"])
    features = torch.cat(list(seen.pooler_output))
    embedded = embedded.clone()
    embedded[0, kinds] = features
    places, _ = model.model.get_rope_index(ids, kinds.int()[None], pictures["image_grid_thw"])
    deep = getattr(seen, "deepstack_features", None)
    options = {} if deep is None else {"visual_pos_masks": kinds[None], "deepstack_visual_embeds": deep}
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=places, **options).last_hidden_state
    logits: Tensor = model.lm_head(hidden)[0]
    return logits


PREFERENCE = Dpo(beta=0.3, label_smoothing=0.1)


def paired_shards(
    made: list[Pictured], dp: int = 1, micro_batches: int = 1
) -> tuple[list[Shard], list[dict[str, Column]]]:
    """Neighbours as pairs, as `pair_shards` has them."""
    mini = [replace(each.example, columns={"ref_logprobs": said_before(each)}) for each in made]
    return pair_shards(mini, dp, micro_batches, scored=False, images=[each.images for each in made])


def said_before(each: Pictured) -> np.ndarray:
    """What a reference says of a sequence: [T]."""
    return np.linspace(-5, -4, len(each.example.tokens), dtype=np.float32)


def preferred(made: list[Pictured], logprobs: list[Tensor]) -> Tensor:
    """The mean loss of neighbours as pairs, by hand."""
    kept = [torch.tensor(each.example.mask) > 0 for each in made]
    said = [
        (each[keep], torch.tensor(said_before(one))[keep]) for each, one, keep in zip(logprobs, made, kept, strict=True)
    ]
    pairs = enumerate(zip(said[::2], said[1::2], strict=True))
    return torch.stack([preference_loss(PREFERENCE, *pair, margin=margin_of(at)) for at, pair in pairs]).mean()


def likely(made: list[Pictured], logprobs: list[Tensor]) -> Tensor:
    """Cross entropy, mean over responses."""
    mask = [torch.tensor(each.example.mask) for each in made]
    total = torch.stack([each.sum() for each in mask]).sum()
    return -torch.stack([(one * kept).sum() for one, kept in zip(logprobs, mask, strict=True)]).sum() / total


def reference(
    folder: Path,
    vision: Vision,
    made: list[Pictured],
    loss_of: Callable[[list[Pictured], list[Tensor]], Tensor] = likely,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of each sequence's labels, and the gradients of the loss, as `gradients_of` names them."""
    model = transformers_model(folder)
    logprobs = []
    for each in made:
        logits = transformers_logits(model, folder, vision, each)
        labels = torch.tensor(each.example.labels)
        logprobs.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    loss_of(made, logprobs).backward()  # type: ignore[no-untyped-call]
    return [each.detach() for each in logprobs], gradients_of(model, folder)


def gradients_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """Of transformers' model, by the text part's names; the tower's begin `visual.`."""
    newer = {name: parameter.grad for name, parameter in model.named_parameters()}
    names = names_of_text(newer, folder) | {f"visual.{part}": name for part, name in tower_names(newer).items()}
    return experts_apart({text: grad for text, name in names.items() if (grad := newer[name]) is not None})


def of_text(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the text part alone."""
    return {name: each for name, each in gradients.items() if not name.startswith("visual.")}


def scored_reference(folder: Path, vision: Vision, made: list[Pictured]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Values of each sequence's tokens, and the gradients of a critic's loss of neighbours as pairs, by the text part's names.

    The model below the head is transformers' own; returns are what `said_before` says.
    """
    whole = transformers_model(folder)
    head = load_file(folder / "model.safetensors")["score.weight"].requires_grad_()
    whole.lm_head = torch.nn.Identity()
    values = [transformers_logits(whole, folder, vision, each) @ head[0] for each in made]
    masks = [torch.tensor(each.example.mask) for each in made]
    total = torch.zeros(())
    for value, mask, each in zip(values, masks, made, strict=True):
        apart = (value - torch.tensor(said_before(each))) ** 2 / 2
        total = total + (apart * mask).sum() / mask.sum() / len(made)
    total.backward()  # type: ignore[no-untyped-call]
    assert head.grad is not None
    return [each.detach() for each in values], gradients_of(whole, folder) | {"score.weight": head.grad}
