"""What each rank does for test_worker: `<rank> <job> <answer>`, two files of pickles; rank 0 leaves the answer."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from megarl.models.bootstrap import prepare_megatron
from megarl.profiling.worker import measure
from tests.support.platforms import chosen


def main() -> None:
    """Measure."""
    rank, job, answer = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    prepare_megatron(chosen())
    measured = measure(rank, pickle.loads(job.read_bytes()))
    if rank == 0:
        answer.write_bytes(pickle.dumps(measured))
