"""What SGLang is told: of a server on one node, and of each part of one over several."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.platform import get_platform
from megarl.serving.server import FEWER_KERNELS, ProcessPlace, ServerProcess, ServerSpec, Span

KEY = "secret"
SPEC = ServerSpec(Path("/models/m"), "bfloat16", tp=16, extra=("--x", "1"))


def value(flags: list[str], name: str) -> str:
    assert flags.count(name) == 1, flags
    return flags[flags.index(name) + 1]


def test_a_server_on_one_node_hears_nothing_of_nodes() -> None:
    flags = SPEC.flags("10.0.0.1", 30000)
    assert value(flags, "--host") == "10.0.0.1" and value(flags, "--tp-size") == "16"
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(flags)
    assert flags[-2:] == ["--x", "1"], "the recipe's own flags come last, and so win"


def test_a_server_on_the_ranks_devices_leaves_them_memory_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    place = ProcessPlace(tmp_path, KEY, temp=tmp_path)
    alone, shared, offloaded = (
        ServerProcess(
            "server 0", replace(SPEC, shares_devices=shares, offloaded=offloaded), get_platform("cuda"), place
        )
        for shares, offloaded in ((False, False), (True, False), (True, True))
    )
    assert "--mem-fraction-static" not in alone.command.argv
    argv = shared.command.argv
    assert argv.index("--mem-fraction-static") < argv.index("--x"), "the last one wins"
    assert "--enable-memory-saver" in offloaded.command.argv and "--enable-memory-saver" not in argv
    assert shared.endpoint.shares_devices and not alone.endpoint.shares_devices
    assert KEY not in " ".join(argv)


def test_a_deterministic_server_is_told_so(tmp_path: Path) -> None:
    place, flag = ProcessPlace(tmp_path, KEY, temp=tmp_path), "--enable-deterministic-inference"
    for platform in (get_platform("cpu"), get_platform("cuda")):
        by_default = ServerProcess("server 0", SPEC, platform, place).command.argv
        argv = ServerProcess("server 0", replace(SPEC, deterministic=True), platform, place).command.argv
        assert flag in argv and flag not in by_default
        assert argv.index(flag) < argv.index("--x")


def test_a_server_of_fp8_begins_without_the_folders_weights() -> None:
    flags = replace(SPEC, quantized=True).flags("10.0.0.1", 30000)
    assert value(flags, "--load-format") == "dummy" and flags[-2:] == ["--x", "1"]
    assert json.loads(value(flags, "--json-model-override-args")) == {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    }
    assert "--load-format" not in SPEC.flags("10.0.0.1", 30000)


def test_parts_of_a_server_meet_at_the_first() -> None:
    parts = [replace(SPEC, span=Span(2, rank, "10.0.0.1:29000")) for rank in range(2)]
    flags = [part.flags(f"10.0.0.{index + 1}", 30000 + index) for index, part in enumerate(parts)]
    assert [value(each, "--node-rank") for each in flags] == ["0", "1"]
    for each in flags:
        assert value(each, "--nnodes") == "2" and value(each, "--tp-size") == "16"
        assert value(each, "--dist-init-addr") == "10.0.0.1:29000"
    assert [value(each, "--host") for each in flags] == ["10.0.0.1", "10.0.0.2"]


def test_a_server_makes_no_second_group_beside_that_of_a_weight_sync(tmp_path: Path) -> None:
    """Which torch does where the environment says DETAIL (2.13: `_new_process_group_helper`); no rank would come to it."""
    server = ServerProcess("server 0", SPEC, get_platform("cpu"), ProcessPlace(tmp_path, KEY, temp=tmp_path))
    assert server.command.env["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    server.stop()


def test_a_server_that_gives_memory_back_keeps_the_graphs_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang captures none where a user's environment asks to give that of graphs back as well, and ends."""
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
    server = ServerProcess("server 0", SPEC, get_platform("cuda"), ProcessPlace(tmp_path, KEY, temp=tmp_path))
    assert server.command.env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"
    server.stop()


def test_a_server_in_fp8_compiles_fewer_kernels_unless_a_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    in_fp8 = replace(SPEC, quantized=True)
    monkeypatch.delenv(FEWER_KERNELS, raising=False)
    assert in_fp8.env()[FEWER_KERNELS] == "1" and FEWER_KERNELS not in SPEC.env()
    monkeypatch.setenv(FEWER_KERNELS, "0")
    assert in_fp8.env()[FEWER_KERNELS] == "0"


def test_a_server_keeps_its_ports_until_it_has_ended(tmp_path: Path) -> None:
    server = ServerProcess("server 0", SPEC, get_platform("cpu"), ProcessPlace(tmp_path, KEY, temp=tmp_path))
    ports = [int(value(list(server.command.argv), flag)) for flag in ("--port", "--nccl-port")]
    assert len({*ports}) == 2
    for bindable in (False, True):
        for port in ports:
            with socket.socket() as other:
                assert _binds(other, port) == bindable
        server.stop()


def _binds(other: socket.socket, port: int) -> bool:
    try:
        other.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
