"""Headers of safetensors files: read as the library reads them, or refused in one paragraph."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from megarl.core.errors import UserError
from megarl.models.hf_header import BITS, read_header
from tests.support.header_fuzz import judge, mutated

FOUR = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


def header(text: bytes | str, data: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_broken_header_is_read_as_the_library_reads_it_or_refused(tmp_path: Path, rng: random.Random) -> None:
    """bench/header_fuzz does 100,000 of them. No file that the library reads is refused."""
    _, content = mutated(rng)
    assert judge(content, tmp_path / "model.safetensors") != "refused by megarl alone"


def test_the_judge_sees_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that believes start offsets and forgets the ends fails at once."""

    def believing(path: Path) -> list[object]:
        found = read_header(path)
        return [type(each)(each.name, each.shape, each.dtype, each.offset + 1) for each in found]

    monkeypatch.setattr("tests.support.header_fuzz.read_header", believing)
    content = header(f'{{"a": {FOUR}}}', b"1234")
    with pytest.raises(AssertionError):
        judge(content, tmp_path / "model.safetensors")


def test_every_dtype_of_the_library_has_its_size() -> None:
    """The library names them all where it is given one that it does not know."""
    with pytest.raises(SafetensorError) as error:
        deserialize(header('{"a": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}}'))
    assert set(re.findall(r"`(\w+)`", str(error.value).split("expected one of")[1])) == set(BITS)
    for dtype, bits in BITS.items():
        text = f'{{"a": {{"dtype": "{dtype}", "shape": [8], "data_offsets": [0, {bits}]}}}}'
        assert len(dict(deserialize(header(text, bytes(bits))))["a"]["data"]) == bits


def test_offsets_are_those_of_the_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 2), "d": torch.randn(())}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    found = read_header(path)
    assert {each.name for each in found} == set(tensors)
    for each in found:
        assert each.shape == tuple(tensors[each.name].shape)
        expected = tensors[each.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[each.offset : each.offset + each.num_bytes] == expected


def _two(first: str, second: str) -> str:
    return f'{{"a": {{"dtype": "F32", "shape": [1], {first}}}, "b": {{"dtype": "F32", "shape": [1], {second}}}}}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header too small"),
        (b"abc", "header too small"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a pointer of Git LFS"),
        (header(b"{not json"), "invalid JSON in header"),
        (header("[]"), "invalid JSON in header"),
        (header('{"a": 3}'), "invalid JSON in header"),
        (header(b'{"\xff": 3}'), "invalid UTF-8 in header"),
        (header(f'{{"a": {FOUR}}}'), "cut off, or has bytes too many"),
        (header(f'{{"a": {FOUR}}}', bytes(5)), "cut off, or has bytes too many"),
        (header(FOUR.join(['{"a": ', "}"]).replace("[1]", "[2]"), bytes(4)), "invalid shape, data type, or offset"),
        (header(FOUR.join(['{"a": ', "}"]).replace("F32", "F33"), bytes(4)), "unknown variant `F33`"),
        (header(FOUR.join(['{"a": ', "}"]).replace("[1]", "[-1]"), bytes(4)), "integer `-1`"),
        (header(FOUR.join(['{"a": ', "}"]).replace("[1]", "[1.0]"), bytes(4)), "floating point `1.0`"),
        (header(FOUR.join(['{"a": ', "}"]).replace("[1]", "[true]"), bytes(4)), "boolean `true`"),
        (header(_two('"data_offsets": [0, 4]', '"data_offsets": [0, 4]'), bytes(4)), "invalid offset for tensor"),
        (header(_two('"data_offsets": [0, 4]', '"data_offsets": [2, 6]'), bytes(6)), "invalid offset for tensor"),
        (header(_two('"data_offsets": [0, 4]', '"data_offsets": [6, 10]'), bytes(10)), "invalid offset for tensor"),
        (header(f'{{"__metadata__": {{"a": 1}}, "a": {FOUR}}}', bytes(4)), "expected a string"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert judge(content, path) == "refused by both"
    with pytest.raises(UserError, match=re.escape(says)) as error:
        read_header(path)
    assert "Copy or export it again" in str(error.value)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_header(tmp_path / "nowhere.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        read_header(tmp_path)
