"""States of linear attention in a server, by hand: bytes of a slot, slots, and what they leave of all else."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import parse_model_config
from megarl.placement.cluster import make_cluster
from megarl.placement.generation import rollout_seconds, step_model
from megarl.placement.memory import ServerBytes, server_bytes
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.placement.states import EACH, StatePool, state_bytes, state_pool
from tests.placement.samples import workload
from tests.placement.test_models_of_cost import servers
from tests.support.large import large_config, large_model

CONFIG = large_model("qwen3_5")
H100 = make_cluster("H100", 1)
# 24 layers: 32 heads of 128 x 128 in float32; three tokens of 2 x 16 x 128 + 32 x 128 channels in bfloat16.
STATE, CONVOLVED = 32 * 128 * 128, 3 * 8192
SLOT = 24 * (4 * STATE + 2 * CONVOLVED)
GIB = 2**30


def held(pool: StatePool | None = None, tp: int = 1, most_tokens: int | None = None) -> ServerBytes:
    return server_bytes(CONFIG, servers(8, tp, 0.8), H100, 2, most_tokens=most_tokens, pool=pool or StatePool())


def test_a_slot_has_the_states_and_the_last_tokens_of_all_linear_layers() -> None:
    assert SLOT == 51_511_296
    assert state_bytes(CONFIG, np.array([1, 4])).tolist() == [SLOT, SLOT / 4]
    assert state_bytes(CONFIG, 1, 2) == 24 * 2 * (STATE + CONVOLVED)
    # Of the eight other layers alone a token has keys and values: 2 x 4 heads x 256 elements.
    assert kv_bytes(CONFIG, np.array([1]), 2)[0] == 8 * 2 * 4 * 256 * 2
    assert not state_bytes(large_model("smollm3"), np.array([1])).any()


def test_slots_take_their_share_of_what_weights_leave() -> None:
    found = held()
    room = 0.8 * 79.5 * GIB - 2 * model_sizes(CONFIG).total
    slots = int((room * 0.9 / 1.9 - SLOT) / SLOT)
    assert slots == 462
    assert found.states[0] == (slots + 1) * SLOT and found.cache[0] == room - found.states[0]
    assert found.cache_tokens[0] == int((room - found.states[0]) / 32768)
    assert found.most_running[0] == slots // 5
    assert found.total[0] == pytest.approx(0.8 * 79.5 * GIB + 3 * GIB)
    # Fewer tokens of keys and values leave the slots as they are.
    told = held(most_tokens=1000)
    assert told.states[0] == found.states[0] and told.cache_tokens[0] == 1000


def test_slots_are_those_that_a_recipe_says() -> None:
    assert held(StatePool(slots=100)).states[0] == 101 * SLOT
    assert held(StatePool(slots=100)).most_running[0] == 20
    assert held(StatePool(slots=100, each=1), tp=4).states[0] == 101 * SLOT / 4
    assert held(StatePool(element_bytes=2)).most_running[0] >= 2 * held().most_running[0] - 4
    assert held(StatePool(slots=10**6)).cache_tokens[0] == 0


@pytest.mark.parametrize(
    ("args", "pool"),
    [
        ([], StatePool()),
        (["--mamba-ssm-dtype", "bfloat16", "--mamba-full-memory-ratio=0.5"], StatePool(2, None, 0.5)),
        (["--max-mamba-cache-size", "7", "--max-mamba-cache-size", "9"], StatePool(slots=9)),
        (["--disable-overlap-schedule"], StatePool(each=3)),
        (["--mamba-radix-cache-strategy", "extra_buffer_lazy"], StatePool(each=4)),
        (["--mamba-radix-cache-strategy", "extra_buffer", "--disable-overlap-schedule"], StatePool(each=4)),
        (["--disable-radix-cache"], StatePool(slots=64, each=1)),
        (["--disable-radix-cache", "--max-mamba-cache-size", "9"], StatePool(slots=9, each=1)),
    ],
)
def test_flags_of_a_server_say_how_states_are_kept(args: list[str], pool: StatePool) -> None:
    assert state_pool(args, 64) == pool


@pytest.mark.parametrize(
    "args", [["--mamba-ssm-dtype", "int8"], ["--max-mamba-cache-size"], ["--mamba-full-memory-ratio=x"]]
)
def test_flags_that_sglang_would_not_take_are_named(args: list[str]) -> None:
    with pytest.raises(UserError, match=rf"^rollout\.server_args says {args[0].partition('=')[0]}"):
        state_pool(args, 64)


def test_a_models_config_says_what_states_are_in() -> None:
    told = {dtype: large_config("qwen3_5") | {"mamba_ssm_dtype": dtype} for dtype in ("float32", "bfloat16", None)}
    read = {dtype: parse_model_config(config, Path("config.json")) for dtype, config in told.items()}
    sizes = {dtype: float(state_bytes(config, 1)) for dtype, config in read.items()}
    assert sizes == {"float32": SLOT, None: SLOT, "bfloat16": 24 * 2 * (STATE + CONVOLVED)}
    assert float(state_bytes(read["bfloat16"], 1, 4)) == SLOT  # a flag is above it


def test_a_running_sequence_has_as_many_slots_as_in_sglang() -> None:
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "srt" / "mem_cache" / "kv_cache_configurator.py"
    found = {
        node.targets[0].id.removeprefix("MAMBA_CACHE_"): ast.literal_eval(node.value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    base, more = found["SIZE_MAX_RUNNING_REQUESTS_RATIO"], "V2_ADDITIONAL_RATIO_"
    assert EACH["extra_buffer", True] == base + found[more + "OVERLAP"]
    assert EACH["extra_buffer_lazy", True] == base + found[more + "OVERLAP_LAZY"]
    assert EACH["extra_buffer", False] == base + found[more + "NO_OVERLAP"]
    assert EACH["no_buffer", False] == base


def test_no_more_sequences_run_at_once_than_have_states() -> None:
    work = workload(CONFIG, samples_per_prompt=64)

    def seconds(pool: StatePool) -> tuple[float, float]:
        found = rollout_seconds(CONFIG, servers(8, 1, 0.8), held(pool), work, H100)
        return float(found.running[0]), float(found.total[0])

    assert seconds(StatePool()) == (92, pytest.approx(seconds(StatePool(slots=462))[1], rel=0.01))
    assert seconds(StatePool(slots=50))[0] == 10 and seconds(StatePool(slots=50))[1] > seconds(StatePool())[1]
    assert seconds(StatePool(slots=4))[1] == np.inf


def test_a_decode_step_reads_and_writes_the_states_of_its_sequences() -> None:
    work = workload(CONFIG)
    step, half = (step_model(each, H100, 1, 1) for each in (work, workload(CONFIG, states=StatePool(element_bytes=2))))
    many = np.array([80.0])
    read = H100.device.memory_bytes_s * H100.rates.memory
    assert step(many, 100.0)[0] - half(many, 100.0)[0] == pytest.approx(80 * 2 * 24 * STATE * 2 / read)
    # A token of context is read in eight layers.
    assert step(many, 1100.0)[0] - step(many, 100.0)[0] == pytest.approx(80 * 1000 * 32768 / read)
