from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.models.hf_config import load_model_config
from megarl.recipe.load import load_recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe
from megarl.run.evaluate import beside
from megarl.run.exported import note_export
from megarl.run.model_check import template_notes
from megarl.run.preflight import (
    Preflight,
    check_run_folder,
    preflight,
    preflight_eval,
    preflight_supervised,
)
from megarl.run.rows_check import check_graded
from megarl.training.run_checkpoints import Checkpoints
from tests.support.bad_input import ALL, GOOD_PAIR, ODD, PAIRS, Bad, Place, good_place, pairs_place
from tests.support.fp8 import write_fp8
from tests.support.tiny import write_tiny_model, write_tiny_qwen


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, model_folder: Path) -> Place:
    return good_place(tmp_path, model_folder)


def run(place: Place, *overrides: str, resume: bool = False) -> Preflight:
    return preflight(load_recipe(place.recipe, overrides).recipe, resume=resume)


def test_a_good_run_is_described(place: Place) -> None:
    place.write_rows(*({"prompt": f"{n}+1", "answer": n + 1} for n in range(6)), {"prompt": "1" * 99, "answer": 1})
    held_out = place.root / "held_out.jsonl"
    held_out.write_text('{"prompt": "1", "answer": "1"}\n' * 5)
    found = run(place, f"data.eval={held_out}", "eval.max_prompts=3")
    assert (found.rows, found.dropped, found.eval_rows) == (6, 1, 3)
    assert found.model.family == "qwen3"
    assert found.platform.name == "cpu"
    assert "4 prompts x 4 samples = 16 samples" in found.lines()[0]
    assert "6 rows, 1 over the length limit dropped, 1.33 epochs; 3 held-out rows" in found.lines()[1]
    assert not place.run.exists()


@pytest.mark.parametrize("bad", [*ALL, *ODD, *PAIRS], ids=lambda bad: bad.name)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, model_folder: Path, bad: Bad) -> None:
    place = (pairs_place if bad in PAIRS else good_place)(tmp_path, model_folder)
    bad.spoil(place)
    before = sorted(place.root.rglob("*"))
    overrides = [text.replace("{root}", str(place.root)) for text in bad.overrides]
    with pytest.raises(UserError) as caught:
        if bad in PAIRS:
            preflight_supervised(load_recipe(place.recipe, overrides, RmRecipe).recipe)
        else:
            run(place, *overrides, resume=bad.resume)
    for part in bad.expected(place):
        assert part in str(caught.value)
    assert "\n\n" not in str(caught.value)
    assert sorted(place.root.rglob("*")) == before


def test_rows_that_no_response_is_right_by_are_told_of(place: Place) -> None:
    place.write_rows(*({"prompt": f"{n}", "answer": "" if n in (2, 4) else n} for n in range(6)))
    [note] = run(place, f"data.eval={place.data}", "eval.max_prompts=1").notes[1:]
    assert (
        note == f"2 rows have an empty answer, by which math finds no response right; the first: {place.data}, line 3"
    )
    # Whoever does not compare with the answer needs none.
    assert run(place, "reward.graders.far={kind: remote, url: 'http://host/grade'}").notes == ()


def test_tokens_beyond_the_vocabulary_in_demonstrations(place: Place) -> None:
    bad = next(bad for bad in ODD if bad.name == "token beyond the vocabulary")
    bad.spoil(place)
    place.recipe.write_text(SFT.format(root=place.root))
    good = {"prompt": "1", "response": "1"}
    place.write_rows(good, good, good, good, {"prompt": "1", "response": "1~"})
    with pytest.raises(UserError, match=r"train\.jsonl, line 5: the tokenizer makes token 500 \('~'\)"):
        preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe)


def test_an_evaluation_needs_a_place_for_its_samples(place: Place) -> None:
    with pytest.raises(UserError, match=r"/proc takes no new folder"):
        preflight_eval(load_recipe(place.recipe, [f"data.eval={place.data}", "run.dir=/proc"]).recipe)


def test_an_evaluation_writes_beside_whatever_is_there(place: Place) -> None:
    recipe = load_recipe(place.recipe).recipe
    kept = place.run / "samples" / "eval_000000.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    names = []
    for _ in range(3):
        folder = beside(recipe).run.folder
        assert list(folder.iterdir()) == []
        (folder / "samples").mkdir()
        names.append(folder.name)
    assert names == ["r-eval", "r-eval-2", "r-eval-3"] and kept.read_text() == "kept"


def test_chat_messages_need_a_chat_template(place: Place) -> None:
    place.write_rows(*({"prompt": [{"role": "user", "content": f"{n}"}], "answer": n} for n in range(4)))
    assert run(place).rows == 4
    (place.model / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl, line 1.*no chat template"):
        run(place)


def test_rows_that_are_too_long_beside_what_is_told_of_tools_are_told_of(place: Place) -> None:
    rows = [{"prompt": "1" * (250 if n == 5 else 2), "answer": 1} for n in range(8)]
    place.write_rows(*rows)
    tools = ["data.max_prompt_tokens=400", "agent={tools: ['tests.support.dry.own:look'], tool_parser: qwen25}"]
    assert run(place, "data.max_prompt_tokens=400").notes == ()
    [note] = run(place, *tools).notes
    assert note.startswith("1 rows are over data.max_prompt_tokens 400 with what the model is told of its tools, ")
    assert note.endswith("tokens: their episodes fail. Raise it; the first: " + f"{place.data}, line 6")
    assert run(place, *tools, "agent.environment=tests.support.dry.own:Talk").notes == (), "its own messages"
    assert run(place, *tools, "data.max_prompt_tokens=900").notes == ()


def test_a_template_that_writes_the_day_is_told_of(place: Place) -> None:
    """As gpt-oss' does; Llama 3.2's takes a date in its place, and others know the function and do not call it here."""
    template = place.model / "chat_template.jinja"
    plain = template.read_text()
    template.write_text(
        "{%- if not day is defined %}{%- set day = strftime_now('%d %b') %}{% endif %}{{ day }}" + plain
    )
    [note] = run(place).notes
    assert "writes the day into its texts" in note
    assert run(place, "data.chat_template_kwargs={day: 26 Jul}").notes == ()
    template.write_text("{%- if tools %}{{ strftime_now('%d %b') }}{% endif %}" + plain)
    assert run(place).notes == ()


def test_a_turn_whose_end_ends_no_response_is_told_of(place: Place) -> None:
    assert run(place).notes == ()
    template, generation = place.model / "chat_template.jinja", place.model / "generation_config.json"
    template.write_text(template.read_text().replace("<|im_end|>", "<|pad|>"))
    [note] = run(place).notes
    assert "ends the assistant's turn with <|pad|>, which ends no response" in note
    held_out = load_recipe(place.recipe, [f"data.eval={place.data}"]).recipe
    assert preflight_eval(held_out).notes == (note,)
    assert run(place, "rollout.stop=['<|pad|>']").notes == ()
    for ends in (0, [2, 0]):
        generation.write_text(json.dumps({"eos_token_id": ends}))
        assert run(place).notes == ()
    template.write_text(template.read_text().replace("<|pad|>", "#"))  # no special token: nothing is known of it
    generation.unlink()
    assert run(place).notes == ()
    template.unlink()
    assert run(place).notes == ()


def test_a_token_of_texts_that_ends_responses_unsaid_is_told_of(place: Place) -> None:
    """Of Llama's models, and others, transformers and SGLang take 2 where no key says; here of this family 7, a digit."""
    recipe = load_recipe(place.recipe).recipe
    model = replace(load_model_config(place.model), eos_token_ids=(7, 2, 10**6))
    assert template_notes(recipe, model) == ()
    config = json.loads((place.model / "config.json").read_text())
    del config["eos_token_id"]
    (place.model / "config.json").write_text(json.dumps(config))
    [note] = template_notes(recipe, model)
    assert "has no eos_token_id" in note and "in its place: 7 ('0'), which is no special token" in note
    assert template_notes(recipe, replace(model, eos_token_ids=(2,))) == ()


def test_evaluation_needs_held_out_rows_and_no_training_data(place: Place) -> None:
    place.data.rename(place.root / "held_out.jsonl")
    recipe = load_recipe(place.recipe, [f"data.eval={place.root}/held_out.jsonl"]).recipe
    (place.run / "hf").mkdir(parents=True)
    assert preflight_eval(recipe).eval_rows == 8
    with pytest.raises(UserError, match=r"set data\.eval"):
        preflight_eval(load_recipe(place.recipe).recipe)


SFT = """\
run: {{dir: {root}/runs, name: r}}
cluster: {{platform: cpu}}
model: {{path: {root}/model, dtype: float32}}
data: {{train: {root}/train.jsonl, max_tokens: 64}}
train: {{steps: 2, batch_samples: 4}}
"""


def test_supervised_runs(place: Place) -> None:
    place.recipe.write_text(SFT.format(root=place.root))
    place.write_rows(*({"prompt": f"{n}", "response": f"{n}"} for n in range(4)), {"prompt": "1", "response": "1" * 99})
    found = preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe)
    assert (found.rows, found.dropped) == (4, 1)
    assert "4 demonstrations" in found.lines()[0]
    assert found.notes == ()
    template = place.model / "chat_template.jinja"
    kept = template.read_text()
    template.write_text(kept.replace("<|im_end|>", "<|pad|>"))
    [note] = preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe).notes
    assert "<|pad|>, which ends no response" in note and "rollout.stop" not in note
    template.write_text(kept.replace("<|im_end|>", ""))
    [note] = preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe).notes
    assert "puts no special token behind the assistant's last turn: rows teach the model no end" in note
    template.write_text(kept)
    found = preflight_supervised(load_recipe(place.recipe, ["train.batch_samples=6"], SftRecipe).recipe)
    assert found.lines()[-1].startswith("train.batch_samples 6 is more than the 4 usable rows")
    with pytest.raises(UserError, match=r"longer than the context of 2048"):
        preflight_supervised(load_recipe(place.recipe, ["data.max_tokens=3000"], SftRecipe).recipe)
    place.write_rows({"prompt": "1"})
    with pytest.raises(UserError, match=r"train\.jsonl, line 1.*data\.response_key"):
        preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe)


def test_runs_on_pairs(tmp_path: Path, model_folder: Path) -> None:
    place = pairs_place(tmp_path, model_folder)
    place.write_rows(*(GOOD_PAIR for _ in range(4)), GOOD_PAIR | {"rejected": "1" * 99})
    found = preflight_supervised(load_recipe(place.recipe, [f"data.eval={place.data}"], RmRecipe).recipe)
    assert (found.rows, found.dropped, found.eval_rows) == (4, 1, 4)
    assert "4 pairs" in found.lines()[0]
    template = place.model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|pad|>"))
    assert preflight_supervised(load_recipe(place.recipe, [], RmRecipe).recipe).notes == (), "it generates nothing"


def test_a_margin_is_refused_where_the_loss_looks_at_no_lead(place: Place) -> None:
    place.recipe.write_text(f"{SFT.format(root=place.root)}dpo: {{loss: apo_zero}}\n")
    place.write_rows(*(GOOD_PAIR | {"margin": margin} for margin in (0, 0, 0, 1)))
    with pytest.raises(UserError, match=r"line 4, field 'margin': dpo\.loss apo_zero heeds no margin"):
        preflight_supervised(load_recipe(place.recipe, [], DpoRecipe).recipe)
    for heeds in ("data.margin_key=none", "dpo.loss=apo_down"):
        assert preflight_supervised(load_recipe(place.recipe, [heeds], DpoRecipe).recipe).rows == 4


def test_labels_that_count_too_differently_are_told_of_and_one_row_has_no_kl(place: Place) -> None:
    place.recipe.write_text(f"{SFT.format(root=place.root)}kto: {{}}\n")

    def found(labels: list[bool], *overrides: str) -> Preflight:
        rows = ({"prompt": f"{n}", "completion": "1", "label": label} for n, label in enumerate(labels))
        place.write_rows(*(row | {"data_source": "ab"[number > 0]} for number, row in enumerate(rows)))
        return preflight_supervised(load_recipe(place.recipe, overrides, KtoRecipe).recipe)

    for labels in ([True] * 4 + [False] * 3, [True] * 3 + [False] * 3):
        assert found(labels).notes == ()
    for labels, counts in ([True] * 4, "count 4 to 0"), ([True, False, False, False], "count 1 to 3"):
        [note] = found(labels).notes
        assert counts in note and "between 1 and 4/3 of the second" in note
    assert found([True, False, False, False], "kto.desirable_weight=3").notes == ()
    with pytest.raises(UserError, match=r"`data\.mix`: 1 row of .* has a share"):
        found([True, False, False], "data.mix={a: 1, b: 0}")


@pytest.mark.parametrize(("metric", "label"), [("desirable", True), ("undesirable", False)])
def test_no_step_is_the_best_by_answers_of_a_label_that_no_held_out_row_has(
    place: Place, metric: str, label: bool
) -> None:
    place.recipe.write_text(f"{SFT.format(root=place.root)}kto: {{}}\n")
    place.write_rows(*({"prompt": f"{n}", "completion": "1", "label": n > 2} for n in range(6)))
    held_out = place.root / "held_out.jsonl"
    keys = [
        f"data.eval={held_out}",
        f"train.keep_best={{metric: kto/eval_{metric}_reward}}",
        "train.save_every=1",
        "eval.every=1",
    ]

    def found(*labels: bool) -> Preflight:
        rows = ({"prompt": f"{n}", "completion": "1", "label": each} for n, each in enumerate(labels))
        held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return preflight_supervised(load_recipe(place.recipe, keys, KtoRecipe).recipe)

    assert found(True, False).eval_rows == 2
    with pytest.raises(
        UserError, match=f"no held-out row of .*held_out.jsonl is labelled {str(label).lower()} .*'label'"
    ):
        found(not label, not label)


def test_a_default_that_grades_in_the_place_of_graders_that_were_taken_back_is_told_of(place: Place) -> None:
    text = place.recipe.read_text()
    place.recipe.write_text(
        f"{text}reward: {{graders: {{a: {{kind: rule, fn: exact}}, b: {{kind: rule, fn: math}}}}}}\n"
    )

    def notes(*overrides: str) -> str:
        loaded = load_recipe(place.recipe, overrides)
        return " ".join(preflight(loaded.recipe, sources=loaded.sources).notes)

    assert "null" not in notes() + notes("reward.graders.a=null")
    both = notes("reward.graders.a=null", "reward.graders.b=null")
    assert "reward.graders (on the command line): null takes the last grader back" in notes("reward.graders=null")
    assert (
        "reward.graders.b (on the command line): null takes the last grader back" in both and "reward.fn math" in both
    )
    assert "null" not in notes("reward.graders.a=null", "reward.graders.b=null", "reward.fn=math")


def test_a_reward_model_is_no_policy(tmp_path: Path, model_folder: Path) -> None:
    place = pairs_place(tmp_path, model_folder)
    place.edit_config(architectures=["Qwen3ForSequenceClassification"], id2label={"0": "SCORE"})
    place.edit_weights(_give_score_head)
    assert preflight_supervised(load_recipe(place.recipe, ["actor.lora={}"], RmRecipe).recipe).model.head == "score"
    place.recipe.write_text(place.recipe.read_text().replace("\nrm:", "\ndpo:"))
    with pytest.raises(UserError, match=r"is a reward model: it has one score a token.*megarl rm"):
        preflight_supervised(load_recipe(place.recipe, [], DpoRecipe).recipe)


def test_adapters_of_linears_that_the_model_lacks_are_refused_before_anything_starts(place: Place) -> None:
    """The ranks would say so as well, a minute later."""
    place.write_rows(*({"prompt": f"{n}+1", "answer": n + 1} for n in range(6)))
    run(place, "actor.lora={targets: [linear_qkv, linear_fc2]}")
    with pytest.raises(
        UserError, match=r"^actor\.lora\.targets names linear_q_proj, and .* Choose among linear_qkv, linear_proj,"
    ):
        run(place, "actor.lora={targets: [linear_proj, linear_q_proj]}")


def test_servers_whose_heads_would_get_narrower_on_a_cpu_are_refused(tmp_path: Path) -> None:
    """Else SGLang ends at the first request, and nobody says why."""
    mixtral = write_tiny_model(tmp_path / "source" / "model", "mixtral", num_key_value_heads=1)
    place = good_place(tmp_path, mixtral)
    with pytest.raises(UserError, match=r"^rollout\.tp 2: the model has 1 key-value heads, and on a CPU .* work: 1\."):
        run(place, "rollout.tp=2")


def test_a_reward_model_generates_nothing(place: Place) -> None:
    place.edit_config(architectures=["Qwen3ForSequenceClassification"], id2label={"0": "SCORE"})
    place.edit_weights(_give_score_head)
    with pytest.raises(UserError, match=r"is a reward model.*generates nothing.*reward_model\.path"):
        run(place)


def test_fp8_weights_are_trained_on_and_not_served(place: Place) -> None:
    write_fp8(place.model)
    for check in (
        lambda: run(place),
        lambda: preflight_eval(load_recipe(place.recipe, [f"data.eval={place.data}"]).recipe),
    ):
        with pytest.raises(UserError, match=r"has FP8 weights.*megarl convert hf-to-mcore.*set model\.path"):
            check()
    place.recipe.write_text(SFT.format(root=place.root))
    place.write_rows(*({"prompt": f"{n}", "response": f"{n}"} for n in range(4)))
    assert preflight_supervised(load_recipe(place.recipe, [], SftRecipe).recipe).model.fp8_block == (128, 128)


def _give_score_head(tensors: dict[str, Any]) -> None:
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].copy()


def test_a_run_is_resumed_only_where_steps_are_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    (checkpoints.begin(5, ["actor"])["actor"] / "weights").touch()
    checkpoints.commit(5, {"weight_version": 5})
    check_run_folder(tmp_path, 6, resume=True)
    check_run_folder(tmp_path, 5, resume=True)  # its export is missing
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    with pytest.raises(UserError, match=r"already done 5 steps, and train\.steps is 5"):
        check_run_folder(tmp_path, 5, resume=True)
    note_export(tmp_path, 4)  # it was lengthened, and died before its end
    check_run_folder(tmp_path, 5, resume=True)
    note_export(tmp_path, 5)
    with pytest.raises(UserError, match=r"already done 5 steps.* remove .*/hf\."):
        check_run_folder(tmp_path, 5, resume=True)
    with pytest.raises(UserError, match=r"already holds a run \(checkpoints, hf\)\. .*--resume, or by --continue"):
        check_run_folder(tmp_path, 6, resume=False)


def test_a_run_on_a_disk_that_is_full_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Its small files find room, and a minute later it ended at one of them."""
    code = "import sys; from pathlib import Path; from megarl.run.preflight import check_run_folder\n"
    code += "check_run_folder(Path(sys.argv[1]), 5, resume=False)"
    mounted = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$0" -c "$2" "$1/runs/mine"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, sys.executable]
    done = subprocess.run([*words, str(tmp_path), code], capture_output=True, text=True, check=False, timeout=120)
    assert f"runs/mine cannot be made: {tmp_path} is on a disk that is full ({tmp_path}: 0.1 of 0 MB are" in done.stderr


def test_a_run_whose_checkpoints_lead_to_where_nothing_can_be_written_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained until its first save, and lost these steps."""
    checkpoints, real = Checkpoints(tmp_path / "checkpoints", keep_last=1), tempfile.TemporaryDirectory
    checkpoints.begin(5, [])
    (tmp_path / "checkpoints" / ".tmp-step_000005").mkdir()
    checkpoints.commit(5, {})

    def read_only(*, dir: Path, **more: Any) -> Any:
        if Path(dir) == checkpoints.folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(dir=dir, **more)

    check_run_folder(tmp_path, 6, resume=True)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", read_only)
    with pytest.raises(UserError, match=r"checkpoints takes no new folder \(Read-only file system\)"):
        check_run_folder(tmp_path, 6, resume=True)


def test_logs_of_a_start_that_failed_do_not_take_the_name(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "recipe.yaml").touch()
    check_run_folder(tmp_path, 1, resume=False)


def test_held_out_rows_say_which_set_they_are_of(place: Place) -> None:
    """Where eval.set_key asks: all that are asked, of not too many sets, before a device is taken."""
    held_out = place.root / "held_out.jsonl"
    key = (f"data.eval={held_out}", "eval.set_key=source")

    def write(*sources: object) -> None:
        rows = ({"prompt": "1", "answer": "1", "source": source} for source in sources)
        held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write("openai/gsm8k", "aime", 7)
    with pytest.raises(UserError, match=r"held_out.jsonl, line 3: its field 'source', which eval.set_key names, is 7"):
        run(place, *key)
    with pytest.raises(UserError, match=r"its field 'sauce', .*, is None"):
        run(place, key[0], "eval.set_key=sauce")
    assert run(place, *key, "eval.max_prompts=2").eval_rows == 2
    apart = "train={steps: 20, save_every: 5, keep_best: {metric: eval/accuracy}}"
    for every, said in ((7, True), (10, False)):
        found = run(place, *key, "eval.max_prompts=2", apart, f"eval.every={every}")
        assert (
            any("step 35 would be the first that is both, and the run has 20" in line for line in found.lines()) == said
        )
    best = "train={save_every: 1, keep_best: {metric: eval/set/openai/gsm8k/accuracy}}"
    write("openai/gsm8k", "aime")
    assert run(place, *key, best, "eval.every=1").eval_rows == 2
    write("gsm8k", "aime")
    with pytest.raises(UserError, match=r"no held-out row of .* is of the set 'openai/gsm8k'.*there are: aime, gsm8k"):
        run(place, *key, best, "eval.every=1")
    with pytest.raises(
        UserError, match=r"`eval.sets`: no held-out row of .* is of the set 'mine'.*there are: aime, gsm8k"
    ):
        run(place, *key, "eval.sets={aime: {max_response_tokens: 4}, mine: {max_response_tokens: 4}}")
    own = "eval.sets={aime: {max_response_tokens: 4}}"
    assert run(place, *key, own).eval_rows == 2
    assert run(place, *key, own, "eval.max_prompts=1").eval_rows == 1  # none of aime's, which has rows all the same
    write("aime", "gsm8k", "aime", "math", "gsm8k", "aime", "math")
    for most, own, asked in (
        ("null", "{aime: {max_prompts: 2}}", 6),
        (3, "{aime: {max_prompts: 2}}", 2 + 3),
        (1, "{aime: {max_prompts: 9}, math: {max_prompts: 1}}", 3 + 1 + 1),
    ):
        assert run(place, *key, f"eval.max_prompts={most}", f"eval.sets={own}").eval_rows == asked
    write(*map(str, range(65)))
    with pytest.raises(UserError, match=r"has 65 different values, such as '0' and '9': .* at most 64"):
        run(place, *key)


GRADERS = "reward.graders={math: {kind: rule, fn: math, only: {kind: sum}}, exact: {kind: rule, fn: exact, only: {kind: word}}}"


def test_an_answer_that_a_built_in_rule_cannot_compare_with_is_refused_where_one_grades_it(place: Place) -> None:
    place.write_rows(*({"prompt": f"{n}+1", "answer": {"target": n}, "kind": "sum"} for n in range(4)))
    with pytest.raises(
        UserError, match=r"train.jsonl, line 1: the row's answer is an object, .*, and math compares.*data.answer_key"
    ):
        run(place, "reward.fn=math")
    own = "reward.graders={own: {kind: rule, fn: 'tests.rollout.grader:picky'}, math: {kind: rule, fn: math, only: {kind: x}}}"
    with pytest.raises(UserError, match=r"no row"):  # that is what is wrong then
        run(place, own)
    assert run(place, "reward.fn=tests.rollout.grader:picky").rows == 4
    place.write_rows(*({"prompt": f"{n}+1", "answer": [n, "x"]} for n in range(4)))
    assert run(place, "reward.fn=math").rows == 4


def test_rows_that_no_grader_is_for_are_named_and_those_held_out_as_well(place: Place) -> None:
    place.write_rows(*({"prompt": f"{n}+1", "answer": "", "kind": ("sum", "word")[n % 2]} for n in range(4)))
    held_out = place.root / "held_out" / place.data.name  # rows with the same ids
    held_out.parent.mkdir()
    held_out.write_text('{"prompt": "1", "answer": "1", "kind": "sum"}\n')
    found = run(place, GRADERS, f"data.eval={held_out}", "eval.grader=math")
    assert any("4 rows have an empty answer, by which math finds no response right" in line for line in found.lines())
    with pytest.raises(
        UserError, match=r"exact does not grade every held-out row that .* leaves out .*held_out/train\.jsonl, line 1"
    ):
        run(place, GRADERS, f"data.eval={held_out}", "eval.grader=exact")
    by_set = ("eval.set_key=kind", "eval.sets={sum: {grader: exact}}")
    with pytest.raises(
        UserError,
        match=r"`eval.sets.sum.grader`: exact does not grade every held-out row that .*held_out/train.jsonl, line 1, which",
    ):
        run(place, GRADERS, f"data.eval={held_out}", *by_set)
    by_all = ("eval.grader=exact", "eval.set_key=kind", "eval.sets={sum: {max_response_tokens: 4}}")
    with pytest.raises(UserError, match=r"`eval.grader`: exact does .*Remove the key: the whole reward says then"):
        run(place, GRADERS, f"data.eval={held_out}", *by_all)
    with pytest.raises(UserError, match=r"`eval.sets.sum.grader`: exact does .*Remove the key: eval.grader says then"):
        run(place, GRADERS, f"data.eval={held_out}", "eval.grader=math", *by_set)
    held_out.write_text('{"prompt": "1", "answer": "1", "kind": "verse"}\n')
    with pytest.raises(
        UserError, match=r"held_out/train\.jsonl, line 1: no grader with a weight grades this row, .*'kind' is 'verse'"
    ):
        run(place, GRADERS, f"data.eval={held_out}")


def test_a_reward_model_rewards_rows_that_are_trained_on_alone_and_only_where_it_has_a_weight(place: Place) -> None:
    """Nobody asks it of held-out answers: without a grader they would all be wrong."""
    ids = np.array([1], np.int32)
    [word, verse] = (
        Prompt(f"a.jsonl:{at}", ids, "1", "1", {"kind": kind}) for at, kind in enumerate(("word", "verse"))
    )
    graders = "reward.graders={exact: {kind: rule, fn: exact, only: {kind: word}}}"
    scored, measured = (
        load_recipe(place.recipe, [graders, "reward_model.path=tiny", f"reward_model.weight={weight}"]).recipe
        for weight in (1, 0)
    )
    check_graded(scored, [word, verse], [word])
    with pytest.raises(UserError, match=r"a\.jsonl:1: no grader with a weight"):
        check_graded(scored, [word], [verse])
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: no grader with a weight"):
        check_graded(measured, [word, verse], [])


def test_rows_of_a_set_without_a_share_need_no_grader_and_a_grader_may_be_for_them(place: Place) -> None:
    place.write_rows(*({"prompt": f"{n}+1", "answer": "1", "kind": ("sum", "verse")[n % 2]} for n in range(12)))
    math = "reward.graders={math: {kind: rule, fn: math, only: {kind: sum}}}"
    mix = ("data.mix={sum: 1, verse: 0}", "data.mix_key=kind")
    run(place, math, *mix)
    run(place, math.replace("}}}", "}}, exact: {kind: rule, fn: exact, only: {kind: verse}}}"), *mix)
    with pytest.raises(UserError, match="no grader with a weight grades this row"):
        run(place, math, "data.mix={sum: 1, verse: 1}", "data.mix_key=kind")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.servers={urls: [http://127.0.0.1:9]}"], "does not answer"),
        (
            ["algorithm.policy_loss=distill", "algorithm.kl_coef=0", "teacher.servers={urls: [http://127.0.0.1:9]}"],
            "does not answer",
        ),
        (["reward.graders={judge: {kind: remote, url: http://127.0.0.1:9, key_env: NO_SUCH_KEY}}"], "NO_SUCH_KEY"),
        (
            ["reward.graders={exact: {kind: rule, fn: exact}, aime: {kind: rule, fn: math, only: {set: aime}}}"],
            "no row is so",
        ),
    ],
)
def test_a_replay_asks_no_server_and_no_grader(place: Place, overrides: list[str], says: str) -> None:
    """Those of the run may be gone; a grader of its held-out rows has none in a replay, which does not evaluate."""
    with pytest.raises(UserError, match=says):
        run(place, *overrides)
    assert preflight(load_recipe(place.recipe, overrides).recipe, replays=True).external is None


def test_tools_alone_reward_no_row(place: Place) -> None:
    """An environment does, so that a row may be without a grader there."""
    ids = np.array([1], np.int32)
    rows = [
        Prompt(f"a.jsonl:{at}", ids, "1", "1", {"kind": kind}) for at, kind in enumerate(("sum", "word", "verse"), 1)
    ]
    tools = ["agent.tools=[python]", "agent.tool_parser=qwen25"]
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: no grader with a weight"):
        check_graded(load_recipe(place.recipe, [GRADERS, *tools]).recipe, rows, ())
    check_graded(load_recipe(place.recipe, [GRADERS, "agent.environment=guess_number"]).recipe, rows, ())
