"""A text world of small mazes: the policy sees where it can go, says a direction, and looks for the exit.

A maze is a spanning tree of a grid, drawn from the group's seed: between any two rooms there is one way. Rooms are told by their
row and column, so that a policy that remembers where it has been need not walk in circles.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn

Room = tuple[int, int]  # row, column
WAYS: Mapping[str, Room] = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
WORD = re.compile("|".join(WAYS))


class Maze:
    """size: rooms on a side. The way begins in one corner, and the exit is in the opposite one.

    Reward 1 at the exit. steps: that the policy has; a turn without a direction, or into a wall, costs one.
    """

    def __init__(self, size: int = 3, steps: int = 16) -> None:
        if not 2 <= size <= 20 or steps < 1:
            raise ValueError(f"size={size}, steps={steps}: wanted are a size from 2 to 20 and at least one step")
        self._size, self._steps = size, steps
        self._open: dict[Room, set[Room]] = {}
        self._here: Room = (0, 0)

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's prompt, and behind it what is seen from the first room."""
        self._open = draw(self._size, row.seed)
        self._here = (0, 0)
        *before, last = row.messages
        return [*before, {**last, "content": f"{last['content']}\n{self._seen()}"}]

    async def step(self, response: Response) -> Turn | Done:
        """The next room, a wall, or the exit. The last direction in the response counts."""
        words = WORD.findall(response.text.lower())
        there = _beside(self._here, words[-1]) if words else None
        moved = there in self._open[self._here]
        if there is not None and moved:
            self._here = there
        if self._here == self._exit:
            best = distance(self._open, (0, 0), self._exit)
            return Done(1.0, {"solved": 1.0, "detour": response.turn + 1.0 - best})
        if response.turn + 1 >= self._steps:
            return Done(0.0, {"solved": 0.0})
        said = "" if moved else "There is a wall. " if words else f"Say one of {', '.join(WAYS)}. "
        return Turn([{"role": "user", "content": said + self._seen()}])

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def _exit(self) -> Room:
        return (self._size - 1, self._size - 1)

    def _seen(self) -> str:
        ways = [way for way in WAYS if _beside(self._here, way) in self._open[self._here]]
        return f"room {self._here[0]} {self._here[1]}, ways: {' '.join(ways)}"


def draw(size: int, seed: int) -> dict[Room, set[Room]]:
    """Which rooms are open to which: a spanning tree by a random walk that turns back where it is stuck."""
    rng = random.Random(seed)
    rooms: dict[Room, set[Room]] = {(row, column): set() for row in range(size) for column in range(size)}
    path, seen = [(0, 0)], {(0, 0)}
    while path:
        ways = [room for way in WAYS if (room := _beside(path[-1], way)) in rooms and room not in seen]
        if not ways:
            path.pop()
            continue
        room = rng.choice(ways)
        rooms[path[-1]].add(room)
        rooms[room].add(path[-1])
        seen.add(room)
        path.append(room)
    return rooms


def distance(rooms: Mapping[Room, set[Room]], start: Room, end: Room) -> int:
    """Steps of the shortest way."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        room = queue.popleft()
        for other in rooms[room] - steps.keys():
            steps[other] = steps[room] + 1
            queue.append(other)
    return steps[end]


def _beside(room: Room, way: str) -> Room:
    return room[0] + WAYS[way][0], room[1] + WAYS[way][1]
