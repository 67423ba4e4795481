from __future__ import annotations

import pytest

from megarl.core.errors import UserError
from megarl.hub.splits import split_pattern

GSM8K = ["README.md", *(f"{c}/{s}-00000-of-00001.parquet" for c in ("main", "socratic") for s in ("test", "train"))]
CARD = """\
---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/train-*
---
"""

IN_FOLDER = "---\nconfigs: [{config_name: b, data_dir: ./b/}]\n---\n"


@pytest.mark.parametrize(
    ("files", "card", "config", "split", "found"),
    [
        (GSM8K, CARD, "main", "train", "main/train-00000-of-00001.parquet"),
        (GSM8K, CARD, "socratic", "train", "socratic/train-00000-of-00001.parquet"),
        (GSM8K, "", "main", "test", "main/test-00000-of-00001.parquet"),
        (["test.jsonl", "README.md"], "", None, "test", "test.jsonl"),
        (["a/train.jsonl", "a/test.jsonl", "a/training_notes.txt"], "", None, "train", "a/train.jsonl"),
        (["rows.jsonl"], "", None, "train", "rows.jsonl"),
        ([f"data/train-0000{i}-of-00003.parquet" for i in range(3)], "", None, "train", "data/train-0000*-of-00003.parquet"),
        ([f"main/{s}/000{i}.parquet" for s in ("train", "test") for i in (0, 1)], "", "main", "train", "main/train/000*.parquet"),
        (["x.parquet", "y.jsonl"], "---\nconfigs: [{config_name: a, data_files: '**/x*', default: true}, {}]\n---", None,
         "train", "x.parquet"),
        (["a.jsonl", "old/a.jsonl"], "---\nconfigs: [{data_files: '*.jsonl'}]\n---", None, "train", "a.jsonl"),
        (["a/x.jsonl", "a/old/x.jsonl"], "---\nconfigs: [{data_files: 'a/*'}]\n---", None, "train", "a/x.jsonl"),
        (["a/x.jsonl", "b/c/x.jsonl"], "---\nconfigs: [{data_files: './b/**'}]\n---", None, "train", "b/c/x.jsonl"),
        (["a/x.jsonl", "b/c/d/x.jsonl"], "---\nconfigs: [{data_files: 'b/**/*.jsonl'}]\n---", None, "train", "b/c/d/x.jsonl"),
        (["b/train.jsonl"], "---\nconfigs: [{config_name: b, data_dir: b}]\n---\n", None, "train", "b/train.jsonl"),
        (["b/test.jsonl", "b/testimonials.jsonl", "b/train.jsonl"], IN_FOLDER, None, "test", "b/test.jsonl"),
        (["b/my_train.jsonl", "b/train_notes.txt", "a/train.jsonl"], IN_FOLDER, None, "train", "b/my_train.jsonl"),
        (["b/all.jsonl", "train.jsonl"], IN_FOLDER, None, "train", "b/all.jsonl"),
        (["train.jsonl"], "---\nconfigs: [broken\n---\n", None, "train", "train.jsonl"),
    ],
)  # fmt: skip
def test_the_files_of_a_split(files: list[str], card: str, config: str | None, split: str, found: str) -> None:
    assert split_pattern(files, card, config, split, "data.train is x") == found


SAVED = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"]
SAVED_SPLITS = ["dataset_dict.json", *(f"train/{name}" for name in SAVED)]


@pytest.mark.parametrize(
    ("files", "card", "config", "split", "said"),
    [
        (GSM8K, CARD, None, "train", "it has the configurations main, socratic. Name one: data.config"),
        (GSM8K, "", None, "train", "it has the configurations main, socratic. Name one: data.config"),
        (GSM8K, CARD, "mian", "train", "there is no configuration 'mian'. Did you mean 'main'?"),
        (GSM8K, "", "mian", "train", "there is no configuration 'mian'. Did you mean 'main'?"),
        (GSM8K, CARD, "main", "tests", "'main' has no split 'tests'. Did you mean 'test'?"),
        (GSM8K, "", "main", "dev", "no file of the split 'dev' is there. It has main/test-"),
        (["train.csv"], "---\nconfigs: [{data_files: train.csv}]\n---", None, "train", "put @refs/convert/parquet behind"),
        (["train.csv"], "", None, "train", "no file of the split 'train' is there. It has train.csv"),
        (["train-a.parquet", "train-b.jsonl"], "", None, "train", "have no pattern in common"),
        ([], "", None, "train", "It has no files"),
        *((["data.jsonl", f"{held_out}.jsonl"], "", None, "train", "no file of the split 'train' is there. It has data.jsonl")
          for held_out in ("val", "evaluation", "testing-1", "dev", "math500test")),
        (SAVED, "", None, "train", "written by save_to_disk of the package datasets, in Arrow's own form, which megarl does not"),
        (SAVED, "", None, "test", "again: datasets.load_from_disk(FOLDER).to_parquet(\"test.parquet\")."),
        (SAVED_SPLITS, "", None, "train", "datasets.load_from_disk(FOLDER)['train'].to_parquet(\"train.parquet\")."),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told(files: list[str], card: str, config: str | None, split: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        split_pattern(files, card, config, split, "data.train is x")
    assert str(caught.value).startswith("data.train is x: ")
    assert said in str(caught.value)
