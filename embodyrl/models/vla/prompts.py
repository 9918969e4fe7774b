"""Prompts and tokenizers: reading a tokenizer, batches of token ids, and tokenizers of models without a checkpoint, in
which a word is a token. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodyrl.models.errors import PolicyError

if TYPE_CHECKING:  # options of models are read where the package is not installed
    from tokenizers import Tokenizer, pre_tokenizers

TOKENIZER = "tokenizer.json"
UNKNOWN = "<unk>"
"""Token of words that are not in the vocabulary."""
SHOWN = 60
"""Characters of a task description that an error shows."""


def read_tokenizer(content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json.

    Raises:
        PolicyError: the file is damaged.
    """
    from tokenizers import Tokenizer  # configs are checked where the package is not installed

    try:
        tokenizer = Tokenizer.from_str(content.decode())
        tokenizer.encode("pick up")
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises what is no Exception where its own code fails
        raise PolicyError(f"{name} cannot be read ({error!s:.200})", "download it again") from error
    return tokenizer


def check_length(ids: Sequence[int], most: int, what: str, task: str) -> None:
    """Raise a `PolicyError` if a prompt has too many tokens."""
    if len(ids) > most:
        shown = task if len(task) <= SHOWN else f"{task[:SHOWN]}..."
        raise PolicyError(
            f"{what} has {len(ids)} tokens, the model takes {most}: set model.prompt_length to {len(ids)} or more, or "
            f"shorten {shown!r}"
        )


def padded(
    rows: Sequence[Sequence[int]], length: int, pad: int = 0, *, left: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding.

    Args:
        rows: token ids of each prompt.
        length: `L`.
        pad: id to pad with.
        left: pad in front of the prompt instead of behind it.
    """
    ids = np.full((len(rows), length), pad, np.int64)
    places, counts = np.arange(length), np.array([len(row) for row in rows])[:, None]
    mask = places >= length - counts if left else places < counts
    ids[mask] = [number for row in rows for number in row]
    return ids, mask


# ------------------------------------------------------------------------------------------------- without a checkpoint


def word_tokenizer(
    special: Sequence[str],
    texts: Iterable[str],
    split: pre_tokenizers.PreTokenizer,
    *,
    more: Iterable[str] = (),
    ids: Mapping[str, int] | None = None,
) -> Tokenizer:
    """Return a tokenizer that knows the words of some texts.

    Args:
        special: the first tokens, `UNKNOWN` among them; the id of a token is its index.
        texts: whose words follow, sorted.
        split: splits text into words.
        more: words that follow these.
        ids: ids of tokens that differ from their index.
    """
    from tokenizers import Tokenizer, models

    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    numbers = {word: index for index, word in enumerate(dict.fromkeys([*special, *words, *more]))} | dict(ids or {})
    tokenizer = Tokenizer(models.WordLevel(numbers, UNKNOWN))
    tokenizer.pre_tokenizer = split
    return tokenizer
