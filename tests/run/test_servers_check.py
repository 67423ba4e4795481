"""Servers that somebody else started are asked before a device is taken, and only where a run may speak with them."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.core.platform import Platform, get_platform
from megarl.core.versions import pins
from megarl.models.config import Rope
from megarl.models.hf_config import load_model_config
from megarl.recipe.load import load_recipe
from megarl.recipe.rollout_rules import longest_sample
from megarl.recipe.run import Run
from megarl.run.plan import PlanOptions, run_plan
from megarl.run.servers_check import (
    _check_dtype,
    _check_hashes,
    check_alone,
    check_calls,
    check_servers,
    keep_mark,
    model_name,
    run_mark,
)
from megarl.serving import external
from megarl.serving.external import ExternalPool, ModelFacts
from megarl.serving.server_flags import SPARE_TOKENS
from tests.support.bad_input import Place, good_place
from tests.support.fp8_models import write_wide
from tests.support.tiny import write_tiny_model, write_tiny_qwen

KEY = "key-of-the-external-servers"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return good_place(tmp_path, write_tiny_qwen(tmp_path / "source" / "model"))


def checked(place: Place, *overrides: str, **how: bool) -> ExternalPool | None:
    recipe = load_recipe(place.recipe, overrides).recipe
    return check_servers(recipe, load_model_config(place.model), get_platform("cpu"), **how)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What servers would be asked."""
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(external, "check_external", lambda *arguments: told.append(arguments))
    monkeypatch.setenv("SERVERS_KEY", KEY)
    return told


def test_what_is_expected_of_a_server_is_what_the_recipe_has(place: Place, asked: list[tuple[Any, ...]]) -> None:
    servers = "rollout.servers={urls: [http://8.8.8.8:30000], key_env: SERVERS_KEY}"
    checked(place, servers)
    checked(place, servers, own_weights=True)
    [(urls, key, expected), (*_, untrained)] = asked
    assert (urls, key) == (("http://8.8.8.8:30000",), KEY)
    assert (expected.name, expected.architectures) == ("model", ("Qwen3ForCausalLM",))
    assert (expected.context, expected.sglang, expected.device) == (96 + SPARE_TOKENS, pins()["sglang"], "cpu")
    assert (expected.weight_version, untrained.weight_version) == ("", "0")
    assert isinstance(expected, ModelFacts) and len(expected.probe_ids) > 20 and not expected.routing


def test_nobody_is_asked_where_the_run_starts_its_own_or_is_elsewhere(
    place: Place, asked: list[tuple[Any, ...]]
) -> None:
    assert checked(place) is None
    assert checked(place, "rollout.servers={urls: [http://8.8.8.8:1], key_env: NOT_SET_HERE}", here=False) is None
    assert asked == []


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        (
            "{urls: [http://h:1], key_env: NOT_SET_HERE}",
            "`rollout.servers.key_env` names the environment variable NOT_SET_HERE",
        ),
        (
            "{urls: [http://127.0.0.1:1, http://8.8.8.8:1]}",
            "http://8.8.8.8:1 is at 8.8.8.8, which is neither loopback nor",
        ),
        ("{urls: ['http://[2001:4860:4860::8888]:1']}", "Start it with --api-key"),
        ("{urls: [http://no-such-host.invalid:1]}", "the host of http://no-such-host.invalid:1 has no address"),
    ],
)
def test_a_pool_that_anybody_could_reach_needs_a_key(
    place: Place, asked: list[tuple[Any, ...]], servers: str, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        checked(place, f"rollout.servers={servers}")
    assert says in str(caught.value) and "\n" not in str(caught.value) and asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.9", "[::1]"])
def test_loopback_and_private_addresses_do_without(place: Place, asked: list[tuple[Any, ...]], host: str) -> None:
    checked(place, f"rollout.servers.urls=['http://{host}:1']")
    [(_, key, _)] = asked
    assert key == ""


def test_a_model_of_the_hub_is_known_by_its_name() -> None:
    cached = Path("/home/u/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0a1b2c")
    assert [model_name(each) for each in (cached, Path("/models/Qwen3-8B"))] == ["Qwen3-8B"] * 2
    assert model_name(Path()) == Path.cwd().name


def test_a_plan_has_nothing_to_choose_for_them(place: Place) -> None:
    nowhere: Any = None
    with pytest.raises(UserError, match=r"put rollout\.servers=N behind the recipe"):
        run_plan(place.recipe, ["rollout.servers.urls=[http://127.0.0.1:1]"], nowhere, PlanOptions())


def test_fp8_is_for_trainers_with_servers_that_can_hold_it(place: Place) -> None:
    recipe = load_recipe(place.recipe, ["rollout.quantization=fp8", "model.dtype=bfloat16"]).recipe
    small, wide = (load_model_config(each) for each in (place.model, write_wide(place.root / "wide", "qwen3")))
    cpu, cuda = get_platform("cpu"), get_platform("cuda")
    check_servers(recipe, wide, cuda)
    for model, platform, evaluates, says in (
        (wide, cpu, False, r"SGLang cannot serve FP8 weights on cpu\. Set it to null, or run on cuda"),
        (small, cuda, False, r"cannot be held in blocks of 128 x 128"),
        (wide, cuda, True, r"has no trainer.*rollout\.quantization=null"),
    ):
        with pytest.raises(UserError, match=says):
            check_servers(recipe, model, platform, own_weights=evaluates)


def test_float32_is_for_servers_whose_attention_takes_it(place: Place) -> None:
    """SGLang does not look at the dtype when it chooses FlashAttention, which has none of 32 bits."""
    cpu, cuda = get_platform("cpu"), get_platform("cuda")

    def check(platform: Platform, *overrides: str) -> None:
        _check_dtype(load_recipe(place.recipe, overrides).recipe, platform)

    check(cpu, "model.dtype=float32")
    check(cuda, "model.dtype=bfloat16")
    check(cuda, "model.dtype=float32", "rollout.server_args=[--attention-backend, triton]")
    check(cuda, "model.dtype=float32", "rollout.servers.urls=[http://127.0.0.1:1]")
    with pytest.raises(UserError, match=r"`model\.dtype` is float32.*Set model\.dtype to bfloat16"):
        check(cuda, "model.dtype=float32")


def test_a_run_is_known_by_its_name_and_what_its_folder_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, moved = Run(name="a", dir=tmp_path), Run(name="a", dir=tmp_path / "moved")
    mark = run_mark(run)
    assert mark == run_mark(run) and mark.startswith("a-")
    others = {run_mark(Run(name="b", dir=tmp_path)), run_mark(moved)}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        assert len({mark, run_mark(run), *others}) == 4
    run.folder.mkdir()
    keep_mark(run)
    moved.folder.parent.mkdir()
    run.folder.rename(moved.folder)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    keep_mark(moved)
    assert run_mark(moved) == mark


def test_hashes_of_shared_experts_are_for_servers_that_keep_them_apart(place: Place) -> None:
    model = load_model_config(write_tiny_model(place.root / "deepseek", "deepseek_v3"))
    apart = "rollout.server_args=[--disable-shared-experts-fusion]"

    def check(platform: str, *overrides: str) -> None:
        _check_hashes(load_recipe(place.recipe, overrides).recipe, model, get_platform(platform))  # type: ignore[arg-type]

    check("cpu", "sync.verify=hash")
    check("cuda")
    check("cuda", "sync.verify=hash", apart)
    with pytest.raises(UserError, match=r"`sync.verify`: on cuda .* Add --disable-shared-experts-fusion"):
        check("cuda", "sync.verify=hash")


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_window_that_samples_outgrow_is_what_sglang_does_not_keep_to(place: Place, *, evaluates: bool) -> None:
    recipe = load_recipe(place.recipe, []).recipe
    longest = longest_sample(recipe)

    def check(family: str, **fields: object) -> None:
        model = load_model_config(write_tiny_model(place.root / f"{family}-{len(fields)}", family, **fields))
        check_servers(recipe, model, get_platform("cpu"), own_weights=evaluates)

    check("mistral", sliding_window=longest - 1)  # the last token is nobody's query
    check("gemma3", sliding_window=longest - 1)
    with pytest.raises(UserError, match=rf"attends to the last {longest - 2} tokens .* at most {longest - 1}, or take"):
        check("mistral", sliding_window=longest - 2, tie_word_embeddings=False)


def test_latents_are_served_where_sglang_attends_to_them(place: Place) -> None:
    recipe = load_recipe(place.recipe, ["model.dtype=bfloat16"]).recipe
    model = load_model_config(write_tiny_model(place.root / "latent", "deepseek_v3"))
    check_servers(recipe, model, get_platform("cuda"))
    with pytest.raises(UserError, match=r"DeepseekV3ForCausalLM has latent attention.*Generate on cuda"):
        check_servers(recipe, model, get_platform("cpu"))


def test_gated_delta_net_is_served_where_sglang_has_kernels_for_it(place: Place) -> None:
    model = load_model_config(write_tiny_model(place.root / "delta", "qwen3_5"))

    def check(platform: str, *said: str) -> None:
        check_servers(load_recipe(place.recipe, ["model.dtype=bfloat16", *said]).recipe, model, get_platform(platform))

    check("cuda")
    for platform, said, message in (
        (
            "cpu",
            [],
            r"Qwen3_5ForCausalLM has Gated DeltaNet, and SGLang .* on cpu by compiled kernels.*Generate on cuda",
        ),
        ("cuda", ["sync.verify=hash"], r"`sync\.verify`: how SGLang holds the linears of Qwen3_5ForCausalLM's"),
        ("cuda", ["rollout.quantization=fp8"], r"`rollout\.quantization`: which linears of Gated DeltaNet"),
    ):
        with pytest.raises(UserError, match=message):
            check(platform, *said)


def test_a_shared_expert_with_a_gate_is_served_with_a_head_and_hashed_as_it_is(place: Place) -> None:
    model = load_model_config(write_tiny_model(place.root / "gated", "qwen2_moe", mlp_only_layers=[]))
    cuda = load_recipe(place.recipe, ["model.dtype=bfloat16", "sync.verify=hash"]).recipe
    check_servers(cuda, model, get_platform("cuda"))
    with pytest.raises(UserError, match=r"Qwen2MoeForCausalLM with a head of its own"):
        check_servers(cuda, replace(model, tied_embeddings=True), get_platform("cuda"))
    own = 2 * model.hidden_size // model.num_heads
    with pytest.raises(
        UserError, match=rf"the heads of the model have {own} elements .* Qwen2MoeForCausalLM with {own // 2}"
    ):
        check_servers(cuda, replace(model, head_dim=own), get_platform("cuda"))
    mixtral = load_model_config(write_tiny_model(place.root / "mixtral", "mixtral", head_dim=own))
    with pytest.raises(UserError, match="MixtralForCausalLM with"):
        check_servers(cuda, mixtral, get_platform("cuda"))
    following = load_model_config(write_tiny_model(place.root / "next", "qwen3_next", mlp_only_layers=[]))
    probed = load_recipe(place.recipe, ["model.dtype=bfloat16"]).recipe
    check_servers(probed, following, get_platform("cuda"))
    for other, says in (
        (replace(following, linear_layers=frozenset({0})), "every second, third or so .* builds Qwen3NextForCausalLM"),
        (replace(following, tied_embeddings=True), "Qwen3NextForCausalLM with a head of its own"),
        (replace(following, moe_layers=frozenset({1, 2})), "layers 0 of the model have an MLP without experts"),
    ):
        with pytest.raises(UserError, match=says):
            check_servers(probed, other, get_platform("cuda"))
    yarn = replace(mixtral, head_dim=own // 2, rope=replace(mixtral.rope, kind="yarn", factor=4.0))
    with pytest.raises(UserError, match=r"scaled \(yarn .* MixtralForCausalLM with plain RoPE"):
        check_servers(cuda, yarn, get_platform("cuda"))
    check_servers(cuda, replace(yarn, rope=mixtral.rope), get_platform("cuda"))


def test_gpt_oss_is_served_in_its_configs_dtype_and_hashed_on_a_cpu_alone(place: Place, tmp_path: Path) -> None:
    folder = write_tiny_model(place.root / "oss", "gpt_oss")
    model, cpu, cuda = load_model_config(folder), get_platform("cpu"), get_platform("cuda")
    said = [f"model.path={folder}", "model.dtype=float32", "sync.verify=hash"]
    check_servers(load_recipe(place.recipe, said).recipe, model, cpu)
    for more, of, platform, message in (
        ([], replace(model, tied_embeddings=True), cpu, r"GptOssForCausalLM with a head of its own"),
        (["model.dtype=bfloat16"], model, cpu, r"the dtype in its config\.json is float32.*they are to have bfloat16"),
    ):
        with pytest.raises(UserError, match=message):
            check_servers(load_recipe(place.recipe, [*said, *more]).recipe, of, platform)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    on_cuda = [*said, "model.dtype=bfloat16"]
    with pytest.raises(UserError, match=r"`sync\.verify`: on cuda the kernels that SGLang chooses"):
        check_servers(load_recipe(place.recipe, on_cuda).recipe, model, cuda)
    on_cuda[-2] = "sync.verify=probe"
    check_servers(load_recipe(place.recipe, on_cuda).recipe, model, cuda)
    with pytest.raises(UserError, match=r"SGLang has no FP8 for the experts of the family gpt_oss"):
        check_servers(load_recipe(place.recipe, [*on_cuda, "rollout.quantization=fp8"]).recipe, model, cuda)
    with pytest.raises(UserError, match=r"has MXFP4 weights, and SGLang on cpu cannot serve them"):
        check_alone(folder, replace(model, mxfp4=True), cpu, "bfloat16")
    assert check_alone(folder, model, cpu, "bfloat16") == model.max_positions
    check_calls("--tool-parser", None, model)
    with pytest.raises(UserError, match=r"--tool-parser: nothing reads every call that GptOssForCausalLM writes"):
        check_calls("--tool-parser", "gpt-oss", model)


def test_exaone_is_served_where_sglang_counts_its_layers_and_norms_its_heads_alike(place: Place) -> None:
    recipe, cpu = load_recipe(place.recipe, []).recipe, get_platform("cpu")
    model = load_model_config(write_tiny_model(place.root / "exaone", "exaone4"))
    check_servers(recipe, model, cpu)
    for change, said in (
        ({"norm_eps": 1e-5}, r"rms_norm_eps in its config\.json is 1e-05.*Write 1e-06 there"),
        (
            {"local_layers": frozenset({1})},
            r"the layers with full attention are not every second.*builds Exaone4ForCausalLM in no",
        ),
        ({"head_dim": 32}, r"the heads of the model have 32 elements .* Exaone4ForCausalLM with 16"),
    ):
        with pytest.raises(UserError, match=said):
            check_servers(recipe, replace(model, **change), cpu)


@pytest.mark.parametrize(
    ("family", "tied", "said"),
    [
        ("mixtral", True, r"MixtralForCausalLM with a head of its own"),
        ("qwen3_moe", True, r"Qwen3MoeForCausalLM with a head of its own"),
        ("olmoe", True, r"OlmoeForCausalLM with a head of its own"),
        ("minimax_m2", True, r"MiniMaxM2ForCausalLM with a head of its own"),
        ("gemma3", False, r"SGLang does not load that of Gemma3ForCausalLM"),
    ],
)
def test_heads_that_sglang_would_leave_empty_are_refused(place: Place, family: str, tied: bool, said: str) -> None:
    recipe = load_recipe(place.recipe, []).recipe
    sparse = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    model = load_model_config(write_tiny_model(place.root / family, family, tie_word_embeddings=not tied, **sparse))
    check_servers(recipe, model, get_platform("cpu"))
    with pytest.raises(UserError, match=said):
        check_servers(recipe, replace(model, tied_embeddings=tied), get_platform("cpu"))


def test_glm_is_served_with_a_head_of_its_own(place: Place) -> None:
    recipe = load_recipe(place.recipe, []).recipe
    model = load_model_config(write_tiny_model(place.root / "glm", "glm4_moe"))
    check_servers(recipe, model, get_platform("cpu"))
    with pytest.raises(UserError, match=r"`model\.path`: the head of the model is its embedding"):
        check_servers(recipe, replace(model, tied_embeddings=True), get_platform("cpu"))
    latent = load_model_config(write_tiny_model(place.root / "flash", "glm4_moe_lite"))
    cuda = load_recipe(place.recipe, ["model.dtype=bfloat16"]).recipe
    check_servers(cuda, latent, get_platform("cuda"))
    for change, said in (
        ({"tied_embeddings": True}, r"Glm4MoeLiteForCausalLM with a head of its own"),
        ({"moe_layers": frozenset({0, 2})}, r"without experts is 1, behind layers with them"),
    ):
        with pytest.raises(UserError, match=said):
            check_servers(cuda, replace(latent, **change), get_platform("cuda"))
    with pytest.raises(UserError, match=r"Glm4MoeLiteForCausalLM has latent attention"):
        check_servers(recipe, latent, get_platform("cpu"))


def test_what_sglang_has_in_its_code_is_what_the_config_says(place: Place) -> None:
    recipe, cpu = load_recipe(place.recipe, []).recipe, get_platform("cpu")
    folders = {family: write_tiny_model(place.root / family, family) for family in ("olmoe", "granitemoe")}
    models = {family: load_model_config(folder) for family, folder in folders.items()}
    assert models["olmoe"].moe is not None
    for family, change, said in (
        ("olmoe", {"norm_eps": 1e-6}, r"rms_norm_eps is 1e-06 .*, and SGLang has 1e-05 for OlmoeForCausalLM"),
        ("olmoe", {"moe": replace(models["olmoe"].moe, normalize=True)}, r"norm_topk_prob is True .* SGLang has False"),
        ("olmoe", {"num_kv_heads": 2}, r"num_key_value_heads is 2 .* SGLang has 4"),
        ("granitemoe", {"rope": Rope(2.5)}, r"rope_theta is 2\.5 .* SGLang has 2\.0 for GraniteMoeForCausalLM"),
        ("granitemoe", {"rope": Rope(1e4, "linear", 4.0)}, r"GraniteMoeForCausalLM with plain RoPE"),
        ("granitemoe", {"head_dim": 32}, r"GraniteMoeForCausalLM with 16"),
    ):
        folder, model = folders[family], models[family]
        assert check_alone(folder, model, cpu, "float32") == model.max_positions
        with pytest.raises(UserError, match=rf"^`model\.path`: .*{said}"):
            check_servers(recipe, replace(model, **change), cpu)
        with pytest.raises(UserError, match=said):
            check_alone(folder, replace(model, **change), cpu, "float32")


@pytest.mark.parametrize("evaluates", [False, True])
def test_experts_in_some_layers_only_are_what_sglang_does_not_build(place: Place, *, evaluates: bool) -> None:
    recipe = load_recipe(place.recipe, []).recipe

    def check(name: str, family: str, **fields: object) -> None:
        model = load_model_config(write_tiny_model(place.root / name, family, num_hidden_layers=4, **fields))
        check_servers(recipe, model, get_platform("cpu"), own_weights=evaluates)

    check("everywhere", "qwen3_moe", mlp_only_layers=[])
    check("everywhere with a gate", "qwen2_moe", mlp_only_layers=[])
    for name, fields, says in (
        ("first", {"mlp_only_layers": [0]}, "layers 0 of the model"),
        ("step", {"mlp_only_layers": [], "decoder_sparse_step": 2}, "layers 0, 2 of the model"),
    ):
        for family in ("qwen3_moe", "qwen2_moe"):
            with pytest.raises(UserError, match=rf"`model\.path`: {says} have an MLP without experts"):
                check(f"{name}-{family}", family, **fields)


def test_a_model_alone_is_served_as_far_as_sglang_computes_it(tmp_path: Path) -> None:
    cpu, cuda = get_platform("cpu"), get_platform("cuda")
    plain = load_model_config(write_tiny_model(tmp_path / "plain"))
    moe = {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    experts = load_model_config(write_tiny_model(tmp_path / "experts", "qwen3_moe", **moe))

    assert check_alone(tmp_path, plain, cpu, "float32") == plain.max_positions
    assert check_alone(tmp_path, replace(plain, window=100), cpu, "bfloat16") == 101
    assert (
        check_alone(tmp_path, replace(plain, window=100, family="gemma3", tied_embeddings=True), cpu, "bfloat16")
        == plain.max_positions
    )
    short = replace(plain, rope=Rope(1e4, "longrope", original_positions=64))
    assert check_alone(tmp_path, short, cpu, "bfloat16") == 64
    for model, platform, dtype, says in (
        (replace(plain, head="score"), cpu, "bfloat16", "is a reward model: .* Serve a language model"),
        (replace(plain, fp8_block=(128, 128)), cpu, "bfloat16", "has FP8 weights, and SGLang on cpu cannot serve them"),
        (plain, cuda, "float32", "--dtype float32: on cuda"),
        (experts, cuda, "bfloat16", rf"^{tmp_path}: layers 0 of the model have an MLP without experts"),
    ):
        with pytest.raises(UserError, match=says):
            check_alone(tmp_path, model, platform, dtype)
