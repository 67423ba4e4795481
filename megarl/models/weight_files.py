"""Which files of an HF folder hold its weights: one, several with an index, or all that are there. Without torch."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from megarl.core import words
from megarl.core.errors import UserError
from megarl.core.json_file import read_object

SHOWN = 5
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "Copy or export the model again."


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the model: folders may hold the same weights in another form beside them.

    Raises UserError when the index names a file that is missing, or when an index stands beside a whole model: which of
    the two counts is not the same in every library.
    """
    return files_of(folder, named_files(folder))


def files_of(folder: Path, named: dict[str, str] | None) -> list[Path]:
    """The files: those of `named_files`, or of a folder without an index all that there are. Raises UserError."""
    single, index = folder / SINGLE, folder / INDEX
    if named is None:
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    files = sorted(set(named.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise UserError(f"{index} names files that are not there: {some(missing)}. {AGAIN}")
    if single.exists() and SINGLE not in files:
        raise UserError(f"{folder} holds {SINGLE} and an index of other files ({INDEX}). Remove what is out of date.")
    return [folder / name for name in files]


def named_files(folder: Path) -> dict[str, str] | None:
    """Tensor -> file, as the index has it; None where there is none.

    Its `total_size` is not looked at: published folders have it wrong, and no library reads it. Names that no file holds
    are missing only where the config asks for them.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    named = read_object(index, AGAIN).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise UserError(
            f"{index} is not an index of safetensors files: it has no weight_map of names to files. {AGAIN}"
        )
    if wrong := [f"{name} in {file!r}" for name, file in named.items() if not _is_inside(file)]:
        raise UserError(
            f"{index} puts {some(wrong)}; the name of a .safetensors file within the folder is wanted. {AGAIN}"
        )
    return named


def _is_inside(file: object) -> bool:
    """Whether this names a safetensors file of the folder, or below it. Links are not followed: caches are made of them."""
    if not isinstance(file, str) or "\0" in file or not file.endswith(".safetensors"):
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and str(path) == file


def some(names: list[str]) -> str:
    """The first few names of tensors, and how many more there are."""
    return words.some([name if name.isprintable() else repr(name) for name in names], SHOWN)
