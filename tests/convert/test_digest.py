import hashlib

import torch

from megarl.convert.digest import Difference, Digest, differences, digest, digests


def test_a_digest_is_of_the_values_in_row_major_order():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert digest(tensor) == Digest((2, 3), "float32", 24, expected)
    assert digest(tensor.t()).hash != expected
    assert digest(tensor.t().contiguous().t()).hash == expected
    assert digest(tensor[:0]) == Digest((0, 3), "float32", 0, hashlib.sha256().hexdigest())
    assert digest(torch.tensor(1.0, dtype=torch.bfloat16)).bytes == 2


def test_progress_counts_bytes():
    told = []
    found = digests([("a", torch.zeros(3)), ("b", torch.zeros(2, dtype=torch.bfloat16))], told.append)
    assert list(found) == ["a", "b"] and told == [12, 16]


def test_differences_name_the_field():
    before = {name: digest(torch.ones(2)) for name in ("same", "gone", "wider", "cast", "other")}
    after = {
        "same": digest(torch.ones(2)),
        "wider": digest(torch.ones(3)),
        "cast": digest(torch.ones(2).bfloat16()),
        "other": digest(torch.tensor([1.0, -1.0])),
        "new": digest(torch.ones(1)),
    }
    found = differences(before, after)
    assert [(each.name, each.what) for each in found] == [
        ("cast", "dtype"),
        ("gone", "tensor"),
        ("new", "tensor"),
        ("other", "hash"),
        ("wider", "shape"),
    ]
    assert found[1] == Difference("gone", "tensor", "present", "missing")
    assert (found[4].before, found[4].after) == ("(2,)", "(3,)")
    assert differences(before, before) == []


def test_negative_zero_is_another_value():
    assert differences({"a": digest(torch.tensor([0.0]))}, {"a": digest(torch.tensor([-0.0]))})[0].what == "hash"
