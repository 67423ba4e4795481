"""Distributed checkpoints of one model with its optimizer and schedule, readable at any other layout.

Megatron's dist_checkpointing (torch_dist) writes one file per rank into a folder; `megarl.json` (see `manifest`) says
what it holds and is written last. The caller gives the folder a temporary name and commits it: nothing here makes a
half-written folder look whole. Call within `Groups.active()`; import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module

from megarl.core.checksums import FileSum, sum_file, sum_files
from megarl.core.disk import FULL
from megarl.core.errors import MegarlError, UserError
from megarl.core.layout import Layout
from megarl.core.versions import installed
from megarl.models.all_gather import all_gather_objects
from megarl.models.config import ModelConfig
from megarl.models.hf_beside import copy_beside
from megarl.models.hf_dtypes import ModelDtype, StoredDtype
from megarl.models.hf_files import TensorInfo
from megarl.models.hf_save import CONFIG, write_carried, write_config
from megarl.models.hf_weights import BUFFERS
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.section import Section
from megarl.training.checkpoint_files import RankStrategy, check_metadata
from megarl.training.manifest import CARRIED, HF_FOLDER, MANIFEST, Manifest, read_manifest
from megarl.training.optimizer_state import OptimizerState
from megarl.training.spec import RoleSpec

# How torch says that the system takes no more of a file; of small common data, before anybody's own file is begun.
UNWRITTEN = ("iostream error", "PytorchStreamWriter failed writing")

SHOWN = 400  # characters of what torch says of a checkpoint that it cannot read, which may name all tensors


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself.

    source: HF folder that the model came from; its config and tokenizer are copied. config: of the model. layout: of the
    role. dtype: of the weights. optimizer, total_steps: of the training; None where the role is frozen. lora: settings of
    its adapters. stored: HF tensors that came in another dtype. along: tensors that are carried along (models/carried.py).
    """

    source: Path
    config: ModelConfig
    layout: Layout
    dtype: ModelDtype
    optimizer: Optimizer | None = None
    total_steps: int = 1
    lora: Lora | None = None
    stored: Mapping[str, StoredDtype] = field(default_factory=dict)
    along: Mapping[str, TensorInfo] = field(default_factory=dict)


def saved_by(spec: RoleSpec, config: ModelConfig, layout: Layout, along: Mapping[str, TensorInfo]) -> Saved:
    """Of a role that was built so. along: as its folder had them then, which need not stay for a model without any."""
    return Saved(
        spec.folder, config, layout, spec.dtype, spec.optimizer, spec.total_steps, spec.lora, spec.stored, along
    )


class PendingSave:
    """A checkpoint whose files are being written. Training may go on; every rank has to call `finish`."""

    def __init__(self, folder: Path, strategy: RankStrategy, request: AsyncRequest, meta: Saved, *, step: int) -> None:
        """Use save_checkpoint. step: optimizer steps done."""
        self._folder, self._strategy, self._request, self._meta = folder, strategy, request, meta
        self._step = step
        self._error: str | None = None
        self._sums: dict[str, FileSum] = {}
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Write in a thread."""
        self._thread.start()

    def run(self) -> None:
        """Write here and now."""
        self._write()

    def finish(self) -> None:
        """Wait for the files of all ranks, then write what makes them a checkpoint; collective.

        Raises UserError on every rank when one could not write its file, a full disk above all.
        """
        if self._thread.ident is not None:
            self._thread.join()
        results = all_gather_objects((self._error, self._sums))
        self._refuse([error for error, _ in results])
        # Megatron's own last step, which notes the format, waits in a barrier, where rank 0 would leave the others if it failed.
        self._request.finalize_fns[0]()
        self._refuse(
            all_gather_objects(self._completed({name: each for _, sums in results for name, each in sums.items()}))
        )

    def _refuse(self, errors: Sequence[str | None]) -> None:
        """Raise UserError where a rank has one. errors: by rank."""
        if failed := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]:
            raise _unwritten(self._folder, "; ".join(failed))

    def _completed(self, sums: dict[str, FileSum]) -> str | None:
        """Rank 0: write what makes the files of all ranks a checkpoint. Returns what went wrong with that."""
        if dist.get_rank() != 0:
            return None
        try:
            self._strategy.complete(self._folder)
            self._describe(sums)
        except (OSError, UserError) as error:
            return _failure(error)
        return None

    def _write(self) -> None:
        try:
            assert self._request.async_fn is not None
            self._request.async_fn()
            if (path := self._strategy.writer and self._strategy.writer.file) is not None:
                self._sums[path.name] = sum_file(path)
        except Exception as error:
            # Told in `finish`, to every rank: the others wait for this one there.
            self._error = _failure(error)

    def _describe(self, sums: dict[str, FileSum]) -> None:
        """Rank 0: copy what belongs to the model, sum the small files, write the manifest."""
        target = self._folder / HF_FOLDER
        target.mkdir()
        config = self._meta.config
        write_config(self._meta.source / CONFIG, target / CONFIG, self._meta.dtype, config)
        copy_beside(self._meta.source, target, sees=config.vision is not None)
        if self._meta.along:
            write_carried(target / CARRIED, self._meta.along)
        others = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
        names = [str(path.relative_to(self._folder)) for path in others]
        sums = {**sums, **sum_files(self._folder, [name for name in names if name not in sums])}
        Manifest(
            family=config.family,
            architecture=config.architecture,
            dtype=self._meta.dtype,
            step=self._step,
            layout=self._meta.layout,
            optimizer=_plain(self._meta.optimizer),
            total_steps=self._meta.total_steps,
            lora=_plain(self._meta.lora),
            stored=dict(self._meta.stored),
            newer_names=config.vision is not None and config.vision.newer_names,
            versions={name: installed(name) or "unknown" for name in ("megarl", "megatron-core", "torch")},
            tensors=self._strategy.tensors(),
            files={name: sums[name] for name in names},
        ).write(self._folder)


def save_checkpoint(
    folder: Path,
    chunks: Sequence[Module],
    optimizer: Any | None,
    scheduler: Any | None,
    meta: Saved,
    *,
    async_save: bool = False,
) -> PendingSave | None:
    """Write this rank's part into `folder`, which exists and is empty; collective.

    chunks: one GPTModel for each virtual stage. optimizer, scheduler: None for a frozen model, which saves its weights.
    async_save: return as soon as the state is copied to the host; the files are written meanwhile, and the checkpoint is
    one only after `PendingSave.finish` on every rank. Otherwise returns None when everything is written.
    Raises UserError when the disk is full.
    """
    state, weights = OptimizerState(optimizer), _weights(chunks)
    content = {**weights, **state.to_save(weights)}
    strategy = RankStrategy(copy=async_save, spare=state.gathered)
    if scheduler is not None:
        content["scheduler"] = scheduler.state_dict()
    try:
        request = dist_checkpointing.save(content, str(folder), sharded_strategy=strategy, async_sharded_save=True)
    except RuntimeError as error:
        if any(words in str(error) for words in UNWRITTEN):
            raise _unwritten(folder, f"rank {dist.get_rank()}: {_failure(error)}") from error
        raise
    assert request is not None
    step = int(scheduler.num_steps) if scheduler is not None else 0
    pending = PendingSave(folder, strategy, request, meta, step=step)
    if async_save:
        pending.start()
        return pending
    pending.run()
    pending.finish()
    return None


def load_checkpoint(
    folder: Path, config: ModelConfig, chunks: Sequence[Module], optimizer: Any | None, scheduler: Any | None
) -> None:
    """Read this rank's part of a checkpoint, whatever layout wrote it; collective. config: of the model.

    With an optimizer, the checkpoint has to hold one's state; without, that is left where it is. Raises UserError where
    there is no checkpoint, it holds weights only, another optimizer's state, or one of other weights, and where one of the two
    has a vision tower in its weights, and the other has not.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise UserError(
            f"{folder} holds no distributed checkpoint: name the folder that a run's checkpoint was saved to."
        )
    check_metadata(folder)
    manifest, state = read_manifest(folder), OptimizerState(optimizer)
    state.check_readable(manifest, folder)
    _check_tower(manifest, config, folder)
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith(BUFFERS):
                buffer.data = buffer.data.float()  # exact, whatever the dtype that the model was cast to
    weights = _weights(chunks)
    wanted = {**weights, **state.to_load(weights)}
    try:
        found = dist_checkpointing.load(wanted, str(folder))
    except CheckpointException as error:  # no Exception, and its text is the traces of all ranks
        told = [f"rank {rank}: {_failure(each)[:SHOWN]}" for rank, (each, _) in sorted(error.failures.items())]
        raise MegarlError(
            f"{folder} could not be read. {'; '.join(told)}. Take another checkpoint: `megarl convert inspect` says which are "
            "whole."
        ) from error
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        missing, unexpected = chunk.load_state_dict(found[name], strict=False)
        if wrong := [each for each in [*missing, *unexpected] if not _is_extra(each)]:
            raise MegarlError(f"{folder} does not fill the model's {wrong}.")
    state.check_weights(found, folder)
    state.load(found)
    if scheduler is not None:
        scheduler.load_state_dict(found["scheduler"])


def _check_tower(manifest: Manifest, config: ModelConfig, folder: Path) -> None:
    """Raise UserError where a tower learned before and is frozen now, which would leave out what it learned; or learns now."""
    learned, learns = bool(manifest.tower), config.vision is not None and bool(config.vision.tower)
    if learned != learns:
        has = "weights of a vision tower that learned" if learned else "no weights of a vision tower: it was frozen"
        now = "learns" if learns else "is frozen, and would be the one that training began with"
        raise UserError(
            f"{folder} holds {has}, and the model's {now} (optimizer.freeze_vision_tower). Go on with what it was, or export the "
            "checkpoint (`megarl convert mcore-to-hf`) and start a new run from the HF folder (model.path)."
        )


def _names(chunks: Sequence[Module]) -> list[str]:
    """Megatron's convention for virtual stages."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _weights(chunks: Sequence[Module]) -> dict[str, Any]:
    """This rank's weights as Megatron describes them; made anew for each call, since Megatron writes into it.

    Transformer Engine's extra state is left out: it is about FP8, and a model without Transformer Engine has none.
    """
    weights: dict[str, Any] = {}
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        model: Any = chunk
        state = model.sharded_state_dict(metadata={})
        weights[name] = {key: value for key, value in state.items() if not _is_extra(key)}
    return weights


def _is_extra(key: str) -> bool:
    """Whether an entry is extra state: `_extra_state` of a module, and of one of several experts `_extra_state1` and so on."""
    return key.rpartition(".")[2].startswith("_extra_state")


def _unwritten(folder: Path, why: str) -> UserError:
    return UserError(
        f"The checkpoint could not be written to {folder}. {why}. Free some space there or choose another folder."
    )


def _failure(error: BaseException) -> str:
    """For people. torch answers a full disk with an error of its own, raised while handling the system's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return f"the disk is full ({cause})"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _plain(section: Section | None) -> dict[str, Any] | None:
    return None if section is None else section.model_dump(mode="json")
