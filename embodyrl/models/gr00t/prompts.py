"""Prompts of GR00T: a chat in which the user shows images and gives the task description, as tokens.

Imports no torch, so that a config can be checked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t.config import Padding
from embodyrl.models.vla.prompts import TOKENIZER, UNKNOWN, padded, word_tokenizer
from embodyrl.models.vla.prompts import read_tokenizer as parse_tokenizer
from embodyrl.screen import counted

PIECE = "<IMG_CONTEXT>"
"""Image token: a placeholder for one patch embedding."""
PAD = "<|endoftext|>"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", PIECE, PAD)


Write = Callable[[str], str]
"""Returns the prompt for a task description."""


def prompt(task: str, images: int, pieces: int, *, listed: bool = False) -> str:
    """Return the chat about a task; `listed` as in `Gr00tConfig.listed_task`."""
    task = str([task]) if listed else task
    shown = "".join(f"<image {number}><img>{PIECE * pieces}</img>" for number in range(1, images + 1))
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{task}<|im_end|>\n<|im_start|>assistant\n"
    )


class PromptError(PolicyError):
    """Raised for prompts that are too long."""


class Prompts:
    """Encodes prompts as token ids of one length. The model attends to padding, so that another length changes its
    actions.

    Args:
        tokenizer: the files' contents by name.
        write: the prompt for a task description.
        piece: the image token.
        image_token: id that the image token must have.
        images: images per prompt.
        tasks: expected task descriptions.
        padding: side of the padding.
        length: tokens of every prompt; None: those of the longest expected prompt, or, without `tasks`, of the longest
            in a batch. The attribute `length` has the result.

    Raises:
        PolicyError: the tokenizer is damaged or that of another model, or a prompt is too long.
    """

    def __init__(
        self,
        tokenizer: Mapping[str, bytes],
        *,
        write: Write,
        piece: str = PIECE,
        image_token: int,
        images: int,
        tasks: Iterable[str],
        padding: Padding,
        length: int | None,
    ) -> None:
        self._tokenizer = read_tokenizer(tokenizer)
        found = self._tokenizer.token_to_id(piece)
        if found != image_token:
            raise PolicyError(
                f"{piece} has {'no id' if found is None else f'id {found}'} in the tokenizer, {image_token} in the "
                "model: it is another model's tokenizer",
                "give the tokenizer of the vision-language model that these weights were made from",
            )
        self._write, self._images = write, images
        self._known: dict[str, list[int]] = {}
        longest = max((len(self.encode(task)) for task in tasks), default=None)
        self.length = longest if length is None else length
        self._origin = "the longest of the simulator's tasks" if length is None else "of the config or the saved policy"
        self._check_lengths(list(self._known))
        self._left = padding is Padding.left
        self._pad = (self._tokenizer.token_to_id(PAD) or 0) if self._left else 0

    def encode(self, task: str) -> list[int]:
        """Return token ids of the chat about a task, without padding."""
        if task not in self._known:
            self._known[task] = list(self._tokenizer.encode(self._write(task), add_special_tokens=False).ids)
        return self._known[task]

    def _check_lengths(self, tasks: Sequence[str]) -> None:
        if self.length is None or not tasks:
            return
        longest = max(tasks, key=lambda task: len(self.encode(task)))
        count = len(self.encode(longest))
        if count > self.length:
            raise PromptError(
                f"with {counted(self._images, 'image')}, a task's prompt has {count} tokens, more than prompt_length = "
                f"{self.length} ({self._origin}): {longest!r}: choose tasks with shorter task descriptions, or set "
                f"model.prompt_length={count}, which changes the prompt of every task: the model attends to padding"
            )

    def batch(self, tasks: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return token ids `[B, L]`, and a mask `[B, L]` that is False for padding.

        Raises:
            PolicyError: a prompt is too long.
        """
        self._check_lengths(tasks)
        rows = [self.encode(task) for task in tasks]
        length = max(map(len, rows)) if self.length is None else self.length
        return padded(rows, length, self._pad, left=self._left)


def read_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Return Qwen's tokenizer from either of its published forms; no code from a checkpoint runs.

    Raises:
        PolicyError: a file is damaged.
    """
    try:
        if TOKENIZER in files:
            return parse_tokenizer(files[TOKENIZER], TOKENIZER)
        from embodyrl.models.libraries import Qwen2Tokenizer  # only for this form, because it imports torch

        lines = files["merges.txt"].decode().splitlines()
        merges: Any = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = Qwen2Tokenizer(vocab=json.loads(files["vocab.json"]), merges=merges).backend_tokenizer
        added = json.loads(files.get("added_tokens.json", b"{}"))
        tokenizer.add_tokens([AddedToken(token, special=True) for token in sorted(added, key=added.__getitem__)])
        return tokenizer
    except (PolicyError, MemoryError):
        raise
    except Exception as error:  # the package raises nothing more special
        raise PolicyError(f"the tokenizer cannot be read ({error})", "download it again") from error


def new_tokenizer(tasks: Iterable[str], image_token: int | None = None) -> Tokenizer:
    """Return a tokenizer for a model without one: the words of the chats about these tasks.

    Args:
        tasks: the task descriptions.
        image_token: id of the image token; None: its index.
    """
    split = pre_tokenizers.Whitespace()
    text = " ".join(prompt(task, images=1, pieces=1) for task in tasks)
    for token in SPECIAL:
        text = text.replace(token, " ")
    ids = None if image_token is None else {PIECE: image_token}
    tokenizer = word_tokenizer([*SPECIAL, UNKNOWN], [text, " ".join(map(str, range(10)))], split, ids=ids)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer
