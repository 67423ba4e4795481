from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.check import check_recipe
from megarl.recipe.explain import Schema, nearest
from megarl.recipe.load import KINDS, command_of, detect_kind, load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml


def test_file_overrides_and_defaults(recipe_file: Path) -> None:
    loaded = load_recipe(recipe_file, ["actor.optimizer.lr=1e-5", "run.seed=7", "report.wandb.project=p"])
    recipe = loaded.recipe
    assert recipe.rollout.prompts_per_step == 8
    assert recipe.actor.optimizer.lr == 1e-5
    assert recipe.actor.optimizer.beta1 == 0.9
    assert recipe.report.wandb is not None
    assert recipe.data.train == Path("rows.jsonl")
    assert loaded.sources["rollout.samples_per_prompt"] == f"{recipe_file}:7"
    assert loaded.sources["run.seed"] == "on the command line"
    assert "actor.optimizer.beta1" not in loaded.sources
    assert loaded.resolved["actor"]["optimizer"]["lr"] == 1e-5
    assert loaded.resolved["data"]["train"] == "rows.jsonl"


def test_what_a_run_has_written_is_no_more_than_defaults_to_a_replay(recipe_file: Path, tmp_path: Path) -> None:
    """It has every default in it: a user can neither leave one out nor have a preset below them."""
    written = tmp_path / "written.yaml"
    written.write_text(
        dump_yaml(load_recipe(recipe_file, ["algorithm.preset=dapo", "algorithm.clip_low=0.1"]).resolved)
    )

    def algorithm(*overrides: str) -> Algorithm:
        return load_recipe(written, overrides, Recipe, recorded=True).recipe.algorithm

    same = algorithm("actor.optimizer.name=sgd")
    assert (same.preset, same.reduction, same.clip_low, same.clip_high) == ("dapo", "token-mean", 0.1, 0.28)
    other = algorithm("algorithm.preset=dr_grpo", "algorithm.clip_low=0.3")
    assert (other.normalize_std, other.reduction, other.clip_low) == (False, "constant", 0.3)
    assert algorithm("algorithm.advantage=rloo").advantage == "rloo"
    with pytest.raises(UserError, match=r"`actor.optimizer.momentum` \(on the command line\) is read by nothing"):
        algorithm("actor.optimizer.momentum=0.5")
    with pytest.raises(UserError, match=r"`algorithm.normalize_std` \(.*written.yaml:\d+\) is read by nothing"):
        load_recipe(written, ["algorithm.advantage=rloo"])


def test_what_a_run_has_set_contradicts_a_replay_from_where_it_stands(recipe_file: Path, tmp_path: Path) -> None:
    """It is no default, though nothing that a replay leaves unread of it is a mistake."""
    written = tmp_path / "written.yaml"
    written.write_text(dump_yaml(load_recipe(recipe_file, ["algorithm.truncated=mask"]).resolved))
    with pytest.raises(UserError, match=r"`algorithm\.truncated` \(.*written\.yaml:\d+\): "):
        load_recipe(written, ["algorithm.advantage=opo"], Recipe, recorded=True)
    changed = load_recipe(written, ["actor.optimizer.name=sgd"], Recipe, recorded=True)
    assert check_recipe(changed.recipe, changed.sources, recorded=True) == []
    assert "`actor.optimizer." in " ".join(check_recipe(changed.recipe, changed.sources))


def test_a_replay_with_another_advantage_than_gae_is_not_whitened_because_gae_was(
    recipe_file: Path, tmp_path: Path
) -> None:
    def replayed(*given: str, **overrides: str) -> bool | None:
        written = tmp_path / "written.yaml"
        written.write_text(dump_yaml(load_recipe(recipe_file, given).resolved))
        changes = [f"algorithm.{key}={value}" for key, value in overrides.items()]
        return load_recipe(written, changes, Recipe, recorded=True).recipe.algorithm.whiten

    gae, rloo = "algorithm.preset=ppo", "algorithm.advantage=rloo"
    assert load_recipe(recipe_file, [gae]).resolved["algorithm"]["whiten"] is True
    assert replayed(gae) is True and replayed(gae, preset="rloo") is None and replayed(gae, advantage="rloo") is None
    assert replayed(gae, advantage="rloo", whiten="true") is True
    assert replayed(gae, "algorithm.whiten=false") is False
    assert replayed(rloo) is None and replayed(rloo, advantage="gae") is True
    assert replayed(rloo, "algorithm.whiten=true", advantage="opo") is True


def test_null_takes_back_what_users_have_named(recipe_file: Path) -> None:
    """An empty section would be merged into the file's, and change nothing."""
    given = "reward: {graders: {a: {kind: rule, fn: math}}}\nalgorithm: {settings: {high: 1}}\n"
    recipe_file.write_text(recipe_file.read_text() + given)
    assert load_recipe(recipe_file, ["reward.graders={}", "algorithm.settings=null"]).recipe.reward.graders
    recipe = load_recipe(recipe_file, ["reward.graders=null", "algorithm.settings=null"]).recipe
    assert (recipe.reward.graders, recipe.algorithm.settings) == ({}, {})


def test_null_takes_back_one_of_several_that_users_have_named(recipe_file: Path, tmp_path: Path) -> None:
    """In a recipe over its base as well; a keyword argument is null and stays."""
    given = "reward: {graders: {a: {kind: rule, fn: math}, b: {kind: rule, fn: exact, only: {kind: [x], lang: [y]}}}}\n"
    given += "algorithm: {advantage: own:advantage, settings: {high: 1, low: 2}}\n"
    given += "eval: {set_key: source, sets: {aime: {temperature: 1.0, top_p: 0.5}, gsm: {temperature: 0.5}}}\n"
    given += "agent: {environment: calculator, settings: {level: 1, seed: 2}}\n"
    rows = "rows.jsonl\n  eval: held_out.jsonl\n  mix: {code: 2, math: 1}\n"
    (tmp_path / "base.yaml").write_text(recipe_file.read_text().replace("rows.jsonl\n", rows) + given)
    over = "base: base.yaml\nreward: {graders: {a: null}}\nalgorithm: {settings: {high: null}}\n"
    recipe_file.write_text(over)
    overrides = ["data.mix.math=null", "eval.sets.gsm=null", "eval.sets.aime.top_p=null", "agent.settings.level=null"]
    recipe = load_recipe(recipe_file, [*overrides, "reward.graders.b.only.lang=null"]).recipe
    assert recipe.reward.graders.keys() == {"b"} and recipe.reward.graders["b"].only == {"kind": ("x",)}
    assert (recipe.algorithm.settings, recipe.data.mix) == ({"low": 2}, {"code": 2})
    assert recipe.eval.sets.keys() == {"aime"} and recipe.eval.sets["aime"].top_p is None
    assert recipe.agent is not None and recipe.agent.settings == {"level": None, "seed": 2}
    assert load_recipe(recipe_file, [*overrides, "data.mix.code=null", "eval.sets.aime=null"]).recipe.data.mix == {}
    for override, says in (
        (
            "eval.sets.gms=null",
            "on the command line): null takes back a name, and there is no 'gms'. Did you mean 'gsm'?",
        ),
        ("data.mix.zz=null", "there is no 'zz'. Names that there are: code, math."),
    ):
        with pytest.raises(UserError) as caught:
            load_recipe(recipe_file, [override, override])
        assert says in str(caught.value)
    recipe_file.write_text(over.replace("a: null", "c: null"))
    with pytest.raises(
        UserError, match=r"`reward\.graders\.c` \(.*:2\): null takes back a name.*that there are: a, b\."
    ):
        load_recipe(recipe_file)


def test_home_is_expanded_where_the_shell_does_not(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    recipe = load_recipe(recipe_file, ["model.path=~/m", "data.eval=~other/e", "run.dir=a/~"]).recipe
    assert (recipe.model.path, recipe.data.eval) == (Path("/home/somebody/m"), Path("~other/e"))
    assert recipe.run.dir == Path("a/~")


def test_integers_are_good_floats_but_not_the_other_way(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["rollout.temperature=1"]).recipe.rollout.temperature == 1.0
    with pytest.raises(UserError, match=r"`train\.steps` \(on the command line\): got 2\.0 \(a number\)"):
        load_recipe(recipe_file, ["train.steps=2.0"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.temprature=1", ["`rollout.temprature` (on the command line)", "Did you mean `rollout.temperature`?"]),
        ("actor.lr=1", ["Unknown key `actor.lr`", "Did you mean `actor.optimizer.lr`?"]),
        ("lr=1", ["Did you mean `actor.optimizer.lr`?"]),
        ("rolout.tp=1", ["Unknown key `rolout`", "Did you mean `rollout`?"]),
        ("qqqqqq=1", ["Unknown key `qqqqqq`", "A recipe has: run, cluster, model"]),
        ("train.steps=ten", ['`train.steps` (on the command line): got "ten" (text)', "a whole number at least 0"]),
        ("train.steps=-1", ["got -1 (a whole number)", "a whole number at least 0"]),
        ("train.steps=true", ["got true (true or false)", "a whole number at least 0"]),
        ("train.steps=null", ["got nothing (null)"]),
        ("rollout.top_p=1.5", ["got 1.5 (a number)", "a number over 0 and at most 1"]),
        ("actor.optimizer.lr=.inf", ["`actor.optimizer.lr`", "a number over 0"]),
        ("actor.optimizer.lr=.nan", ["`actor.optimizer.lr`", "a number over 0"]),
        ("data.shuffle=yes", ['got "yes" (text)', "true or false"]),
        ("algorithm.kl_kind=k4", ['got "k4"', "allowed: k1 or k2 or k3"]),
        ("algorithm.advantage=gea", ['got "gea"', "allowed: grpo"]),
        ("rollout.kv_tokens=x", ["a whole number over 0 or null"]),
        ("rollout.stop=END", ['got "END" (text)', "a list of text"]),
        ("rollout.stop=[1]", ["`rollout.stop.0`", "a list of text", "Quotes make it text: '1'."]),
        ("run.name=true", ["`run.name`", "Quotes make it text: 'true'."]),
        (
            "actor.optimizer.lr='1e-5'",
            ["`actor.optimizer.lr`", '"1e-5" (text)', "Without quotes it is a number: 1e-5."],
        ),
        ("actor.mini_batch_samples='16'", ["`actor.mini_batch_samples`", "Without quotes it is a number: 16."]),
        ("train.steps=1e3", ["`train.steps`", "got 1000.0 (a number)", "Write 1000."]),
        ("cluster.platform=gpu", ["`cluster.platform`", "Did you mean cuda?"]),
        ("model.dtype=fp32", ["`model.dtype`", "Did you mean float32?"]),
        ("data=3", ["`data`", "a section with the keys train, eval"]),
        ("run.seed.x=1", ["`run.seed`", "(a section)", "a whole number at least 0"]),
        ("run.name=../up", ["`run.name`", "text that matches"]),
        ("model.path=1", ["`model.path`", "allowed: a path"]),
        ("agent.environment=gues_number", ["cannot run. `agent.environment` (", "Did you mean guess_number?"]),
        ("agent.environment=Shop", ["cannot run. `agent.environment` (", "code or text that matches"]),
        ("agent.mcp=[http://me:secret@a/mcp]", ["`agent.mcp.0` (", "Name a command in its place that reads the key"]),
        ("agent.tools=[pyton]", ["`agent.tools.0` (", "Did you mean python?"]),
        ("algorithm.kl_kind=abz", ['got "abz"', "Did you mean abs?"]),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(recipe_file: Path, override: str, says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, [override])
    for part in says:
        assert part in str(caught.value)
    assert str(recipe_file) in str(caught.value)


def test_quotes_make_no_text_of_a_list(recipe_file: Path) -> None:
    with pytest.raises(UserError, match=r"`run\.name`.*\(folder name of the run\)\.$"):
        load_recipe(recipe_file, ["run.name=[a]"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("actor.optimizer.lr: 1", "Dots are for the command line; in a file write `actor: {optimizer: {lr: ...}}`."),
        ("actor: {optimizer.lr: 1}", "Dots are for the command line; in a file write `actor: {optimizer: {lr: ...}}`."),
        ("actor.lr: 1", "Did you mean `actor.optimizer.lr`?"),
        ("actor: {<<: {epochs: 2}}", "merges nothing by it: write the keys out"),
    ],
)
def test_what_other_files_are_written_like_is_told_apart(recipe_file: Path, line: str, says: str) -> None:
    recipe_file.write_text(f"{recipe_file.read_text()}{line}\n")
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file)
    assert says in str(caught.value)


def test_file_and_line_of_a_wrong_key_and_of_a_wrong_value(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "  stepz: 3\n  save_every: -1\n")
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file)
    text = str(caught.value)
    assert "for 2 reasons" in text
    assert f"`train.save_every` ({recipe_file}:12): got -1" in text
    assert f"Unknown key `train.stepz` ({recipe_file}:11). Did you mean `train.steps`?" in text


def test_a_missing_key_is_named_with_its_meaning(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("  max_response_tokens: 64\n", ""))
    with pytest.raises(UserError, match=r"`rollout\.max_response_tokens` is missing.*longest response, in tokens"):
        load_recipe(recipe_file)


def test_a_mistake_in_the_base_is_reported_there(tmp_path: Path, recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "cluster: {device: 2}\n")
    child = tmp_path / "child.yaml"
    child.write_text("base: recipe.yaml\n")
    with pytest.raises(UserError, match=r"`cluster\.device` \(.*recipe\.yaml:11\)"):
        load_recipe(child)


def test_each_command_knows_the_recipes_of_all_others(
    recipe_file: Path, sft_file: Path, rm_file: Path, dpo_file: Path, kto_file: Path
) -> None:
    files = dict(zip(KINDS, (recipe_file, sft_file, rm_file, dpo_file, kto_file), strict=True))
    for wanted, kind in KINDS.items():
        assert command_of(detect_kind(files[wanted])) == wanted
        for command, file in files.items():
            if command == wanted:
                assert isinstance(load_recipe(file, [], kind).recipe, kind)
                continue
            with pytest.raises(UserError) as caught:
                load_recipe(file, [], kind)
            assert f"is a recipe for `megarl {command}`, not for `megarl {wanted}`" in str(caught.value)
            assert f"Run `megarl {command} {file}`." in str(caught.value)
            assert (f"Recipes for `megarl {wanted}` have a section" in str(caught.value)) == (wanted != "sft")


def test_a_recipe_of_no_kind_is_told_what_is_wrong(rm_file: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown key `rm`.*A recipe has: run, cluster") as caught:
        load_recipe(rm_file, ["train.stepz=1"])
    assert "is a recipe for" not in str(caught.value)


def test_nearest_prefers_the_same_section() -> None:
    schema = Schema(Recipe)
    assert nearest(("rollout", "samples_per_promt"), schema) == "rollout.samples_per_prompt"
    assert nearest(("eval", "samples_per_promt"), schema) == "eval.samples_per_prompt"
    assert nearest(("algorithm", "qqqqqq"), schema) is None


def test_every_key_of_the_schema_says_what_it_means() -> None:
    for kind in KINDS.values():
        schema = Schema(kind)
        silent = [".".join(keys) for keys in schema.leaves() if not schema.meaning(keys)]
        assert silent == []
        assert not [keys for keys in schema.leaves() if "something else" in schema.allowed(keys)]
