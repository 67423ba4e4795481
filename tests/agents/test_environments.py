"""The environments that come with megarl, by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.agents.environment import Done, EpisodeRow, Response, Turn
from megarl.agents.environments.calculator import HELP, Calculator, result
from megarl.agents.environments.guess_number import GuessNumber
from megarl.agents.environments.maze import WAYS, Maze, distance, draw


def played(environment: Any, said: list[str], *, answer: str = "", prompt: str = "Go", seed: int = 1) -> list[Any]:
    """What the environment answers to each of these, after its first messages."""

    async def go() -> list[Any]:
        row = EpisodeRow("r:1", ({"role": "user", "content": prompt},), answer, {}, seed)
        found: list[Any] = [[message["content"] for message in await environment.start(row)]]
        for turn, text in enumerate(said):
            found.append(await environment.step(Response(text, (), turn)))
        await environment.close()
        return found

    return asyncio.run(go())


def told(content: str, reward: float = 0.0) -> Turn:
    return Turn([{"role": "user", "content": content}], reward)


def test_guesses_are_answered_and_the_secret_is_worth_one() -> None:
    said = ["50", "Is it 25, or 37?", "42"]
    assert played(GuessNumber(), said, answer="42") == [
        ["Go"],
        told("lower"),
        told("higher"),
        Done(1.0, {"guesses": 3.0, "solved": 1.0}),
    ]


def test_a_guess_is_spent_on_words_and_the_last_ends_the_game() -> None:
    found = played(GuessNumber(guesses=2), ["what?", "7"], answer="42")
    assert found[1:] == [told("no number"), Done(0.0, {"solved": 0.0})]
    assert played(GuessNumber(guesses=1), ["42"], answer="42")[1] == Done(1.0, {"guesses": 1.0, "solved": 1.0})


def test_what_is_left_is_told_where_it_is_asked_for() -> None:
    found = played(
        GuessNumber(10, 40, guesses=6, tell_range=True), ["25", "28", "what?", "14", "40", "26"], answer="26"
    )
    texts = ["higher: 26-40", "lower: 26-27", "no number: 26-27", "higher: 26-27", "lower: 26-27"]
    assert found[1:-1] == [told(text) for text in texts]
    assert found[-1] == Done(1.0, {"guesses": 6.0, "solved": 1.0})


def test_without_an_answer_the_secret_is_of_the_group() -> None:
    def secret(seed: int) -> int:
        found = played(GuessNumber(0, 9, guesses=11), [str(number) for number in range(10)], seed=seed)
        return next(at for at, answer in enumerate(found[1:]) if isinstance(answer, Done))

    assert secret(3) == secret(3) and len({secret(seed) for seed in range(30)}) > 5


@pytest.mark.parametrize("settings", [{"low": 3, "high": 2}, {"guesses": 0}])
def test_a_game_that_cannot_be_played_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="wanted are low <= high"):
        GuessNumber(**settings)


def test_a_secret_outside_of_the_range_is_the_rows_fault() -> None:
    with pytest.raises(ValueError, match="secret 7 is not from 0 to 5"):
        played(GuessNumber(0, 5), [], answer="7")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (("12", "*", "34"), "408"),
        (("7", "-", "9"), "-2"),
        (("6", "/", "4"), "3/2"),
        (("6", "/", "-3"), "-2"),
        (("1", "/", "0"), "no division by 0"),
    ],
)
def test_the_calculator_by_hand(asked: tuple[str, str, str], shown: str) -> None:
    assert result(*asked) == shown


def test_a_problem_is_worked_off_operation_by_operation() -> None:
    said = ["First 12*34=", "I see. 408 + 5 =", "#### 413"]
    found = played(Calculator(step_cost=0.1), said, answer="413")
    assert found == [["Go"], told("408", -0.1), told("413", -0.1), Done(1.0, {"solved": 1.0, "used": 2.0})]


def test_wrong_answers_words_and_numbers_beyond_all_bounds() -> None:
    found = played(Calculator(), ["hm", "9" * 13 + "*2=", "9" * 12 + "*2=", "#### 4 dogs"], answer="4")
    # Of a number that is too long its end would be another number: nothing of it is taken.
    assert found[1:3] == [told(HELP), told(HELP)]
    assert found[3] == told("1999999999998") and found[4] == Done(0.0, {"solved": 0.0, "used": 1.0})


def test_a_number_that_has_no_end_is_wrong_and_fails_no_episode() -> None:
    """A policy that repeats a digit for ever would never be told that it is wrong."""
    assert played(GuessNumber(), ["9" * 5000, "-" + "9" * 5000, "5"], answer="5")[1:] == [
        told("lower"),
        told("higher"),
        Done(1.0, {"guesses": 3.0, "solved": 1.0}),
    ]
    assert played(Calculator(), ["#### " + "9" * 5000], answer="4")[1] == Done(0.0, {"solved": 0.0, "used": 0.0})


CHAINED = "What is 47+38-15*2?"  # from left to right: 85, 70, 140


def test_a_chain_is_worked_off_from_left_to_right() -> None:
    said = ["47+38=", "let me see", "85 - 15 =", "70*2=", "#### 140"]
    found = played(Calculator(chain=True), said, answer="140", prompt=CHAINED)
    assert found == [
        [CHAINED],
        told("85-15*2"),
        told(HELP),
        told("70*2"),
        told("140"),
        Done(1.0, {"solved": 1.0, "used": 3.0}),
    ]


@pytest.mark.parametrize(
    ("said", "used"),
    [
        (["#### 140"], 0.0),  # right, and nothing is worked off
        (["47+38=", "85-15=", "#### 140"], 2.0),  # a step is missing
        (["38-15="], 1.0),  # another step
        (["47+38=", "47+38="], 2.0),  # one again
        (["47+38=", "85-15=", "70*2=", "140*2="], 4.0),  # one too many
        (["47+38=", "85-15=", "70*2=", "#### 104"], 3.0),  # a wrong answer
    ],
)
def test_wrong_and_missing_steps_of_a_chain_fail(said: list[str], used: float) -> None:
    assert played(Calculator(chain=True), said, answer="140", prompt=CHAINED)[-1] == Done(
        0.0, {"solved": 0.0, "used": used}
    )


def test_differences_below_zero_are_worked_off_too() -> None:
    said = ["10-30=", "-20-5=", "#### -25"]
    found = played(Calculator(chain=True), said, answer="-25", prompt="10-30-5")
    assert found[1:] == [told("-20-5"), told("-25"), Done(1.0, {"solved": 1.0, "used": 2.0})]


def test_a_prompt_without_a_chain_is_the_rows_fault() -> None:
    with pytest.raises(ValueError, match=r"row r:1: wanted are operations in its prompt, such as 12\+34-5"):
        played(Calculator(chain=True), [], answer="4", prompt="What is it?")


def test_a_maze_is_walked_to_its_exit() -> None:
    maze = Maze(size=2, steps=9)
    rooms = draw(2, seed=5)
    found = played(maze, ["north", "hm"], seed=5)
    ways = " ".join(way for way, (row, column) in WAYS.items() if (row, column) in rooms[(0, 0)])
    assert found == [
        [f"Go\nroom 0 0, ways: {ways}"],
        told(f"There is a wall. room 0 0, ways: {ways}"),
        told(f"Say one of north, east, south, west. room 0 0, ways: {ways}"),
    ]
    way = ["East, then south", "east"] if (1, 0) in rooms[(0, 0)] and (1, 1) in rooms[(1, 0)] else ["east", "south"]
    last = played(Maze(size=2), way, seed=5)[-1]
    assert last == Done(1.0, {"solved": 1.0, "detour": 0.0})


def test_steps_run_out() -> None:
    assert played(Maze(size=3, steps=2), ["north", "north"])[-1] == Done(0.0, {"solved": 0.0})


@given(st.integers(2, 8), st.integers(0, 2**63 - 1))
def test_between_any_two_rooms_there_is_one_way(size: int, seed: int) -> None:
    rooms = draw(size, seed)
    assert sum(map(len, rooms.values())) == 2 * (size * size - 1), "a tree"
    assert all(distance(rooms, (0, 0), room) >= sum(room) for room in rooms)
    assert rooms == draw(size, seed)


@pytest.mark.parametrize("settings", [{"size": 1}, {"steps": 0}])
def test_mazes_of_no_size_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="wanted are a size from 2 to 20"):
        Maze(**settings)
