"""What a collector holds of a sample, and what of it goes to the object store: 9 bytes a token, in one piece."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megarl.core.types import Block, Image, Record
from megarl.data.blocks import laid, memory_of, sample_block
from tests.data.test_owners import make_sample

SAMPLES = [make_sample(0, 0, 2, [1, 0, 1]), make_sample(1, 0, 3, [1, 1], first=6)]


def block_of_laid() -> Block:
    return sample_block([laid(sample) for sample in SAMPLES], np.arange(2), np.array([0.5, 0.25], np.float32))


def test_a_record_says_of_each_token_what_predicts_the_next() -> None:
    record = Record.of(memory_of((np.array([7, 8]), np.array([9, 10, 11])), 1, np.array([1, 0, 1], np.uint8)))
    assert (record.tokens.tolist(), record.loss_mask.tolist()) == ([7, 8, 9, 10, 11], [0, 1, 0, 1, 0])
    assert [part.dtype for part in record] == [np.int32, np.float32, np.uint8]
    first, second = block_of_laid().records
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert first.loss_mask.tolist() == [0, 1, 0, 1, 0]
    # Of -3, -1.55 and -0.1 the second is not trained on.
    assert first.rollout_logprobs.tolist() == [0, np.float32(-3), 0, np.float32(-0.1), 0]


def test_a_sample_says_the_same_once_its_arrays_are_in_one_record() -> None:
    for sample in SAMPLES:
        whole = laid(sample)
        assert whole.memory is not None and whole.memory.nbytes == 9 * sample.num_tokens
        assert whole.response_ids.tolist() == sample.response_ids.tolist()
        assert whole.loss_mask.tolist() == sample.loss_mask.tolist()
        trained = sample.loss_mask > 0
        assert whole.rollout_logprobs[trained].tolist() == sample.rollout_logprobs[trained].tolist()
        arrays = (whole.response_ids, whole.loss_mask, whole.rollout_logprobs)
        assert all(array.base is whole.memory for array in arrays), "beside the record there is a copy"


def test_a_block_goes_to_the_object_store_without_a_copy() -> None:
    samples = [laid(sample) for sample in SAMPLES]
    block = sample_block(samples, np.arange(2), np.ones(2, np.float32))
    assert all(memory is sample.memory for memory, sample in zip(block.memories, samples, strict=True))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(block, protocol=5, buffer_callback=buffers.append)
    found = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    assert all(any(np.shares_memory(memory, each) for each in found) for memory in block.memories)
    back: Block = pickle.loads(data, buffers=buffers)
    assert [memory.tolist() for memory in back.memories] == [memory.tolist() for memory in block.memories]


def test_a_block_knows_its_sizes() -> None:
    block = block_of_laid()
    assert (block.lengths.tolist(), block.num_tokens) == ([5, 5], 10)
    assert (block.weights.tolist(), block.sample_index.tolist()) == ([0.5, 0.25], [0, 1])


def test_an_array_that_was_replaced_beside_its_record_is_asserted() -> None:
    sample = laid(SAMPLES[0])
    other = np.zeros(3, np.uint8)
    with pytest.raises(AssertionError, match="replaced beside its record"):
        sample_block([replace(sample, loss_mask=other)], np.arange(1), np.ones(1))
    [record] = sample_block([replace(sample, loss_mask=other, memory=None)], np.arange(1), np.ones(1)).records
    assert not record.loss_mask.any() and not record.rollout_logprobs.any()
    with pytest.raises(AssertionError, match="empty prompt"):
        laid(replace(sample, prompt=replace(sample.prompt, token_ids=np.zeros(0, np.int32))))


def test_samples_of_a_prompt_share_its_images_also_on_their_way() -> None:
    image = bytes(100_000)
    shown = replace(SAMPLES[0].prompt, images=(Image(b"", 4, 4),))
    samples = [replace(laid(replace(sample, prompt=shown)), images=(image,)) for sample in SAMPLES * 4]
    samples.append(laid(SAMPLES[1]))
    block = sample_block(samples, np.arange(9), np.ones(9, np.float32))
    assert block.images is not None and [len(each) for each in block.images] == [1] * 8 + [0]
    back: Block = pickle.loads(data := pickle.dumps(block, protocol=5))
    assert len(data) < 110_000, "the bytes go once"
    assert back.images is not None and all(each[0] is back.images[0][0] for each in back.images[:8])
    assert block_of_laid().images is None
    with pytest.raises(AssertionError, match="without its images"):
        sample_block([replace(samples[0], images=())], np.arange(1), np.ones(1, np.float32))
