"""A model is known by its config and weights, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.models.fingerprint import PIECE_BYTES, PIECES, fingerprint


def test_a_copy_is_the_same_and_any_change_is_another(tmp_path: Path) -> None:
    folder, copy = tmp_path / "model", tmp_path / "copy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = bytes(range(256)) * (2 * PIECES * PIECE_BYTES // 256)
    (folder / "model.safetensors").write_bytes(weights)
    shutil.copytree(folder, copy)
    seen = {fingerprint(folder)}
    assert fingerprint(copy) in seen
    changes = {
        "config.json": [b"{ }"],
        "model.safetensors": [b"\1" + weights[1:], weights[:-1] + b"\1", weights + b"\1", b"", weights[:100]],
    }
    for name, contents in changes.items():
        before = (copy / name).read_bytes()
        for content in contents:
            (copy / name).write_bytes(content)
            assert fingerprint(copy) not in seen
            seen.add(fingerprint(copy))
        (copy / name).write_bytes(before)
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    assert fingerprint(copy) not in seen
