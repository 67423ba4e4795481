"""Loads torch and Megatron when it is imported, in a process that others are copied from."""

import gc
import importlib

from megarl.core.loading import as_if_missing, without_collection
from megarl.models.bootstrap import prepare_megatron
from tests.support.platforms import chosen

# The last is what torch loads, with sympy, when it first hands gradients to a part of a pass: half a second of each rank.
MODULES = ("megarl.training.engine", "megarl.training.checkpoint", "torch.fx.experimental.symbolic_shapes")

if not chosen().has_device_memory:  # no copy of a process can use a device that it has used
    with without_collection(), as_if_missing("wandb"), as_if_missing("tensorboard"):
        prepare_megatron(chosen())
        for name in MODULES:
            importlib.import_module(name)
        gc.freeze()  # the copies share it
