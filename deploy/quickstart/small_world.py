"""Makes up a world of people, cities and countries: documents about it, and questions that need one or two of them.

All worlds have the same names. Who lives where differs, so that what a model knows about one world is of no use in
another.
"""

import random
from dataclasses import dataclass
from typing import Literal

NUM_PEOPLE, NUM_CITIES, NUM_COUNTRIES = 200, 50, 24
WORKS = (
    "baker", "barber", "builder", "butcher", "carpenter", "clerk", "dancer", "doctor", "farmer", "fisher", "hunter",
    "judge", "lawyer", "miller", "miner", "painter", "pilot", "potter", "sailor", "singer", "tailor", "teacher",
    "waiter", "weaver",
)  # fmt: skip
_SYLLABLES = ("ba", "ko", "ri", "mu", "ne", "lo", "ta", "vi", "sa", "du", "pe", "zo")


def _names(count: int) -> list[str]:
    rng = random.Random(0)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(rng.choices(_SYLLABLES, k=3)).capitalize()] = None
    return list(drawn)


_NAMES = _names(NUM_PEOPLE + NUM_CITIES + NUM_COUNTRIES)
PEOPLE, CITIES = _NAMES[:NUM_PEOPLE], _NAMES[NUM_PEOPLE : NUM_PEOPLE + NUM_CITIES]
COUNTRIES = [f"{name}ia" for name in _NAMES[NUM_PEOPLE + NUM_CITIES :]]


@dataclass(frozen=True)
class Question:
    """Asks for a fact in the last of the documents about `names`; each document contains the next name."""

    text: str
    names: tuple[str, ...]
    answer: str
    kind: Literal["city", "country"]
    """Kind of the fact."""


class World:
    """Says where people live, their work, and where the cities are."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self._country = {city: rng.choice(COUNTRIES) for city in CITIES}
        self._city = {person: rng.choice(CITIES) for person in PEOPLE}
        self._work = {person: rng.choice(WORKS) for person in PEOPLE}

    def documents(self) -> list[dict[str, str]]:
        """Returns a document about each person and each city, with title and text."""
        people = [(name, f"{name} is a {self._work[name]} who lives in {self._city[name]}.") for name in PEOPLE]
        cities = [(name, f"{name} is a city in {self._country[name]}.") for name in CITIES]
        return [{"title": title, "text": text} for title, text in people + cities]

    def questions(self) -> list[Question]:
        """Returns the questions: of one document about each city, of one and of two about each person."""
        asked = [Question(f"In which country is {city}?", (city,), self._country[city], "country") for city in CITIES]
        for name in PEOPLE:
            city = self._city[name]
            asked.append(Question(f"In which city lives {name}?", (name,), city, "city"))
            asked.append(Question(f"In which country lives {name}?", (name, city), self._country[city], "country"))
        return asked
