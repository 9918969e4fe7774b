"""Prompts of pi0 and pi0.5: task description and state as PaliGemma's tokens.

Imports no torch, so that a config can be checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.errors import MissingPackageError
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.prompts import UNKNOWN, check_length, padded, word_tokenizer
from embodyrl.models.vla.prompts import read_tokenizer as parse_tokenizer

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
STEPS = 256
"""Bins of a number of the state."""


@dataclass(frozen=True)
class TextTokenizer:
    """PaliGemma's tokenizer."""

    encode: Callable[[str], list[int]]
    """Token ids of a text, without special tokens."""
    begin: int
    """Id of the first token of a prompt."""
    end: int | None
    """Id of the token that ends a text; None: there is none."""
    size: int
    """Token ids."""


def read_tokenizer(name: str, content: bytes) -> TextTokenizer:
    """Return PaliGemma's tokenizer.

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
            return TextTokenizer(
                lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
                begin,
                tokenizer.token_to_id(EOS),
                tokenizer.get_vocab_size(with_added_tokens=False),
            )
        pieces = _sentencepiece(content)
        return TextTokenizer(pieces.encode, pieces.bos_id(), pieces.eos_id(), pieces.get_piece_size())
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


def written(state: NDArray[np.floating]) -> str:
    """Return a normalised state `[S]` as prompts show it."""
    return " ".join(map(str, digits(state)))


def prompt_with_state(task: str, state: NDArray[np.floating]) -> str:
    """Return the prompt of a task and a normalised state `[S]`."""
    return f"Task: {cleaned(task)}, State: {written(state)};\nAction: "


class Prompts:
    """Encodes prompts as token ids, padded on the right with 0.

    Args:
        tokenizer: encodes text.
        length: tokens of a prompt, with padding.
    """

    def __init__(self, tokenizer: TextTokenizer, length: int) -> None:
        self._encode, self._begin = tokenizer.encode, tokenizer.begin
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
        check_length(found, self.length, "a prompt", task)
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
        return padded([self.fitting_ids(*each) for each in zip(tasks, states, strict=True)], self.length)


def new_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of these tasks, and of states."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    texts = [*(f"{cleaned(task)} \n" for task in tasks), *(prompt_with_state(task, np.zeros(2)) for task in tasks)]
    numbers = [text for step in range(-1, STEPS) for text in (str(step), f"{step};")]
    return word_tokenizer([PAD, BOS, UNKNOWN], texts, split, more=numbers)
