"""The sentence that the model reads, in tokens of PaliGemma."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from embodyrl.models.pi.tokens import BOS, STEPS, Words, cleaned, prompt_with_state

UNKNOWN, PAD = "<unk>", "<pad>"


class Prompts(Words):
    """Turns sentences into token ids, padded on the right with 0; arguments as for `Words`."""

    def batch(
        self, tasks: Sequence[str], states: Sequence[NDArray[np.floating] | None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token ids `[B, L]`, and which of them are no padding, bool `[B, L]`.

        Args:
            tasks: sentences.
            states: `B` of `[S]`, normalised, to be written into the prompt; None: they are not.

        Raises:
            PolicyError: a prompt is too long.
        """
        states = [None] * len(tasks) if states is None else states
        rows = [self.fitting_ids(task, state) for task, state in zip(tasks, states, strict=True)]
        ids = torch.tensor([row + [0] * (self.length - len(row)) for row in rows])
        mask = torch.tensor([[True] * len(row) + [False] * (self.length - len(row)) for row in rows])
        return ids, mask


def word_tokenizer(tasks: Iterable[str]) -> Tokenizer:
    """A tokenizer for a model that starts from nothing: the words of these tasks, and what writes a state."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")])
    texts = [*(f"{cleaned(task)} \n" for task in tasks), *(prompt_with_state(task, np.zeros(2)) for task in tasks)]
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    numbers = [text for step in range(-1, STEPS) for text in (str(step), f"{step};")]
    vocabulary = dict.fromkeys([PAD, BOS, UNKNOWN, *sorted(words), *numbers])
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, UNKNOWN))
    tokenizer.pre_tokenizer = split
    return tokenizer
