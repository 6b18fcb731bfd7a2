"""The house with a key and a door: its rules, without Gymnasium."""

import re
from random import Random

import pytest

from rollout.environments.text_world import DIRECTIONS, OPPOSITE, ROOMS, House


def room_of(text: str) -> str:
    return re.findall(r"You are in the (\w+)\.", text)[-1]


@pytest.mark.parametrize("seed", range(20))
def test_every_room_can_be_reached_and_every_way_leads_back(seed: int) -> None:
    house = House(Random(seed), 4, 4)
    start = house.look()
    assert set(house.names.values()) == set(ROOMS)
    seen: set[str] = set()

    def explore(text: str) -> None:
        seen.add(room_of(text))
        for direction in re.findall("|".join(DIRECTIONS), text):
            beyond = house.do(f"go {direction}")
            if room_of(beyond) not in seen:
                explore(beyond)
            assert house.do(f"go {OPPOSITE[direction]}") == text

    explore(start)
    assert seen == set(ROOMS)


def test_the_door_opens_with_the_key_only() -> None:
    house = House(Random(3))
    house.room = house.door_room
    assert house.look().endswith("There is a locked door.")
    assert house.do("take key") == "There is no key."
    assert house.do("unlock door") == "You have no key." and not house.is_open
    house.room = house.key_room
    assert house.do("unlock door") == "There is no door."
    assert house.look().endswith("There is a key.")
    assert house.do("I see a key.\nTake key!") == "You have the key.", "the last line counts"
    assert house.do("take key") == "There is no key." and "key" not in house.look()
    house.room = house.door_room
    assert house.do("unlock door") == "The door is open." and house.is_open


def test_what_cannot_be_done_changes_nothing() -> None:
    house = House(Random(0))
    before = house.look()
    closed = next(direction for direction in DIRECTIONS if direction not in house.ways[house.room])
    assert house.do(f"go {closed}") == f"You cannot go {closed}."
    for command in ("", "\n\n", "go", "go up", "dance", "take the key"):
        assert house.do(command).startswith("That is no command. Find the key")
    assert house.look() == before


def test_the_same_random_numbers_make_the_same_house() -> None:
    house, same, other = House(Random(1)), House(Random(1)), House(Random(2))
    assert (house.names, house.ways, house.room) == (same.names, same.ways, same.room)
    assert house.names != other.names


@pytest.mark.parametrize("size", [(1, 2), (5, 4), (0, 0)])
def test_a_house_has_a_size(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"width={size[0]}, height={size[1]}: must make 3 to 16 rooms"):
        House(Random(0), *size)
