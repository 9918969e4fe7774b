"""The prompt, in tokens.

Shapes: `B` samples, `L` tokens, pictures included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from embodyrl.models.gr00t.options import Padding
from embodyrl.models.gr00t.tokens import PAD, PIECE, SPECIAL, UNKNOWN, Words, prompt


class Prompts(Words):
    """Turns sentences into token ids of one length: the model looks at padding as well, so that another length would be
    another prompt.

    Args:
        padding: where to fill up.
        arguments: as for `Words`.
    """

    def __init__(self, *arguments: Any, padding: Padding, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._left = padding is Padding.left
        self._pad = (self._tokenizer.token_to_id(PAD) or 0) if self._left else 0

    def batch(self, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids `[B, L]`, and which of them are no padding, bool `[B, L]`.

        Raises:
            PolicyError: a sentence is too long.
        """
        self._check_lengths(tasks)
        rows = [self.encode(task) for task in tasks]
        length = max(map(len, rows)) if self.length is None else self.length
        ids = torch.full((len(rows), length), self._pad)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for index, row in enumerate(rows):
            place = slice(length - len(row), length) if self._left else slice(len(row))
            ids[index, place] = torch.tensor(row)
            mask[index, place] = True
        return ids, mask


def word_tokenizer(tasks: Iterable[str], image_token: int | None = None) -> Tokenizer:
    """A tokenizer for a model without one: the words of the chats about these tasks.

    Args:
        tasks: the sentences.
        image_token: id of the token that stands for a piece of a picture; None: the next one.
    """
    split = pre_tokenizers.Whitespace()
    text = " ".join(prompt(task, pictures=1, pieces=1) for task in tasks)
    for token in SPECIAL:
        text = text.replace(token, " ")
    words = {word for word, _ in split.pre_tokenize_str(text)} | {str(number) for number in range(10)}
    vocabulary = [*SPECIAL, UNKNOWN, *sorted(words)]
    numbers = {word: index for index, word in enumerate(vocabulary)}
    numbers[PIECE] = numbers[PIECE] if image_token is None else image_token
    tokenizer = Tokenizer(models.WordLevel(numbers, UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer
