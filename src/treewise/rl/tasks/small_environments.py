"""Two environments of several turns that need nothing beyond Python, for tests, examples and benchmarks."""

import copy
import random
from dataclasses import dataclass, field

from treewise.errors import ConfigError


@dataclass
class GuessNumber:
    """Guess a number within a number of tries; each answer is higher, lower or correct.

    The reward is 1 for the number at the first try and falls to 0 with the tries that were used up.
    """

    high: int = 16
    max_tries: int = 5
    secret: int = field(default=0, init=False)
    num_tries: int = field(default=0, init=False)
    is_correct: bool = field(default=False, init=False)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.is_correct or self.num_tries >= self.max_tries

    def reset(self, seed: int = 0) -> str:
        """Draws a number from the seed."""
        self.secret = random.Random(seed).randint(1, self.high)
        self.num_tries, self.is_correct = 0, False
        return f" Guess a number from 1 to {self.high}."

    def guess(self, number: str) -> str:
        """Guesses the number.

        Args:
            number: The guess, a whole number.
        """
        self.num_tries += 1
        words = "".join(c if c.isdigit() else " " for c in str(number)).split()
        if not words:
            return "not a number"
        value = int(words[0])
        self.is_correct = value == self.secret
        if self.is_correct:
            return "correct"
        return "higher" if value < self.secret else "lower"

    def get_reward(self) -> float:
        """In [0, 1]."""
        return (self.max_tries - self.num_tries + 1) / self.max_tries if self.is_correct else 0.0

    def fork(self) -> "GuessNumber":
        """An independent copy."""
        return copy.copy(self)


@dataclass
class KeyAndDoor:
    """A corridor of rooms: find the key, then reach the door. Copied by deep copy: it has no `fork`.

    The reward is 1 for leaving by the door, 0.25 for holding the key, else 0.
    """

    num_rooms: int = 4
    room: int = field(default=0, init=False)
    key_room: int = field(default=0, init=False)
    door_room: int = field(default=0, init=False)
    has_key: bool = field(default=False, init=False)
    is_outside: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.num_rooms < 3:
            raise ConfigError(f"KeyAndDoor has {self.num_rooms} rooms; a start, a key and a door need 3.")

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.is_outside

    def reset(self, seed: int = 0) -> str:
        """Places key and door from the seed; the start is another room."""
        self.room, self.key_room, self.door_room = random.Random(seed).sample(range(self.num_rooms), 3)
        self.has_key = self.is_outside = False
        return f" You are in room {self.room} of rooms 0 to {self.num_rooms - 1}. Take the key, then open the door."

    def move(self, direction: str) -> str:
        """Walks to the next room.

        Args:
            direction: Either left or right.
        """
        step = {"left": -1, "right": 1}.get(direction)
        if step is None or not 0 <= self.room + step < self.num_rooms:
            return f"You cannot go {direction}. You are in room {self.room}."
        self.room += step
        seen = [name for name, room in (("a key", self.key_room), ("a door", self.door_room)) if room == self.room]
        return f"You are in room {self.room}. You see {' and '.join(seen) or 'nothing'}."

    def take(self) -> str:
        """Takes the key, if it is here."""
        self.has_key = self.has_key or self.room == self.key_room
        return "You have the key." if self.has_key else "There is no key here."

    def open(self) -> str:
        """Opens the door, if it is here and you have the key."""
        self.is_outside = self.has_key and self.room == self.door_room
        return "You are outside." if self.is_outside else "Nothing opens."

    def get_reward(self) -> float:
        """0, 0.25 or 1."""
        return 1.0 if self.is_outside else 0.25 * self.has_key
