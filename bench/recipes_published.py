"""Shipped recipes of real models as planned, beside published runs of the same size.

    python -m bench.recipes_published

A recipe's own placement, on the nodes that its first lines name, is planned with the lengths of the published run, which is the
nearest in size of those in bench/published on as many H100; beside it what the search would pick for the recipe. Where the models
differ, what a device does for a step can be compared by the operations that the model needs for the step's tokens. No figure of
ours is measured. Writes bench/results/recipes_published.json and the table into docs/placement.md.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.plan_published import NEMO_PROMPT, NEMO_ROWS
from bench.support.measure import write
from bench.support.published import PROMPT_TOKENS, QWEN_30B_A3B, SAMPLES, Row, read_rows
from megarl.models.config import ModelConfig
from megarl.models.flops import train_flops
from megarl.placement.cluster import make_cluster
from megarl.placement.devices import DEVICES, GIB
from megarl.placement.lengths import ASSUMED_SPREAD, lognormal
from megarl.placement.own import own_placement
from megarl.placement.placed import PlacementPlan
from megarl.placement.plan import make_plan
from megarl.placement.sizes import model_sizes
from megarl.placement.workload import recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.plan_models import PlannedModels

RECIPES = Path(__file__).parent.parent / "recipes"
PAGE = Path(__file__).parent.parent / "docs" / "placement.md"
BEGIN, END = "<!-- bench.recipes_published -->", "<!-- end of bench.recipes_published -->"
DEVICE = "H100"


@dataclass(frozen=True)
class Published:
    """A run. tokens: of a sample on average. mfu: of the update, where it was published. memory: what is known of it."""

    name: str
    model: ModelConfig
    devices: int
    samples: int
    tokens: float
    prompt_tokens: float
    step_s: float
    mfu: float | None
    memory: str


def verl_run(rows: Sequence[Row], family: str, devices: int) -> Published:
    """The fastest whole step of a family on so many devices, on the kernels that megarl has."""
    found = [row for row in rows if row.family == family and row.megatron and not row.unfused and row.values["step_s"]]
    best = min((row for row in found if row.number("devices") == devices), key=lambda row: row.number("step_s"))
    prompts = int(best.values["generated_prompts"])
    return Published(
        f"verl, {best.values['model']}, {family} row {best.values['number']}",
        best.config,
        devices,
        prompts * SAMPLES,
        best.tokens,
        PROMPT_TOKENS,
        best.number("step_s"),
        best.number("mfu"),
        f"ran; roles offloaded, servers with {best.values['memory_share']} of the device",
    )


def nemo_run(devices: int) -> Published:
    """NeMo-RL's synchronous step."""
    with NEMO_ROWS.open() as file:
        row = next(row for row in csv.DictReader(file) if row["policy"] == "on" and int(row["num_gpus"]) == devices)
    tokens, step_s = float(row["avg_seq_len"]), float(row["step_s"])
    name = f"NeMo-RL v0.6, {row['model']}, on policy"
    samples = int(row["gen_gbs"])
    return Published(name, QWEN_30B_A3B, devices, samples, tokens, NEMO_PROMPT, step_s, None, "ran")


def of_step(model: ModelConfig, tokens: float, samples: int) -> float:
    """Model FLOPs that learn from a step's samples, all of the mean length."""
    return train_flops(model, [round(tokens)]) * samples


@dataclass(frozen=True)
class Shipped:
    """A recipe, and the nodes of its own words."""

    name: str
    recipe: Recipe
    nodes: int
    per_node: int = 8

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def models(self) -> PlannedModels:
        """Known by their config.json."""
        return PlannedModels(self.recipe)

    def plans(self, run: Published | None) -> tuple[PlacementPlan, PlacementPlan]:
        """Its own placement, and the search's pick, with the run's lengths, or else the likely ones."""
        longest, models = self.recipe.rollout.max_response_tokens, self.models
        responses = None if run is None else lognormal(run.tokens - run.prompt_tokens, ASSUMED_SPREAD, longest)
        given = None if run is None else run.prompt_tokens
        work = recipe_workload(self.recipe, models.policy, responses, given, read=models)
        cluster = make_cluster(DEVICE, self.nodes, self.per_node)
        own = own_placement(self.recipe, work, cluster)
        assert own.predicted is not None and own.problem is None, (self.name, own.problem)
        return own.predicted, make_plan(work, cluster).best


def shipped() -> list[Shipped]:
    """Every recipe of a real model."""
    found = []
    for file in sorted(RECIPES.glob("*.yaml")):
        if not file.stem.startswith("quickstart"):
            words = re.search(r"^#   megarl (plan .*)$", file.read_text(), re.MULTILINE)
            assert words, file
            asked = shlex.split(words[1])
            given = {
                flag: int(asked[asked.index(flag) + 1]) for flag in ("--nodes", "--devices-per-node") if flag in asked
            }
            found.append(Shipped(file.stem, load_recipe(file).recipe, *given.values()))
    return found


def beside(each: Shipped, rows: Sequence[Row]) -> list[Published]:
    """Published runs of about its size on as many devices."""
    if ("_30b_" in each.name, each.devices) == (True, 32):
        return [verl_run(rows, "dapo-30b", 32), nemo_run(32)]
    return [verl_run(rows, "dapo-7b", 8)] if ("_4b_" in each.name, each.devices) == (True, 8) else []


def compare(each: Shipped, run: Published | None) -> dict[str, Any]:
    """What is planned of the recipe, and what was published."""
    (plan, pick), devices, recipe = each.plans(run), each.devices, each.recipe
    samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    model = each.models.policy
    row: dict[str, Any] = {
        "recipe": each.name,
        "parameters": model_sizes(model).total,
        "devices": devices,
        "step_s": plan.step_s,
        "phases": dict(plan.phases),
        "pick": {"step_s": pick.step_s, "placement": pick.describe()},
        "peaks": [{"pool": pool.describe(), "bytes": pool.peak_bytes, "role": pool.peak_role} for pool in plan.pools],
    }
    if run is None:
        return row
    flops, peak = of_step(model, run.tokens, samples), DEVICES[DEVICE].flops
    theirs = of_step(run.model, run.tokens, run.samples)
    return row | {
        "run": run.name,
        "run_parameters": model_sizes(run.model).total,
        "run_memory": run.memory,
        "tokens": run.tokens,
        "tokens_s": {
            "planned": samples * run.tokens / plan.step_s / devices,
            "published": run.samples * run.tokens / run.step_s / run.devices,
        },
        "flops_s": {
            "planned": flops / plan.step_s / devices,
            "published": theirs / run.step_s / run.devices,
        },
        "mfu": {
            "planned": flops / plan.phases["train"] / recipe.cluster.devices / peak,
            "published": run.mfu,
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As the page has it."""
    titles = (
        *(
            "recipe, devices",
            "its own placement: s a step; fullest devices",
            "the search's pick, s",
            "beside",
            "tokens a sample",
        ),
        *("tokens/s a device", "TFLOP/s a device, whole step", "MFU of the update"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        peaks = ", ".join(f"{peak['bytes'] / GIB:.0f} GiB ({peak['role']})" for peak in row["peaks"])
        cells = [f"{row['recipe']}, {row['devices']}", f"{row['step_s']:.0f}; {peaks}", f"{row['pick']['step_s']:.0f}"]
        if "run" not in row:
            cells += ["none of its size is among the published rows", *[""] * 4]
        else:
            sizes = f"{row['run_parameters'] / 1e9:.1f}B beside {row['parameters'] / 1e9:.1f}B"
            mfu = row["mfu"]["published"]
            cells += [f"{row['run']} ({sizes})", f"{row['tokens']:,.0f}", _both(row["tokens_s"], 1, ",.0f")]
            cells += [_both(row["flops_s"], 1e12, ".0f")]
            cells += [f"{row['mfu']['planned']:.0%} / {'not published' if mfu is None else f'{mfu:.0%}'}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(pair: dict[str, float], unit: float, form: str) -> str:
    return f"{pair['planned'] / unit:{form}} / {pair['published'] / unit:{form}}"


def main(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result, and no page is written; else bench/results.")
    ] = None,
) -> None:
    """Plan the shipped recipes beside published runs."""
    published = read_rows()
    rows = []
    for each in shipped():
        runs: list[Published] | list[None] = beside(each, published) or [None]
        rows += [compare(each, run) for run in runs]
    print(table(rows))
    write("recipes_published", {"rows": rows}, out)
    if out is None:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    typer.run(main)
