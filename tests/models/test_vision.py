"""How images come to a model: sizes and positions as transformers has them, and what folders say of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.hf_files import check_weights
from megarl.models.rules import expected_tensors
from megarl.models.vision import PREPROCESSOR, PROCESSOR, Vision, load_vision, png_size
from tests.support.multimodal import in_newer_names
from tests.support.vision import (
    QWEN2,
    QWEN2_5,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    SQUARE,
    TINY,
    Architecture,
    png,
    write_tiny_vision_model,
)

FAMILY = {
    QWEN2: "Qwen2ForCausalLM",
    QWEN2_5: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
}
FAMILY |= {QWEN3_5: "Qwen3_5ForCausalLM", QWEN3_5_MOE: "Qwen3_5MoeForCausalLM"}
VISION = Vision(9, 7, 8, 28, 56 * 56, 28 * 28 * 1280, (16, 24, 24))
CLASSES = {
    QWEN2_5: ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLModel", "Qwen2_5_VLTextModel"),
    QWEN3: ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLModel", "Qwen3VLTextModel"),
}


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([28, 32]),
    st.sampled_from([(56 * 56, 28 * 28 * 1280), (65536, 16777216), (3136, 12845056), (4 * 32 * 32, 16 * 32 * 32)]),
)
@example(28 + 14, 28 * 3 + 14, 28, (3136, 12845056))  # halves, which Python rounds to the even
@example(5000, 25, 32, (3136, 12845056))
def test_sizes_are_transformers(width: int, height: int, square: int, pixels: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    assume(max(width, height) <= 200 * min(width, height))
    vision = Vision(9, 7, 8, square, *pixels, (16, 24, 24))
    rows, columns = smart_resize(height, width, square, *pixels)
    assert vision.fitted(width, height) == (columns, rows)
    assert vision.num_tokens(columns, rows) == columns * rows // square**2


def test_what_is_too_narrow_is_no_image() -> None:
    with pytest.raises(ValueError, match="2010 x 10 pixels: the longer side is more than 200 times the shorter one"):
        VISION.fitted(2010, 10)


Pieces = list[int | tuple[int, int]]


@given(st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 6), st.integers(1, 6))), min_size=1, max_size=8))
def test_positions_are_transformers(pieces: Pieces) -> None:
    """Texts and images of columns x rows of squares, one behind the other."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    tokens, sizes = laid_out(pieces)
    found = VISION.positions(np.array(tokens), sizes)
    if not sizes:
        assert np.array_equal(found, np.tile(np.arange(len(tokens)), (3, 1)))
        return
    ids = torch.tensor(tokens)[None]
    grids = torch.tensor([[1, height // 14, width // 14] for width, height in sizes])
    for model in (Qwen2_5_VLModel, Qwen3VLModel):
        vision_config = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
        mine = SimpleNamespace(config=SimpleNamespace(vision_config=vision_config))
        mine.get_vision_position_ids = lambda *given, of=model, me=mine, **named: of.get_vision_position_ids(
            me, *given, **named
        )
        expected, _ = model.get_rope_index(mine, ids, (ids == VISION.image_token).int(), grids)
        assert np.array_equal(found, expected[:, 0].numpy())


def laid_out(pieces: Pieces) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens, and the sizes of images. transformers takes neighbours for one image, and templates never make any."""
    tokens, sizes = list[int](), list[tuple[int, int]]()
    for piece in pieces:
        if isinstance(piece, int):
            tokens += [1] * piece
        else:
            tokens += [VISION.start_token, *[VISION.image_token] * (piece[0] * piece[1]), VISION.end_token]
            sizes.append((28 * piece[0], 28 * piece[1]))
    return tokens, sizes


def test_an_image_token_that_a_model_wrote_is_text() -> None:
    tokens, sizes = laid_out([2, (2, 1), 2])
    with_one = np.array([*tokens, VISION.image_token, 1])
    found = VISION.positions(with_one, sizes)
    assert VISION.squares(with_one, sizes).nonzero()[0].tolist() == [3, 4]
    assert (found[:, -2:] == found.max(axis=1)[:, None] - [1, 0]).all()


def test_fewer_tokens_than_squares_are_refused() -> None:
    tokens, sizes = laid_out([2, (2, 3), 2])
    with pytest.raises(ValueError, match="6 image tokens are there, and the images have 8"):
        VISION.positions(np.array(tokens), [*sizes, (56, 28)])
    with pytest.raises(ValueError, match="an image of 112 x 28 has 4 tokens, and fewer are there"):
        VISION.positions(np.array([9, 9, 1, 9, 9]), [(112, 28)])


@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3])
@pytest.mark.parametrize("share", [(16, 24, 24), (24, 20, 20)])
def test_frequencies_turn_by_the_axes_of_transformers(architecture: Architecture, share: tuple[int, int, int]) -> None:
    """Angles of three positions that differ, of a head of 128: which of them each frequency has."""
    interleaved = architecture == QWEN3
    vision = Vision(9, 7, 8, 28, 1, 1, share, interleaved)
    angles = torch.arange(3)[:, None, None, None].expand(3, 1, 1, 64).float()
    if interleaved:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

        expected = Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope(None, angles.clone(), list(share))[0, 0]
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_multimodal_rotary_pos_emb

        both = torch.cat([angles, angles], dim=-1)
        ones = torch.ones(1, 1, 1, 128)
        turned, _ = apply_multimodal_rotary_pos_emb(ones, ones, both, torch.zeros_like(both), list(share))
        expected = turned[0, 0, 0, :64]
        assert torch.equal(expected, turned[0, 0, 0, 64:])
    assert vision.turned_by(64) == expected.flatten().int().tolist()


@pytest.mark.parametrize("architecture", SQUARE)
@pytest.mark.parametrize("newer", [False, True])
def test_a_folder_is_the_model_of_its_text_part(architecture: Architecture, newer: bool, tmp_path: Path) -> None:
    """As published, or in the names that transformers' modules have now."""
    published = architecture == QWEN2_5 and not newer
    folder = write_tiny_vision_model(tmp_path / "model", architecture, tied=True, published=published)
    if newer:
        in_newer_names(folder)
    config = load_model_config(folder)
    assert config.architecture == FAMILY[architecture]
    assert config.tied_embeddings and config.eos_token_ids == (2,)
    assert config.vision == load_vision(folder)
    assert config.vision is not None and config.vision.square == SQUARE[architecture]
    assert config.vision.video_token == config.vision.image_token + 1
    assert config.vision.deepstack == len(TINY[architecture][2].get("deepstack_visual_indexes", ()))
    assert config.rope.kind == "default"
    index = check_weights(expected_tensors(config), folder, config)
    assert index.keys() >= expected_tensors(config).keys()


def test_a_folder_that_does_not_say_how_images_come_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json, which says at which size images come"):
        load_model_config(folder)
    vision = parse_model_config(raw, folder / "config.json").vision  # what a plan asks
    assert vision is not None and (vision.least_pixels, vision.most_pixels) == (56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize(("key", "value"), [("patch_size", 16), ("merge_size", 4), ("temporal_patch_size", 1)])
def test_a_folder_that_cuts_images_otherwise_than_its_tower_takes_them_is_refused(
    key: str, value: int, tmp_path: Path
) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, key: value}))
    wanted = (
        rf"preprocessor_config\.json: {key} is {value}; \d+, as the vision_config of config\.json has it, is wanted"
    )
    with pytest.raises(UserError, match=wanted):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("image_token_id", None, "image_token_id"),
        ("vision_config", {"patch_size": 0}, r"patch_size"),
        ("rope_scaling", {"type": "mrope", "mrope_section": [2, 3]}, "three counts of frequencies are wanted"),
        (
            "rope_scaling",
            {"type": "mrope", "mrope_section": [2, 3, 4]},
            "as many frequencies as a head has, 8, are wanted",
        ),
        ("model_type", "qwen3_vl", "'qwen2_5_vl', as the architecture has it, is wanted"),
    ],
)
def test_a_config_that_says_something_else_is_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", published=True)
    raw = json.loads((folder / "config.json").read_text())
    raw[key] = {**raw[key], **value} if key == "vision_config" else value
    with pytest.raises(UserError, match=said):
        parse_model_config(raw, folder / "config.json")


def test_the_size_of_a_png_is_in_its_header() -> None:
    assert png_size(png(30, 20)) == (30, 20)
    for data in (b"GIF89a", png(3, 2)[:20]):
        with pytest.raises(ValueError, match="no PNG"):
            png_size(data)


def test_sizes_are_read_where_transformers_reads_them(tmp_path: Path) -> None:
    """Folders that transformers 5 writes have them within the processor, and that goes before an older file."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = write_tiny_vision_model(tmp_path / "model")
    said = json.loads((folder / PREPROCESSOR).read_text())
    of_older = load_vision(folder)
    (folder / PROCESSOR).write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    assert load_vision(folder) == of_older
    newer = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": said | {"max_pixels": 5 * 28 * 28}}
    (folder / PROCESSOR).write_text(json.dumps(newer))
    for _ in range(2):
        assert load_vision(folder).most_pixels == 5 * 28 * 28
        assert load_model_config(folder).vision == load_vision(folder)
        assert Qwen2VLImageProcessorPil.from_pretrained(folder).size["longest_edge"] == 5 * 28 * 28
        (folder / PREPROCESSOR).unlink(missing_ok=True)


WITHOUT_TORCH = """
import sys
from pathlib import Path
from megarl.models.hf_config import load_model_config
print(load_model_config(Path(sys.argv[1])))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3_5_MOE])
def test_a_process_that_reads_such_a_folder_loads_no_torch_and_reads_the_same(
    tmp_path: Path, architecture: Architecture
) -> None:
    """Driver, coordinator and collectors would load it for seconds each."""
    write_tiny_vision_model(tmp_path, architecture)
    argv = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(load_model_config(tmp_path))
