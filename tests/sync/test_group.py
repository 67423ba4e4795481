"""The group's arithmetic and bytes."""

from __future__ import annotations

import time

import torch

from megarl.serving.client import ServerEndpoint
from megarl.sync.group import MeetingPlace, flatten, slots


def test_servers_take_as_many_ranks_as_they_have_after_the_sender() -> None:
    servers = [ServerEndpoint(f"server {i}", "http://h:1", "key", tp) for i, tp in enumerate((2, 1, 4))]
    places, world_size = slots(servers)
    assert [place.rank_offset for place in places] == [1, 3, 4]
    assert world_size == 8


def test_a_bucket_is_the_bytes_of_its_tensors_end_to_end() -> None:
    transposed = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    flat = flatten([transposed, torch.tensor([5], dtype=torch.int16)])
    assert flat.dtype == torch.uint8
    assert flat[:16].view(torch.float32).tolist() == [1.0, 3.0, 2.0, 4.0]
    assert flat[16:].view(torch.int16).tolist() == [5]


def test_what_lies_end_to_end_already_is_not_copied() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    tensors = [memory[8:16].view(torch.float32), memory[16:17], memory[17:30]]
    flat = flatten(tensors)
    assert flat.data_ptr() == tensors[0].data_ptr() and flat.tolist() == list(range(8, 30))
    for apart in ([memory[8:16], memory[17:20]], [memory[8:16], memory[4:8]], [memory[:4].clone(), memory[4:8]]):
        assert flatten(apart).data_ptr() != apart[0].data_ptr()
        assert flatten(apart).tolist() == apart[0].tolist() + apart[1].tolist()


def test_a_meeting_place_listens_on_its_address_and_counts_who_waits() -> None:
    place = MeetingPlace.make("127.0.0.1", 30.0)
    assert place.address[1] > 0
    assert place.arrived() == 0
    assert place.store is not None
    place.store.set("group/0/1", "address")
    assert place.arrived() == 1
    place.close()
    assert place.arrived() == 0


def test_who_waits_at_a_meeting_place_hears_what_rank_0_says() -> None:
    place = MeetingPlace.make("127.0.0.1", 30.0)
    other = MeetingPlace.find(place.address, 30.0)
    assert not other.is_come() and not other.is_given_up()
    place.all_come()
    place.give_up(coming=3)
    end = time.monotonic() + 30
    while not (other.is_come() and other.is_given_up()):  # another's connection may be read first: who waits asks again
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (other.coming(), other.arrived()) == (3, 0)
    other.close()
    place.close()
    assert place.is_given_up()


def test_who_helps_a_sender_is_before_the_servers() -> None:
    servers = [ServerEndpoint(f"server {i}", "http://h:1", "key", tp) for i, tp in enumerate((2, 1))]
    places, world_size = slots(servers, num_members=3)
    assert [place.rank_offset for place in places] == [3, 5]
    assert world_size == 6
