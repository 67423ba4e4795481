"""The text part of a multimodal HF folder as a folder of its own, and back: tensors are copied, never computed. Without torch.

Both check everything from headers and configs before they write, and copy a piece at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.convert.convert import Outcome
from megarl.convert.job import Message
from megarl.convert.processes import folder_bytes
from megarl.convert.progress import ConversionProgress
from megarl.convert.target import Target, apart, check_target, explained, followed, open_target
from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.models.config import ModelConfig
from megarl.models.hf_beside import TOKENIZER_CONFIG, check_readable, copy_beside, files_beside
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.hf_fields import Fields, shown
from megarl.models.hf_files import (
    EMBEDDING,
    HEAD,
    TensorInfo,
    are_same,
    check_index,
    check_weights,
    content_bytes,
    read_index,
    unstacked,
)
from megarl.models.hf_header import BITS
from megarl.models.hf_stacked import stacked
from megarl.models.multimodal import Multimodal, read_multimodal, text_names
from megarl.models.predicting import predicting
from megarl.models.rules import expected_tensors
from megarl.models.tensor_copy import Wrote, write_replaced, write_tensors
from megarl.models.text_config import text_config
from megarl.models.weight_files import INDEX, SINGLE, some, weight_files

CONFIG = "config.json"
# Where processors keep a chat template, in the order in which transformers takes them.
PROCESSOR_TEMPLATES = ("chat_template.json", "processor_config.json")
# Weights in other forms, which stay as they were trained before, and code of strangers.
FORMS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
CODE = (".py", ".pyc")
# What says nothing of the weights: the end of responses, and what pads.
BESIDE = ("eos_token_ids", "pad_token_id")


@dataclass(frozen=True)
class Whole:
    """A multimodal folder, checked, and what its text part is as a folder of its own.

    raw: that folder's config.json; text: the same, read. names: its tensors -> what they are called here. index: its tensors,
    as they lie here; parts: as that folder has them, with the layers that predict further tokens, whose names are the same.
    """

    folder: Path
    raw: dict[str, Any]
    text: ModelConfig
    names: Mapping[str, str]
    index: Mapping[str, TensorInfo]
    parts: Mapping[str, TensorInfo]

    @cached_property
    def files(self) -> list[Path]:
        """Of the weights."""
        return weight_files(self.folder)


def check_multimodal(folder: Path) -> ModelConfig:
    """The text part of a folder that may have no weights yet. Raises UserError where megarl does not train it."""
    return _read_config(folder)[2]


def text_part(source: Path, target: Path, *, force: bool, console: Console) -> Outcome:
    """Write the text part of a multimodal folder as an HF folder: its config, its tensors, the tokenizer and what lies beside.

    Raises UserError, and leaves nothing half-written, for a folder that is no such model or not whole, and for what the disk
    refuses.
    """
    whole = _read_whole(source)
    files_beside(source)  # refuses those that cannot be read
    total = sum(map(content_bytes, whole.parts.values()))
    with _writing("text-part", target, total, (source,), force, console) as (output, wrote):
        by_file = [{name: info for name, info in whole.parts.items() if info.file == file} for file in whole.files]
        parts = [part for part in by_file if part]
        files = [SINGLE] if len(parts) == 1 else [_shard(i, len(parts)) for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            # Wide ones first, as the format's own writer has them: each begins at a multiple of its width.
            wide = sorted(part, key=lambda name: -BITS[part[name].dtype])
            write_tensors(output.content / file, {name: part[name] for name in wide}, wrote)
        if len(parts) > 1:
            weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            said = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (output.content / INDEX).write_text(json.dumps(said, indent=1))
        (output.content / CONFIG).write_text(json.dumps(whole.raw, indent=2) + "\n")
        copy_beside(source, output.content)
        _template_as_text(source, output.content)
        written = folder_bytes(output.content)
        output.commit()
    return Outcome(followed(target), written, 0, ())


def into_multimodal(text: Path, source: Path, target: Path, *, force: bool, console: Console) -> Outcome:
    """Write a multimodal folder again with the weights of a text folder in the place of its own; the rest stays, to the byte.

    Raises UserError, and leaves nothing half-written, where the two are not one model's, or a folder is not whole, and for
    what the disk refuses.
    """
    whole = _read_whole(source)
    replaced = _replacements(text, whole)
    others, left = _beside_weights(whole)
    for path in others:
        check_readable(path)
    if left:
        console.print(f"not copied, as weights in other forms or code: {some(left)}", highlight=False, soft_wrap=True)
    total = sum(file.stat().st_size for file in (*whole.files, *others))
    with _writing("into-multimodal", target, total, (text, source), force, console) as (output, wrote):
        for file in whole.files:
            place = output.content / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_replaced(file, place, replaced, wrote)
        for path in others:
            place = output.content / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            wrote(place.stat().st_size)
        written = folder_bytes(output.content)
        output.commit()
    return Outcome(followed(target), written, 0, ())


def _read_config(folder: Path) -> tuple[Multimodal, dict[str, Any], ModelConfig]:
    """What the folder's config.json names; of its text part the config.json, and the same, read."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}. Name the HF folder of a multimodal model.")
    path = folder / CONFIG
    fields = Fields(read_object(path, "Export the model again."), path)
    multimodal = read_multimodal(fields)
    raw = text_config(fields, multimodal)
    return multimodal, raw, parse_model_config(raw, path)


def _read_whole(folder: Path) -> Whole:
    multimodal, raw, config = _read_config(folder)
    index = read_index(folder)
    names = text_names(index, multimodal, folder)
    ours = {text: index[name] for text, name in names.items()}
    further = {name: index[name] for name in sorted(predicting(index, config))}
    if config.tied_embeddings and {HEAD, EMBEDDING} <= ours.keys() and not are_same(ours[HEAD], ours[EMBEDDING]):
        # The configs of Mistral 3 tie by default what their weights have apart; transformers goes by the weights.
        raw, config = {**raw, "tie_word_embeddings": False}, replace(config, tied_embeddings=False)
    expected = expected_tensors(config)
    parts = (unstacked(ours, expected) if multimodal.stacked_experts else ours) | further
    check_index(expected, parts, folder, config)
    return Whole(folder, raw, config, names, ours, parts)


def _replacements(text: Path, whole: Whole) -> dict[str, list[TensorInfo]]:
    """The multimodal folder's tensor -> what takes its place: one tensor, or those of each expert in the place of one of all.

    Raises UserError where they are not one model's.
    """
    config = load_model_config(text)
    ours, theirs = asdict(whole.text), asdict(config)
    others = [key for key in ours if ours[key] != theirs[key] and key not in BESIDE]
    if others:
        said = some([f"{key} {shown(theirs[key])} and {shown(ours[key])}" for key in others])
        raise UserError(
            f"{text} is not the text part of {whole.folder}: they differ in {said}. Name the folder that its text part was "
            "trained to, or the multimodal folder that it was taken from."
        )
    index = check_weights(expected_tensors(config), text, config)
    found = {name: index[name] for name in expected_tensors(config)}
    if HEAD in whole.names and HEAD not in found:
        found[HEAD] = index[EMBEDDING]  # a stored copy of a tied head
    of_all = {name: parts for name, parts in stacked(found).items() if name in whole.names}
    replaced = {name: [found.pop(part) for part in parts] for name, parts in of_all.items()}
    replaced |= {name: [info] for name, info in found.items()}
    dtypes = {name: {info.dtype for info in parts} for name, parts in replaced.items()}
    wrong = [
        f"{name} is {' and '.join(sorted(said))} and {whole.index[name].dtype}"
        for name, said in dtypes.items()
        if said != {whole.index[name].dtype}
    ]
    if wrong:
        raise UserError(
            f"Tensors of {text} and {whole.folder} are not of one dtype: {some(wrong)}. Write the text part in the other's "
            "first, by `megarl convert mcore-to-hf RUN TEXT --dtype`."
        )
    return {whole.names[name]: parts for name, parts in replaced.items()}


@contextmanager
def _writing(
    title: str, target: Path, num_bytes: int, sources: tuple[Path, ...], force: bool, console: Console
) -> Iterator[tuple[Target, Wrote]]:
    """A target to fill and commit, and whom to tell of bytes that are written. Raises UserError; see `check_target`."""
    path = followed(target)
    apart(path, *sources)
    check_target(path, num_bytes, force=force)
    done = 0
    with open_target(path) as output, ConversionProgress(console, title, num_bytes) as progress:
        progress.hear(Message("phase", "writing"))

        def wrote(more: int) -> None:
            nonlocal done
            done += more
            progress.written(done)

        with explained(path, num_bytes):
            output.content.mkdir()
            yield output, wrote
        progress.done()


def _template_as_text(source: Path, folder: Path) -> None:
    """Give the tokenizer the chat template that only a processor reads, where it has none of its own."""
    place, config = folder / "chat_template.jinja", folder / TOKENIZER_CONFIG
    if place.exists():
        return
    if config.exists() and read_object(config, "Save the tokenizer again.").get("chat_template") is not None:
        return
    for name in PROCESSOR_TEMPLATES:
        if (source / name).exists():
            template = read_object(source / name, "Save the processor again.").get("chat_template")
            if isinstance(template, str):
                place.write_text(template, encoding="utf-8")
                return


def _beside_weights(whole: Whole) -> tuple[list[Path], list[str]]:
    """Files that stay with weights that were trained further; and names of what does not. What is hidden is passed over.

    Folders go with them (templates, a second tokenizer, pictures of the card), but for those that hold the model once more.
    """
    kept, left, weights = list[Path](), list[str](), set(whole.files)
    for path in sorted(whole.folder.iterdir()):
        if path.name.startswith("."):
            continue
        within = sorted(path.rglob("*")) if path.is_dir() else [path]
        if path.is_dir() and any(each.name.endswith(FORMS) and each not in weights for each in within):
            left.append(f"{path.name}/")
            continue
        for each in within:
            if each in weights or each.is_dir():
                continue
            if each.name.endswith((*FORMS, *CODE)) or (each.name.endswith(".index.json") and each.name != INDEX):
                left.append(str(each.relative_to(whole.folder)))
            elif not any(part.startswith(".") for part in each.relative_to(whole.folder).parts):
                kept.append(each)
    return kept, left


def _shard(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
