"""A run that is right in every way, and the ways in which users get one wrong, for the tests of preflight and CLI."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RECIPE = """\
run: {{dir: {root}/runs, name: r}}
cluster: {{platform: cpu}}
model: {{path: {root}/model, dtype: float32}}
data:
  train: {root}/train.jsonl
  max_prompt_tokens: 64
rollout:
  prompts_per_step: 4
  samples_per_prompt: 4
  max_response_tokens: 32
train:
  steps: 2
"""

RM_RECIPE = """\
run: {{dir: {root}/runs, name: r}}
cluster: {{platform: cpu}}
model: {{path: {root}/model, dtype: float32}}
data: {{train: {root}/train.jsonl, max_tokens: 64}}
rm: {{}}
train: {{steps: 2, batch_samples: 4}}
"""


@dataclass(frozen=True)
class Place:
    """Where a run's inputs lie."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "train.jsonl"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def run(self) -> Path:
        return self.root / "runs" / "r"

    def write_rows(self, *rows: object) -> None:
        """Replace the data; rows that are no text are written as JSON."""
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        self.data.write_text("".join(f"{line}\n" for line in lines))

    def edit_config(self, **changes: object) -> None:
        """Change keys of the model's config.json."""
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def edit_weights(self, change: Callable[[dict[str, object]], None]) -> None:
        """Change the tensors of the model's only weights file."""
        from safetensors.numpy import load_file, save_file

        path = self.model / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def good_place(root: Path, model: Path) -> Place:
    """Inputs of a run that preflight lets through; `model` is copied."""
    place = Place(root)
    shutil.copytree(model, place.model)
    place.write_rows(*({"prompt": f"{n}+{n}=?", "answer": 2 * n} for n in range(8)))
    place.recipe.write_text(RECIPE.format(root=root))
    return place


def pairs_place(root: Path, model: Path) -> Place:
    """Inputs of a run of `megarl rm` that preflight lets through."""
    place = good_place(root, model)
    place.write_rows(*(GOOD_PAIR for _ in range(4)))
    place.recipe.write_text(RM_RECIPE.format(root=root))
    return place


GOOD_PAIR = {"prompt": "1+1=?", "chosen": "2", "rejected": "3"}
Break = Callable[[Place], object]


@dataclass(frozen=True)
class Bad:
    """One mistake. says: what the message must name, `{root}` filled in. overrides: given on the command line."""

    name: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    spoil: Break = lambda place: None
    resume: bool = False

    def expected(self, place: Place) -> list[str]:
        return [part.replace("{root}", str(place.root)) for part in self.says]


def _row(place: Place, row: object) -> None:
    good = {"prompt": "1+1=?", "answer": "2"}
    place.write_rows(good, good, row, good)


def _pair(place: Place, row: object) -> None:
    place.write_rows(GOOD_PAIR, GOOD_PAIR, row, GOOD_PAIR)


# For `megarl rm`.
PAIRS = (
    Bad(
        "chosen and rejected alike",
        ("train.jsonl, line 3", "the same answer", "Leave the row out"),
        spoil=lambda p: _pair(p, GOOD_PAIR | {"rejected": "2"}),
    ),
    Bad(
        "rejected missing",
        ("train.jsonl, line 3", "no field 'rejected'", "Did you mean 'reject'?"),
        spoil=lambda p: _pair(p, {"prompt": "1", "chosen": "1", "reject": "2"}),
    ),
    Bad(
        "margin that is no number",
        ("train.jsonl, line 3, field 'margin'", "is nan", "a finite number"),
        spoil=lambda p: _pair(p, GOOD_PAIR | {"margin": float("nan")}),
    ),
    Bad(
        "held-out pairs missing",
        ("{root}/held_out.jsonl", "no such data file"),
        ("data.eval={root}/held_out.jsonl",),
    ),
    Bad(
        "micro-batch that holds no pair",
        ("actor.micro_batch_tokens 100", "twice data.max_tokens", "Nearest valid value: 128"),
        ("actor.micro_batch_tokens=100",),
    ),
    Bad("adapters beside a new head", ("score head begins at zero", "Remove actor.lora"), ("actor.lora={}",)),
    Bad(
        "demonstrations given to rm",
        ("is a recipe for `megarl sft`, not for `megarl rm`", "have a section `rm`"),
        spoil=lambda p: p.recipe.write_text(p.recipe.read_text().replace("rm: {}\n", "")),
    ),
)

DATA = (
    Bad("data file missing", ("{root}/train.jsonl", "no such data file"), spoil=lambda p: p.data.unlink()),
    Bad("data file empty", ("{root}/train.jsonl", "no rows"), spoil=lambda p: p.write_rows()),
    Bad("malformed row", ("train.jsonl, line 3", "malformed JSON"), spoil=lambda p: _row(p, '{"prompt": ')),
    Bad("row is a list", ("train.jsonl, line 3", "a JSON object is wanted"), spoil=lambda p: _row(p, [1])),
    Bad(
        "prompt missing",
        ("train.jsonl, line 3", "no field 'prompt'", "Did you mean 'promt'?"),
        spoil=lambda p: _row(p, {"promt": "1", "answer": "1"}),
    ),
    Bad(
        "prompt of a wrong type",
        ("train.jsonl, line 3, field 'prompt'", "is a number", "a string or a list of chat messages"),
        spoil=lambda p: _row(p, {"prompt": 7, "answer": "1"}),
    ),
    Bad(
        "answer missing",
        ("train.jsonl, line 3", "there is no answer", "'label'", "data.answer_key"),
        spoil=lambda p: _row(p, {"prompt": "1", "solution": "1"}),
    ),
    Bad("named answer missing", ("line 1", "no field 'gold'", "data.answer_key"), ("data.answer_key=gold",)),
    Bad(
        "data of an unknown kind",
        ("train.csv", "unknown kind of data file '.csv'", ".jsonl"),
        ("data.train=train.csv",),
    ),
    Bad(
        "broken Parquet",
        ("train.parquet", "not a readable Parquet file"),
        ("data.train={root}/train.parquet",),
        spoil=lambda p: (p.root / "train.parquet").write_text("no parquet"),
    ),
    Bad("held-out file missing", ("{root}/held_out.jsonl",), ("data.eval={root}/held_out.jsonl",)),
    Bad("fewer rows than prompts", ("8 usable rows", "Set it to at most 8"), ("rollout.prompts_per_step=9",)),
    Bad(
        "a prompt over the limit, refused",
        ("train.jsonl, line 3", "over data.max_prompt_tokens=64"),
        ("data.over_length=error",),
        spoil=lambda p: _row(p, {"prompt": "1" * 100, "answer": "1"}),
    ),
    Bad(
        "all prompts over the limit",
        ("all 8 prompts are over data.max_prompt_tokens=1",),
        ("data.max_prompt_tokens=1",),
    ),
)

RECIPE_KEYS = (
    Bad("recipe missing", ("There is no recipe at {root}/recipe.yaml",), spoil=lambda p: p.recipe.unlink()),
    Bad(
        "unknown key in the file",
        ("{root}/recipe.yaml:13", "`train.stepz`", "Did you mean `train.steps`?"),
        spoil=lambda p: p.recipe.write_text(p.recipe.read_text() + "  stepz: 3\n"),
    ),
    Bad("unknown key on the command line", ("`rollout.temprature` (on the command line)",), ("rollout.temprature=1",)),
    Bad("wrong type", ("`train.steps`", '"many" (text)', "a whole number at least 0"), ("train.steps=many",)),
    Bad(
        "not YAML",
        ("{root}/recipe.yaml:13", "not YAML"),
        spoil=lambda p: p.recipe.write_text(p.recipe.read_text() + "]\n"),
    ),
    Bad(
        "rm recipe given to train",
        ("is a recipe for `megarl rm`, not for `megarl train`", "Run `megarl rm {root}/recipe.yaml`"),
        spoil=lambda p: p.recipe.write_text(RM_RECIPE.format(root=p.root)),
    ),
    Bad("a key that nothing reads", ("`eval.every`", "set data.eval to a file"), ("eval.every=2",)),
    Bad("adapters on no linear", ("linear_qvk", "linear_qkv, linear_proj"), ("actor.lora.targets=[linear_qvk]",)),
    Bad("a group of one", ("`rollout.samples_per_prompt`", "a group of 1 has none"), ("rollout.samples_per_prompt=1",)),
    Bad(
        "mini-batch that does not divide",
        ("actor.mini_batch_samples 5", "Nearest valid value: 4 or 8"),
        ("actor.mini_batch_samples=5",),
    ),
    Bad(
        "micro-batch too small",
        ("actor.micro_batch_tokens 50", "Nearest valid value: 96"),
        ("actor.micro_batch_tokens=50",),
    ),
    Bad("tp that does not divide the devices", ("actor.parallel tp 2", "cluster.devices 1"), ("actor.parallel.tp=2",)),
    Bad(
        "tp that does not divide the heads",
        ("actor.parallel (tp3", "4 attention heads"),
        ("actor.parallel.tp=3", "cluster.devices=3"),
    ),
    Bad(
        "an external server that is not there",
        ("The external server http://127.0.0.1:9 does not answer", "Start it, or mend its address"),
        ("rollout.servers.urls=[http://127.0.0.1:9]",),
    ),
    Bad(
        "external servers without their key",
        ("`rollout.servers.key_env`", "MEGARL_TEST_NO_SUCH_KEY", "not set"),
        ("rollout.servers={urls: [http://127.0.0.1:9], key_env: MEGARL_TEST_NO_SUCH_KEY}",),
    ),
    Bad("servers' tp that does not divide the heads", ("rollout.tp 3", "Sizes that work: 1, 2, 4"), ("rollout.tp=3",)),
)

MODEL = (
    Bad("model folder missing", ("{root}/nowhere", "model.path"), ("model.path={root}/nowhere",)),
    Bad("model without config", ("{root}/model", "config.json"), spoil=lambda p: (p.model / "config.json").unlink()),
    Bad(
        "model without tokenizer",
        ("{root}/model", "tokenizer"),
        spoil=lambda p: [path.unlink() for path in p.model.glob("tokenizer*")],
    ),
    Bad(
        "model without weights",
        ("{root}/model", "safetensors"),
        spoil=lambda p: (p.model / "model.safetensors").unlink(),
    ),
    Bad(
        "unsupported architecture",
        ("GPT2LMHeadModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        spoil=lambda p: p.edit_config(architectures=["GPT2LMHeadModel"]),
    ),
    Bad(
        "weights that lack a tensor",
        ("do not match its config.json", "model.norm.weight"),
        spoil=lambda p: p.edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
    ),
    Bad(
        "weights of another shape",
        ("do not match its config.json", "mlp.down_proj.weight", "[64, 256]"),
        spoil=lambda p: p.edit_config(intermediate_size=256),
    ),
    Bad(
        "weights cut off",
        ("{root}/model/model.safetensors", "cut off"),
        spoil=lambda p: _cut_off(p.model / "model.safetensors"),
    ),
    Bad(
        "weights whose header says another type",
        ("{root}/model/model.safetensors", "invalid shape, data type, or offset", "Copy or export it again"),
        spoil=lambda p: _lie(p.model / "model.safetensors"),
    ),
    Bad(
        "config of wrong types",
        ("{root}/model/config.json", "eos_token_id is 'x'", "a whole number or a list of whole numbers"),
        spoil=lambda p: p.edit_config(eos_token_id="x"),
    ),
    Bad(
        "layers that are not those of layer_types",
        ("{root}/model/config.json", "layer_types has 1 entries, and num_hidden_layers is 3"),
        spoil=lambda p: p.edit_config(layer_types=["full_attention"]),
    ),
    Bad(
        "prompt and response longer than the context",
        ("data.max_prompt_tokens 2040", "rollout.max_response_tokens 32", "context of 2048", "Lower the limit by 24"),
        ("data.max_prompt_tokens=2040",),
    ),
)

REWARD = (
    Bad("reward that is no name", ("reward.fn='maths'", "Did you mean 'math'?"), ("reward.fn=maths",)),
    Bad("reward that does not import", ("no_such_module_here",), ("reward.fn=no_such_module_here:f",)),
    Bad("reward that is not there", ("'sqroot'", "Did you mean 'sqrt'?"), ("reward.fn=cmath:sqroot",)),
    Bad(
        "grader without its key",
        ("`reward.graders.far.key_env`", "MEGARL_TEST_NO_SUCH_KEY", "not set"),
        ("reward.graders.far={kind: remote, url: 'http://host/grade', key_env: MEGARL_TEST_NO_SUCH_KEY}",),
    ),
    Bad(
        "judge whose template has another variable",
        ("`reward.graders.judge.template`", "'respons'", "Did you mean 'response'?"),
        ("reward.graders.judge={kind: judge, url: 'http://host/v1', model: m, template: '{{ respons }}'}",),
    ),
    Bad(
        "address that is none",
        ("`reward.graders.far.url`", "http://host:8000/grade"),
        ("reward.graders.far={kind: remote, url: 'host:8000'}",),
    ),
    Bad(
        "two ways to say who grades",
        ("`reward.fn`", "reward.graders is given"),
        ("reward.fn=exact", "reward.graders.own={kind: rule, fn: math}"),
    ),
    Bad("reward with other parameters", ("copy:copy", "prompt, response, answer, metadata"), ("reward.fn=copy:copy",)),
)

FOLDER = (
    Bad(
        "run folder holds a run",
        ("{root}/runs/r already holds a run", "--resume", "run.name="),
        spoil=lambda p: _touch(p.run / "metrics.jsonl"),
    ),
    Bad("nothing to resume", ("nothing to resume", "{root}/runs/r"), resume=True),
    Bad(
        "run folder cannot be made",
        ("{root}/train.jsonl is not a folder", "run.dir"),
        ("run.dir={root}/train.jsonl/runs",),
    ),
)


def _rows(spoiled: object) -> Break:
    return lambda place: _row(place, spoiled)


def _message(**message: object) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": "1"} | message], "answer": "1"}


def _swap(path: str, target: str) -> Break:
    """A link in a file's place."""

    def spoil(place: Place) -> None:
        (place.root / path).unlink(missing_ok=True)
        (place.root / path).symlink_to(place.root / target)

    return spoil


def _word_beyond(place: Place) -> None:
    """The tokenizer learns a word that the model has no row for, and a prompt has it."""
    path = place.model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["~"] = 500
    path.write_text(json.dumps(tokenizer))
    _row(place, {"prompt": "1~1", "answer": "1"})


# Refused by the preflight alike; the command line is tried with those above.
ODD = (
    Bad("half a character", ("train.jsonl, line 3", "\\ud83d"), spoil=_rows('{"prompt": "\\ud83d", "answer": "1"}')),
    Bad(
        "answer null",
        ("line 3: the field 'answer' (the answer) is null",),
        spoil=_rows({"prompt": "1", "answer": None}),
    ),
    Bad(
        "answer no number",
        ("line 3, field 'answer': the answer is nan",),
        spoil=_rows('{"prompt": "1", "answer": NaN}'),
    ),
    Bad(
        "answer that a built-in rule cannot compare with",
        (
            "train.jsonl, line 3: the row's answer is an object, with which no response can be compared, and math compares",
        ),
        spoil=_rows({"prompt": "1", "answer": {"a": 1}}),
    ),
    Bad(
        "answer of a wrong type",
        ("the answer is true or false; wanted",),
        spoil=_rows({"prompt": "1", "answer": False}),
    ),
    Bad(
        "role that nobody knows",
        ("line 3, message 1: there is no role 'usr'. Did you mean 'user'?",),
        spoil=_rows(_message(role="usr")),
    ),
    Bad(
        "message of null",
        ("line 3, field 'prompt', message 1: 'content' is null",),
        spoil=_rows(_message(content=None)),
    ),
    Bad(
        "messages without words",
        ("line 3, field 'prompt': all messages are empty",),
        spoil=_rows(_message(content=" ")),
    ),
    Bad("token beyond the vocabulary", ("line 3: the tokenizer makes token 500 ('~')", "has 128"), spoil=_word_beyond),
    Bad(
        "folder in the data's place", ("{root} is a folder", "Did you mean {root}/train.jsonl?"), ("data.train={root}",)
    ),
    Bad("data that is a broken link", ("a link that leads nowhere",), spoil=_swap("train.jsonl", "nowhere")),
    Bad("data with too long a name", ("cannot be used: File name too long",), ("data.train=/" + "a" * 300 + ".jsonl",)),
    Bad("file in the model's place", ("train.jsonl is not a folder",), ("model.path={root}/train.jsonl",)),
    Bad(
        "model without a tokenizer", ("has no tokenizer (",), spoil=lambda p: [f.unlink() for f in p.model.glob("tok*")]
    ),
    Bad("run under /proc", ("/proc takes no new folder", "Set run.dir"), ("run.dir=/proc/runs",)),
    Bad("run with too long a name", ("takes no names of more than 255 bytes",), ("run.name=" + "a" * 300,)),
    Bad(
        "run in a broken link",
        ("{root}/link is a link that leads nowhere",),
        ("run.dir={root}/link",),
        _swap("link", "no"),
    ),
    Bad(
        "run in a link to itself",
        ("{root}/link takes no new", "symbolic"),
        ("run.dir={root}/link",),
        _swap("link", "link"),
    ),
    Bad("run with a NUL", ("`run.dir` (on the command line)", "has a NUL"), ('run.dir="a\\0b"',)),
    Bad("true for a section", ("`report.wandb`", "Write {} for a section of defaults"), ("report.wandb=true",)),
    Bad("number of too many digits", ("value of train.steps (on the command line)",), ("train.steps=" + "9" * 5000,)),
    Bad(
        "far too many samples",
        ("actor.mini_batch_samples",),
        ("rollout.samples_per_prompt=1000000000001", "actor.mini_batch_samples=7"),
    ),
    Bad(
        "variable that is not set",
        ("`run.name` (on the command line): the environment variable MEGARL_TEST_UNSET is not set",),
        ("run.name=${MEGARL_TEST_UNSET}",),
    ),
    Bad(
        "recipe is a folder",
        ("{root}/recipe.yaml, the recipe, is a folder",),
        spoil=lambda p: (p.recipe.unlink(), p.recipe.mkdir()),
    ),
    Bad(
        "base that is not there",
        ("no base of {root}/recipe.yaml (named at {root}/recipe.yaml:1) at {root}/none.yaml", "is relative to {root}."),
        spoil=lambda p: p.recipe.write_text("base: none.yaml\n" + p.recipe.read_text()),
    ),
)

ALL = (*DATA, *RECIPE_KEYS, *MODEL, *REWARD, *FOLDER)


def _cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _lie(path: Path) -> None:
    """One tensor in the middle is said to be twice as wide as it is."""
    content = path.read_bytes()
    middle = content.index(b'"dtype":"F32"', content.index(b"layers.1.mlp"))
    path.write_bytes(content[:middle] + b'"dtype":"F64"' + content[middle + 13 :])


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
