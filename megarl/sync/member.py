"""One of the trainer's ranks in a broadcast: joins the groups that it sends in, gathers its buckets and sends them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.all_gather import all_gather_objects
from megarl.serving.client import ServerEndpoint
from megarl.sync.group import Address, BackendName, MeetingPlace, SendGroup, Sent, connect, flatten, slots
from megarl.sync.outgoing import Outgoing
from megarl.sync.parcel import Parcel
from megarl.sync.session import GRACE_S, JOIN_S, bucket_limit_s, left

ARRIVAL_POLL_S = 0.005
GIVEN_UP = "rank 0 gave up"
T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """Rank 0's word, with which all ranks begin. name: of the groups, but for their sender. seconds: that it may take.

    joins: the groups are made anew, by all ranks: who has left them is rank 0's to know.
    """

    servers: tuple[ServerEndpoint, ...]
    name: str
    backend: BackendName
    seconds: float
    joins: bool

    def group(self, sender: int) -> str:
        """The name of a sender's group."""
        return f"{self.name}-{sender}"


@dataclass
class Outcome:
    """How a rank fared. reason: what went wrong on its side. gather_s: seconds of putting its buckets together."""

    reason: str | None = None
    gather_s: float = 0.0


@dataclass
class Member:
    """One rank's end. All ranks make the same calls in the same order, but for what is between them and their own groups.

    host: this node's address, as the servers reach it. control: the process group of the trainer's ranks; None where there is
    one. join_s: how long a broadcast waits for its members; gloo cannot be told to give up earlier.
    """

    rank: int
    host: str
    device: torch.device
    control: dist.ProcessGroup | None
    grace_s: float = GRACE_S
    join_s: float = JOIN_S
    _servers: tuple[ServerEndpoint, ...] = ()
    _members: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by sender, in the order of joining
    _places: dict[int, MeetingPlace] = field(default_factory=dict)
    _groups: dict[int, SendGroup] = field(default_factory=dict)

    def word(self, said: T) -> T:
        """Rank 0's word, on every rank; what the others pass is not heard."""
        if self.control is None:
            return said
        heard = [said]
        dist.broadcast_object_list(heard, src=0, group=self.control, device=self.device)
        return heard[0]

    def share(self, said: T) -> list[T]:
        """What every rank says, by rank."""
        return [said] if self.control is None else all_gather_objects(said, self.control)

    def is_joined(self, servers: Sequence[ServerEndpoint], parcels: Sequence[Parcel]) -> bool:
        """Whether the groups are those that these servers and buckets need."""
        return self._servers == tuple(servers) and self._members == members_of(parcels)

    def open(self, attempt: Attempt, parcels: Sequence[Parcel]) -> dict[int, Address]:
        """Leave the old groups, and make a meeting place where this rank sends. By sender, where its place is."""
        self.close()
        self._servers, self._members = attempt.servers, members_of(parcels)
        if self.rank in self._members:
            self._places[self.rank] = MeetingPlace.make(self.host, attempt.seconds)
        mine = self._places[self.rank].address if self.rank in self._places else None
        found = self.share(mine)
        return {sender: address for sender in self._members if (address := found[sender]) is not None}

    def join(self, attempt: Attempt, addresses: dict[int, Address]) -> str | None:
        """Join the groups that this rank sends in or helps, one after another; why it could not."""
        end = time.monotonic() + attempt.seconds
        for sender, members in self._members.items():
            if self.rank in members:
                reason = self._try_to_enter(attempt, sender, members, addresses[sender], end)
                if reason is not None:
                    self.close()  # turns away who still looks for it
                    return reason
        return None

    def _try_to_enter(
        self, attempt: Attempt, sender: int, members: tuple[int, ...], address: Address, end: float
    ) -> str | None:
        try:
            if sender != self.rank:
                self._places[sender] = MeetingPlace.find(address, left(end))
            return None if self._enter(attempt, sender, members, end) else "not every server came to join the group"
        except RuntimeError as error:
            return f"the group could not be made: {error}"

    def _enter(self, attempt: Attempt, sender: int, members: tuple[int, ...], end: float) -> bool:
        place = self._places[sender]
        _, world_size = slots(attempt.servers, len(members))
        # NCCL's members do not wait for each other until the first broadcast: rank 0 knows that their calls returned.
        while not (place.arrived() >= world_size - len(members) or place.is_come()):
            if place.is_given_up() or time.monotonic() > end:
                self._await_stragglers(place)
                return False
            time.sleep(ARRIVAL_POLL_S)
        index = members.index(self.rank)
        limit_s = attempt.seconds + self.grace_s + self.join_s
        name = attempt.group(sender)
        self._groups[sender] = connect(name, index, world_size, place, attempt.backend, limit_s)
        return True

    def _await_stragglers(self, place: MeetingPlace) -> None:
        """Wait, after giving up, until every server that has not answered is at the meeting place.

        Closing it turns away whoever is there; a server that comes later would look for it for half an hour.
        """
        end = time.monotonic() + self.grace_s
        while time.monotonic() < end and not (place.is_given_up() and place.arrived() >= place.coming()):
            time.sleep(ARRIVAL_POLL_S)

    def stream(self, outgoing: Outgoing, seconds: float) -> Outcome:
        """Gather every bucket, and send those that are this rank's to send; one is sent while the next is gathered.

        After a failure the rest are still gathered, because the other ranks gather them too.
        """
        outcome, end = Outcome(), time.monotonic() + seconds
        sent: tuple[int, Sent] | None = None
        if self.rank in self._places:
            self._places[self.rank].begin(-1)  # the group may be kept, and have sent before
        limit_s = (
            0.0  # of what is on its way before this rank's next bucket has arrived: servers take one after another
        )
        for number, parcel in enumerate(outgoing.parcels):
            began = time.monotonic()
            tensors = outgoing.gather(number)
            outcome.gather_s += time.monotonic() - began
            limit_s += bucket_limit_s(parcel.nbytes, end, self.join_s)
            if self.rank in parcel.members and outcome.reason is None:
                outcome.reason = self._finish(sent) or self._given_up(parcel.sender)
                if outcome.reason is None:
                    sent = None  # lets go of its memory, before another's is taken
                    if self.rank == parcel.sender:
                        self._places[self.rank].begin(number)
                    sent = (
                        parcel.sender,
                        self._start(parcel, tensors or self._room(outgoing, number), min(left(end), limit_s)),
                    )
                    limit_s = 0.0
            tensors = []  # what travels end to end is a copy of them
        if outcome.reason is None:
            outcome.reason = self._finish(sent)
        if outcome.reason is not None:
            # Leaving frees the servers that still wait in a broadcast: they answer with an error, and so say that they live.
            self.close()
        return outcome

    def _start(self, parcel: Parcel, tensors: list[Tensor], limit_s: float) -> Sent:
        if parcel.sender == self.rank:
            tensors = [flatten(tensors)] if parcel.is_flattened else [each.detach().contiguous() for each in tensors]
        return self._groups[parcel.sender].start(tensors, limit_s)

    def _room(self, outgoing: Outgoing, number: int) -> list[Tensor]:
        """Memory for a bucket that another rank sends."""
        parcel, room = outgoing.parcels[number], outgoing.room(number)
        if room is None or len(room) < parcel.room_bytes:
            room = torch.empty(parcel.room_bytes, dtype=torch.uint8, device=self.device)
        return parcel.within(room)

    def _finish(self, sent: tuple[int, Sent] | None) -> str | None:
        """Wait for what is under way; what went wrong with it."""
        if sent is None:
            return None
        sender, broadcasts = sent
        try:
            broadcasts.wait(self._places[sender].is_given_up, self._groups[sender].abort)
        except Exception as error:  # what a backend raises has no common class
            return str(error)
        return None

    def _given_up(self, sender: int) -> str | None:
        return GIVEN_UP if self._places[sender].is_given_up() else None

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.close()
        for place in self._places.values():
            place.close()
        self._groups, self._places, self._members, self._servers = {}, {}, {}, ()


def members_of(parcels: Sequence[Parcel]) -> dict[int, tuple[int, ...]]:
    """Sender -> the trainer's ranks in its group; in the same order on every rank."""
    return {parcel.sender: parcel.members for parcel in sorted(parcels, key=lambda parcel: parcel.sender)}
