"""`megarl plan`: reads a recipe and a cluster, searches, and shows what was found; without torch and without devices."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.core.disk import check_writable
from megarl.core.errors import UserError
from megarl.data.chat import load_tokenizer
from megarl.hub.fetch import find_tokenizer
from megarl.placement.apply import AUTO, apply_plan, plan_recipe
from megarl.placement.cluster import Cluster, make_cluster, one_kind, read_cluster
from megarl.placement.length_files import read_lengths
from megarl.placement.lengths import ASSUMED_SPREAD, Band, Lengths, assumed_lengths, cut, lognormal
from megarl.placement.own import own_placement
from megarl.placement.page import page
from megarl.placement.plan import Plan
from megarl.placement.recompute import spared_layers
from megarl.placement.report import as_json, render
from megarl.placement.simulate import Conditions, render_simulation, simulate
from megarl.placement.workload import ROLLOUT, Quantization, Workload, recipe_workload
from megarl.recipe.load import Loaded, load_recipe
from megarl.recipe.sampling_rules import asks_beside, correction_by_default
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import scored_first
from megarl.run.model_check import with_linears
from megarl.run.past_run import PastRun, calibrated, cluster_of_run, compare, read_run
from megarl.run.plan_models import PlannedModels

# From so many on a search takes long enough to be spoken of.
MANY_DEVICES = 1024


@dataclass(frozen=True)
class PlanOptions:
    """What `megarl plan` was asked for.

    name: only placements of that name. lengths: file or folder that lengths are read from. response_mean, response_spread: of
    the lengths; mean None is not known. prompt_mean: likewise of prompts. max_staleness: in place of the recipe's.
    quantization: of the servers' weights. from_run: folder of a run that rates and lengths are taken from. simulate: steps to
    play; 0 plays none. as_text: JSON in place of tables. html: also a page at that path.
    """

    top: int = 5
    name: str = AUTO
    lengths: Path | None = None
    response_mean: float | None = None
    response_spread: float = ASSUMED_SPREAD
    prompt_mean: float | None = None
    max_staleness: int | None = None
    quantization: Quantization | None = None
    explain: bool = False
    from_run: Path | None = None
    simulate: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    as_text: bool = False
    html: Path | None = None


def choose_cluster(
    path: Path | None, device: str | None, nodes: int, devices_per_node: int | None, from_run: Path | None = None
) -> Cluster:
    """The cluster of a file, of a device of the table, or of a run. Raises UserError for none and for two."""
    if path is None and device is None and from_run is not None:
        return cluster_of_run(read_run(from_run))
    if (path is None) == (device is None):
        raise UserError(
            "A plan is made for a cluster: give either --cluster FILE (`nodes: 2`, `device: H100`), or --device NAME "
            "with --nodes N."
        )
    if path is not None:
        return read_cluster(path)
    assert device is not None
    return make_cluster(device, nodes, devices_per_node)


def run_plan(path: Path, overrides: list[str], cluster: Cluster, options: PlanOptions) -> None:
    """Plan and print: first how sure the lengths are, and what that means for the seconds."""
    if options.html is not None:
        check_writable(options.html, "--html")
    loaded = load_recipe(path, overrides, Recipe)
    if loaded.recipe.rollout.external is not None:
        raise UserError(
            "rollout.servers.urls names servers that somebody else started: they are on no device of the run, and a plan has "
            "nothing to choose for them. Plan as if the run started its servers: put rollout.servers=N behind the recipe. "
            "`megarl train` checks by itself that the ranks alone fit."
        )
    console = Console(stderr=options.as_text, markup=False)
    models = PlannedModels(loaded.recipe)
    recipe = with_linears(loaded, models.policy).recipe
    workload = recipe_workload(recipe, models.policy, read=models)
    for note in models.notes:
        console.print(note, highlight=False)
    lengths = _lengths(recipe, workload, options)
    if options.from_run is not None:
        run = read_run(options.from_run)
        console.print(compare(run, one_kind(cluster)), highlight=False)
        cluster = calibrated(run, cluster)
        if not lengths.given:
            lengths = _those_of(run, recipe)
    workload = replace(
        workload,
        responses=lengths.responses,
        prompt_tokens=lengths.prompt_tokens,
        quantization=options.quantization or workload.quantization,
    )
    if options.max_staleness is not None:
        workload = _with_staleness(workload, loaded, options.max_staleness)
    plan = _searched(recipe, workload, cluster, options)
    seconds = _band(recipe, workload, cluster, options, plan, lengths)
    console.print("\n".join(_words(recipe, workload, lengths, seconds)), highlight=False)
    if (asks := _unlike_pick(recipe, plan)) is not None:
        console.print(
            f"{asks} has servers work while the ranks train, and the fastest placement has both on the same devices: to run it, "
            "remove the key. With servers apart: --placement split.",
            highlight=False,
        )
    if options.html is not None:
        options.html.write_text(page(plan))
    conditions = replace(options.conditions, save_every=recipe.train.save_every)
    played = simulate(plan.best, workload, options.simulate, conditions) if options.simulate else None
    spared = [
        (whose, one)
        for whose, placed in (("the pick", apply_plan(recipe, plan)), ("the recipe's own", recipe))
        for one in spared_layers(placed, workload, cluster)
    ]
    if options.as_text:
        found = as_json(plan) | {"lengths": _as_json(lengths, seconds)}
        found |= {"spared": [{"placement": whose, **asdict(one)} for whose, one in spared]}
        Console().print_json(json.dumps(found | ({"simulation": played.as_json()} if played else {})))
    else:
        console.print(render(plan, explain=options.explain), highlight=False)
        for whose, one in spared:
            console.print(f"{whose}: {one.words}", highlight=False)
    if played is not None:
        console.print(render_simulation(played, plan.best), highlight=False)


def _with_staleness(workload: Workload, loaded: Loaded[Recipe], most: int) -> Workload:
    """The step with samples so many versions old, and with what a run then does of itself where its recipe says nothing."""
    recipe = loaded.recipe
    stale = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_staleness": most})})
    silent = not any(key.startswith("algorithm.correction") for key in loaded.sources)
    correction = correction_by_default(stale, silent=silent)
    stale = stale.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"correction": correction})})
    return replace(workload, staleness=most, scores=scored_first(stale, "may ask for all"))


def _searched(recipe: Recipe, workload: Workload, cluster: Cluster, options: PlanOptions) -> Plan:
    """The plan, with the recipe's own placement. A search that takes long is spoken of before: nothing else is until its end."""
    if cluster.num_devices >= MANY_DEVICES:
        words = f"Searching placements on {cluster.describe()}: so many take a minute or more, and fewer nodes less."
        Console(stderr=True, markup=False).print(words, highlight=False)
    plan = plan_recipe(recipe, workload, cluster, options.name, top=options.top)
    return replace(plan, own=own_placement(recipe, workload, cluster))


def _unlike_pick(recipe: Recipe, plan: Plan) -> str | None:
    """The key that the recipe cannot keep where the pick has its servers; None where it runs there as it is."""
    [generating] = [pool for pool in plan.best.pools if any(role.role == ROLLOUT for role in pool.roles)]
    # Where processes stand for devices servers take none of the ranks'.
    shared = len(generating.roles) > 1 and generating.kind.device.offloads_to_host
    return asks_beside(recipe) if shared else None


@dataclass(frozen=True)
class Known:
    """The lengths that a plan is made with. words: where they are from. given: not assumed."""

    responses: Lengths
    prompt_tokens: float
    words: str
    given: bool
    band: Band | None = None


def _lengths(recipe: Recipe, workload: Workload, options: PlanOptions) -> Known:
    """What is known of the lengths. Raises UserError where two options say it."""
    limit, given = recipe.rollout.max_response_tokens, options.prompt_mean
    if given is not None and not 0 < given <= recipe.data.max_prompt_tokens:
        raise UserError(
            f"--prompt-mean {given:g} cannot be: it is the tokens of a prompt on average, above 0 and at most "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens}."
        )
    prompt = given or workload.prompt_tokens
    if options.lengths is not None and options.response_mean is not None:
        raise UserError("--lengths and --response-mean both say how long responses are. Give one of them.")
    if options.lengths is not None:

        @cache
        def tokenizer() -> Any:
            return load_tokenizer(find_tokenizer(recipe.model.path))

        read = read_lengths(
            options.lengths, limit, lambda text: len(tokenizer().encode(text, add_special_tokens=False))
        )
        prompt = given or min(read.prompt_tokens or prompt, recipe.data.max_prompt_tokens)
        return Known(read.responses, prompt, f"{read.words} in {options.lengths}", given=True)
    if options.response_mean is not None:
        lengths = lognormal(options.response_mean, options.response_spread, limit)
        return Known(lengths, prompt, "as given", given=True)
    band = assumed_lengths(limit)
    return Known(band.likely, prompt, "assumed", given=False, band=band)


def _those_of(run: PastRun, recipe: Recipe) -> Known:
    """The lengths that a run met, cut where the recipe does: its limits may be lower than the run's were."""
    responses = cut(run.workload.responses, recipe.rollout.max_response_tokens)
    prompt = min(run.workload.prompt_tokens, recipe.data.max_prompt_tokens)
    return Known(responses, prompt, f"those of {run.folder}", given=True)


def _band(
    recipe: Recipe, workload: Workload, cluster: Cluster, options: PlanOptions, plan: Plan, lengths: Known
) -> tuple[float, ...]:
    """Seconds of a step at the least, the likely and the most lengths; of one where they are known."""
    if lengths.band is None:
        return (plan.best.step_s,)
    ends = (replace(workload, responses=each) for each in (lengths.band.low, lengths.band.high))
    low, high = (plan_recipe(recipe, each, cluster, options.name, top=1).best.step_s for each in ends)
    return low, plan.best.step_s, high


def _may_see(recipe: Recipe, workload: Workload) -> bool:
    """Whether prompts may have images, whose tokens count."""
    return workload.models[ROLLOUT].vision is not None and recipe.data.images_key is not None


def _tower_words(workload: Workload) -> tuple[str, ...]:
    """A line on what is counted of vision towers that learn."""
    seen = {role: vision for role in workload.towers if (vision := workload.models[role].vision) is not None}
    if not seen:
        return ()
    each = "; ".join(f"{role}, {seen[role].tower_elements / 1e6:.4g} million weights" for role in sorted(seen))
    return (
        f"Vision towers that learn ({each}): memory is counted with an image of {workload.largest_image} tokens in each prompt, "
        "the largest that the recipe lets through (data.max_image_pixels bounds it), and weight syncs with the actor's tower. "
        "What images take of time is not counted: how large they are is not known.",
    )


def _words(recipe: Recipe, workload: Workload, lengths: Known, seconds: tuple[float, ...]) -> tuple[str, ...]:
    """What a plan does not know, before its tables."""
    return _length_words(lengths, seconds, _may_see(recipe, workload)), *_tower_words(workload)


def _length_words(lengths: Known, seconds: tuple[float, ...], sees: bool) -> str:
    """How sure the prediction is, by its lengths; sees: whether prompts may have images."""
    if lengths.band is None:
        return (
            f"Lengths: {lengths.words}; a mean response of {lengths.responses.mean:.0f} tokens, a mean prompt of "
            f"{lengths.prompt_tokens:.0f}."
        )
    low, likely, high = seconds
    means = [each.mean for each in (lengths.band.low, lengths.band.likely, lengths.band.high)]
    return (
        f"Lengths are not known: a step takes {low:.3g} s, likely {likely:.3g} s, or {high:.3g} s, with mean responses of "
        f"{means[0]:.0f}, {means[1]:.0f} or {means[2]:.0f} tokens (of published runs, cut at the limit, a tenth, half and "
        f"nine tenths are below) and prompts of {lengths.prompt_tokens:.0f}{', without images' if sees else ''}. Give the "
        "run's own by --lengths FILE (samples or a log), or by --response-mean and --prompt-mean; below are the likely ones."
    )


def _as_json(lengths: Known, seconds: tuple[float, ...]) -> dict[str, Any]:
    names = ("low", "likely", "high") if lengths.band is not None else ("known",)
    return {
        "source": lengths.words,
        "response_mean": lengths.responses.mean,
        "prompt_mean": lengths.prompt_tokens,
        "step_s": dict(zip(names, map(float, seconds), strict=True)),
    }
