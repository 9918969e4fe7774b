"""Task descriptions as tokens of SmolVLM2. Imports no torch, so that a config can be checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.models.vla.prompts import TOKENIZER, UNKNOWN, check_length, padded, word_tokenizer
from embodyrl.models.vla.prompts import read_tokenizer as parse_tokenizer

PAD = "<|im_end|>"


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
        check_length(found, self._most, "a task description", task)
        return found

    def batch(self, tasks: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding.

        Raises:
            PolicyError: a task description is too long.
        """
        rows = [self.ids(task) for task in tasks]
        return padded(rows, max([self.length, *map(len, rows)]), self._pad)


def new_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of these tasks."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    return word_tokenizer([UNKNOWN, PAD, "\n"], map(ended, tasks), split)
