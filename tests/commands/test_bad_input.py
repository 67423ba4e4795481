"""What a user sees who gets something wrong: exit code 2, one paragraph, no stack trace, nothing started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bad_input import ALL, PAIRS, Bad, Place, good_place, pairs_place
from tests.support.command import megarl
from tests.support.tiny import write_tiny_qwen


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen(tmp_path_factory.mktemp("model"))


def test_a_process_of_its_own_says_the_same(tmp_path: Path, model_folder: Path) -> None:
    bad, place = ALL[0], good_place(tmp_path, model_folder)
    bad.spoil(place)
    words = ["train", str(place.recipe), *(text.replace("{root}", str(tmp_path)) for text in bad.overrides)]
    command = [sys.executable, "-m", "megarl", *words]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert_one_paragraph(run)
    assert run.stderr == megarl(*words, folder=tmp_path).stderr


def assert_one_paragraph(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 2, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert run.stderr.startswith("megarl: ")
    assert "\n\n" not in run.stderr.strip()


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_train_refuses_with_one_paragraph(tmp_path: Path, model_folder: Path, bad: Bad) -> None:
    place = good_place(tmp_path, model_folder)
    bad.spoil(place)
    before = sorted(tmp_path.rglob("*"))
    overrides = [text.replace("{root}", str(tmp_path)) for text in bad.overrides]
    run = megarl("train", str(place.recipe), *overrides, *(["--resume"] if bad.resume else []), folder=tmp_path)
    assert_one_paragraph(run)
    for part in bad.expected(place):
        assert part in run.stderr
    # A run's first act is to make its folder, for the logs of what it starts.
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bad", PAIRS[::3], ids=lambda bad: bad.name)
def test_rm_refuses_with_one_paragraph(tmp_path: Path, model_folder: Path, bad: Bad) -> None:
    place = pairs_place(tmp_path, model_folder)
    bad.spoil(place)
    before = sorted(tmp_path.rglob("*"))
    run = megarl(
        "rm", str(place.recipe), *(text.replace("{root}", str(tmp_path)) for text in bad.overrides), folder=tmp_path
    )
    assert_one_paragraph(run)
    for part in bad.expected(place):
        assert part in run.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_no_words_at_all_are_answered_with_the_commands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "Usage: " in run.stdout + run.stderr and "Traceback" not in run.stderr


def test_eval_without_held_out_rows(tmp_path: Path, model_folder: Path) -> None:
    place: Place = good_place(tmp_path, model_folder)
    run = megarl("eval", str(place.recipe), folder=tmp_path)
    assert_one_paragraph(run)
    assert "set data.eval" in run.stderr


def test_the_wrong_command_for_a_recipe(tmp_path: Path, model_folder: Path) -> None:
    place = good_place(tmp_path, model_folder)
    run = megarl("sft", str(place.recipe), folder=tmp_path)
    assert_one_paragraph(run)
    assert "is a recipe for `megarl train`" in run.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("train", "{r}", "model.path=https://huggingface.co/Qwen/Qwen3-4B"),
            "the address https://huggingface.co/Qwen/Qwen3-4B.",
        ),
        (
            ("train", "{r}", "data.train=https://x.org/a.jsonl"),
            "https://x.org/a.jsonl is an address. Download the file",
        ),
        (("plan", "{r}", "--device", "H100", "--html", "none/x.html"), "--html none/x.html cannot be written"),
        (("profile", "--out", "none/x.yaml"), "--out none/x.yaml cannot be written"),
        (("submit", "{r}", "--slurm", "--dry-run", "--sbatch", "qos"), "--sbatch qos is no option of sbatch"),
        (("train", "{r}", "model.path=OWNER/NAME@v2"), "`hf download OWNER/NAME --revision v2`"),
        (
            ("train", "{r}", "--train.steps", "3"),
            "--train.steps is no option. Keys of the recipe are set without dashes",
        ),
        (("train", "{r}", "--actor.optimizer.lr=1e-5"), "without dashes: actor.optimizer.lr=1e-5."),
        (
            ("eval", "model"),
            "is a model's folder. Name a recipe in its place, and the model behind it: model.path=model.",
        ),
        (("eval", "model/.."), "is a folder. Name a file in it, such as model/../recipe.yaml."),
        (("eval", "done"), "such as done/recipe.yaml; behind it model.path=done/hf is what the run has trained."),
        (("recipe", "copy", "quickstart", "."), "quickstart.yaml and quickstart_base.yaml are there already"),
        (
            ("recipe", "copy", "quickstart", "quickstart.yaml/in"),
            "quickstart.yaml/in cannot be written: Not a directory",
        ),
        (("train", "{r}", "--discard-journal"), "--discard-journal forgets what an earlier start"),
        (("plan", "{r}", "--device", "H100", "--sync", "--html", "x.html"), "--html cannot go with --sync"),
        (("plan", "{r}", "--device", "H100", "--sync", "--from-run", "x"), "--from-run gives --sync its cluster"),
        (("plan", "{r}", "--device", "H100", "--seed", "3"), "--seed is read with --simulate alone"),
        (
            ("plan", "{r}", "--cluster", "c.yaml", "--nodes", "4"),
            "--nodes is read with --device alone",
        ),
        (
            ("plan", "{r}", "--from-run", "x", "--devices-per-node", "4"),
            "--devices-per-node is read with --device alone",
        ),
        (
            ("plan", "{r}", "--device", "H100", "--response-mean", "100", "--response-spread", "1e300"),
            "a spread from 0 to 20",
        ),
        (
            ("plan", "{r}", "--device", "H100", "--response-spread", "2"),
            "--response-spread is read with --response-mean alone",
        ),
    ],
)
def test_slips_of_the_first_hour(
    tmp_path: Path, model_folder: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = good_place(tmp_path, model_folder)
    for name in ("quickstart.yaml", "quickstart_base.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "done" / "hf").mkdir(parents=True)
    shutil.copy(place.model / "config.json", tmp_path / "done" / "hf")
    run = megarl(*(word.replace("{r}", str(place.recipe)) for word in words), folder=tmp_path)
    assert_one_paragraph(run)
    assert says in run.stderr


def test_the_essential_keys_are_shown_whole(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    place = good_place(tmp_path, model_folder)
    shown = megarl("recipe", "show", str(place.recipe), "--essential", folder=tmp_path).stdout
    assert "rollout.max_response_tokens" in shown and "\u2026" not in shown
