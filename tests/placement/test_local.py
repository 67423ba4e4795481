"""Which row of the table this machine's devices are."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement import local

NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-PCIE-40GB": "A100-40",
    "NVIDIA A100-SXM-64GB": None,
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA GH200 480GB": None,
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20-141",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": None,
    "NVIDIA L4": "L4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": None,
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX 5000 Ada Generation": None,
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA GeForce RTX 5090 D v2": None,
    "Tesla T4": None,
}


@pytest.mark.parametrize(("model", "name"), NAMES.items())
def test_devices_are_known_by_what_the_driver_calls_them(
    model: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "0000:17:00.0" / "information"
    file.parent.mkdir()
    file.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    monkeypatch.setattr(local, "_DRIVER_FILES", tmp_path)
    assert local.device_name() == name
