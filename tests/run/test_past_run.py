"""What a run says of its placement: medians by a plan's phases, calibrated rates, and advice only where it is worth it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megarl.core.errors import UserError
from megarl.models.known_configs import known_config
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.local import host_cluster
from megarl.placement.recipe_plan import predict_recipe
from megarl.placement.workload import read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.save import RECIPE_FILE
from megarl.recipe.schema import Recipe
from megarl.recipe.source import dump_yaml
from megarl.run.past_run import BETWEEN, FEWEST_STEPS, advice, calibrated, cluster_of_run, compare, read_run
from megarl.run.plan import PlanOptions, run_plan
from tests.placement.samples import write_config

MEASURED = {
    "perf/rollout_s": 1.0,
    "perf/logprobs_s": 0.15,  # of half the samples
    "perf/reference_s": 0.2,
    "perf/advantages_s": 0.01,
    "perf/update_s": 0.8,
    "perf/sync_s": 0.1,
    "perf/step_s": 2.29,
}

ENOUGH = FEWEST_STEPS + 1  # the first step is left out


def run_folder(folder: Path, *overrides: str, rows: list[dict[str, float]] | None = None) -> Path:
    """A finished run of the quickstart's recipe with these rows of metrics."""
    model = folder / "model"
    model.mkdir()
    write_config(model, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
    loaded = load_recipe(Path("recipes/quickstart.yaml"), [f"model.path={model}", *overrides], Recipe)
    (folder / RECIPE_FILE).write_text(dump_yaml(loaded.resolved))
    lengths = {"rollout/prompt_len_mean": 15.0, "rollout/response_len_mean": 20.0}
    if rows is None:
        rows = [{name: 9 * value for name, value in MEASURED.items()}, MEASURED, MEASURED]
    lines = [{"step": 0}, *({"step": step, **lengths, **row} for step, row in enumerate(rows, 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_medians_leave_out_the_first_step_and_what_only_some_steps_have(tmp_path: Path) -> None:
    some = {**MEASURED, "perf/eval_s": 5.0, "perf/step_s": MEASURED["perf/step_s"] + 5.0}
    run = read_run(run_folder(tmp_path, rows=[{**MEASURED, "perf/rollout_s": 60.0}, some, some]))
    expected = {"rollout": 1.0, "sync": 0.1, "prepare": 0.36, "train": 0.8, BETWEEN: 0.03}
    assert run.seconds == pytest.approx(expected)
    assert run.step_s == pytest.approx(2.29)
    assert run.workload.prompt_tokens == 15.0
    assert run.workload.responses.mean == pytest.approx(20.0, rel=0.01)


def test_lengths_are_counted_where_a_run_wrote_enough_of_them(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "samples").mkdir()
    # As the collector writes them: with characters that are ends of lines to str.splitlines alone.
    rows = [{"response": "a\u2028b\x85c", "response_tokens": 5 + 30 * (index % 2)} for index in range(64)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "samples" / "step_000001.jsonl").write_text(lines)
    responses = read_run(folder).workload.responses
    assert responses.mean == pytest.approx(20, rel=0.05)
    assert responses.values[0] == 5 and responses.values[-1] == 35


def test_a_file_without_samples_has_no_lengths_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "samples").mkdir()
    (folder / "samples" / "step_000001.jsonl").write_text("")  # of a collector in the place of one that died
    assert read_run(folder).workload.responses.mean == pytest.approx(20.0, rel=0.01)
    for line in ('{"response_tok', '{"response": "a"}', "7"):
        (folder / "samples" / "step_000002.jsonl").write_text(f'{{"response_tokens": 5}}\n{line}\n')
        with pytest.raises(UserError, match=r"step_000002\.jsonl, line 2 is not a sample"):
            read_run(folder)


def test_lengths_are_cut_where_the_planned_recipe_has_lower_limits_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path)
    lower = ["rollout.max_response_tokens=6", "data.max_prompt_tokens=9"]
    options = PlanOptions(as_text=True, from_run=folder)
    run_plan(Path("recipes/quickstart.yaml"), [f"model.path={folder / 'model'}", *lower], host_cluster(1), options)
    lengths = json.loads(capsys.readouterr().out)["lengths"]
    assert 5 < lengths["response_mean"] <= 6 and lengths["prompt_mean"] == 9


def test_calibrated_rates_predict_the_run_itself(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path))
    before = cluster_of_run(run)
    after = predict_recipe(run.recipe, run.workload, calibrated(run, before)).phases
    assert {phase: float(after[phase]) for phase in run.seconds} == pytest.approx(dict(run.seconds), rel=0.12)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(compare(run, before))
    text = console.export_text()
    assert "prepare" in text and "2.29" in text and "%" in text


def test_sleeping_and_waking_counts_once_and_servers_stay_on_the_ranks_devices(tmp_path: Path) -> None:
    """A run whose clock has it in the phases that need it, held against one node, which it had, and against four."""
    path, node = known_config(Path("Qwen/Qwen3-4B")), make_cluster("H100", 1)
    assert path is not None
    words = ["cluster.devices=8", "rollout.servers=8", "eval.overlap=false", "rollout.offload=[weights, kv_cache]"]
    words += ["actor.offload=[grads, params, optimizer]", "rollout.server_args=[--mem-fraction-static, '0.6']"]
    loaded = load_recipe(Path("recipes/qwen3_4b_grpo_8.yaml"), [f"model.path={path.parent}", *words], Recipe)
    (tmp_path / RECIPE_FILE).write_text(dump_yaml(loaded.resolved))
    plan = predict_recipe(loaded.recipe, recipe_workload(loaded.recipe, read_model(path.parent), None, 150.0), node)
    slept = {role.role: role.seconds["sleep and wake"] for pool in plan.pools for role in pool.roles}
    assert min(slept["rollout"], 6 * slept["actor"]) > 2
    measured = {
        "rollout/prompt_len_mean": 150.0,
        "rollout/response_len_mean": recipe_workload(loaded.recipe, read_model(path.parent)).responses.mean,
        "perf/rollout_s": plan.phases["rollout"] + slept["rollout"],
        "perf/reference_s": plan.phases["prepare"] + slept["reference"],
        "perf/update_s": plan.phases["train"] + slept["actor"],
        "perf/sync_s": plan.phases["sync"],
        "perf/step_s": plan.step_s,
    }
    rows = [json.dumps({"step": step} | {name: float(each) for name, each in measured.items()}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = read_run(tmp_path)
    for cluster in (node, node.of_nodes(4)):
        known = calibrated(run, cluster)
        assert known.nodes == cluster.nodes
        after = predict_recipe(run.recipe, run.workload, known.of_nodes(1))
        assert after.step_s == pytest.approx(plan.step_s, rel=0.005)
        console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(compare(run, cluster))
        errors = re.findall(r"([+-]\d+)%", console.export_text())
        assert len(errors) == 6 and {int(each) for each in errors} == {0}


def predicted_rows(folder: Path, overrides: tuple[str, ...], cluster: Cluster) -> list[dict[str, float]]:
    """Metrics as a run has them that goes just as the model says."""
    recipe = load_recipe(Path("recipes/quickstart.yaml"), [f"model.path={folder}", *overrides], Recipe).recipe
    workload = recipe_workload(recipe, read_model(folder), None, 15.0)
    phases = predict_recipe(recipe, workload, cluster).phases
    names = {"rollout": "rollout", "prepare": "logprobs", "train": "update", "sync": "sync"}
    row = {f"perf/{name}_s": float(phases[phase]) for phase, name in names.items()}
    return [{**row, "perf/step_s": float(sum(phases.values()))}] * ENOUGH


def test_advice_comes_where_another_placement_is_faster(tmp_path: Path) -> None:
    bad = ("cluster.devices=4", "actor.parallel.pp=2", "actor.parallel.tp=2", "actor.micro_batch_tokens=128")
    write_config(tmp_path, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
    folder = run_folder(tmp_path, *bad, rows=predicted_rows(tmp_path, bad, host_cluster(4)))
    said = advice(folder)
    assert said is not None
    assert "a step instead of" in said and f"--from-run {folder}" in said


def test_a_run_of_few_steps_gives_no_advice(tmp_path: Path) -> None:
    bad = ("cluster.devices=4", "actor.parallel.pp=2", "actor.parallel.tp=2", "actor.micro_batch_tokens=128")
    write_config(tmp_path, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
    rows = predicted_rows(tmp_path, bad, host_cluster(4))
    assert advice(run_folder(tmp_path, *bad, rows=rows[1:])) is None


@pytest.mark.parametrize(("staleness", "way"), [(0, " with rollout.max_staleness=1: "), (1, " s: ")])
def test_advice_compares_a_synchronous_run_with_asynchronous_ones(tmp_path: Path, staleness: int, way: str) -> None:
    """Four devices, of which two can generate while two train; the asynchronous run is advised of its own kind alone."""
    cluster = host_cluster(4)
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=12e9))
    folder = run_folder(tmp_path, "cluster.devices=4", f"rollout.max_staleness={staleness}", rows=[MEASURED] * ENOUGH)
    said = advice(folder, cluster)
    assert said is not None and f"{way}" in said and "asynchronous: actor" in said
    assert said.endswith(" --max-staleness 1") == (staleness == 0)


def test_no_advice_for_the_best_placement(tmp_path: Path) -> None:
    one = ("cluster.devices=1",)
    write_config(tmp_path, layers=2, hidden=256, heads=8, ffn=768, vocab=320)
    assert advice(run_folder(tmp_path, *one, rows=predicted_rows(tmp_path, one, host_cluster(1)))) is None


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no step yet"):
        read_run(run_folder(tmp_path, rows=[]))
