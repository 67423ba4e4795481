"""Which rows a run reads: keys that all kinds of runs have. Rows are files, or splits of a data set by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megarl.recipe.section import PositiveInt, Section, UserPath

# What a path that ends so names is a file, whether it is there or not.
FILE_SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".pq", ".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")


Mix = Annotated[
    dict[str, Annotated[float, Field(ge=0)]],
    Field(
        description="shares of sets of rows in training, in any unit: {math: 3, code: 1}; default: every row once an epoch"
    ),
]
ImagesKey = Annotated[
    str | None,
    Field(
        description="field with a row's images, for models that see images: paths, data URLs, base64 or bytes; null: a field "
        "like others"
    ),
]
MaxImagePixels = Annotated[
    PositiveInt | None,
    Field(description="most pixels of an image, which comes smaller to the model; default: as the model's files say"),
]
MixKey = Annotated[str, Field(description="field of a row that names its set for mix")]


class DataSet(Section):
    """Files, or splits of a data set."""

    train: UserPath = Field(
        strict=False,
        description="rows to train on: a file (`*` in its name: several); or a data set, as a folder or by its name on the "
        "Hugging Face hub (openai/gsm8k, openai/gsm8k@REVISION)",
    )
    eval: UserPath | None = Field(None, strict=False, description="held-out rows, named as those of train are")
    config: str | None = Field(None, description="configuration of the data set; default: its only or default one")
    eval_config: str | None = Field(
        None, description="that of the set of held-out rows; default: config, where both are the same set"
    )
    train_split: str = Field("train", description="split of the data set to train on")
    eval_split: str = Field("test", description="split of the data set to hold out")
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="what the model's chat template is given by name whenever it renders: {enable_thinking: false} for Qwen3",
    )


def is_set(path: Path | None) -> bool:
    """Whether a path names a data set, which has splits, and not a file."""
    return path is not None and path.suffix.lower() not in FILE_SUFFIXES
