"""Task descriptions as tokens of SmolVLM2. Imports no torch, so that a config can be checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.checkpoint import read_tokenizer as parse_tokenizer
from embodyrl.models.vla.words import UNKNOWN, word_level, words_of

TOKENIZER = "tokenizer.json"
PAD = "<|im_end|>"
SHOWN = 60
"""Characters of a task description that an error shows."""


def read_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, without truncation and padding.

    Raises:
        PolicyError: the file is damaged.
    """
    tokenizer = parse_tokenizer(content, TOKENIZER)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ended(task: str) -> str:
    """Return a task description that ends in a line break; nothing else of it is changed."""
    return task if task.endswith("\n") else f"{task}\n"


class Prompts:
    """Encodes task descriptions as token ids, padded on the right.

    Args:
        tokenizer: of the language model.
        pad: id of the token to pad with.
        length: most tokens of a task description.
        tasks: task descriptions of the simulator, to whose longest others are padded. None: to `length`.
    """

    def __init__(self, tokenizer: Tokenizer, *, pad: int, length: int, tasks: Iterable[str] | None = None) -> None:
        self._tokenizer, self._pad, self._most = tokenizer, pad, length
        lengths = [] if tasks is None else [len(self.ids(task)) for task in tasks]
        self.length = length if tasks is None else max(lengths, default=0)
        """Tokens of a padded task description; longer ones lengthen their batch."""

    def ids(self, task: str) -> list[int]:
        """Return the token ids of a task description without padding.

        Raises:
            PolicyError: there are too many; LeRobot would cut them, and the line break with them.
        """
        found = list(self._tokenizer.encode(ended(task)).ids)
        if len(found) > self._most:
            shown = task if len(task) <= SHOWN else f"{task[:SHOWN]}..."
            raise PolicyError(
                f"a task description has {len(found)} tokens, the model takes {self._most}: set model.prompt_length to "
                f"{len(found)} or more, or shorten {shown!r}"
            )
        return found

    def batch(self, tasks: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding.

        Raises:
            PolicyError: a task description is too long.
        """
        rows = [self.ids(task) for task in tasks]
        length = max([self.length, *map(len, rows)])
        ids = np.full((len(rows), length), self._pad, np.int64)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        return ids, np.arange(length) < np.array([len(row) for row in rows])[:, None]


def word_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of these tasks."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    words = words_of([ended(task) for task in tasks], split)
    return word_level(list(dict.fromkeys([UNKNOWN, PAD, "\n", *words])), split)
