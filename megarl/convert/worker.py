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
from typing import TYPE_CHECKING

from megarl.convert.job import Job, Message, parse_job
from megarl.core.errors import MegarlError
from megarl.recipe.roles import Lora, Optimizer
from megarl.training.manifest import read_manifest
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.convert.digest import Difference, Digest

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
        if job.operation == "hf-to-mcore":
            return RoleSpec(job.source, job.dtype, layout=job.layout)
        manifest = read_manifest(job.source)
        trained = job.operation == "reshard" and manifest.optimizer is not None
        return RoleSpec(
            job.hf,
            job.dtype,
            layout=job.layout,
            optimizer=Optimizer.model_validate(manifest.optimizer) if trained else None,
            total_steps=manifest.total_steps,
            lora=Lora.model_validate(manifest.lora) if manifest.lora else None,
            load_weights=False,
        )

    def _differences(self) -> tuple[list[Difference], int]:
        """Between the HF tensors of the source and those of what was written, after it was read back. Collective."""
        from megarl.convert.digest import differences

        job = self._job
        before = self._original() if job.operation == "hf-to-mcore" else self._exported()
        if job.operation == "hf-to-mcore":
            self._rank.build(ROLE, RoleSpec(job.target / "hf", job.dtype, layout=job.layout, load_weights=False))
            self._rank.load(ROLE, job.target)
        else:
            self._rank.build(ROLE, RoleSpec(job.target, job.dtype, layout=job.layout))
        after = self._exported()
        return differences(before, after), len(before)

    def _exported(self) -> dict[str, Digest]:
        """Of the model as it is in memory, under HF names; of nothing but on the first rank. Collective."""
        from megarl.convert.digest import digests

        buckets = self._rank.buckets(ROLE, BUCKET_BYTES)
        self._phase("verifying", self._expected_bytes())
        return digests((pair for bucket in buckets for pair in bucket), self._tell)

    def _original(self) -> dict[str, Digest]:
        """Of the HF files, cast to the job's dtype; only the first rank reads them."""
        from megarl.convert.digest import digests
        from megarl.convert.hf_tensors import hf_tensors

        if self._rank.rank != 0:
            return {}
        self._phase("verifying", self._expected_bytes())
        return digests(hf_tensors(self._job.source, self._job.dtype), self._tell)

    def _expected_bytes(self) -> int:
        from megarl.convert.sizes import weight_bytes

        return weight_bytes(self._job.hf, self._job.dtype)

    def _reshard_differences(self) -> tuple[list[Difference], int]:
        """Between two checkpoints, tensor by tensor, the optimizer's and what is beside tensors included. Rank 0 reads."""
        from megarl.convert.digest import Difference, differences, digests
        from megarl.training.checkpoint_files import common_state

        if self._rank.rank != 0:
            return [], 0
        job = self._job
        self._phase("verifying", 2 * sum(entry.bytes for entry in read_manifest(job.source).tensors.values()))
        before = digests(_stored(job.source, job.hf), self._tell)
        half = sum(each.bytes for each in before.values())
        after = digests(_stored(job.target, job.hf), lambda done: self._tell(half + done))
        found = differences(before, after)
        states = common_state(job.source), common_state(job.target)
        found += [
            Difference(name, "state", repr(states[0].get(name)), repr(states[1].get(name)))
            for name in sorted({*states[0], *states[1]})
            if states[0].get(name) != states[1].get(name)
        ]
        return found, len(before)


def _stored(folder: Path, hf: Path) -> Iterator[tuple[str, Tensor]]:
    from megarl.training.checkpoint_files import stored_tensor
    from megarl.training.manifest import read_model_config

    rows = read_model_config(hf).vocab_size
    for name, entry in read_manifest(folder).tensors.items():
        tensor = stored_tensor(folder, name, entry)
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
