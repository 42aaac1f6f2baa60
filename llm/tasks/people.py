"""The task `people`: questions about 400 people who do not exist, so that no model knows them.

Each fact is a passage of its own, and a question takes two of them: where was the teacher of X
born? They are what the tool `search` finds where it has no corpus of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.core.seeding import derive_seed
from unirl.llm.tasks.task import permutation

_FIRST = (
    "Ada Boris Celia Dario Edda Fabio Greta Hugo Irma Jonas "
    "Karla Leon Mira Nils Olga Pavel Rosa Stefan Thea Viktor"
)
_LAST = (
    "Abendroth Birk Castel Dorn Eklund Fabre Grau Holm Ivers Jansen "
    "Kestner Lind Moreau Norden Ostrow Petri Rask Sorel Tamm Voss"
)
_TOWNS = (
    "Altmar Brenholt Corvane Dunmere Estvik Farrow Glenholm Harsk Istra Jorvale "
    "Kelmont Lorwick Marsund Nelhaven Orsted Pellworth Quarry Rosmark Selby Tornau"
)
_CRAFTS = "weaver smith painter printer baker carpenter potter glazier"


@dataclass(frozen=True)
class Person:
    name: str
    teacher: int
    town: str
    craft: str


def people() -> list[Person]:
    """The same at every call; nobody teaches oneself."""
    firsts, lasts, towns, crafts = (each.split() for each in (_FIRST, _LAST, _TOWNS, _CRAFTS))
    size = len(firsts) * len(lasts)
    order = permutation(derive_seed("people", "teachers"), size)
    # Each is taught by the next one of an order: a permutation without a fixed point.
    teacher = {int(order[i]): int(order[(i + 1) % size]) for i in range(size)}
    draw = permutation(derive_seed("people", "towns"), size)
    return [
        Person(
            f"{firsts[i // len(lasts)]} {lasts[i % len(lasts)]}",
            teacher[i],
            towns[int(draw[i]) % len(towns)],
            crafts[int(draw[i]) // len(towns) % len(crafts)],
        )
        for i in range(size)
    ]


def passages() -> list[str]:
    """Three of each person."""
    everybody = people()
    return [
        text
        for each in everybody
        for text in (
            f"{each.name} was born in {each.town}.",
            f"{each.name} worked as a {each.craft}.",
            f"{each.name} was a pupil of {everybody[each.teacher].name}.",
        )
    ]


def questions() -> Sequence[tuple[str, str]]:
    """Each with its answer."""
    everybody = people()
    return [
        (f"Where was the teacher of {each.name} born?", everybody[each.teacher].town)
        for each in everybody
    ]
