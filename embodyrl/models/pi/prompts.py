"""From a task description and a state to tokens of PaliGemma. Nothing here imports torch, so that a config can be
checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.errors import MissingPackageError
from embodyrl.models.errors import PolicyError
from embodyrl.models.vla.checkpoint import UNKNOWN, word_level, words_of

BOS, PAD = "<bos>", "<pad>"
STEPS = 256
"""Into which a state is divided."""
SHOWN = 60
"""Letters of a task description that an error repeats."""

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""


def read_tokenizer(name: str, content: bytes) -> tuple[Encode, int]:
    """Return how text becomes token ids, and the id that begins a task description.

    Args:
        name: `tokenizer.json`, or `tokenizer.model` (SentencePiece).
        content: of the file.

    Raises:
        PolicyError: the file is damaged.
        MissingPackageError: SentencePiece is not installed.
    """
    try:
        if name.endswith(".json"):
            tokenizer = Tokenizer.from_str(content.decode())
            begin = tokenizer.token_to_id(BOS)
            if begin is None:
                raise PolicyError(f"{name} is not PaliGemma's, it has no token {BOS}: set model.tokenizer to that one")
            return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), begin
        pieces = _sentencepiece(content)
        return pieces.encode, pieces.bos_id()
    except (PolicyError, MissingPackageError, MemoryError):
        raise
    except Exception as error:  # the packages raise nothing more special
        raise PolicyError(f"{name} cannot be read ({error}): download it again") from error


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
    """A task description on one line."""
    return task.strip().replace("_", " ").replace("\n", " ")


def digits(state: NDArray[np.floating]) -> NDArray[np.int64]:
    """Numbers `[...]` in [-1, 1] as steps 0 .. 255; what is smaller is -1, what is larger 255."""
    steps: NDArray[np.int64] = np.digitize(state, np.linspace(-1, 1, STEPS + 1)[:-1]) - 1
    return steps


def prompt_with_state(task: str, state: NDArray[np.floating]) -> str:
    """A task and a state `[S]`, normalised."""
    return f"Task: {cleaned(task)}, State: {' '.join(map(str, digits(state)))};\nAction: "


class Prompts:
    """Scheduler task descriptions into token ids, padded on the right with 0.

    Args:
        encode: how text becomes token ids.
        begin: the id that begins a task description.
        length: of a prompt with its padding.
    """

    def __init__(self, encode: Encode, begin: int, length: int) -> None:
        self._encode, self._begin = encode, begin
        self.length = length

    def ids(self, task: str, state: NDArray[np.floating] | None = None) -> list[int]:
        """Token ids of a prompt without padding; without a state `[S]`, a line break of its own ends it."""
        if state is None:
            return [self._begin, *self._encode(cleaned(task)), *self._encode("\n")]
        return [self._begin, *self._encode(prompt_with_state(task, state))]

    def fitting_ids(self, task: str, state: NDArray[np.floating] | None = None) -> list[int]:
        """The same.

        Raises:
            PolicyError: there are too many.
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
        """Refuse task descriptions that are too long now, not when their turn comes.

        Args:
            tasks: task descriptions.
            numbers: in a state that is written into the prompt, each at its longest, in three digits; None: it is not.

        Raises:
            PolicyError: a prompt is too long.
        """
        for task in tasks:
            self.fitting_ids(task, None if numbers is None else np.ones(numbers))

    def batch(
        self, tasks: Sequence[str], states: Sequence[NDArray[np.floating] | None] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and which of them are no padding `[B, L]`.

        Args:
            tasks: task descriptions.
            states: `B` of `[S]`, normalised, to be written into the prompt; None: they are not.

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
    """A tokenizer for a model that starts from nothing: the words of these tasks, and what writes a state."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    texts = [*(f"{cleaned(task)} \n" for task in tasks), *(prompt_with_state(task, np.zeros(2)) for task in tasks)]
    numbers = [text for step in range(-1, STEPS) for text in (str(step), f"{step};")]
    vocabulary = dict.fromkeys([PAD, BOS, UNKNOWN, *words_of(texts, split), *numbers])
    return word_level(list(vocabulary), split)
