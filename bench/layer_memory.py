"""Activations of single layers at the widths of real models, as torch's fake tensors have them beside the planner's count.

    python -m bench.layer_memory

Fake tensors have shapes and no memory: Megatron's layers of published models run forward and backward here as they would on
a rank of a pipeline, over torch's fake process groups, and the bytes of all live tensors are counted. On the kernels of the CPU's
layers (torch's); of experts' layers nothing, whose sizes hang on values (bench/memory_predicted.py has small ones). Writes
bench/results/layer_memory.json and the table into docs/placement.md. Exit code 0 only where no error is above 10%.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.support.measure import in_fresh_process, write
from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.models.config import ModelConfig
from megarl.models.known_configs import FOLDER
from megarl.placement.activations import Counting
from megarl.placement.devices import DEVICES
from megarl.placement.space import FULL, one_layout
from megarl.placement.workload import read_model
from megarl.recipe.section import Recompute
from tests.support.live_bytes import LiveBytes

PAGE = Path(__file__).parent.parent / "docs" / "placement.md"
BEGIN, END = "<!-- bench.layer_memory -->", "<!-- end of bench.layer_memory -->"
WORST = 0.10
EACH = 2  # bytes of an activation: bfloat16
SEQUENCES = 4  # of a micro-batch, all as long
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
QWEN_06B = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}


@dataclass(frozen=True)
class Case:
    """A published model's dense layers on one rank. differs: from its config.json. tp: with sequence parallel."""

    model: str
    tokens: int
    tp: int = 1
    cp: int = 1
    differs: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    @property
    def layout(self) -> Layout:
        """In the middle of a pipeline of three: nothing but layers."""
        size = 3 * self.tp * self.cp
        return Layout(tp=self.tp, cp=self.cp, pp=3, sequence_parallel=self.tp > 1, world_size=size)

    @property
    def label(self) -> str:
        """Layout and tokens."""
        cuts = [f"{axis}{size}" for axis, size in (("tp", self.tp), ("cp", self.cp)) if size > 1]
        return ", ".join([*cuts, f"{self.tokens:,} tokens"])


CASES = (
    Case("Qwen/Qwen3-4B", 4096, differs=tuple(QWEN_06B.items()), name="Qwen3-0.6B"),
    Case("Qwen/Qwen3-4B", 4096),
    Case("Qwen/Qwen3-4B", 16384),
    Case("Qwen/Qwen3-8B", 4096),
    Case("Qwen/Qwen3-8B", 32768, cp=2),
    Case("meta-llama/Llama-3.1-8B-Instruct", 4096, tp=2),
    Case("meta-llama/Llama-3.1-70B-Instruct", 8192, tp=8),
    Case("meta-llama/Llama-3.1-70B-Instruct", 16384, tp=8, cp=2),
    Case("deepseek-ai/DeepSeek-V3", 4096, tp=4),
)


def config_of(case: Case, layers: int) -> ModelConfig:
    """So many dense layers on each rank of the pipeline."""
    config = read_model(FOLDER / case.model)
    sizes = dict(case.differs)
    if sizes:
        config = replace(
            config,
            hidden_size=sizes["hidden_size"],
            ffn_hidden_size=sizes["intermediate_size"],
            num_heads=sizes["num_attention_heads"],
        )
    return replace(config, num_layers=3 * layers, moe=None, moe_layers=frozenset())


@contextmanager
def one_of(layout: Layout) -> Iterator[Any]:
    """The groups of the pipeline's middle rank, whose peers do not exist."""
    from megatron.core import parallel_state

    from megarl.training.parallel import make_groups

    dist.init_process_group("fake", rank=layout.world_size // 3, world_size=layout.world_size, store=FakeStore())
    try:
        yield make_groups(layout, timeout_s=60, seed=1)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def passes(case: Case, layers: int, recompute: Recompute) -> tuple[int, int]:
    """Bytes beside weights and input: after the forward pass, and at the backward pass's fullest moment."""
    from megarl.models.gpt import build_gpt
    from megarl.models.packed import packed_params

    config, layout, platform = config_of(case, layers), case.layout, get_platform("cpu")
    local = case.tokens // case.cp
    with one_of(layout) as groups, groups.active():
        ends = [case.tokens // SEQUENCES * number for number in range(SEQUENCES + 1)]
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            with patch.object(
                torch.nn.Module, "to", lambda module, *_: module
            ):  # it is on its device, and fakes stay there
                [chunk] = build_gpt(
                    config, layout, groups.collection, dtype=torch.bfloat16, platform=platform, recompute=recompute
                )
            for parameter in chunk.parameters():  # its gradient is summed elsewhere, and let go of
                parameter.register_post_accumulate_grad_hook(lambda done: setattr(done, "grad", None))
            packed = packed_params(torch.tensor(ends, dtype=torch.int32), case.cp)
            given = torch.empty(local // case.tp, 1, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            tokens, positions = torch.zeros(1, local, dtype=torch.int64), torch.zeros(1, local, dtype=torch.int64)
            chunk.set_input_tensor(given)
            before = live.now
            output = chunk(tokens, positions, None, packed_seq_params=packed)
            kept = live.now - before
            live.reset()
            output.backward(torch.empty_like(output))
            return kept, live.peak - before


def measure(case: Case) -> dict[str, tuple[float, float]]:
    """By recompute: what one layer keeps, and what its backward pass takes beside what all layers keep."""
    found: dict[str, tuple[float, float]] = {}
    for mode in MODES:
        (two, _), (three, peak) = passes(case, 2, mode), passes(case, 3, mode)
        found[mode] = float(three - two), float(peak - three)
    return found


def predict(case: Case) -> dict[str, tuple[float, float]]:
    """The same, as the planner counts it."""
    found: dict[str, tuple[float, float]] = {}
    for mode in MODES:
        choice = one_layout(case.layout, case.tokens, mode)
        counting = Counting(
            config_of(case, 1),
            choice,
            EACH,
            DEVICES["cpu"].kernels,
            case.tokens // SEQUENCES,
        )
        layer, full = counting.dense, choice.recompute[0] == FULL
        kept = float((counting.hidden if full else layer.kept)[0])
        found[mode] = kept, float((layer.extra + (layer.kept if full else 0))[0])
    return found


def measure_all(cases: tuple[Case, ...]) -> list[dict[str, tuple[float, float]]]:
    """In a process of its own: Megatron is loaded once, with groups that talk to nobody."""
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    prepare_megatron(get_platform("cpu"))
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    fake_tensor.CONSTANT_NUMEL_LIMIT = SEQUENCES + 1  # where sequences begin is a value that shapes hang on
    # It compares random states, and fake tensors have no values; nothing here is drawn.
    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    return [measure(case) for case in cases]


def rows_of(cases: tuple[Case, ...], measured: list[dict[str, tuple[float, float]]]) -> list[dict[str, Any]]:
    """A row for each case and each way to recompute; errors are shares of what was measured."""
    rows = []
    for case, found in zip(cases, measured, strict=True):
        said = predict(case)
        for mode in MODES:
            (kept, extra), (kept_said, extra_said) = found[mode], said[mode]
            rows.append(
                {
                    "model": case.name or case.model.rpartition("/")[2],
                    "layout": case.label,
                    "recompute": mode,
                    "measured": {"kept": kept, "extra": extra},
                    "predicted": {"kept": kept_said, "extra": extra_said},
                    "kept_error": kept_said / kept - 1,
                    "extra_error": extra_said / extra - 1,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """As the page has it."""
    lines = [
        "| model | rank | recompute | a layer keeps, MB | error | beside it in its backward pass, MB | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kept, extra = (row["measured"][name] / 1e6 for name in ("kept", "extra"))
        lines.append(
            f"| {row['model']} | {row['layout']} | {row['recompute']} "
            f"| {kept:.1f} | {row['kept_error']:+.1%} | {extra:.1f} | {row['extra_error']:+.1%} |"
        )
    return "\n".join(lines)


def main(
    *,
    quick: Annotated[bool, typer.Option(help="One case, and nothing written into the page.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Compare what layers keep and take with the planner's count."""
    cases = CASES[:1] if quick else CASES
    rows = rows_of(cases, in_fresh_process(1, measure_all, cases))
    print(table(rows))
    worst = max(abs(row[name]) for row in rows for name in ("kept_error", "extra_error"))
    print(json.dumps({"worst": worst}))
    write("layer_memory", {"worst": worst, "rows": rows}, out)
    if not quick:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    if worst > WORST:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
