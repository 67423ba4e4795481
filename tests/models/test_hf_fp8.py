"""FP8 weights in blocks: every slice, at every layout, against a loop over bytes; and folders whose scales lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import Scales, TensorInfo, check_weights, read_index
from megarl.models.hf_read import HfReader, dequantized
from megarl.models.parts import num_parts, part_of
from megarl.models.rules import expected_tensors, rules
from tests.models.configs import cases, random_tensors
from tests.support.fp8 import dequantised, e4m3, quantised, slow_reference, write_fp8
from tests.support.tiny import write_tiny_model
from tests.support.whole_tensors import split

BLOCK = (16, 24)  # divides neither the heads nor the latents of the small model
TARGETS = st.sampled_from([torch.float32, torch.bfloat16])
NO_FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("fp8") / "model", "deepseek_v3", num_hidden_layers=2)
    return write_fp8(folder, BLOCK)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def stored(folder: Path, tensors: dict[str, Tensor], block: tuple[int, int]) -> dict[str, TensorInfo]:
    """Write tensors, FP8 and scales among them, and index them."""
    save_file(tensors, folder / "model.safetensors")
    index = read_index(folder)
    for name, info in list(index.items()):
        if f"{name}_scale_inv" in index:
            scales = Scales(index[f"{name}_scale_inv"], block)
            index[name] = TensorInfo(info.shape, info.dtype, info.file, info.offset, scales)
    return index


def test_every_byte_stands_for_what_torch_says() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        every.view(torch.float8_e4m3fn).float().nan_to_num(999),
        torch.tensor([e4m3(b) for b in range(256)]).nan_to_num(999),
    )


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=NO_FIXTURES)
def test_any_slice_is_that_of_the_slow_reference(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    block = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    blocks = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    seed, target = data.draw(st.integers(0, 2**31)), data.draw(TARGETS)
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=random)  # neither of the two NaN
    values = (values | torch.randint(0, 2, shape, dtype=torch.uint8, generator=random) << 7).view(torch.float8_e4m3fn)
    scales = (torch.randn(blocks, generator=random) * 0.01).to(data.draw(TARGETS))
    rows, columns = (slice(*sorted(data.draw(st.tuples(st.integers(0, s), st.integers(0, s))))) for s in shape)
    every_column = data.draw(st.booleans())
    index = stored(Path(mkdtemp(dir=tmp_path)), {"a": values, "a_scale_inv": scales}, block)
    expected = slow_reference(values, scales, block, target)[rows]
    expected = expected if every_column else expected[:, columns]
    found = torch.empty(expected.shape, dtype=target)
    with HfReader(index, check_finite=True) as reader:
        reader.read("a", rows, None if every_column else columns, found)
        assert reader.finish() == []
    assert same(found, expected)


@given(case=cases(), block=st.tuples(st.integers(1, 5), st.integers(1, 5)), target=TARGETS)
@settings(max_examples=40, deadline=None, suppress_health_check=NO_FIXTURES)
def test_every_part_of_every_layout_is_whole_again(
    tmp_path: Path, case: tuple, block: tuple[int, int], target: torch.dtype
) -> None:
    """Parts begin in the middle of blocks: read part by part and put together, a tensor is what the reference says."""
    config, layout = case
    tensors, expected = {}, {}
    for name, tensor in random_tensors(config).items():
        tensors[name] = tensor
        expected[name] = tensor.to(target)
        if tensor.dim() == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensor + 1, block)
            expected[name] = slow_reference(tensors[name], tensors[f"{name}_scale_inv"], block, target)
    index = stored(Path(mkdtemp(dir=tmp_path)), tensors, block)
    with HfReader(index, check_finite=False) as reader:
        for rule in rules(config, "torch"):
            parts = []
            for number in range(num_parts(rule, layout)):
                part = part_of(rule, number, num_parts(rule, layout))
                held = torch.zeros(part.shape, dtype=target)
                for run in part.runs:
                    rows = held[run.at : run.at + run.stop - run.start]
                    reader.read(rule.sources[run.source].name, slice(run.start, run.stop), part.columns, rows)
                parts.append(held)
            reader.finish()
            for name, tensor in split(rule, parts):
                assert same(tensor, expected[name]), name


def test_transformers_agrees_where_blocks_divide() -> None:
    """Elsewhere it refuses, or takes blocks of another size than the config's: it divides rows by scales."""
    values, scales = quantised(torch.randn(256, 384), (128, 128))
    whole = dequantized(values, scales, (128, 128), slice(0, 256), None)
    for dtype in (torch.float32, torch.bfloat16):
        assert same(whole.to(dtype), Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=dtype))


def test_a_value_that_is_no_number_is_noticed(tmp_path: Path) -> None:
    values, scales = quantised(torch.randn(4, 4), (2, 2))
    for tensors in (
        {"a": values, "a_scale_inv": scales.clone().fill_(float("nan"))},
        {"a": torch.full((4, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), "a_scale_inv": scales},
    ):
        with HfReader(stored(tmp_path, tensors, (2, 2)), check_finite=True) as reader:
            reader.read("a", slice(0, 4), None, torch.empty(4, 4))
            assert reader.finish() == ["a"]


def check(folder: Path) -> dict[str, TensorInfo]:
    config = load_model_config(folder)
    return check_weights(expected_tensors(config), folder, config)


def test_a_published_folder_is_read(folder: Path) -> None:
    index = check(folder)
    [weight] = [name for name in index if name.endswith("layers.1.mlp.experts.3.gate_proj.weight")]
    assert index[weight].scales is not None
    assert index[weight].scales.block == BLOCK
    assert index["model.norm.weight"].scales is None
    config = load_model_config(folder)
    expected = dequantised(folder, BLOCK, torch.bfloat16)
    with HfReader(index, check_finite=True) as reader:
        for name, shape in expected_tensors(config).items():
            target = torch.empty(shape, dtype=expected[name].dtype)
            reader.read(name, slice(0, shape[0]), None, target)
            reader.finish()
            assert same(target, expected[name]), name


WEIGHT = "model.layers.1.mlp.experts.3.gate_proj.weight"


def _change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _dequantise_one(tensors: dict[str, Tensor]) -> None:
    tensors[WEIGHT] = tensors[WEIGHT].bfloat16()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(f"{WEIGHT}_scale_inv"), f"without scales: {WEIGHT} is F8_E4M3, and there is no"),
        (
            lambda t: t.update({f"{WEIGHT}_scale_inv": torch.zeros(2, 2)}),
            "[2, 2] F32; blocks of 16 x 24 want [3, 3] F32",
        ),
        (lambda t: t.update({f"{WEIGHT}_scale_inv": torch.zeros(3)}), "[3] F32; blocks of 16 x 24 want [3, 3] F32"),
        (lambda t: t.update({f"{WEIGHT}_scale_inv": torch.zeros(3, 3, dtype=torch.int8)}), "is [3, 3] I8; blocks"),
        (_dequantise_one, f"not in the config: {WEIGHT}_scale_inv"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}), "no scale"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.uint8)}), f"{WEIGHT} is U8, supported are"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.float8_e5m2)}), f"{WEIGHT} is F8_E5M2, supported are"),
    ],
)
def test_scales_that_do_not_go_with_their_weights(
    edit: Callable[[dict[str, Tensor]], object], says: str, folder: Path
) -> None:
    _change(folder, edit)
    with pytest.raises(UserError) as error:
        check(folder)
    assert says.replace("no scale", "there is no model.norm.weight_scale_inv") in str(error.value)
    assert str(folder) in str(error.value)


def test_a_norm_has_no_blocks(folder: Path) -> None:
    norm = {
        "model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn),
        "model.norm.weight_scale_inv": torch.ones(4),
    }
    _change(folder, lambda tensors: tensors.update(norm))
    with pytest.raises(UserError, match=r"model\.norm\.weight is F8_E4M3, and \[64\] is no matrix"):
        check(folder)


def _config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def test_a_config_that_does_not_say_that_weights_are_quantised(folder: Path) -> None:
    _config(folder, quantization_config=None)
    with pytest.raises(UserError, match=r"is F8_E4M3, and config\.json has no quantization_config"):
        check(folder)


def test_a_config_that_says_quantised_of_weights_that_are_not(folder: Path) -> None:
    """As a folder is left whose weights were converted by hand: servers would read bfloat16 as FP8."""
    save_file(dequantised(folder, BLOCK, torch.bfloat16), folder / "model.safetensors")
    with pytest.raises(UserError, match=r"config\.json has a quantization_config, and no tensor is F8_E4M3"):
        check(folder)
    _config(folder, quantization_config=None)
    check(folder)
