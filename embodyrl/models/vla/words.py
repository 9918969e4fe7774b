"""Tokenizers of vision-language-action models without a checkpoint: a word is a token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # options of models are read where the package is not installed
    from tokenizers import Tokenizer, pre_tokenizers

UNKNOWN = "<unk>"
"""Token of words that are not in the vocabulary."""


def word_level(
    vocabulary: Sequence[str], split: pre_tokenizers.PreTokenizer, ids: Mapping[str, int] | None = None
) -> Tokenizer:
    """Return a tokenizer that maps every word of a vocabulary to an id.

    Args:
        vocabulary: words, including `UNKNOWN`; the id is the index.
        split: splits text into words.
        ids: ids of words that differ from their index.
    """
    from tokenizers import Tokenizer, models

    numbers = {word: index for index, word in enumerate(vocabulary)} | dict(ids or {})
    tokenizer = Tokenizer(models.WordLevel(numbers, UNKNOWN))
    tokenizer.pre_tokenizer = split
    return tokenizer


def words_of(texts: Iterable[str], split: pre_tokenizers.PreTokenizer) -> list[str]:
    """Return the distinct words of texts, sorted."""
    return sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
