"""What the schedule gives a model with each micro-batch."""

import torch

from megarl.core.layout import Layout
from megarl.models.bootstrap import prepare_megatron
from megarl.training.batch import to_device
from tests.support.platforms import chosen
from tests.training.samples import examples, shards

prepare_megatron(chosen())
from megarl.training import schedule  # noqa: E402


def test_the_bounds_of_a_micro_batch_are_not_looked_at_on_the_device():
    """A look would wait for all that the device has still to do, at each forward pass."""
    [shard], _ = shards([examples([3, 10, 2], 50)])
    for layout, longest in ((Layout(), 10), (Layout(cp=2, world_size=2), 12)):
        batch = to_device(shard.mini_batches[0].micro_batches[0], {}, "meta", layout, 0)
        step = schedule._forward_step(lambda *_: None, None, layout.cp, {})
        given, _ = step(iter([batch]), lambda *_, packed_seq_params: packed_seq_params)
        assert (given.max_seqlen_q, given.max_seqlen_kv) == (longest, longest)
        assert given.cu_seqlens_q.device == torch.device("meta")
