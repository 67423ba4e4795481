"""Run by `alone.py`: what a server of a model that sees loads beside, and that SGLang finds its own code for images in it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megarl.core.stand_in import StandInModule
from megarl.serving import sglang_cpu
from megarl.serving.sglang_cpu_images import MODEL_TYPES, OTHERS, PROCESSORS, ImagesProcessor
from tests.serving.alone import UNWANTED
from tests.support.vision import QWEN2, QWEN2_5, QWEN3, QWEN3_MOE


def main() -> None:
    """Raises AssertionError where it is otherwise."""
    before = {*sys.modules}
    sglang_cpu.load_images()
    more = {*sys.modules} - before
    assert f"{PROCESSORS}.qwen_vl" in more
    assert not more.intersection((*UNWANTED, *OTHERS)), more.intersection((*UNWANTED, *OTHERS))
    assert isinstance(importlib.import_module("torchvision"), StandInModule)
    found: Any = importlib.import_module("sglang.srt.managers.multimodal_processor")
    found.import_processors(PROCESSORS)
    known = {model.__name__: processor.__name__ for model, processor in found.PROCESSOR_MAPPING.items()}
    assert {known[architecture] for architecture in (QWEN2, QWEN2_5, QWEN3, QWEN3_MOE)} == {"QwenVLImageProcessor"}, (
        known
    )
    hook: Any = importlib.import_module("sglang.srt.multimodal.customized_mm_processor_utils")
    assert {hook._CUSTOMIZED_MM_PROCESSOR[each] for each in MODEL_TYPES} == {ImagesProcessor}
