"""Prompts of pi0-FAST: task description and state as PaliGemma's tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from embodyrl.models.pi.prompts import BOS, EOS, PAD, STEPS, TextTokenizer, cleaned, written
from embodyrl.models.pi.prompts import Prompts as PiPrompts
from embodyrl.models.vla.prompts import UNKNOWN, word_tokenizer

STOP = "|"
"""Ends the codes of an answer."""
ANSWER = "Action: "
"""Begins an answer."""


def prompt(task: str, state: NDArray[np.floating] | None, *, lower: bool) -> str:
    """Return the prompt of a task and a normalised state `[S]`.

    Args:
        task: task description.
        state: None: the model reads none.
        lower: as openpi has it: in lower case, and line breaks stay.
    """
    text = task.lower().strip().replace("_", " ") if lower else cleaned(task)
    return f"Task: {text}{'' if state is None else f', State: {written(state)}'};\n"


class Prompts(PiPrompts):
    """Encodes prompts as token ids, padded on the right with 0.

    Args:
        tokenizer: encodes text.
        length: tokens of a prompt, with padding.
        lower: see `prompt`.
    """

    def __init__(self, tokenizer: TextTokenizer, length: int, *, lower: bool) -> None:
        super().__init__(tokenizer, length)
        self._lower = lower

    def ids(self, task: str, state: NDArray[np.floating] | None = None) -> list[int]:
        """Return token ids of a prompt without padding."""
        return [self._begin, *self._encode(prompt(task, state, lower=self._lower))]


def new_tokenizer(tasks: Iterable[str], codes: int) -> Tokenizer:
    """Return a tokenizer for a model with random weights: the words of these tasks, of states and of answers, and ids
    for codes behind them."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    texts = [ANSWER, *(prompt(task, state, lower=False) for task in tasks for state in (None, np.zeros(2)))]
    numbers = [text for step in range(-1, STEPS) for text in (str(step), f"{step};")]
    places = [f"<code{number}>" for number in reversed(range(codes))]
    return word_tokenizer([PAD, EOS, BOS, UNKNOWN, STOP], texts, split, more=[*numbers, *places])
