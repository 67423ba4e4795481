"""What SGLang makes of images on a machine without torchvision: its own code for Qwen's models, and nothing of others'.

SGLang loads what it has for the images of sixty models as a server of one starts, and for Qwen's alone eight more of them. Here
the other modules are empty, and the other models only named. Qwen's images are cut into squares by transformers' class that
needs no torchvision; its class for videos needs one, so that the processor here has none.

Written for SGLang 0.5.21 and transformers 5.12. Not for models without images, whose servers never load this.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from megarl.core.loading import without_collection
from megarl.core.stand_in import standing_in

PROCESSORS = "sglang.srt.multimodal.processors"
MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Models that the same module of SGLang is for.
OTHERS = tuple(
    f"sglang.srt.models.{name}"
    for name in (
        *("cosmos3", "interns2_mobius", "interns2preview", "qwen3_5", "qwen3_5_mtp"),
        *("qwen3_omni_moe", "qwen4_exp"),
    )
)


class ImagesProcessor:
    """What SGLang asks of transformers' processor of a model: a tokenizer, and squares of images. Nothing of videos."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """A prompt's text and all that it shows at once, which SGLang asks for where it prepares no image alone."""
        raise NotImplementedError(
            "On a CPU megarl's servers prepare images alone: there are no videos, and --mm-preprocess-cache-size-mb is over 0."
        )

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> ImagesProcessor:
        """Of a model's folder. Called by SGLang."""
        pil: Any = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        tokenizers: Any = importlib.import_module("transformers").AutoTokenizer
        return cls(
            pil.Qwen2VLImageProcessorPil.from_pretrained(folder, **options),
            tokenizers.from_pretrained(folder, **options),
        )


def load(only_named: Sequence[str] = ()) -> None:
    """Import it. SGLang's server has been imported before. only_named: other packages of which names are enough."""
    with without_collection(), standing_in((*only_named, *OTHERS)):
        importlib.import_module(f"{PROCESSORS}.qwen_vl")
    package = importlib.import_module(PROCESSORS)
    for _, name, _ in pkgutil.iter_modules(package.__path__, f"{PROCESSORS}."):
        sys.modules.setdefault(name, ModuleType(name))  # SGLang looks for processors in it, and finds none
    # Its compiled form, which the first image of each rank would wait ten seconds of a core for.
    tower: Any = importlib.import_module("sglang.srt.layers.attention.vision")
    tower.apply_rotary_pos_emb = tower.apply_rotary_pos_emb_native_eager
    known: Any = importlib.import_module("sglang.srt.multimodal.customized_mm_processor_utils")
    known._CUSTOMIZED_MM_PROCESSOR.update(dict.fromkeys(MODEL_TYPES, ImagesProcessor))
