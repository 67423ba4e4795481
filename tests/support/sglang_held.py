"""What each rank of an SGLang server holds of a model's folder, without the server: by SGLang's own models, loader and hashes.

Ranks are copies of the process that tests' servers are copies of. Nothing that answers requests is started, which is what costs.
That servers say the same of themselves is for tests of real ones.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.serving.server import ServerSpec
from megarl.sync.hashes import Sums
from tests.support.forked_servers import Copies
from tests.support.platforms import chosen
from tests.support.sglang_fp8 import joined

DEADLINE_S = 120.0  # a quiet machine needs one


def sums_of(copies: Copies, spec: ServerSpec, folder: Path, *, as_on_devices: bool = False) -> list[Sums]:
    """Hashes of every tensor, by rank. folder: an empty one. Fails with what SGLang said.

    as_on_devices: weights are cut as SGLang's loaders do it there, where nothing of a model's config is filled up.
    """
    words, files = spec.words(chosen(), "127.0.0.1", 0), [folder / f"{rank}.json" for rank in range(spec.tp)]
    children = [
        copies.call(
            "tests.support.sglang_held:hold",
            words=words,
            rank=rank,
            store=str(folder / "store"),
            answer=str(file),
            as_on_devices=as_on_devices,
        )
        for rank, file in enumerate(files)
    ]
    for child in children:
        child.wait(DEADLINE_S)
    return [json.loads(file.read_text()) for file in files]


def hold(words: list[str], rank: int, store: str, answer: str, as_on_devices: bool) -> None:
    """One rank, as SGLang's ModelRunner.load_model makes it."""
    load = import_module("sglang.srt.configs.load_config").LoadConfig()
    config = joined(words, rank, Path(store))
    tp_size = import_module("sglang.srt.runtime_context").get_parallel().tp_size
    if as_on_devices:
        linear: Any = import_module("sglang.srt.layers.linear")
        linear._is_cpu = False
    else:
        update = import_module("sglang.srt.configs.update_config")
        config = update.adjust_config_with_unaligned_cpu_tp(config, load, tp_size)
    device = import_module("sglang.srt.configs.device_config").DeviceConfig("cpu", rank)
    model = import_module("sglang.srt.model_loader").get_model(
        model_config=config, load_config=load, device_config=device
    )
    checker = import_module("sglang.srt.utils.weight_checker").WeightChecker(get_model=lambda: model)
    Path(answer).write_text(json.dumps(checker.handle("checksum", role="target")["checksums"]))
