"""Prompts of OpenVLA and OpenVLA-OFT: a question about the task, as tokens.

The tokenizer is read from tokenizer.json by the `tokenizers` package; no code from the checkpoint runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.prompts import TOKENIZER, UNKNOWN, read_tokenizer, word_tokenizer

if TYPE_CHECKING:  # options of models are read where the package is not installed
    from tokenizers import Tokenizer

BOS, EOS, PAD = "<s>", "</s>", "<PAD>"
SPACE = "\u2581"
"""Llama's token of a single space; public code ends every prompt with it."""


def prompt(task: str) -> str:
    """Return the question about a task."""
    return f"In: What action should the robot take to {task.lower()}?\nOut:"


class Prompts:
    """Encodes prompts as token ids, padded on the left after the first token.

    Args:
        tokenizer: contents of tokenizer.json.
        longest: maximum tokens of a prompt.
        tasks: expected task descriptions; batches are padded to the longest of their prompts, so that shapes do not
            change.
    """

    def __init__(self, tokenizer: bytes, longest: int, tasks: Iterable[str]) -> None:
        self._tokenizer = read_tokenizer(tokenizer, TOKENIZER)
        self._longest = longest
        self.pad, self.eos = self._id(PAD), self._id(EOS)
        self._space = self._tokenizer.token_to_id(SPACE)
        self._known: dict[str, list[int]] = {}
        self._width = max((len(self.encode(task)) for task in tasks), default=0)

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise PolicyError(f"tokenizer.json has no token {token!r}: it is not that of an OpenVLA model")
        return int(number)

    def encode(self, task: str) -> list[int]:
        """Return token ids of the question about a task, without padding.

        Raises:
            PolicyError: the prompt is too long for the model.
        """
        if task not in self._known:
            ids = list(self._tokenizer.encode(prompt(task)).ids)
            if self._space is not None and ids[-1] != self._space:
                ids.append(self._space)
            if len(ids) > self._longest:
                raise PolicyError(
                    f"a task description has {len(ids)} tokens, the model takes {self._longest}: {task[:60]!r}..."
                )
            self._known[task] = ids
        return self._known[task]

    def batch(self, tasks: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding."""
        rows = [self.encode(task) for task in tasks]
        width = max(self._width, *(len(row) for row in rows))
        ids = np.array([[row[0], *[self.pad] * (width - len(row)), *row[1:]] for row in rows], np.int64)
        mask = np.array([[True, *[False] * (width - len(row)), *[True] * (len(row) - 1)] for row in rows])
        return ids, mask


def new_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of the questions about these tasks."""
    from tokenizers import pre_tokenizers, processors

    split = pre_tokenizers.Whitespace()
    tokenizer = word_tokenizer([UNKNOWN, BOS, EOS, PAD], map(prompt, tasks), split)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer
