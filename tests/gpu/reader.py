"""A process that reads device memory of another, as a server does: a payload a line on its input, sums as answers.

SGLang finds the device by its UUID, because its number is another in each process; so does this.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from typing import Any

import torch
from torch.multiprocessing import reductions

from megarl.sync.device_segment import DEVICE

rebuild_by_number = reductions.rebuild_cuda_tensor


def rebuild(*arguments: Any) -> Any:
    """The tensor, of a device that is named by its UUID."""
    numbers = {str(torch.cuda.get_device_properties(each).uuid): each for each in range(torch.cuda.device_count())}
    return rebuild_by_number(*arguments[:DEVICE], numbers[arguments[DEVICE]], *arguments[DEVICE + 1 :])


def main() -> None:
    reductions.rebuild_cuda_tensor = rebuild
    for line in sys.stdin:
        found = pickle.loads(base64.b64decode(line))
        sums = {}
        for meta in found["metadata"]:
            part = found["flattened_tensor"][meta.start_idx : meta.end_idx]
            sums[meta.name] = float(part.view(meta.dtype).reshape(meta.shape).double().sum())
        del found, part
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    main()
