"""An example of a text world: a house with a key in one room and a locked door in another.

It is slipstream/House-v0 of rollout/environments/gymnasium.py; its rules know nothing of Gymnasium.
"""

import string
from functools import cache
from random import Random
from typing import Any

from rollout.environments.optional import optional

DIRECTIONS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
ROOMS = (
    "attic", "bathroom", "bedroom", "cellar", "corridor", "hall", "kitchen", "laundry",
    "library", "lounge", "nursery", "office", "pantry", "studio", "veranda", "workshop",
)  # fmt: skip
TASK = "Find the key, and unlock the door. Say: go and a direction, take key, or unlock door."
Cell = tuple[int, int]
"""Column and row of a room."""


class House:
    """Rooms on a grid, each of which can be reached. The same random numbers make the same house.

    Example:
        house = House(Random(0))
        house.look()  # "You are in the attic. You can go east, south. There is a key."
        house.do("take key")  # "You have the key."
    """

    def __init__(self, random: Random, width: int = 3, height: int = 3):
        """Raises ValueError for fewer than 3 rooms, or more than have a name."""
        cells = [(column, row) for row in range(height) for column in range(width)]
        if not 3 <= len(cells) <= len(ROOMS):
            raise ValueError(f"width={width}, height={height}: must make 3 to {len(ROOMS)} rooms")
        self.names = dict(zip(cells, random.sample(ROOMS, len(cells)), strict=True))
        self.room, self.key_room, self.door_room = random.sample(cells, 3)
        self.ways: dict[Cell, dict[str, Cell]] = _tree(random, cells)
        self.has_key = False
        self.is_open = False

    def look(self) -> str:
        ways = [direction for direction in DIRECTIONS if direction in self.ways[self.room]]
        parts = [f"You are in the {self.names[self.room]}.", f"You can go {', '.join(ways)}."]
        if self.room == self.key_room and not self.has_key:
            parts.append("There is a key.")
        if self.room == self.door_room:
            parts.append("There is a locked door.")
        return " ".join(parts)

    def do(self, command: str) -> str:
        """Follow the last line of a command, and return what the world says to it. What cannot be done changes
        nothing."""
        words = (command.lower().splitlines() or [""])[-1].strip(" .!").split()
        match words:
            case ["go", direction] if direction in DIRECTIONS:
                if direction not in self.ways[self.room]:
                    return f"You cannot go {direction}."
                self.room = self.ways[self.room][direction]
                return self.look()
            case ["take", "key"]:
                if self.room != self.key_room or self.has_key:
                    return "There is no key."
                self.has_key = True
                return "You have the key."
            case ["unlock", "door"]:
                if self.room != self.door_room:
                    return "There is no door."
                self.is_open = self.has_key
                return "The door is open." if self.is_open else "You have no key."
        return f"That is no command. {TASK}"


def _tree(random: Random, cells: list[Cell]) -> dict[Cell, dict[str, Cell]]:
    """Draw ways that connect all cells, without a circle."""
    ways: dict[Cell, dict[str, Cell]] = {cell: {} for cell in cells}
    path = [cells[0]]
    while path:
        column, row = path[-1]
        beside = {name: (column + right, row + down) for name, (right, down) in DIRECTIONS.items()}
        new = [name for name, cell in beside.items() if ways.get(cell) == {}]
        if not new:
            path.pop()
            continue
        direction = random.choice(new)
        ways[path[-1]][direction] = beside[direction]
        ways[beside[direction]][OPPOSITE[direction]] = path[-1]
        path.append(beside[direction])
    return ways


def make_house(width: int = 3, height: int = 3) -> Any:
    """Make a `gymnasium.Env`: texts are observations and actions, and opening the door is worth 1."""
    return _environment()(width, height)


@cache
def _environment() -> Any:
    gymnasium: Any = optional("gymnasium", "gymnasium")

    class HouseEnvironment(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(1000, charset=string.printable)
        action_space = gymnasium.spaces.Text(200, charset=string.printable)

        def __init__(self, width: int, height: int):
            self._size = (width, height)
            House(Random(0), *self._size)  # raises for a wrong size

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed, options=options)
            self._house = House(Random(int(self.np_random.integers(2**32))), *self._size)
            return f"{TASK} {self._house.look()}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            text = self._house.do(action)
            return text, float(self._house.is_open), self._house.is_open, False, {}

    return HouseEnvironment
