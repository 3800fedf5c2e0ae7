"""The words of the word problems: people, things, places and days, from words.txt.

Every plural is regular except for those in `_IRREGULAR`, so a noun is given by its singular.
"""

from pathlib import Path
from typing import Any, NamedTuple

_IRREGULAR = {
    **{"loaf": "loaves", "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes"},
    "child": "children",
}
_AS_THEY_STAND = ("SHE", "HE", "SHOPS", "PLACES", "TOUR_GOALS", "JOBS")  # lists of no nouns


class Noun(NamedTuple):
    """A thing to count; in an f-string it is its plural, as every number here is at least 2."""

    one: str
    many: str

    def __str__(self) -> str:
        return self.many

    @property
    def a(self) -> str:
        """The singular with its article: "a box", "an apple"."""
        return f"{'an' if self.one[0] in 'aeiou' else 'a'} {self.one}"


class Person(NamedTuple):
    """A first name with its pronouns; in an f-string it is the name."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()


def _plural(one: str) -> str:
    if one in _IRREGULAR:
        return _IRREGULAR[one]
    if one.endswith(("s", "x", "ch", "sh")):
        return one + "es"
    if one.endswith("y") and one[-2] not in "aeiou":
        return one[:-1] + "ies"
    return one + "s"


def _words(line: str) -> tuple[str, tuple[Any, ...]]:
    name, _, text = line.partition(": ")
    words = text.split(", ")
    if name in _AS_THEY_STAND:
        return name, tuple(words)
    return name, tuple(Noun(one, _plural(one)) for one in words)


_LINES = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
WORDS = dict(_words(line) for line in _LINES if not line.startswith("#"))
PEOPLE = (
    *(Person(name, "she", "her", "her") for name in WORDS.pop("SHE")),
    *(Person(name, "he", "his", "him") for name in WORDS.pop("HE")),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
