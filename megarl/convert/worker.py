"""One rank of a conversion: `python -m megarl.convert.worker RANK`, with the job as one line on its standard input.

It answers with lines of JSON on its standard output (see `job.Message`); what goes wrong unexpectedly is on its standard
error. Every rank holds its share of the model and no more; the first also holds the tensor that it writes or compares.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from megarl.convert.job import Job, Message, parse_job
from megarl.core.errors import MegarlError, UserError
from megarl.models.hf_dtypes import ModelDtype
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.section import Section
from megarl.training.manifest import HF_FOLDER, MANIFEST, read_manifest
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.convert.digest import Difference, Digest

S = TypeVar("S", bound=Section)
ROLE = "model"
BUCKET_BYTES = 64 * 2**20
# Padded to what the layout's tensor-parallel size divides: two layouts agree in the rows of the vocabulary alone.
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


class Worker:
    """Does one job with one rank."""

    def __init__(self, rank: Rank, job: Job) -> None:
        self._rank, self._job = rank, job
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not get between the messages
        self._total = 0

    def run(self) -> None:
        """The whole conversion; the target is written, and verified where asked for. Raises MegarlError."""
        job = self._job
        self._rank.rendezvous("127.0.0.1", job.port, job.deadline_s)
        self._phase("reading")
        self._rank.build(ROLE, self._spec())
        if job.operation != "hf-to-mcore":
            self._rank.load(ROLE, job.source)
        self._phase("writing")
        if job.operation == "mcore-to-hf":
            self._rank.export_hf(ROLE, job.hf, job.target)
        else:
            self._rank.save(ROLE, job.target)
        if job.verify:
            found, compared = self._reshard_differences() if job.operation == "reshard" else self._differences()
            rows = tuple((each.name, each.what, each.before, each.after) for each in found)
            self.say(Message("verified", done=compared, differences=rows))

    def say(self, message: Message) -> None:
        """Tell the parent; the first rank speaks for all, but everybody has errors of his own."""
        if self._rank.rank == 0 or message.kind == "error":
            print(message.dump(), file=self._out, flush=True)

    def _phase(self, text: str, total: int = 0) -> None:
        self._total = total
        self.say(Message("phase", text, total=total))

    def _tell(self, done: int) -> None:
        self.say(Message("progress", done=done, total=self._total))

    def _spec(self) -> RoleSpec:
        """What the job reads: weights, and for a reshard the optimizer that the checkpoint has."""
        job = self._job
        dtypes = job.dtypes
        if job.operation == "hf-to-mcore":
            return RoleSpec(job.source, dtypes.model, layout=job.layout, stored=dtypes.others)
        manifest = read_manifest(job.source)
        trained = job.operation == "reshard" and manifest.optimizer is not None
        return RoleSpec(
            job.hf,
            dtypes.model,
            layout=job.layout,
            optimizer=_section(Optimizer, manifest.optimizer, job.source) if trained else None,
            total_steps=manifest.total_steps,
            lora=_section(Lora, manifest.lora, job.source) if manifest.lora else None,
            load_weights=False,
            stored=dtypes.others,
        )

    def _differences(self) -> tuple[list[Difference], int]:
        """Between the HF folder, as the safetensors library reads it, and the checkpoint. Collective.

        A checkpoint that was written is read back; one that was read is compared as the model that it made.
        """
        from megarl.convert.digest import differences

        job, dtypes = self._job, self._job.dtypes
        if job.operation == "mcore-to-hf":
            before = self._exported() | self._carried(job.hf)
            after = self._of_folder(job.target, None) | self._carried(job.target)
            return differences(before, after), len(before)
        before = self._of_folder(job.source, dtypes.model if job.casts else None) | self._carried(job.source)
        spec = RoleSpec(
            job.target / HF_FOLDER, dtypes.model, layout=job.layout, load_weights=False, stored=dtypes.others
        )
        self._rank.build(ROLE, spec)
        self._rank.load(ROLE, job.target)
        return differences(before, self._exported() | self._carried(job.target / HF_FOLDER)), len(before)

    def _exported(self) -> dict[str, Digest]:
        """Of the model as it is in memory, under HF names; of nothing but on the first rank. Collective."""
        from megarl.convert.digest import digests

        buckets = self._rank.buckets(ROLE, BUCKET_BYTES)
        self._phase("verifying", self._expected_bytes())
        return digests((pair for bucket in buckets for pair in bucket), self._tell)

    def _of_folder(self, folder: Path, cast: ModelDtype | None) -> dict[str, Digest]:
        """Of an HF folder, in its own dtypes or as a model of another; only the first rank reads it."""
        from megarl.convert.digest import digests
        from megarl.convert.hf_tensors import hf_tensors

        if self._rank.rank != 0:
            return {}
        self._phase("verifying", self._expected_bytes())
        return digests(hf_tensors(folder, cast, tower=self._has_tower), self._tell)

    def _carried(self, folder: Path) -> dict[str, Digest]:
        """Of what is carried along with the model, in an HF folder or a checkpoint's; only the first rank reads it."""
        from megarl.convert.digest import digests
        from megarl.convert.hf_tensors import carried_tensors

        if self._rank.rank != 0:
            return {}
        return digests(carried_tensors(folder, self._rank.engine(ROLE).config), lambda _: None)

    @property
    def _has_tower(self) -> bool:
        """Whether a vision tower is a part of the model, and not copied beside it."""
        vision = self._rank.engine(ROLE).config.vision
        return vision is not None and bool(vision.tower)

    def _expected_bytes(self) -> int:
        from megarl.convert.sizes import model_bytes

        return model_bytes(self._rank.engine(ROLE).config, self._job.dtypes)

    def _reshard_differences(self) -> tuple[list[Difference], int]:
        """Between two checkpoints, tensor by tensor, the optimizer's and what is beside them included. Rank 0 reads."""
        from megarl.convert.digest import Difference, differences, digests
        from megarl.training.checkpoint_files import common_state

        if self._rank.rank != 0:
            return [], 0
        job = self._job
        self._phase("verifying", 2 * sum(entry.bytes for entry in read_manifest(job.source).tensors.values()))
        before = digests(_stored(job.source, job.hf), self._tell)
        half = sum(each.bytes for each in before.values())
        after = digests(_stored(job.target, job.hf), lambda done: self._tell(half + done))
        before |= self._carried(job.hf)
        found = differences(before, after | self._carried(job.target / HF_FOLDER))
        states = common_state(job.source), common_state(job.target)
        found += [
            Difference(name, "state", repr(states[0].get(name)), repr(states[1].get(name)))
            for name in sorted({*states[0], *states[1]})
            if states[0].get(name) != states[1].get(name)
        ]
        return found, len(before)


def _section(kind: type[S], raw: Any, folder: Path) -> S:
    """A section of the recipe, as a manifest has it. Raises UserError where it is none."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{folder / MANIFEST} is broken ({'.'.join(map(str, first['loc']))}: {first['msg']}): the checkpoint is damaged."
        ) from error


def _stored(folder: Path, hf: Path) -> Iterator[tuple[str, Tensor]]:
    from megarl.training.checkpoint_files import stored_tensors
    from megarl.training.manifest import read_model_config

    rows = read_model_config(hf).vocab_size
    for name, tensor in stored_tensors(folder, read_manifest(folder).tensors):
        yield name, tensor[:rows] if name.endswith(VOCABULARY) else tensor


def main() -> None:
    """Entry point of a rank."""
    job = parse_job(sys.stdin.readline())
    worker = Worker(Rank(int(sys.argv[1]), job.layout.world_size, "cpu", seed=0), job)
    try:
        worker.run()
        code = 0
    except MegarlError as error:
        worker.say(Message("error", str(error), code=error.exit_code))
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # All is on the disk, and leaving in order could wait for ranks that wait for this one.
    os._exit(code)


if __name__ == "__main__":
    main()
