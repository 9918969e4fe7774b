"""Paraphrases of task descriptions, made from a table of words and frames (`words.json`).

Level 1 has another verb, 2 a polite frame, 3 other verbs and nouns in an indirect frame, 4 an aside, 5 a story around
the words of level 3. All of them are known before an episode begins, so that memory holds their numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from embodyrl.config.schema import MOST_LEVEL
from embodyrl.envs.perturb.kinds import Perturbation, generator, level_of

FILE = Path(__file__).with_name("words.json")
VARIANTS = 4
"""Paraphrases of each level."""
PER_DESCRIPTION = MOST_LEVEL * VARIANTS
"""Paraphrases of a task description."""


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def known_verbs() -> list[str]:
    """Return the verbs with which a task description may begin so that there are paraphrases of it."""
    return list(_table()["verbs"])


def _verb(text: str) -> str | None:
    """Return the verb with which a text begins, the longest that is known; None if it begins with none."""
    lower = text.lower()
    found = [verb for verb in _table()["verbs"] if re.match(rf"{verb}\b", lower)]
    return max(found, key=len, default=None)


def has_paraphrases(description: str) -> bool:
    """Return whether there are paraphrases of a task description."""
    return _verb(description) is not None


@lru_cache(maxsize=4096)
def paraphrases(description: str) -> tuple[str, ...]:
    """Return all paraphrases of a task description, `VARIANTS` of each level, the lowest level first; the description
    itself in place of each if there are none."""
    verb = _verb(description)
    if verb is None:
        return (description,) * PER_DESCRIPTION
    table, own = _table(), description[0].lower() + description[1:]
    found = [_with_verb(own, verb, number) for number in range(VARIANTS)]
    others = [_with_other_words(own, verb, number) for number in range(VARIANTS)]
    found += [frame.format(own) for frame in table["frames"]]
    found += [frame.format(text) for frame, text in zip(table["indirect"], others, strict=True)]
    found += [frame.format(own) for frame in table["asides"]]
    # Another verb than at level 3, so that level 5 is not the same words once more.
    turned = [*others[1:], others[0]]
    found += [frame.format(text) for frame, text in zip(table["stories"], turned, strict=True)]
    return tuple(found)


def _with_verb(text: str, verb: str, number: int) -> str:
    return str(_table()["verbs"][verb][number]) + text[len(verb) :]


def _with_other_words(text: str, verb: str, number: int) -> str:
    """Return a text with other verbs, also after `and`, and other nouns."""
    first, *rest = re.split(r"\band ", text)
    parts = [_with_verb(first, verb, number)]
    parts += [part if (inner := _verb(part)) is None else _with_verb(part, inner, number) for part in rest]
    nouns = _table()["nouns"]
    pattern = "|".join(rf"\b{noun}\b" for noun in sorted(nouns, key=len, reverse=True))
    return re.sub(pattern, lambda match: nouns[match[0]], "and ".join(parts))


def described(description: str, seed: int, perturb: Perturbation) -> str:
    """Return the task description that an episode shows.

    Args:
        description: that of its task.
        seed: of the episode.
        perturb: kinds and levels.
    """
    level = level_of(perturb, "words")
    if not level:
        return description
    number = int(generator(seed, "words").integers(VARIANTS))
    return paraphrases(description)[VARIANTS * (level - 1) + number]


def with_paraphrases(descriptions: Sequence[str]) -> list[str]:
    """Return task descriptions, and after them all paraphrases of each. Paraphrases of two lists of the same length
    have the same numbers."""
    return [*descriptions, *(text for description in descriptions for text in paraphrases(description))]
