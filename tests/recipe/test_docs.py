"""docs/algorithms.md and docs/supervised.md say what is so: names, inputs, numbers, formulas, recipes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import megarl
from megarl.algorithms import advantage, correction, inputs, kl, kl_control, returns, shaping
from megarl.algorithms.inputs import LOSS_INPUTS, SAMPLE_ADVANTAGES, SAMPLE_INPUTS, TOKEN_ADVANTAGES, TOKEN_INPUTS
from megarl.algorithms.kl import KlKind, kl_estimate
from megarl.algorithms.limits import MAX_LOG_RATIO
from megarl.algorithms.policy_loss import POLICY_LOSSES, distill_loss, gmpo_loss, gspo_loss
from megarl.algorithms.preference import (
    apo_down_loss,
    apo_zero_loss,
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    robust_loss,
)
from megarl.algorithms.reduce import Reduction, sample_weights
from megarl.algorithms.returns import kl_penalty
from megarl.core.metrics import check_names
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.check import check_functions
from megarl.recipe.explain import Schema
from megarl.recipe.load import KINDS, load_recipe
from megarl.recipe.presets import PRESETS

DOCS = Path(megarl.__file__).parent.parent / "docs"
ALGORITHMS, SUPERVISED = ((DOCS / name).read_text() for name in ("algorithms.md", "supervised.md"))
# Files, and a field of rows, whose names begin as sections do.
OTHERS = {
    "eval.json",
    "train.py",
    "train.jsonl:3",
    "reward_model.ground_truth",
    "reward_model.ground_truth.target",
    "reward_model.style",
    "model.safetensors.index.json",
}
SMALL = {"⁻": "-", **{each: str(digit) for digit, each in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}}


def section(page: str, heading: str) -> str:
    """The text under a heading of the second order."""
    [found] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of the only table in the text, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(text: str) -> list[str]:
    """What stands in backquotes, blocks of code aside."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def listed(text: str, head: str) -> list[str]:
    """The backquoted names after a word such as `Inputs:`, up to the end of the sentence."""
    [found] = re.findall(rf"{head} (.*?)(?:\.\s|$)", text, flags=re.DOTALL)
    return names(found)


def blocks(page: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("heading", "functions"),
    [
        ("Advantages of samples", SAMPLE_ADVANTAGES),
        ("Advantages of tokens", TOKEN_ADVANTAGES),
        ("Policy losses", POLICY_LOSSES),
    ],
)
def test_the_tables_of_functions_are_the_functions(heading: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    text = section(ALGORITHMS, heading)
    table = {name: row for row in rows(text) for name in names(row[0])}
    others = set(table) - set(functions)
    assert set(functions) <= set(table)
    # Beside them what they are made of, by its name in the code.
    assert all(hasattr(returns, name) for name in others) and (not others or heading == "Advantages of tokens")
    for name, row in table.items():
        papers = re.findall(r"\d{4}\.\d{5}", row[-1])
        function = functions.get(name) or getattr(returns, name)
        described = (inspect.getdoc(function) or "") + (inspect.getdoc(inspect.getmodule(function)) or "")
        assert all(paper in described for paper in papers), (name, papers)


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Advantages of samples", SAMPLE_INPUTS),
        ("Advantages of tokens", TOKEN_INPUTS),
        ("Policy losses", LOSS_INPUTS),
    ],
)
def test_the_inputs_are_those_that_a_function_is_given(heading: str, known: inputs.Inputs) -> None:
    assert listed(section(ALGORITHMS, heading), "Inputs:") == list(known)


def test_the_other_names_of_a_recipe_are_all_there() -> None:
    assert [names(row[0])[0] for row in rows(section(ALGORITHMS, "Denominators"))] == list(get_args(Reduction))
    assert get_args(Algorithm.model_fields["reduction"].annotation) == get_args(Reduction)
    disagree = section(ALGORITHMS, "Rollout and trainer disagree")
    kinds = [names(line)[0] for line in disagree.splitlines() if line.startswith("- ")]
    assert kinds == list(correction.CORRECTIONS)
    assert set(get_args(correction.Level)) <= set(names(disagree))
    assert set(get_args(KlKind)) <= set(names(section(ALGORITHMS, "KL")))
    presets = listed(section(ALGORITHMS, "Presets"), "give any:")
    assert sorted(presets) == sorted(PRESETS)


def test_every_key_that_a_page_names_is_one() -> None:
    """Dotted names that begin with a section of some recipe; those of modules and metrics do not."""
    schemas = [Schema(kind) for kind in KINDS.values()]
    sections = {key for schema in schemas for key in schema.children(())}
    unknown = {}
    for path in (*DOCS.glob("*.md"), DOCS.parent / "README.md"):
        for name in names(path.read_text()):
            first, *rest = name.partition(":")[0].split(".")
            if not rest or first not in sections or name in OTHERS or not re.fullmatch(r"[a-z_.]+", ".".join(rest)):
                continue
            if not any(schema.node((first, *rest)) for schema in schemas):
                unknown[f"{path.name}: {name}"] = True
    assert list(unknown) == []


def power(text: str) -> float:
    """10⁻⁶ as a number."""
    base, exponent = re.fullmatch(r"(\d+)([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text).groups()  # type: ignore[union-attr]
    return float(base) ** int("".join(SMALL[each] for each in exponent))


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def cell(heading: str, name: str) -> str:
    return next(row[1] for row in rows(section(ALGORITHMS, heading)) if name in names(row[0]))


def test_numbers_are_those_of_the_code() -> None:
    def epsilon(text: str) -> float:
        return power(re.search(r"\+ (10[⁻\w]+)", text)[1])  # type: ignore[index]

    samples = section(ALGORITHMS, "Advantages of samples")
    assert epsilon(cell("Advantages of samples", "grpo")) == default(advantage.group_advantages, "eps")
    baseline = advantage.reinforce_pp_baseline_advantages
    assert epsilon(cell("Advantages of samples", "reinforce_pp_baseline")) == default(baseline, "eps")
    assert epsilon(cell("Advantages of tokens", "whiten")) == default(returns.whiten, "eps")
    egpo = advantage.egpo_advantages
    low, high = re.search(r"H_i \+ ε\), ([\d.]+), ([\d.]+)\)", samples).groups()  # type: ignore[union-attr]
    assert (float(low), float(high)) == (default(egpo, "min_weight"), default(egpo, "max_weight"))
    threshold = re.search(r"a reward of at least ([\d.]+) is right", samples)[1]  # type: ignore[index]
    assert float(threshold) == default(egpo, "right_reward")
    assert power(re.search(r"The ε = (\S+)", samples)[1]) == default(egpo, "eps")  # type: ignore[index]
    assert f"±{MAX_LOG_RATIO:g}" in section(ALGORITHMS, "Policy losses")
    assert f"±{kl_control.MAX_ERROR:g}" in section(ALGORITHMS, "KL")
    assert f"linearly to −{default(shaping.overlong_penalty, 'factor'):g}" in section(
        ALGORITHMS, "Reward shaping and sampling"
    )


def test_deviations_are_the_populations() -> None:
    text = section(ALGORITHMS, "Conventions")
    share, size = re.search(r"by ([\d.]+)% in groups of (\d+)", text).groups()  # type: ignore[union-attr]
    assert float(share) == pytest.approx(100 * (1 - math.sqrt((int(size) - 1) / int(size))), abs=0.05)
    rewards = np.array([1, 0, 0, 3], np.float32)
    expected = (rewards - rewards.mean()) / rewards.std()  # numpy's is the population's
    assert advantage.group_advantages(rewards, np.zeros(4, np.int64), True) == pytest.approx(expected, rel=1e-5)
    assert returns.whiten(rewards, np.ones(4)) == pytest.approx(expected, rel=1e-5)
    lengths = np.array([1, 1, 2, 1])
    of_tokens = np.repeat(rewards - rewards.mean(), lengths)
    found = advantage.reinforce_pp_baseline_advantages(rewards, np.zeros(4, np.int64), lengths)
    assert np.repeat(found, lengths) == pytest.approx((of_tokens - of_tokens.mean()) / of_tokens.std(), rel=1e-5)


@pytest.mark.parametrize("kind", get_args(KlKind))
def test_only_k1_in_the_loss_is_not_clamped(kind: KlKind) -> None:
    far = 3 * MAX_LOG_RATIO
    assert "Only `k1` in the loss is not clamped" in section(ALGORITHMS, "Conventions")
    in_loss = [float(kl_estimate(torch.tensor(-at), torch.tensor(0.0), kind)) for at in (MAX_LOG_RATIO, far)]
    in_reward = [float(kl_penalty(np.array([-at]), np.zeros(1), kind)[0]) for at in (MAX_LOG_RATIO, far)]
    assert (in_loss[0] == in_loss[1]) == (kind != "k1")
    assert in_reward[0] == in_reward[1] == pytest.approx(in_loss[0])
    leaf = torch.tensor(-far, requires_grad=True)
    kl.kl_estimate(leaf, torch.tensor(0.0), kind).backward()
    assert float(leaf.grad or 0) == (1.0 if kind == "k1" else 0.0)


def test_what_else_is_clamped() -> None:
    far, edge, one = torch.tensor([3 * MAX_LOG_RATIO]), torch.tensor([MAX_LOG_RATIO]), torch.ones(1)
    for name in ("ppo", "cispo", "distill"):
        settings = {"clip_low": 1.0, "clip_high": 1e12} if name != "distill" else {}
        third = {"teacher_logprobs": one} if name == "distill" else {"advantages": -one}
        ratios = [
            POLICY_LOSSES[name](logprobs=at, old_logprobs=0 * one, **third, **settings).ratio for at in (far, edge)
        ]
        assert ratios[0] == ratios[1]
    means = [gspo_loss(one, one, at, 1.0, 1e12).ratio for at in (far, edge)]
    assert means[0] == means[1]
    means = [gmpo_loss(at, 0 * one, one, lambda values: values, 1.0, 1e12).ratio for at in (far, edge)]
    assert means[0] == means[1]
    gains = [distill_loss(0 * one, 0 * one, at).loss for at in (far, edge)]
    assert gains[0] == gains[1]
    bounds = np.array([0, 2])
    for level in get_args(correction.Level):
        ratio = correction.importance_ratios(np.full(2, 30.0), np.zeros(2), np.ones(2), bounds, level)
        assert ratio[0] == pytest.approx(math.exp(MAX_LOG_RATIO))
    taught = returns.distill_advantages(np.zeros(1), np.array([99.0]), np.ones(1))
    assert taught == [MAX_LOG_RATIO]
    steered = kl_control.AdaptiveKl(1.0, target=1.0, horizon=1).updated(0.0, 1000)
    assert steered.coef == pytest.approx(1e-3)  # never below a thousandth


def test_constant_counts_all_samples_and_the_limit() -> None:
    assert sample_weights([4, 0, 2], "constant", max_tokens=10).tolist() == pytest.approx([1 / 30, 0, 1 / 30])
    assert cell("Denominators", "constant") == "1 / (N × `rollout.max_response_tokens`)"


def formula(page: str, name: str) -> Callable[..., Any]:
    """A formula of a page as a function of its names."""
    [text] = re.findall(rf"^    {name}\s+= (.*?)(?:\s+mean over pairs)?$", page, flags=re.MULTILINE)
    text = re.sub(r"(?<=[\w)]) log sigmoid\(", " * logsigmoid(", text).replace("log sigmoid(", "logsigmoid(")
    text = re.sub(r"(?<=[a-z_]) \(", " * (", text).replace("^", "**")
    text = re.sub(r"(?<=\d) (?=[a-z])", " * ", text)
    code = compile(text, name, "eval")
    known = {"logsigmoid": torch.nn.functional.logsigmoid, "sigmoid": torch.sigmoid, "max": lambda a, b: b.clamp(min=a)}
    return lambda **values: eval(code, {"__builtins__": {}}, known | values)


def test_the_formulas_of_pairs_are_those_of_the_code() -> None:
    lead = torch.linspace(-2, 2, 7)
    expected = formula(SUPERVISED, "sigmoid")(label_smoothing=0.2, lead=lead)
    assert torch.allclose(bradley_terry_loss(lead, 0.2), expected)
    assert torch.allclose(ipo_loss(lead, 0.3), formula(SUPERVISED, "ipo")(lead=lead, beta=0.3))
    assert torch.allclose(robust_loss(lead, 0.2), formula(SUPERVISED, "robust")(label_smoothing=0.2, lead=lead))
    assert torch.allclose(hinge_loss(lead), formula(SUPERVISED, "hinge")(lead=lead))
    rewards = {"reward_c": lead + 0.5, "reward_r": lead.flip(0)}
    assert torch.allclose(apo_zero_loss(*rewards.values()), formula(SUPERVISED, "apo_zero")(**rewards))
    assert torch.allclose(apo_down_loss(lead + 0.5, lead), formula(SUPERVISED, "apo_down")(lead=lead, **rewards))
    # The conventions' h - m / beta - 1 / (2 beta), squared, with lead = beta h - m.
    h, m, beta = lead, 0.4, 0.3
    assert torch.allclose(ipo_loss(beta * h - m, beta), (h - m / beta - 1 / (2 * beta)) ** 2)
    c, r = torch.tensor(1.5), torch.tensor(-0.5)
    page = formula(SUPERVISED, "loss")(s_c=c, s_r=r, m=0.25, center_coef=0.1)
    assert page == bradley_terry_loss(c - r - 0.25) + 0.1 * (c + r) ** 2


def test_the_commands_of_supervised_runs_and_their_metrics() -> None:
    table = {
        names(row[0])[0].removeprefix("megarl "): names(row[3])[0] for row in rows(SUPERVISED.split("## Pairs")[0])
    }
    assert list(table) == [name for name in KINDS if name != "train"]
    for metric in table.values():
        check_names({metric.replace("*", "loss"): 0.0})


def test_the_recipes_of_the_page_are_accepted(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```python\n(.*?)^```", ALGORITHMS, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(code)
    base = recipe_file.read_text()
    for text in blocks(ALGORITHMS):
        recipe_file.write_text(base + text)
        loaded = load_recipe(recipe_file)
        check_functions(loaded.recipe, loaded.sources)
    assert loaded.recipe.algorithm.settings == {"scale": 0.5}
