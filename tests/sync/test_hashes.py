"""Servers hold what the trainer has, bit for bit: real servers' hashes of all their tensors, of every family and size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.errors import SyncError
from megarl.core.ports import free_port
from megarl.core.types import FloatArray
from megarl.models.hf_config import load_model_config
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerSpec
from megarl.serving.server_models import missing_settings
from megarl.sync import hashes
from megarl.sync.hash_report import refuse
from megarl.sync.hashes import ExpectedSums, Sums, all_sums, compare, differences
from tests.support.forked_ranks import Ranks
from tests.support.forked_servers import Copies
from tests.support.hashes import differing, tensors_in
from tests.support.platforms import chosen
from tests.support.served import NEEDS, ON_DEVICES, HfModel
from tests.support.sglang_held import sums_of
from tests.support.tiny import GEMMA4_EXPERTS, longrope, write_tiny_model
from tests.sync.hash_ranks import DEVICES, ROWS, Job
from tests.sync.receiver import Receiver

KEY, START_S = "key-of-the-tests-servers", 300.0
# SGLang asks its model before it says that it is well, and its attention on CPUs is not for latent attention: such a server
# holds weights, and can be asked for nothing else.
UNASKED = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
EXPERTS = {"mlp_only_layers": []}
TOKENS = [5, 6, 7, 8, 9, *range(40, 70)]
# As DeepSeek-V2 has it; without, SGLang builds none of it on a CPU.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    **{"mscale": 0.707, "mscale_all_dim": 0.707},
}
LONGROPE = longrope(0.75) | {"original_max_position_embeddings": len(TOKENS)}  # the longest that is the same everywhere
TRANSPORTS = ["broadcast", "shared_memory", DEVICES, "disk"]


@contextmanager
def servers_of(
    copies: Copies, folder: Path, model: Path, tps: Sequence[int], dtype: Any = "float32"
) -> Iterator[list[ServerEndpoint]]:
    """A server of each tensor-parallel size."""
    place = ProcessPlace(folder / "logs", KEY, env=UNASKED)
    with ExitStack() as stack:
        made = []
        for tp in tps:
            spec = ServerSpec(
                model, dtype, tp=tp, kv_tokens=2048, extra=ON_DEVICES if chosen().has_device_memory else ()
            )
            made.append(copies.server(f"server of tp {tp}", spec, chosen(), place))
            stack.callback(made[-1].stop)
        start_all(made, START_S)
        yield [server.endpoint for server in made]


async def asked(server: ServerEndpoint) -> FloatArray:
    """The server's log-probs of TOKENS 1.."""
    async with ServerClient(server) as client:
        return (await client.prompt_scores(TOKENS)).logprobs


def write_model(folder: Path, family: str, **overrides: Any) -> Path:
    """What SGLang asks of a config of DeepSeek's, and transformers does not write, is added."""
    write_tiny_model(folder, family, **overrides)
    if family in ("deepseek_v2", "deepseek_v3"):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | missing_settings(folder)))
    return folder


@pytest.mark.slow
@pytest.mark.needs(*NEEDS)
@pytest.mark.parametrize(
    ("family", "overrides", "tps"),
    [
        # Both sizes of qwen2, qwen3, qwen3_moe, llama, gemma3 and deepseek_v3, at every layout: bench/weight_sync_layouts.
        ("qwen2", {"vocab_size": 130, "tie_word_embeddings": True}, (1,)),
        ("llama", {"num_key_value_heads": 1}, (2,)),
        ("mistral", {}, (2,)),
        ("ministral3", {"vocab_size": 130, "num_key_value_heads": 1}, (2,)),
        ("qwen2_moe", {"mlp_only_layers": [], "shared_expert_intermediate_size": 72}, (2,)),
        ("phi3", {"num_key_value_heads": 1, "intermediate_size": 80}, (1,)),
        (
            "phi3",
            LONGROPE
            | {"num_key_value_heads": 1, "intermediate_size": 80, "vocab_size": 130, "tie_word_embeddings": True},
            (2,),
        ),
        ("mixtral", {}, (2,)),
        ("deepseek_v3", {}, (2,)),
        ("apertus", {"vocab_size": 130}, (2,)),
        ("deepseek_v2", {"vocab_size": 130, "rope_parameters": YARN}, (2,)),
        ("ernie4_5", {"vocab_size": 130}, (2,)),
        ("ernie4_5_moe", {"vocab_size": 130}, (2,)),
        ("hunyuan_v1_dense", {"vocab_size": 130}, (2,)),
        ("hunyuan_v1_moe", {"vocab_size": 130}, (2,)),
        ("glm4", {"intermediate_size": 80, "num_key_value_heads": 1}, (2,)),
        ("glm4_moe", {}, (2,)),  # by one rank: in bfloat16, below
        ("glm4_moe_lite", {}, (2,)),
        ("granite", {}, (2,)),
        ("granitemoe", {"vocab_size": 130}, (2,)),
        ("olmo2", {"num_key_value_heads": 4}, (2,)),
        ("olmo3", {"vocab_size": 130}, (2,)),
        ("exaone4", {"vocab_size": 130}, (2,)),
        ("smollm3", {"vocab_size": 130}, (2,)),
        ("seed_oss", {"vocab_size": 130}, (2,)),
        ("minimax_m2", {"vocab_size": 130}, (2,)),
        ("olmoe", {}, (1,)),
        ("gemma3", {"vocab_size": 130}, (2,)),
        ("gemma4", {"vocab_size": 130, "num_global_key_value_heads": 2}, (1, 2)),
        ("gemma4", GEMMA4_EXPERTS | {"vocab_size": 130, "num_global_key_value_heads": 2}, (1, 2)),
        ("gpt_oss", {"vocab_size": 130, "num_key_value_heads": 1}, (2,)),
    ],
)
def test_what_servers_hold_of_every_family_is_known_and_what_they_compute_is_the_models(
    family: str, overrides: dict[str, Any], tps: tuple[int, ...], copies: Copies, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family, **overrides)
    with servers_of(copies, tmp_path, model, tps) as servers:
        for server in servers:
            assert differing(server, model) == []
            if load_model_config(model).mla is None:
                assert np.abs(asyncio.run(asked(server)) - HfModel(model).logprobs(TOKENS)).max() < 1e-5
            # One number of one tensor, by the least that float32 knows.
            norm = "feedforward_layernorm" if family == "apertus" else "post_attention_layernorm"
            for name in (f"model.layers.1.{norm}.weight", "model.layers.2.self_attn.o_proj.weight"):
                tensors = dict(tensors_in(model))
                last = tensors[name].view(-1)[-1:]
                last.copy_(torch.nextafter(last, last + 1))
                engine_name = f"{name} of rank" if server.tp > 1 else name
                assert [each for each in differing(server, model, tensors=tensors) if engine_name in each] != []


def expected_of(model: Path, tensors: Mapping[str, torch.Tensor], tp: int) -> list[Sums]:
    sums = ExpectedSums(load_model_config(model), [tp], torch.float32, chosen())
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums.finish()[tp]


# Those of which no test asks a server of the other size; OLMoE's are of one rank alone.
@pytest.mark.slow
@pytest.mark.needs(*NEEDS)
@pytest.mark.parametrize(
    ("family", "overrides", "tp"),
    [
        ("mistral", {"vocab_size": 130}, 1),
        ("ministral3", {"num_key_value_heads": 1}, 1),
        ("mixtral", {"vocab_size": 130}, 1),
        ("granitemoe", {"vocab_size": 130}, 1),
        ("qwen2_moe", {"mlp_only_layers": [], "shared_expert_intermediate_size": 72}, 1),
        ("apertus", {"vocab_size": 130}, 1),
        ("deepseek_v2", {"vocab_size": 130, "rope_parameters": YARN}, 1),
        ("ernie4_5", {"vocab_size": 130}, 1),
        ("ernie4_5_moe", {"vocab_size": 130}, 1),
        ("hunyuan_v1_dense", {"vocab_size": 130}, 1),
        ("hunyuan_v1_moe", {"vocab_size": 130}, 1),
        ("glm4", {"intermediate_size": 80, "num_key_value_heads": 1}, 1),
        ("glm4_moe_lite", {}, 1),
        ("granite", {}, 1),
        ("olmo3", {"vocab_size": 130}, 1),
        ("exaone4", {"vocab_size": 130}, 1),
        ("smollm3", {"vocab_size": 130}, 1),
        ("seed_oss", {"vocab_size": 130}, 1),
        ("minimax_m2", {"vocab_size": 130}, 1),
        ("olmo2", {"num_key_value_heads": 4}, 1),
        ("gpt_oss", {"vocab_size": 130, "num_key_value_heads": 1}, 1),
        ("gpt_oss", {"vocab_size": 130, "num_key_value_heads": 1}, 2),  # of which a server says the same
    ],
)
def test_what_the_ranks_of_a_server_would_hold_is_known(
    family: str, overrides: dict[str, Any], tp: int, copies: Copies, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family, **overrides)
    (tmp_path / "ranks").mkdir()
    found = sums_of(copies, ServerSpec(model, "float32", tp=tp), tmp_path / "ranks")
    tensors = dict(tensors_in(model))
    assert differences(expected_of(model, tensors, tp), found) == []
    attention = "model.layers.1.self_attn"
    latent = load_model_config(model).mla is not None
    tensors[f"{attention}.{'o' if latent else 'q'}_proj.weight"].view(-1)[-1:] += 1
    [differs] = differences(expected_of(model, tensors, tp), found)
    # Some of SGLang's models hold queries apart from keys and values.
    assert differs.startswith(
        f"{attention}.o_proj.weight" if latent else (f"{attention}.qkv_proj", f"{attention}.q_proj")
    )


@pytest.mark.slow
@pytest.mark.needs(*NEEDS)
def test_servers_in_bfloat16_hold_what_rounding_makes_of_float32(copies: Copies, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm4_moe")  # of which they hold routers in float32
    with servers_of(copies, tmp_path, model, (1,), "bfloat16") as [server]:
        assert differing(server, model, torch.bfloat16) == []
        assert len(differing(server, model, torch.float32)) > 20


# All layouts of tests/training/invariance_cases, each by every transport: bench/weight_sync_layouts. Here those with ranks
# enough to tell the transports apart take all of them, the others some: each transport is that of two layouts at least.
LAYOUTS: list[tuple[str, dict[str, Any], dict[int, list[tuple[dict[str, Any], list[str]]]]]] = [
    (
        "qwen3",
        {"vocab_size": 130, "num_hidden_layers": 4},
        {
            1: [({}, ["shared_memory", "disk"])],
            2: [({"pp": 2, "vpp": 2}, ["broadcast", DEVICES]), ({"cp": 2}, ["shared_memory"])],
            4: [({"tp": 2, "pp": 2}, TRANSPORTS)],
        },
    ),
    (
        "qwen3_moe",
        EXPERTS,
        {2: [({"tp": 2, "ep": 2, "sequence_parallel": True}, ["disk"])], 4: [({"ep": 2, "etp": 2}, TRANSPORTS)]},
    ),
]


@pytest.mark.slow
@pytest.mark.needs(*NEEDS)
@pytest.mark.parametrize(("family", "overrides", "layouts"), LAYOUTS, ids=[family for family, _, _ in LAYOUTS])
def test_servers_of_any_size_hold_the_export_of_any_layout(
    family: str,
    overrides: dict[str, Any],
    layouts: dict[int, list[tuple[dict[str, Any], list[str]]]],
    ranks: Ranks,
    copies: Copies,
    tmp_path: Path,
) -> None:
    models = [write_model(tmp_path / f"model {seed}", family, seed=seed, **overrides) for seed in (1, 2)]
    start = write_model(tmp_path / "start", family, seed=3, **overrides)
    with servers_of(copies, tmp_path, start, (1, 2)) as servers:
        for world_size, each in layouts.items():
            job = Job(
                free_port(),
                world_size,
                [sizes for sizes, _ in each],
                [transports for _, transports in each],
                [str(model) for model in models],
                [asdict(server) for server in servers],
                str(tmp_path),
            )
            file, log = job.write(tmp_path / f"{world_size}.json"), tmp_path / f"{world_size}.log"
            assert ranks.run("tests.sync.hash_ranks", world_size, file, log=log) == ""
        rows = [json.loads(row) for row in (tmp_path / ROWS).read_text().splitlines()]
        wanted = [transport for each in layouts.values() for _, transports in each for transport in transports]
        assert [row["transport"] for row in rows] == wanted


def test_differences_name_tensor_rank_and_what_is_wrong() -> None:
    ours = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert differences(ours, ours) == []
    theirs = [{"a": "1", "b": "0"}, {"a": "3", "c": "5"}]
    assert differences(ours, theirs) == [
        "b of rank 0",
        "b of rank 1 (not there)",
        "c of rank 1 (nothing was sent for it)",
    ]
    assert differences(ours[:1], theirs[:1]) == ["b"]
    assert differences(ours, theirs[:1]) == ["hashes of 1 ranks in the place of 2"]


def test_a_difference_stops_the_run_with_names() -> None:
    refuse({}, 3)
    with pytest.raises(SyncError) as raised:
        refuse({"server 1": [f"t{number}" for number in range(5)]}, 3)
    assert "Weight version 3" in str(raised.value) and "server 1: 5 tensors, t0, t1, t2, t3, ..." in str(raised.value)


def test_hashes_do_not_depend_on_the_order_in_which_tensors_come(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    config, tensors = load_model_config(folder), list(tensors_in(folder))
    found = []
    for order in (tensors, tensors[::-1]):
        sums = ExpectedSums(config, [1, 2], torch.float32, chosen())
        for name, tensor in order:
            sums.add(name, tensor)
        found.append(sums.finish())
    assert found[0] == found[1]
    assert len(found[0][2]) == 2 and found[0][1][0] != found[0][2][0]


def test_what_is_missing_or_unknown_is_said(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    config, tensors = load_model_config(folder), dict(tensors_in(folder))
    taken: list[str] = []
    nobody = ServerEndpoint("nobody", "http://127.0.0.1:9", KEY)

    def buckets(names: list[str]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name in names:
            taken.append(name)
            yield [(name, tensors.get(name, torch.zeros(1)))]

    for names, message in ((list(tensors)[1:], "has no"), (["other", *tensors], "known to hold other")):
        taken.clear()
        with pytest.raises(SyncError, match=message):
            compare(buckets(names), config, [nobody], "float32", chosen(), 5.0)
        assert taken == names  # the other ranks wait for every bucket
    report = compare(buckets(list(tensors)), config, [nobody], "float32", chosen(), 5.0)
    assert report.num_tensors == 0 and report.wrong == {} and "no answer" in report.failed["nobody"]


def test_hashes_that_cannot_be_expected_leave_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks give their parts of every bucket, whoever takes them."""
    folder = write_tiny_model(tmp_path)
    tensors, taken = dict(tensors_in(folder)), []
    nobody = ServerEndpoint("nobody", "http://127.0.0.1:9", KEY)

    def unknown(*_: Any, **__: Any) -> None:
        raise SyncError("an engine that nobody knows")

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for each in tensors.items():
            taken.append(each[0])
            yield [each]

    monkeypatch.setattr(hashes, "held_by", unknown)
    with pytest.raises(SyncError, match="an engine that nobody knows"):
        compare(buckets(), load_model_config(folder), [nobody], "float32", chosen(), 5.0)
    assert taken == list(tensors)


def test_a_server_without_an_answer_is_told_from_one_with_wrong_weights() -> None:
    async def go() -> dict[str, Any]:
        async with Receiver("well") as well, Receiver("refusing") as refusing:
            refusing.refuse["/weights_checker"] = 400, "no"
            return await all_sums([well.endpoint, refusing.endpoint], 5.0)

    found = asyncio.run(go())
    assert "answered 400" in found["refusing"]
    assert "ranks" in found["well"]  # the fake knows no hashes: the answer has no such field


def test_a_server_that_does_not_say_which_rank_its_hashes_are_of_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: Any) -> dict[str, Any]:
        return {"ranks": [{"parallelism_info": [], "checksums": {"a": "0"}}]}

    monkeypatch.setattr("megarl.sync.hashes.ServerClient.ask", answer)
    found = asyncio.run(all_sums([ServerEndpoint("odd", "http://127.0.0.1:9", KEY)], 5.0))
    assert "odd (http://127.0.0.1:9) /weights_checker says of a rank nothing in parallelism_info" in found["odd"]
