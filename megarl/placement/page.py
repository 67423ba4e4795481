"""A plan as one HTML page that needs nothing else: which roles are on which devices, and one step over time."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from string import Template

from megarl.placement.host import host_words
from megarl.placement.placed import PlacementPlan, PoolPlan
from megarl.placement.plan import Plan
from megarl.placement.report import other_lines, own_line
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, TEACHER

_COLOURS = {
    ACTOR: "#4063d8",
    ROLLOUT: "#389826",
    REFERENCE: "#9558b2",
    CRITIC: "#cb3c33",
    REWARD: "#c07a00",
    TEACHER: "#607080",
}
_IN_TURN = ("sync", "sleep and wake")
_WIDTH, _ROW, _LEFT = 960, 26, 150
_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Placement: $title</title>
<style>body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1000px;color:#222}svg text{font-size:12px}
table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}</style>
<h1>$title</h1><p>$summary</p>
<h2>Devices</h2>$devices
<h2>One step</h2>$gantt
<h2>What lost</h2><table><tr><th>placement</th><th>seconds</th><th>why</th></tr>$others</table></html>
""")


def page(plan: Plan) -> str:
    """The whole page."""
    told = host_words(plan.best)
    lines = [*([own_line(plan)] if plan.own else []), *other_lines(plan)]
    others = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in (_cell(text) for text in line))}</tr>" for line in lines
    )
    return _PAGE.substitute(
        title=escape(plan.best.describe()),
        summary=escape(
            f"{plan.cluster.describe()}: {plan.best.step_s:.4g} s a step, {plan.tokens_per_s:.4g} tokens/s a device. "
            f"Seconds and bytes are predictions. {told[:1].upper()}{told[1:]}"
        ).rstrip(),
        devices=_devices(plan),
        gantt=gantt(plan.best),
        others=others,
    )


def _cell(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _devices(plan: Plan) -> str:
    """Every pool as a bar as wide as its share of the devices; in it a band a role, and its layout."""
    total = plan.cluster.all_devices
    height = max(len(pool.roles) for pool in plan.best.pools) * _ROW + 24
    bars = []
    for pool in plan.best.pools:
        left, width = pool.first / total * _WIDTH, pool.devices / total * _WIDTH
        bars.append(f'<text x="{left + 2:.1f}" y="14">{pool.first}-{pool.first + pool.devices - 1}</text>')
        for index, role in enumerate(pool.roles):
            top = 20 + index * _ROW
            bars.append(_bar(left, top, max(width - 2, 1), role.role, f"{role.role}: {role.shape}"))
    return _svg(height, bars)


def gantt(placement: PlacementPlan) -> str:
    """One step over time, a row a role: weight sync and waking, the rollout, then two stages that each wait for the slowest pool.

    Updates that go on beside the next step's rollout come in again at the left.
    """
    phases = placement.phases
    scale = (_WIDTH - _LEFT) / placement.step_s
    before = sum(phases[phase] for phase in _IN_TURN)
    rollout = 0.0 if placement.asynchronous else phases["rollout"]
    starts = {"rollout": before, "prepare": before + rollout, "train": before + rollout + phases["prepare"]}
    # What nothing else goes on beside: over all pools one role after the other.
    turn = {phase: sum(phases[each] for each in _IN_TURN[:index]) for index, phase in enumerate(_IN_TURN)}
    bars: list[str] = []
    row = 0
    for pool in placement.pools:
        for role, spans in _spans(pool, starts, turn):
            top = row * _ROW + 4
            bars.append(f'<text x="0" y="{top + 15}">{escape(role)}</text>')
            for stage, start, seconds in spans:
                text = f"{role}, {stage}: {seconds:.3g} s"
                here = min(seconds, max(placement.step_s - start, 0.0))
                bars.append(_bar(_LEFT + start * scale, top, max(here * scale, 1), role, text, stage))
                if seconds - here > 1e-9:
                    bars.append(_bar(_LEFT, top, max((seconds - here) * scale, 1), role, text, stage))
            row += 1
    bars.append(f'<text x="{_WIDTH - 60}" y="{row * _ROW + 18}">{placement.step_s:.4g} s</text>')
    return _svg(row * _ROW + 26, bars)


def _spans(
    pool: PoolPlan, starts: Mapping[str, float], turn: dict[str, float]
) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Stage, start and seconds of every role's work; roles of a pool take turns. turn: by phase, when its next role may begin."""
    clock = dict(starts)
    result = []
    for role in pool.roles:
        spans = []
        for stage, clocks in [*((phase, turn) for phase in _IN_TURN), *((stage, clock) for stage in starts)]:
            seconds = role.seconds.get(stage, 0.0)
            if seconds > 0:
                spans.append((stage, clocks[stage], seconds))
                clocks[stage] += seconds
        result.append((role.role, spans))
    return result


def _bar(left: float, top: float, width: float, role: str, hint: str, label: str = "") -> str:
    text = label or hint
    shown = text if len(text) * 7 < width else text[: max(0, int(width / 7))]
    return (
        f'<g><title>{escape(hint)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 4}" rx="3" '
        f'fill="{_COLOURS[role]}"/><text x="{left + 4:.1f}" y="{top + 15}" fill="#fff">{escape(shown)}</text></g>'
    )


def _svg(height: float, content: list[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img">{"".join(content)}</svg>'
