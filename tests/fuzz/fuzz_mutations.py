"""Damage to a decoded reply, one small change at a time, seeded, and of a named kind.

A tree is what JSON decodes to; a stream is the list of its events, in order. Nothing here knows what a field
means: a walk from the root picks any place, so a mutant may hit ids, logprobs, counts or what nobody reads.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STOP_PROBABILITY = 0.3
"""The chance to stop at each level of the walk: deep lists of numbers do not drown the rest."""


@dataclass(frozen=True)
class Place:
    """One child of a container."""

    parent: Any
    key: Any
    path: tuple[Any, ...]

    @property
    def value(self) -> Any:
        return self.parent[self.key]


def any_place(tree: Any, rng: random.Random) -> Place:
    """A child somewhere in the tree; the root itself has no place."""
    node, path = tree, ()
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        place = Place(node, key, (*path, key))
        value = place.value
        if not isinstance(value, (dict, list)) or not value or rng.random() < STOP_PROBABILITY:
            return place
        node, path = value, place.path


def drop(place: Place, rng: random.Random) -> None:
    del place.parent[place.key]


def duplicate(place: Place, rng: random.Random) -> None:
    """A second copy: beside it or anywhere in its list, or over the value of another key of its object."""
    again = copy.deepcopy(place.value)
    if isinstance(place.parent, list):
        at = place.key + 1 if rng.random() < 0.5 else rng.randrange(len(place.parent) + 1)
        place.parent.insert(at, again)
    else:
        place.parent[rng.choice(list(place.parent))] = again


def swap(place: Place, rng: random.Random) -> None:
    """Two children of one container change places."""
    keys = list(place.parent) if isinstance(place.parent, dict) else range(len(place.parent))
    other = rng.choice(keys)
    parent = place.parent
    parent[place.key], parent[other] = parent[other], parent[place.key]


def retype(place: Place, rng: random.Random) -> None:
    """The same thing as another type, or nothing at all."""
    value = place.value
    choices: list[Any] = [None, str(value), bool(value), [], {}, float("nan")]
    if isinstance(value, (int, float)) and abs(value) < 1e300:
        choices += [int(value), float(value), str(value), 10**400, -1 - int(value)]
    if isinstance(value, list):
        choices += [dict(enumerate(map(str, value))), tuple(value)]
    if isinstance(value, dict):
        choices += [list(value), list(value.values())]
    place.parent[place.key] = rng.choice(choices)


def truncate(place: Place, rng: random.Random) -> None:
    """A list, text or object loses its end; a number becomes its integer part."""
    value = place.value
    if isinstance(value, (list, str)):
        keep = rng.randrange(len(value)) if value else 0
        place.parent[place.key] = value[:keep]
    elif isinstance(value, dict):
        keep = rng.randrange(len(value)) if value else 0
        place.parent[place.key] = dict(list(value.items())[:keep])
    elif isinstance(value, float) and abs(value) < 1e300:
        place.parent[place.key] = int(value)


def nest(place: Place, rng: random.Random) -> None:
    """One container more round a value, or one less."""
    value = place.value
    choices: list[Any] = [[value], {"value": value}, {place.key: value}]
    if isinstance(value, dict) and value:
        choices.append(rng.choice(list(value.values())))
    if isinstance(value, list) and value:
        choices.append(rng.choice(value))
    place.parent[place.key] = rng.choice(choices)


def alter(place: Place, rng: random.Random) -> None:
    """Another value of the same type: what only a second statement can give away."""
    value = place.value
    if isinstance(value, bool):
        place.parent[place.key] = not value
    elif isinstance(value, int):
        place.parent[place.key] = max(0, value + rng.choice([-1, 1, 7]))
    elif isinstance(value, float):
        place.parent[place.key] = value + rng.choice([-0.5, 0.25, -9999.0])
    elif isinstance(value, str):
        place.parent[place.key] = value + rng.choice(["x", " ", "1"])
    elif isinstance(value, (list, tuple)):
        place.parent[place.key] = value[::-1]
    else:
        place.parent[place.key] = {"value": 1} if value is None else {**value, "unheard_of": 1}


KINDS: dict[str, Callable[[Place, random.Random], None]] = {
    kind.__name__: kind for kind in (drop, duplicate, swap, retype, truncate, nest, alter)
}
"""Every kind of damage, by name."""


def mutant(tree: Any, kind: str, rng: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """A damaged copy, and the path of what was damaged."""
    changed = copy.deepcopy(tree)
    place = any_place(changed, rng)
    KINDS[kind](place, rng)
    return changed, place.path
