"""Prompts of pi0 and pi0.5: task description and state as PaliGemma's tokens.

Imports no torch, so that a config can be checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.errors import MissingPackageError
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.checkpoint import read_tokenizer as parse_tokenizer
from embodyrl.models.vla.words import UNKNOWN, word_level, words_of

BOS, PAD = "<bos>", "<pad>"
STEPS = 256
"""Bins of a number of the state."""
SHOWN = 60
"""Characters of a task description that an error shows."""

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""


def read_tokenizer(name: str, content: bytes) -> tuple[Encode, int]:
    """Return the function that encodes text, and the id of the first token of a prompt.

    Args:
        name: `tokenizer.json`, or `tokenizer.model` (SentencePiece).
        content: contents of the file.

    Raises:
        PolicyError: the file is damaged.
        MissingPackageError: SentencePiece is not installed.
    """
    try:
        if name.endswith(".json"):
            tokenizer = parse_tokenizer(content, name)
            begin = tokenizer.token_to_id(BOS)
            if begin is None:
                raise PolicyError(
                    f"{name} is not PaliGemma's, it has no token {BOS}", "set model.tokenizer to that one"
                )
            return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), begin
        pieces = _sentencepiece(content)
        return pieces.encode, pieces.bos_id()
    except (PolicyError, MissingPackageError, MemoryError):
        raise
    except Exception as error:  # the packages raise nothing more special
        raise PolicyError(f"{name} cannot be read ({error})", "download it again") from error


def _sentencepiece(content: bytes) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingPackageError(
            "tokenizer.model needs sentencepiece, which is not installed: pip install sentencepiece, or give "
            "PaliGemma's tokenizer.json"
        ) from error
    return SentencePieceProcessor(model_proto=content)


def cleaned(task: str) -> str:
    """Return a task description on one line."""
    return task.strip().replace("_", " ").replace("\n", " ")


def digits(state: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bins 0 .. 255 of numbers `[...]` in [-1, 1]; -1 for smaller numbers, 255 for larger ones."""
    steps: NDArray[np.int64] = np.digitize(state, np.linspace(-1, 1, STEPS + 1)[:-1]) - 1
    return steps


def prompt_with_state(task: str, state: NDArray[np.floating]) -> str:
    """Return the prompt of a task and a normalised state `[S]`."""
    return f"Task: {cleaned(task)}, State: {' '.join(map(str, digits(state)))};\nAction: "


class Prompts:
    """Encodes prompts as token ids, padded on the right with 0.

    Args:
        encode: encodes text.
        begin: id of the first token.
        length: tokens of a prompt, with padding.
    """

    def __init__(self, encode: Encode, begin: int, length: int) -> None:
        self._encode, self._begin = encode, begin
        self.length = length

    def ids(self, task: str, state: NDArray[np.floating] | None = None) -> list[int]:
        """Return token ids of a prompt without padding; without a state `[S]`, it ends with a line break."""
        if state is None:
            return [self._begin, *self._encode(cleaned(task)), *self._encode("\n")]
        return [self._begin, *self._encode(prompt_with_state(task, state))]

    def fitting_ids(self, task: str, state: NDArray[np.floating] | None = None) -> list[int]:
        """Return `ids` if they fit.

        Raises:
            PolicyError: there are more than `length`.
        """
        found = self.ids(task, state)
        if len(found) > self.length:
            shown = task if len(task) <= SHOWN else f"{task[:SHOWN]}..."
            raise PolicyError(
                f"a prompt has {len(found)} tokens, the model takes {self.length}: set model.prompt_length to "
                f"{len(found)} or more, or shorten {shown!r}"
            )
        return found

    def check(self, tasks: Iterable[str], numbers: int | None) -> None:
        """Check the length of prompts in advance.

        Args:
            tasks: task descriptions.
            numbers: size of a state that is written into the prompt; each number is taken to have three digits. None:
                no state.

        Raises:
            PolicyError: a prompt is too long.
        """
        for task in tasks:
            self.fitting_ids(task, None if numbers is None else np.ones(numbers))

    def batch(
        self, tasks: Sequence[str], states: Sequence[NDArray[np.floating] | None] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding.

        Args:
            tasks: task descriptions.
            states: `B` normalised states `[S]` to write into the prompts; None: none.

        Raises:
            PolicyError: a prompt is too long.
        """
        states = [None] * len(tasks) if states is None else states
        rows = [self.fitting_ids(task, state) for task, state in zip(tasks, states, strict=True)]
        ids = np.zeros((len(rows), self.length), np.int64)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        return ids, np.arange(self.length) < np.array([len(row) for row in rows])[:, None]


def word_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of these tasks, and of states."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    texts = [*(f"{cleaned(task)} \n" for task in tasks), *(prompt_with_state(task, np.zeros(2)) for task in tasks)]
    numbers = [text for step in range(-1, STEPS) for text in (str(step), f"{step};")]
    vocabulary = dict.fromkeys([PAD, BOS, UNKNOWN, *words_of(texts, split), *numbers])
    return word_level(list(vocabulary), split)
