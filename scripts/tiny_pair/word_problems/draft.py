"""What a template needs to draw a problem (`Rng`) and what it returns (`Draft`)."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from tiny_pair.word_problems.words import DAYS, PEOPLE, Person


class Draft(NamedTuple):
    """One draw of a template: the same problem in several wordings, and its one solution.

    `lines` uses only what every wording tells, so a question fixes its answer to the letter.
    """

    numbers: tuple[int, ...]
    questions: tuple[str, ...]
    lines: tuple[str, ...]
    result: int


class Rng(random.Random):
    """A seeded source of numbers and words."""

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included (several times faster than randint)."""
        return low + int(self.random() * (high - low + 1))

    def pick[T](self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def pick_two[T](self, items: Sequence[T]) -> tuple[T, T]:
        """Two different items."""
        first = int(self.random() * len(items))
        step = 1 + int(self.random() * (len(items) - 1))
        return items[first], items[(first + step) % len(items)]

    def person(self) -> Person:
        return self.pick(PEOPLE)

    def people(self) -> tuple[Person, Person]:
        return self.pick_two(PEOPLE)

    def three_people(self) -> tuple[Person, Person, Person]:
        first, second = self.people()
        third = self.person()
        while third in (first, second):
            third = self.person()
        return first, second, third

    def days(self) -> tuple[str, str, str]:
        """Three days in a row."""
        first = self.between(0, 6)
        return DAYS[first], DAYS[(first + 1) % 7], DAYS[(first + 2) % 7]

    def taken_to_leave(self, total: int, parts: int) -> int:
        """How much to take from total (at most about half) so that parts divides the rest.

        Needs total >= 2 * parts + 2: at least 2 are taken, and each part gets at least 2.
        """
        most = min((total - 2) // parts, 40)
        return total - parts * self.between(max(2, most // 2), most)

    def added_to_split(self, total: int, parts: int, more: int) -> int:
        """How much to add to total, from 2 up to about `more`, so that parts divides the sum."""
        least = (total + 1 + parts) // parts
        return parts * self.between(least, max(least, (total + more) // parts)) - total

    def banknotes(self, cost: int) -> int:
        """A round sum of money that pays for cost and leaves at least 2 dollars."""
        return (cost + 11) // 10 * 10 + 10 * self.between(0, 5)
