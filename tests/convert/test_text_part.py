import errno
import filecmp
import io
import json
import os
import resource
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import FileIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from megarl import command_line
from megarl.convert.text_part import into_multimodal, text_part
from megarl.core.errors import UserError
from megarl.models import tensor_copy
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import TensorInfo, are_same, check_weights
from megarl.models.rules import expected_tensors
from tests.support.multimodal import TINY, exchange_experts, in_newer_names, newer, text_logits, write_multimodal
from tests.support.privileges import without_privileges

IDS = torch.randint(4, 128, (2, 24), generator=torch.Generator().manual_seed(1))
FAMILIES = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4ForConditionalGeneration experts": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Mistral3ForConditionalGeneration": "mistral",
    "Mistral3ForConditionalGeneration ministral3": "ministral3",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "mistral",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "InternVLForConditionalGeneration": "qwen3",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Glm4vForConditionalGeneration": "glm4",
}
LLAVA, QWEN3 = "LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"
# Every architecture with and without a head of its own, in both generations of names and in several files.
CASES = [(architecture, tied, how) for architecture in TINY for tied, how in ((False, "older"), (True, "newer"))]
CASES += [
    ("Qwen3VLMoeForConditionalGeneration", False, "published"),
    ("Gemma3ForConditionalGeneration", True, "sharded"),
    (QWEN3, False, "sharded"),
]


def make(folder, architecture, tied, how):
    saving = {"max_shard_size": "40KB"} if how == "sharded" else {}
    write_multimodal(folder, architecture, tied=tied, **saving)
    if how == "newer":
        in_newer_names(folder)
    if how == "published":
        exchange_experts(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A multimodal folder, and its text part."""
    folder = tmp_path_factory.mktemp("llava")
    make(folder / "whole", LLAVA, False, "older")
    take(folder / "whole", folder / "text")
    return folder


@pytest.fixture
def copied(llava, tmp_path):
    """Both, to change them."""
    for name in ("whole", "text"):
        shutil.copytree(llava / name, tmp_path / name)
    return tmp_path


def take(source, target, *, force=False):
    return text_part(source, target, force=force, console=Console(file=io.StringIO()))


def put(text, source, target):
    return into_multimodal(text, source, target, force=False, console=Console(file=io.StringIO()))


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change(folder, **keys):
    """Set keys of a config.json; None removes one."""
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def command(*words):
    out, error, code = io.StringIO(), io.StringIO(), 0
    argv = ["megarl", "convert", *map(str, words)]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(error):
        try:
            command_line.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), " ".join(error.getvalue().split())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("architecture", "tied", "how"), CASES)
def test_there_and_back(tmp_path, architecture, tied, how):
    whole, text, trained = make(tmp_path / "whole", architecture, tied, how), tmp_path / "text", tmp_path / "trained"
    take(whole, text)

    config = load_model_config(text)
    assert (config.family, config.tied_embeddings) == (FAMILIES[architecture], tied)
    check_weights(expected_tensors(config), text, config)
    assert filecmp.cmp(whole / "tokenizer.json", text / "tokenizer.json", shallow=False)
    assert (len(list(text.glob("*.safetensors"))) > 1) == (how == "sharded")
    assert {tensor.dtype for tensor in tensors(text).values()} == {torch.bfloat16}
    expected = text_logits(whole, IDS)
    assert expected.std() > 0.5 and torch.equal(text_logits(text, IDS), expected)

    put(text, whole, tmp_path / "same")
    assert names(tmp_path / "same") == names(whole)
    assert filecmp.cmpfiles(whole, tmp_path / "same", names(whole), shallow=False)[0] == names(whole)

    for file in text.glob("*.safetensors"):
        generator = torch.Generator().manual_seed(3)
        shift = lambda tensor: tensor + 0.1 * torch.randn(tensor.shape, generator=generator).bfloat16()  # noqa: B023, E731
        save_file({name: shift(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    put(text, whole, trained)
    before, after, ours = tensors(whole), tensors(trained), tensors(text)
    if "VLMoe" in architecture:
        assert ours["model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (24, 64)
        ours = {
            name: each.mT if how == "published" and each.dim() == 3 else each for name, each in stacked(ours).items()
        }
    assert before.keys() == after.keys()
    for name in before:
        part = newer(name).removeprefix("model.language_model.") if "language_model" in newer(name) else name
        is_text = "language_model" in newer(name) or newer(name).startswith("lm_head.")
        wanted = (
            ours[f"model.{part}" if "language_model" in newer(name) else "lm_head.weight"] if is_text else before[name]
        )
        assert torch.equal(after[name], wanted), name
    learned = text_logits(trained, IDS)
    assert torch.equal(learned, text_logits(text, IDS)) and (learned - expected).abs().max() > 0.1


@pytest.mark.parametrize(("of_whole", "of_text"), [("one", "one"), ("one", "apart"), ("apart", "one")])
def test_experts_in_one_tensor_and_one_by_one(tmp_path, of_whole, of_text):
    """Published folders have them in one tensor, and those that transformers or megarl wrote one by one."""
    whole, text = make(tmp_path / "whole", "Qwen3_5MoeForConditionalGeneration", False, "older"), tmp_path / "text"
    take(whole, text)
    for folder, form in ((whole, of_whole), (text, of_text)):
        for file in folder.glob("*.safetensors"):
            found = {"one": stacked, "apart": one_by_one}[form](load_file(file))
            save_file(found, file, {"format": "pt"})
    before = tensors(whole)
    assert any(".experts.0." in name for name in before) == (of_whole == "apart")
    assert any(".experts.0." in name for name in tensors(text)) == (of_text == "apart")
    for file in text.glob("*.safetensors"):
        save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    put(text, whole, tmp_path / "trained")
    assert tensors(tmp_path / "trained").keys() == before.keys()
    for name, tensor in tensors(tmp_path / "trained").items():
        assert torch.equal(tensor, before[name] * (1 if "visual" in name else 2)), name


def one_by_one(found):
    """Tensors of all experts as those of each one."""
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    result = {}
    for name, tensor in found.items():
        prefix, _, kind = name.rpartition(".")
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            result[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = zip(kinds[kind], own.chunk(len(kinds[kind])), strict=True)
            result |= {f"{prefix}.{expert}.{part}.weight": rows.contiguous() for part, rows in parts}
    return result


def stacked(found):
    """Tensors of each expert as those of all."""
    result = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in found if ".experts.0." in name}:
        own = lambda kind: [found[f"{prefix}.experts.{e}.{kind}.weight"] for e in range(4)]  # noqa: B023, E731
        gates = [torch.cat(pair) for pair in zip(own("gate_proj"), own("up_proj"), strict=True)]
        result |= {f"{prefix}.experts.gate_up_proj": torch.stack(gates)}
        result |= {f"{prefix}.experts.down_proj": torch.stack(own("down_proj"))}
    return result | {name: tensor for name, tensor in found.items() if name.endswith("_proj") and ".experts." in name}


def test_config_is_what_transformers_understands(tmp_path):
    """A published config leaves out what transformers fills; text parts of Qwen2.5-VL lie at the top of it."""
    whole = make(tmp_path / "whole", "Qwen2_5_VLForConditionalGeneration", True, "older")
    raw = json.loads((whole / "config.json").read_text())
    part = raw.pop("text_config")
    for key in ("rope_parameters", "layer_types", "hidden_act", "dtype", "model_type", "rms_norm_eps"):
        part.pop(key, None)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mrope_section": [2, 3, 3]}
    raw |= {**part, "rope_scaling": scaling, "eos_token_id": [2, 5], "torch_dtype": raw.pop("dtype")}
    (whole / "config.json").write_text(json.dumps(raw))
    take(whole, tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    assert text["architectures"] == ["Qwen2ForCausalLM"] and text["model_type"] == "qwen2"
    assert (text["rms_norm_eps"], text["hidden_act"], text["dtype"]) == (1e-5, "silu", "bfloat16")
    assert text["eos_token_id"] == [2, 5] and text["tie_word_embeddings"] is True
    assert text["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e6,
    }
    assert torch.equal(text_logits(tmp_path / "text", IDS), text_logits(whole, IDS))


def test_what_a_text_part_leaves_unsaid_is_not_what_its_family_does(tmp_path):
    """GLM-4.1V turns whole heads where no key says, GLM-4 the half of each, and its heads are 128 wide."""
    whole = make(tmp_path / "whole", "Glm4vForConditionalGeneration", False, "older")
    raw = json.loads((whole / "config.json").read_text())
    del raw["text_config"]["rope_parameters"]["partial_rotary_factor"]
    raw["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
    (whole / "config.json").write_text(json.dumps(raw))
    take(whole, tmp_path / "text")
    config = load_model_config(tmp_path / "text")
    assert (config.rotary_dim, config.head_dim) == (16, 16)
    assert torch.equal(text_logits(tmp_path / "text", IDS), text_logits(whole, IDS))


def test_what_the_whole_passes_over_its_text_part_does_not_hear(tmp_path):
    """Qwen3-VL knows no sliding windows, and Qwen3 does."""
    whole = make(tmp_path / "whole", QWEN3, False, "older")
    raw = json.loads((whole / "config.json").read_text())
    raw["text_config"] |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    (whole / "config.json").write_text(json.dumps(raw))
    take(whole, tmp_path / "text")
    assert load_model_config(tmp_path / "text").window is None
    assert torch.equal(text_logits(tmp_path / "text", IDS), text_logits(whole, IDS))


def test_a_gemma_that_names_its_pattern(tmp_path):
    whole = make(tmp_path / "whole", "Gemma3ForConditionalGeneration", True, "older")
    raw = json.loads((whole / "config.json").read_text())
    assert raw["text_config"].pop("layer_types") == ["sliding_attention", "full_attention"]
    (whole / "config.json").write_text(json.dumps({**raw, "eos_token_id": [2, 5]}))
    take(whole, tmp_path / "text")
    config = load_model_config(tmp_path / "text")
    assert config.local_layers == {0}  # sliding_window_pattern is 2: all but every second
    assert config.eos_token_ids == (2, 5) and config.rope.factor == 8.0 and config.local_rope.theta == 1e4
    assert torch.equal(text_logits(tmp_path / "text", IDS), text_logits(whole, IDS))


def test_a_head_that_the_config_ties_and_the_weights_do_not(tmp_path):
    """Mistral Small 3.1 is published so: Mistral3Config ties where no key says."""
    whole = make(tmp_path / "whole", "Mistral3ForConditionalGeneration", False, "older")
    change(whole, tie_word_embeddings=None)
    take(whole, tmp_path / "text")
    assert load_model_config(tmp_path / "text").tied_embeddings is False
    assert torch.equal(text_logits(tmp_path / "text", IDS), text_logits(whole, IDS))
    put(tmp_path / "text", whole, tmp_path / "same")
    assert filecmp.cmp(whole / "model.safetensors", tmp_path / "same" / "model.safetensors", shallow=False)


def test_a_stored_copy_of_a_tied_head_follows_the_embedding(tmp_path):
    whole, text = make(tmp_path / "whole", QWEN3, True, "older"), tmp_path / "text"
    held = load_file(whole / "model.safetensors")
    held["lm_head.weight"] = held["model.language_model.embed_tokens.weight"].clone()
    save_file(held, whole / "model.safetensors", {"format": "pt"})
    take(whole, text)
    ours = load_file(text / "model.safetensors")
    del ours["lm_head.weight"]  # as transformers and megarl export it
    ours["model.embed_tokens.weight"] += 1
    save_file(ours, text / "model.safetensors", {"format": "pt"})
    put(text, whole, tmp_path / "trained")
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(text_logits(tmp_path / "trained", IDS), text_logits(text, IDS))


def test_what_lies_beside_the_weights(copied):
    whole = copied / "whole"
    (whole / "chat_template.jinja").unlink()
    (whole / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    (whole / "additional_chat_templates").mkdir()
    (whole / "additional_chat_templates" / "tools.jinja").write_text("x")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "x.gguf", "modeling.py", ".hidden", "x.index.json"):
        (whole / name).write_text("{}")
    # Without an index one file counts, and that is model.safetensors.
    take(whole, copied / "again")
    assert (copied / "again" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert not (copied / "again" / "preprocessor_config.json").exists()
    put(copied / "again", whole, copied / "back")
    kept = {
        "config.json",
        "preprocessor_config.json",
        "chat_template.json",
        "tokenizer.json",
        "additional_chat_templates",
    }
    assert kept < set(names(copied / "back"))
    assert not {"consolidated.safetensors", "pytorch_model.bin", "modeling.py", ".hidden", "x.index.json"} & set(
        names(copied / "back")
    )
    assert (copied / "back" / "additional_chat_templates" / "tools.jinja").read_text() == "x"
    assert "chat_template.jinja" not in names(copied / "back")


def test_a_template_in_a_processors_config_goes_with_the_text_where_there_is_no_other(copied):
    whole = copied / "whole"
    (whole / "chat_template.jinja").unlink()
    (whole / "processor_config.json").write_text('{"chat_template": "{{ messages }}", "image_token": "<image>"}')
    take(whole, copied / "again")
    assert (copied / "again" / "chat_template.jinja").read_text() == "{{ messages }}"
    (whole / "chat_template.json").write_text('{"chat_template": "{{ messages[0] }}"}')
    take(whole, copied / "newer")
    assert (copied / "newer" / "chat_template.jinja").read_text() == "{{ messages[0] }}"


def test_folders_beside_the_weights_go_with_them_but_for_the_model_in_other_forms(copied):
    whole = copied / "whole"
    kept = {
        "additional_chat_templates/tools.jinja": "x",
        "decoder_tokenizer/tokenizer.json": "{}",  # where a processor has a second tokenizer, transformers looks for it here
        "assets/deep/picture.svg": "<svg/>",
        "custom_generate/requirements.txt": "torch",
    }
    left = ("original/consolidated.00.pth", "original/params.json", "onnx/deep/model.onnx", "onnx/config.json")
    left += ("custom_generate/generate.py", ".cache/x.json", "assets/.hidden")
    for name, text in {**kept, **dict.fromkeys(left, "x")}.items():
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).write_text(text)
    (whole / "tokenizer.model").symlink_to(copied / "nowhere")
    words = ("into-multimodal", copied / "text", whole, copied / "back")
    code, _, error = command(*words)
    assert code == 2 and "whole/tokenizer.model is a link that leads nowhere" in error
    (whole / "tokenizer.model").unlink()
    code, _, error = command(*words)
    assert code == 0
    assert "not copied, as weights in other forms or code: custom_generate/generate.py, onnx/, original/" in error
    files = {str(path.relative_to(copied / "back")) for path in (copied / "back").rglob("*") if path.is_file()}
    beside = {str(path.relative_to(whole)) for path in whole.iterdir() if path.is_file()}
    assert files == {*beside, *kept}
    assert {name: (copied / "back" / name).read_text() for name in kept} == kept


def test_command(llava, tmp_path):
    code, out, _ = command("text-part", llava / "whole", tmp_path / "text", "--json")
    assert code == 0 and json.loads(out)["target"] == str(tmp_path / "text")
    assert json.loads(out)["bytes"] == sum(file.stat().st_size for file in (tmp_path / "text").iterdir())
    code, out, error = command("text-part", llava / "whole", tmp_path / "text")
    assert code == 2 and "exists already" in error
    assert command("text-part", llava / "whole", tmp_path / "text", "--force")[0] == 0
    code, out, _ = command("into-multimodal", tmp_path / "text", llava / "whole", tmp_path / "back")
    assert code == 0 and f"{tmp_path / 'back'}:" in out
    assert names(tmp_path) == ["back", "text"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architecture 'LlamaForCausalLM' is no multimodal model.*These are: Gemma3",
        ),
        ({"architectures": None}, r"architecture missing is no multimodal model"),
        ({"model_type": "mistral3"}, r"model_type is 'mistral3'; 'llava', as the architecture has it, is wanted"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"has a quantization_config, .*before it was quantised"),
        (
            {"text_config": {"model_type": "gpt2"}},
            r"the text part has model_type 'gpt2', which is no family.*Qwen2ForCausalLM",
        ),
        ({"text_config": {"model_type": "none"}}, r"transformers cannot read this config \(KeyError"),
        ({"text_config": {"model_type": "llama", "hidden_act": "relu"}}, r"hidden_act='relu'.* is not supported"),
        ({"text_config": {"model_type": "llama", "vocab_size": 128}}, r"do not match its config.json.*missing: "),
    ],
)
def test_configs_that_are_refused(copied, keys, said):
    change(copied / "whole", **keys)
    with pytest.raises(UserError, match=said):
        take(copied / "whole", copied / "x")
    assert names(copied) == ["text", "whole"]


def test_names_that_are_there_twice(copied):
    path = copied / "whole" / "model.safetensors"
    held = load_file(path)
    held["lm_head.weight"] = held["language_model.lm_head.weight"].clone()
    save_file(held, path, {"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"twice.*language_model\.lm_head\.weight and lm_head\.weight|twice.*: lm_head\.weight and language",
    ):
        take(copied / "whole", copied / "x")


def test_another_text_is_refused(copied):
    change(copied / "text", rms_norm_eps=1e-6)
    with pytest.raises(UserError, match=r"is not the text part of .*: they differ in norm_eps 1e-06 and 1e-05\."):
        put(copied / "text", copied / "whole", copied / "x")
    change(copied / "text", rms_norm_eps=1e-5)
    path = copied / "text" / "model.safetensors"
    held = load_file(path)
    save_file({name: tensor.float() for name, tensor in held.items()}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"not of one dtype: .* is F32 and BF16.*mcore-to-hf RUN TEXT --dtype"):
        put(copied / "text", copied / "whole", copied / "x")
    del held["model.norm.weight"]
    save_file(held, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"do not match its config\.json\. missing: model\.norm\.weight"):
        put(copied / "text", copied / "whole", copied / "x")
    with pytest.raises(UserError, match=r"LlavaForConditionalGeneration' is a multimodal model"):
        put(copied / "whole", copied / "whole", copied / "x")
    assert names(copied) == ["text", "whole"]


def test_targets_that_are_refused(copied):
    for target in (copied / "whole", copied):
        with pytest.raises(UserError, match=r"(is|holds) the source"):
            take(copied / "whole", target, force=True)
    with pytest.raises(UserError, match="is the source"):
        into_multimodal(
            copied / "text", copied / "whole", copied / "text", force=True, console=Console(file=io.StringIO())
        )
    with pytest.raises(UserError, match=r"nowhere does not exist\. Name the HF folder of a multimodal model"):
        take(copied / "nowhere", copied / "x")
    assert names(copied) == ["text", "whole"]
    view = copied / "view"  # as the hub's cache is one
    view.mkdir()
    for path in (copied / "whole").iterdir():
        (view / path.name).symlink_to(path)
    with pytest.raises(UserError, match=r"whole holds what .*view/.* leads to, a part of the source"):
        take(view, copied / "whole", force=True)
    assert "model.safetensors" in names(copied / "whole")


def test_a_broken_file_leaves_nothing(copied, monkeypatch):
    path = copied / "whole" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors file that can be read"):
        take(copied / "whole", copied / "x")
    path.write_bytes(content)

    def cut_off(*args):
        os.truncate(path, 20_000)
        return write(*args)

    write = tensor_copy.write_tensors
    monkeypatch.setattr("megarl.convert.text_part.write_tensors", cut_off)
    with pytest.raises(UserError, match=r"model\.safetensors ends early: it was changed while it was read"):
        take(copied / "whole", copied / "x")
    assert names(copied) == ["text", "whole"]


@pytest.mark.parametrize("words", [("text-part", "whole"), ("into-multimodal", "text", "whole")])
def test_a_full_disk_leaves_nothing(copied, words):
    """Of a limit on file sizes, which is what a quota answers too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        code, _, error = command(words[0], *(copied / name for name in words[1:]), copied / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and "No room for" in error and "nothing was left behind" in error
    assert names(copied) == ["text", "whole"]


@pytest.mark.parametrize("words", [("text-part", "whole"), ("into-multimodal", "text", "whole")])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_other_errors_of_the_disk_are_not_called_full(copied, monkeypatch, number, words):
    """As where it is read only since an error."""

    def broken(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tensor_copy, "write_all", broken)
    code, _, error = command(words[0], *(copied / name for name in words[1:]), copied / "x")
    assert code == 2 and f"{copied / 'x'} was not written: {os.strerror(number)}. Mend" in error
    assert names(copied) == ["text", "whole"]


def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path):
    """The kernel answers so for a process's memory where there is none."""
    said = r"^/proc/self/mem cannot be read \(Input/output error\)"
    with (
        open("/proc/self/mem", "rb") as source,
        FileIO(tmp_path / "x", "wb") as out,
        pytest.raises(UserError, match=said),
    ):
        tensor_copy._copy(source, 0, 10, out, lambda _: None)
    info = TensorInfo((10,), "U8", Path("/proc/self/mem"), 0)
    with pytest.raises(UserError, match=said):
        are_same(info, info)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "preprocessor_config.json"])
def test_a_file_that_may_not_be_read_is_refused_before_anything_is_written(copied, name):
    whole = copied / "whole"
    (whole / name).chmod(0)
    with without_privileges():
        for words in (("into-multimodal", copied / "text", whole), ("text-part", whole)):
            code, _, error = command(*words, copied / "x")
            if words[0] == "text-part" and name == "preprocessor_config.json":  # no part of it
                assert code == 0
            else:
                assert code == 2 and f"megarl: {whole / name} cannot be read (Permission denied)" in error
                assert "writing" not in error and names(copied) == ["text", "whole"]


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_written(copied):
    (copied / "here").mkdir()
    take(copied / "whole", copied / "here" / "old")
    for folder, words, said in (
        (copied / "here", (), "cannot be made: "),
        (copied / "here" / "old", ("--force",), "cannot be written to, so --force does not replace it"),
    ):
        target = copied / "here" / ("old" if words else "x")
        folder.chmod(0o555)
        with without_privileges():
            code, _, error = command("text-part", copied / "whole", target, *words)
        folder.chmod(0o755)
        assert code == 2 and f"megarl: {target} {said}" in error and "writing" not in error
        assert names(copied / "here") == ["old"]
    assert len(names(copied / "here" / "old")) > 3


def test_no_room_is_said_before_anything_is_written(copied, monkeypatch):
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr("megarl.convert.target.shutil.disk_usage", lambda _: usage(2_000_000, 1_900_000, 100_000))
    with pytest.raises(UserError, match=r"No room for .*nothing was written"):
        take(copied / "whole", copied / "x")
