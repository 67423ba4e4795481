"""SGLang's own models with Gated DeltaNet, which it serves on CUDA alone, take every tensor of a folder, and its config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.platform import get_platform
from megarl.serving import server_models
from tests.support.tiny import write_tiny_model
from tests.support.vision import QWEN3_5, QWEN3_5_MOE, write_tiny_vision_model

FAMILIES: dict[str, dict[str, object]] = {"qwen3_5": {}, "qwen3_5_moe": {}, "qwen3_next": {"mlp_only_layers": []}}
BASE = 500_000.0
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@pytest.mark.slow
def test_all_that_a_folder_has_is_in_the_model_that_sglang_builds(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / family, family, **more) for family, more in FAMILIES.items()]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        assert "full_attention_interval" not in config and "rope_theta" not in config, "as transformers 5 writes it"
        config["rope_parameters"]["rope_theta"] = BASE
        (folder / "config.json").write_text(json.dumps(config))
    for architecture in (QWEN3_5, QWEN3_5_MOE):
        folders.append(write_tiny_vision_model(tmp_path / architecture, architecture, text=LAYERS))
        config = json.loads((folders[-1] / "config.json").read_text())
        assert "deepstack_visual_indexes" not in config["vision_config"], "as transformers 5 writes it"
        config["text_config"]["rope_parameters"]["rope_theta"] = BASE
        (folders[-1] / "config.json").write_text(json.dumps(config))
    unused = set.intersection(*(set(server_models.unused_models(folder)) for folder in folders))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sglang_delta", *map(str, folders)],
        env={**os.environ, **get_platform("cpu").env, server_models.VARIABLE: ",".join(unused)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    layers = ["linear_attention", "attention", "linear_attention"]
    expected = {"unfilled": [], "otherwise": 0, "tower": [], "base": BASE, "layers": layers}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        str(folder): expected | {"turns by three axes": "Conditional" in folder.name} for folder in folders
    }
