"""Which files of a data set are which split of which configuration: by its card, or by their names as `datasets` does.

Files are names relative to the data set's root. Nothing is read but the card, a README.md that begins with YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

import yaml

from megarl.core.errors import UserError
from megarl.core.words import did_you_mean, some

READ = (".jsonl", ".ndjson", ".parquet", ".pq")
# What `datasets` takes for the name of a split, and a set beside which files without any are no training rows.
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
CONVERTED = "refs/convert/parquet"
SHOWN = 8


def split_pattern(files: Sequence[str], card: str, config: str | None, split: str, about: str) -> str:
    """The file of a split, or a pattern with one `*` in the name that only its files match.

    card: text of the README.md, or nothing. about: which key names which set, for messages. Raises UserError: no such
    configuration or split, more than one, or files that megarl does not read.
    """
    configs = _configs(card)
    found = _by_card(files, configs, config, split, about) if configs else None
    if found is None:
        found = _by_name(files, config, split, about)
    if not found:
        raise UserError(f"{about}: no file of the split {split!r} is there. {_saved(files, split) or _listed(files)}")
    wrong = sorted({PurePosixPath(file).suffix for file in found if PurePosixPath(file).suffix not in READ})
    if wrong:
        raise UserError(
            f"{about}: the split {split!r} is in {', '.join(map(repr, wrong))} files, and megarl reads {', '.join(READ)}. The "
            f"hub has most of its data sets in Parquet too: put @{CONVERTED} behind the name."
        )
    return _pattern(sorted(found), files, split, about)


def _configs(card: str) -> dict[str, Mapping[str, Any]]:
    """The `configs` of a card by their names; empty where it has none."""
    head = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", card, flags=re.DOTALL)
    try:
        front = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}  # the hub shows such a card as plain text
    configs = front.get("configs") if isinstance(front, dict) else None
    named = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    return {str(each.get("config_name", "default")): each for each in named}


def _by_card(
    files: Sequence[str], configs: Mapping[str, Mapping[str, Any]], config: str | None, split: str, about: str
) -> list[str] | None:
    """The split's files; None where the card leaves it to the files' names."""
    chosen = _chosen(configs, config, about)
    listed, folder = (configs[chosen].get(key) for key in ("data_files", "data_dir"))
    if listed is None:
        return None if folder is None else _in_folder(files, PurePosixPath(str(folder)), split)
    by_split = _patterns(listed)
    if split not in by_split:
        raise UserError(f"{about}: {chosen!r} has no split {split!r}.{_near(split, by_split)}")
    return [file for file in files if any(_matches(file, pattern) for pattern in by_split[split])]


def _in_folder(files: Sequence[str], folder: PurePosixPath, split: str) -> list[str]:
    """Those below a card's data_dir, by their names there."""
    inside = [PurePosixPath(file) for file in files if PurePosixPath(file).is_relative_to(folder)]
    data = [file for file in inside if file.suffix in READ] or inside
    names = {str(file.relative_to(folder)): str(file) for file in data}
    return [names[name] for name in _named(list(names), split)]


def _chosen(configs: Mapping[str, Mapping[str, Any]], config: str | None, about: str) -> str:
    if config is not None:
        if config not in configs:
            raise UserError(f"{about}: there is no configuration {config!r}.{_near(config, configs)}")
        return config
    default = [name for name, each in configs.items() if each.get("default") is True]
    chosen = default or [name for name in configs if name == "default"] or list(configs)
    if len(chosen) > 1:
        raise UserError(f"{about}: it has the configurations {', '.join(configs)}. Name one: data.config.")
    return chosen[0]


def _patterns(files: Any) -> dict[str, list[str]]:
    """The forms that `data_files` of a card may have; without a split all is for training."""
    if isinstance(files, str):
        return {"train": [files]}
    if isinstance(files, dict):
        return {str(split): _list(paths) for split, paths in files.items()}
    patterns: dict[str, list[str]] = {}
    for each in files if isinstance(files, list) else []:
        if isinstance(each, dict):
            patterns.setdefault(str(each.get("split", "train")), []).extend(_list(each.get("path", [])))
        else:
            patterns.setdefault("train", []).append(str(each))
    return patterns


def _list(paths: Any) -> list[str]:
    return [str(path) for path in paths] if isinstance(paths, list) else [str(paths)]


def _matches(file: str, pattern: str) -> bool:
    """As the hub's cards mean it: `*` stays within a folder, and `**` is any number of folders."""
    return _parts_match(file.split("/"), pattern.removeprefix("./").split("/"))


def _parts_match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[skipped:], patterns[1:] or ["*"]) for skipped in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _parts_match(parts[1:], patterns[1:])


def _by_name(files: Sequence[str], config: str | None, split: str, about: str) -> list[str]:
    """The files whose path has the split's name in it, as a word; all where no file's has any split's."""
    data = [file for file in files if PurePosixPath(file).suffix in READ]
    if config is not None:
        inside = [file for file in data if config in PurePosixPath(file).parts[:-1]]
        if not inside:
            folders = sorted({part for file in data for part in PurePosixPath(file).parts[:-1]})
            raise UserError(f"{about}: there is no configuration {config!r}.{_near(config, folders)}")
        data = inside
    found = _named(data, split)
    homes = sorted({_home(file, split) for file in found} - {""})
    if len(homes) > 1:
        raise UserError(f"{about}: it has the configurations {', '.join(homes)}. Name one: data.config.")
    return found


def _named(files: Sequence[str], split: str) -> list[str]:
    """Those whose path has the split's name in it; all are for training where no file's has any split's."""
    words = ("train", "training") if split == SPLITS[0] else (split,)
    found = [file for file in files if any(_has_word(file, word) for word in words)]
    if not found and split == SPLITS[0] and not any(_has_word(file, each) for file in files for each in SPLITS):
        return list(files)
    return found


def _has_word(file: str, word: str) -> bool:
    """As `datasets` looks for splits: between other characters than letters."""
    stem = str(PurePosixPath(file).with_suffix(""))
    return re.search(rf"(?:^|[-._ /0-9]){re.escape(word)}(?:$|[-._ /0-9])", stem) is not None


def _home(file: str, split: str) -> str:
    """The folder that tells configurations apart: what stands before the split, without `data`."""
    parts = PurePosixPath(file).parts[:-1]
    return "/".join(part for part in parts if part != "data" and not _has_word(part, split))


def _pattern(found: Sequence[str], files: Sequence[str], split: str, about: str) -> str:
    if len(found) == 1:
        return found[0]
    start = _common_start(found)
    end = _common_start([file[len(start) :][::-1] for file in found])[::-1]
    pattern = f"{start}*{end}"
    folders = {PurePosixPath(file).parent for file in found}
    same = {file for file in files if PurePosixPath(file).parent in folders and fnmatchcase(file, pattern)}
    suffixes = {PurePosixPath(file).suffix for file in found}
    if len(folders) > 1 or len(suffixes) > 1 or same != set(found):
        raise UserError(
            f"{about}: the files of the split {split!r} have no pattern in common ({', '.join(found[:SHOWN])}). Put its rows "
            "into one file."
        )
    return pattern


def _common_start(words: Sequence[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*words, strict=False))
    return "".join(letters[0] for letters in same)


def _near(name: str, there: Any) -> str:
    return f"{did_you_mean(name, there, quoted=True)} There are: {', '.join(there) or 'none'}."


def _saved(files: Sequence[str], split: str) -> str:
    """What to do with a folder of `save_to_disk`; empty where it is none."""
    names = {PurePosixPath(file).name for file in files}
    if not names & {"dataset_dict.json", "state.json"} or not any(name.endswith(".arrow") for name in names):
        return ""
    of_split = f"[{split!r}]" if "dataset_dict.json" in names else ""
    return (
        "It was written by save_to_disk of the package datasets, in Arrow's own form, which megarl does not read. Write it "
        f'again: datasets.load_from_disk(FOLDER){of_split}.to_parquet("{split}.parquet").'
    )


def _listed(files: Sequence[str]) -> str:
    shown = [file for file in files if PurePosixPath(file).suffix in READ] or list(files)
    return f"It has {some(shown, SHOWN) or 'no files'}."
