import shutil

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from megarl.convert.commands import run_inspect
from megarl.convert.inspection import inspect, render
from megarl.core.errors import MegarlError, UserError
from megarl.training.manifest import HF_FOLDER, MANIFEST
from tests.convert.conftest import flip, parsed, write_checkpoint


def test_a_checkpoint_of_a_run(run, capsys):
    assert run_inspect(run, as_json=True, quick=False) == 0
    found = parsed(capsys.readouterr().out)
    assert found["whole"] is True and found["damage"] == []
    assert (found["family"], found["dtype"], found["step"], found["run_step"]) == ("qwen3", "float32", 12, 6)
    assert (found["recipe"], found["layout"], found["optimizer"]) == ("quick", "tp2 dp2", "adam")
    assert found["parameters"] == 97 * 64  # the optimizer's tensors are not the model's
    assert found["sizes"]["kv_heads"] == 2 and found["sizes"]["vocabulary"] == 97
    assert found["tensors"]["output_layer.weight"] == {"shape": [97, 64], "dtype": "float32", "bytes": 24832}
    assert found["files"]["__0_0.distcp"] == 200


def test_people_get_the_same(run):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(inspect(run)))
    text = console.export_text()
    for expected in ("quick, step 6", "tp2 dp2; any layout can read it", "12 optimizer steps", "97 x 64", "whole"):
        assert expected in text


def test_an_hf_folder(hf):
    found = inspect(hf)
    assert (found.kind, found.dtype, found.step, found.optimizer) == ("hf", "F32", None, None)
    assert found.tensors["model.norm.weight"].bytes == 64 * 4
    assert found.parameters == sum(entry.bytes for entry in found.tensors.values()) // 4


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: flip(folder / "__0_0.distcp"), "__0_0.distcp has other content than was written"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"cut"), "__0_0.distcp has 3 bytes of 200"),
        (lambda folder: (folder / "metadata.json").unlink(), "metadata.json is missing"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_damage_is_named_and_is_exit_code_1(tmp_path, hf, capsys, harm, message):
    folder = write_checkpoint(tmp_path / "x", hf)
    harm(folder)
    assert run_inspect(folder, as_json=True, quick=False) == 1
    found = parsed(capsys.readouterr().out)
    assert found["whole"] is False and found["damage"] == [message]


def test_an_hf_folder_without_some_of_its_tensors_is_damaged(tmp_path, hf, capsys):
    folder = tmp_path / "cut"
    shutil.copytree(hf, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "model.norm.weight"}, folder / "model.safetensors")
    assert run_inspect(folder, as_json=True, quick=False) == 1
    found = parsed(capsys.readouterr().out)
    assert found["whole"] is False and "missing: model.norm.weight" in found["damage"][0]


def test_a_quick_look_reads_no_content(tmp_path, hf, capsys):
    folder = write_checkpoint(tmp_path / "x", hf)
    flip(folder / "__0_0.distcp")
    assert run_inspect(folder, as_json=False, quick=True) == 0


def test_a_cut_file_of_weights_is_damage(tmp_path, hf, capsys):
    folder = tmp_path / "cut"
    shutil.copytree(hf, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert run_inspect(folder, as_json=True, quick=False) == 1
    found = parsed(capsys.readouterr().out)
    assert found["whole"] is False and "model.safetensors" in found["damage"][0]


def test_what_is_too_broken_to_be_told_of_is_exit_code_1(tmp_path, hf):
    folder = write_checkpoint(tmp_path / "x", hf)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:100])
    with pytest.raises(MegarlError, match=r"megarl.json is not JSON: .*is damaged") as error:
        run_inspect(folder, as_json=False, quick=False)
    assert error.value.exit_code == 1
    folder = write_checkpoint(tmp_path / "y", hf)
    (folder / HF_FOLDER / "config.json").write_text("{")
    with pytest.raises(MegarlError, match=r"config.json is not JSON") as error:
        run_inspect(folder, as_json=False, quick=False)
    assert error.value.exit_code == 1


def test_a_run_without_a_whole_checkpoint_is_exit_code_1(run):
    for file in run.rglob("__0_0.distcp"):
        flip(file)
    with pytest.raises(MegarlError, match=r"holds no committed checkpoint. Damaged: .*other content") as error:
        run_inspect(run, as_json=False, quick=False)
    assert error.value.exit_code == 1


def test_a_manifest_of_the_future(tmp_path, hf):
    folder = write_checkpoint(tmp_path / "x", hf, format=2)
    with pytest.raises(UserError, match="has format 2, and this megarl reads 1"):
        inspect(folder)
