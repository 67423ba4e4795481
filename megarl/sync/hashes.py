"""Proves a weight sync tensor by tensor: the hash of each as the servers hold it, against the trainer's own weights.

The trainer gathers its weights once more and hashes of them what each rank of a server holds (held.py), bucket by bucket.
Servers hash meanwhile, by SGLang's `/weights_checker`. What an engine computes from its weights once they are there, such as
the absorbed projections of latent attention, is in no hash: the probe (verify.py) is for that, and comes as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megarl.core.errors import MegarlError, SyncError
from megarl.core.platform import Platform
from megarl.models.config import ModelConfig
from megarl.models.hf_dtypes import ModelDtype
from megarl.models.hf_weights import Bucket
from megarl.serving.answers import AnswerError, field
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.sync.hash_report import HashReport
from megarl.sync.held import MADE, held_by
from megarl.sync.held_piece import Piece
from megarl.sync.held_tower import is_of_tower
from megarl.sync.tensor_hash import Hash, flat_bytes, make_hash

PATH = "/weights_checker"
Sums = dict[str, str]  # a rank's tensors by the engine's names, and their hashes


class ExpectedSums:
    """The hashes that servers must have, from the trainer's HF tensors, which come one by one.

    tps: the servers' tensor-parallel sizes. dtype: that the servers were started with. HF tensors of one fused tensor may come
    in any order; those that come early are kept.
    """

    def __init__(self, config: ModelConfig, tps: Collection[int], dtype: torch.dtype, platform: Platform) -> None:
        self._keys: dict[tuple[tuple[Piece, ...], torch.dtype], list[tuple[int, int, str]]] = {}
        for tp in sorted(set(tps)):
            for held in held_by(config, tp, pads=platform.pads_weights):
                key = held.pieces, torch.float32 if held.wide else dtype
                self._keys.setdefault(key, []).append((tp, held.rank, held.name))
        self._growing = {key: _Growing(*key, make_hash(platform.tensor_hash)) for key in self._keys}
        self._readers: dict[str, list[_Growing]] = {}
        for (pieces, _), growing in self._growing.items():
            for name in {piece.tensor for piece in pieces}:
                self._readers.setdefault(name, []).append(growing)

    def add(self, name: str, tensor: Tensor) -> None:
        """An HF tensor, whole. Raises SyncError for one that no server holds."""
        if name not in self._readers:
            raise SyncError(f"No tensor of a server is known to hold {name}: its hash cannot be compared.")
        for growing in self._readers[name]:
            growing.add(name, tensor)

    def finish(self) -> dict[int, list[Sums]]:
        """By tensor-parallel size, each rank's hashes. Raises SyncError where tensors did not come."""
        found: dict[int, list[Sums]] = {}
        for key, holders in self._keys.items():
            digest = self._growing[key].hexdigest()
            for tp, rank, name in holders:
                found.setdefault(tp, [{} for _ in range(tp)])[rank][name] = digest
        return found


class _Growing:
    """A tensor of a server that is hashed as its pieces come."""

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, hashing: Hash) -> None:
        self._pieces, self._dtype, self._hash = pieces, dtype, hashing
        self._next = 0
        self._early: dict[int, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        for place, piece in enumerate(self._pieces):
            if piece.tensor == name:
                if place == self._next:
                    self._take(cut(tensor, piece, self._dtype))
                else:
                    self._early[place] = cut(tensor, piece, self._dtype).clone()
        while self._next in self._early:
            self._take(self._early.pop(self._next))

    def hexdigest(self) -> str:
        if self._next < len(self._pieces):
            raise SyncError(f"The trainer has no {self._pieces[self._next].tensor} to compare with the servers' hash.")
        return self._hash.hexdigest()

    def _take(self, part: Tensor) -> None:
        for flat in flat_bytes(part):
            self._hash.update(flat)
        self._next += 1


def cut(tensor: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """What a piece is of its HF tensor, cast as a server does it."""
    tensor = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    if piece.expert is not None:
        tensor = tensor[piece.expert].mT if tensor.dim() == 3 else tensor[piece.expert]
    elif tensor.dim() == 3:
        tensor = tensor.flatten(0, 1)
    part = tensor[piece.start : piece.stop]
    if piece.columns is not None:
        part = part[:, slice(*piece.columns)]
    part = part.to(dtype)
    if piece.beside:
        part = torch.cat([part, part.new_zeros(part.shape[0], piece.beside)], 1)
    return torch.cat([part, part.new_zeros(piece.below, *part.shape[1:])]) if piece.below else part


def differences(expected: Sequence[Sums], found: Sequence[Sums]) -> list[str]:
    """Each tensor of a server that is not what was sent, with what is wrong. Both by rank."""
    if len(expected) != len(found):
        return [f"hashes of {len(found)} ranks in the place of {len(expected)}"]
    wrong = []
    for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        of = f" of rank {rank}" if len(expected) > 1 else ""
        wrong += [f"{name}{of}" for name in ours if name in theirs and theirs[name] != ours[name]]
        wrong += [f"{name}{of} (not there)" for name in ours if name not in theirs]
        frozen = not any(map(is_of_tower, ours))  # a tower that does not learn is the server's own
        sent = [name for name in theirs if not name.endswith(MADE) and not (frozen and is_of_tower(name))]
        wrong += [f"{name}{of} (nothing was sent for it)" for name in sent if name not in ours]
    return wrong


async def server_sums(server: ServerEndpoint, deadline_s: float) -> list[Sums]:
    """Hashes of every tensor that a server holds, by rank. Raises MegarlError as `ServerClient.ask` does, and AnswerError."""
    async with ServerClient(server) as client:
        told = await client.ask(PATH, {"action": "checksum"}, deadline_s)
    what = f"{server.name} ({server.url}) {PATH}"
    found: dict[int, Sums] = {}
    for each in field(told, "ranks", list, what):
        places = field(each, "parallelism_info", list, what)
        if not places:
            raise AnswerError(f"{what} says of a rank nothing in parallelism_info: which rank it is cannot be told.")
        place = places[0]
        found[field(place, "tp_rank", int, what)] = field(each, "checksums", dict, what)
    return [found[rank] for rank in sorted(found)]


async def all_sums(servers: Sequence[ServerEndpoint], deadline_s: float) -> dict[str, list[Sums] | str]:
    """Every server's hashes by its name, or why it has none."""

    async def one(server: ServerEndpoint) -> list[Sums] | str:
        try:
            return await server_sums(server, deadline_s)
        except MegarlError as error:
            return str(error)

    answers = await asyncio.gather(*map(one, servers))
    return {server.name: answer for server, answer in zip(servers, answers, strict=True)}


def compare(
    buckets: Iterable[Bucket],
    config: ModelConfig,
    servers: Sequence[ServerEndpoint],
    dtype: ModelDtype,
    platform: Platform,
    deadline_s: float,
) -> HashReport:
    """The servers' hashes against those of the trainer's weights. For rank 0, which gets whole tensors.

    Every bucket is taken, whatever goes wrong: gathering is collective. Raises SyncError where the hashes to expect cannot be
    computed.
    """
    with ThreadPoolExecutor(1, "hashes") as pool:
        asked = pool.submit(asyncio.run, all_sums(servers, deadline_s))
        tps = {server.name: server.tp for server in servers}
        expected = expected_sums(buckets, lambda: ExpectedSums(config, tps.values(), getattr(torch, dtype), platform))
        answers = asked.result()
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    given = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    wrong = {name: differences(expected[tps[name]], answer) for name, answer in given.items()}
    num_tensors = sum(len(sums) for name in given for sums in expected[tps[name]])
    return HashReport(num_tensors, failed, {name: found for name, found in wrong.items() if found})


def expected_sums(buckets: Iterable[Bucket], make: Callable[[], ExpectedSums]) -> dict[int, list[Sums]]:
    """Hashes of what the buckets hold. All are taken, also after one that does not fit, and where nothing can be expected."""
    trouble: Exception | None = None
    sums: ExpectedSums | None = None
    for bucket in buckets:
        if trouble is not None:
            continue
        try:
            sums = sums or make()
            for name, tensor in bucket:
                sums.add(name, tensor)
        except Exception as error:  # raised below: the other ranks gather the rest
            trouble = error
    if trouble is not None:
        raise trouble
    return (sums or make()).finish()
