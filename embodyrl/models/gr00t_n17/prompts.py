"""Prompts of GR00T N1.7, and positions of their tokens. Imports no torch.

Shapes: `B` samples, `L` tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from embodyrl.models.gr00t.config import Padding
from embodyrl.models.gr00t.prompts import PIECE as CHAT_PIECE
from embodyrl.models.gr00t.prompts import Prompts, Write
from embodyrl.models.gr00t.prompts import prompt as chat
from embodyrl.models.vla.prompts import UNKNOWN, word_tokenizer

PIECE, BEGIN, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
"""Image token, a placeholder for one token of an image; and tokens around an image."""
PAD = "<|endoftext|>"
SPECIAL = ("<|im_start|>", "<|im_end|>", BEGIN, END, PIECE, PAD)
NOTHING = "Perform the task."
"""Stands for an empty task description."""


def plain(task: str) -> str:
    """Return a task description in lower case without punctuation, as the model was trained with."""
    return "".join(each for each in (task or NOTHING).lower() if each.isalnum() or each.isspace() or each == "_")


def prompt(task: str, images: int, pieces: int, *, formalize: bool) -> str:
    """Return the prompt about a task: images, then its description.

    Args:
        task: the description.
        images: their number.
        pieces: tokens of an image.
        formalize: change the description as `plain` does.
    """
    shown = f"{BEGIN}{PIECE * pieces}{END}" * images
    return f"<|im_start|>user\n{shown}{plain(task) if formalize else task or NOTHING}<|im_end|>\n"


def formalized_chat(task: str, images: int, pieces: int, *, formalize: bool) -> str:
    """Return the prompt of N1.6: the chat of N1.5, with the description as in `prompt`."""
    return chat(plain(task) if formalize else task or NOTHING, images, pieces)


class PlacedPrompts(Prompts):
    """Prompts of one length, and the positions of their tokens.

    Args:
        tokenizer: the files' contents by name.
        chats: whether prompts are those of N1.6.
        image_token: id that the image token must have.
        images: images per prompt.
        grid: rows and columns of tokens of an image.
        formalize: see `prompt`.
        tasks, length: see `Prompts`.

    Raises:
        PolicyError: the tokenizer is damaged or that of another model, or a prompt is too long.
    """

    def __init__(
        self,
        tokenizer: Mapping[str, bytes],
        *,
        chats: bool,
        image_token: int,
        images: int,
        grid: tuple[int, int],
        formalize: bool,
        tasks: Iterable[str],
        length: int | None,
    ) -> None:
        pieces = grid[0] * grid[1]
        write: Write = partial(formalized_chat if chats else prompt, images=images, pieces=pieces, formalize=formalize)
        super().__init__(
            tokenizer,
            write=write,
            piece=CHAT_PIECE if chats else PIECE,
            image_token=image_token,
            images=images,
            tasks=tasks,
            padding=Padding.left,
            length=length,
        )
        self.grid, self._token = grid, image_token

    def places(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return time, row and column of each token, `[B, 3, L]`, for prompts `[B, L]`; 0 for padding."""
        found = np.zeros((len(ids), 3, ids.shape[1]), np.int64)
        for row, (tokens, valid) in enumerate(zip(ids, mask, strict=True)):
            found[row][:, valid] = token_places(tokens[valid] == self._token, self.grid)
        return found


def token_places(is_image: NDArray[np.bool_], grid: tuple[int, int]) -> NDArray[np.int64]:
    """Return time, row and column `[3, L]` of the tokens of a prompt without padding.

    Text advances all three. The tokens of an image share one time, and have rows and columns from there on; what
    follows continues after the larger of its sides.

    Args:
        is_image: `[L]`, True for tokens of images.
        grid: rows and columns of tokens of an image.
    """
    height, width = grid
    rows, columns = (axis.ravel() for axis in np.indices(grid))
    of_image = np.stack([np.zeros_like(rows), rows, columns])
    places: list[NDArray[np.int64]] = []
    start, index = 0, 0
    while index < len(is_image):
        image = bool(is_image[index])
        places.append(start + (of_image if image else np.zeros((3, 1), np.int64)))
        start += max(height, width) if image else 1
        index += height * width if image else 1
    return np.concatenate(places, axis=1)


def new_tokenizer(tasks: Iterable[str], image_token: int | None = None) -> Tokenizer:
    """Return a tokenizer of N1.7 for a model without one: the words of the prompts about these tasks.

    Args:
        tasks: the task descriptions.
        image_token: id of the image token; None: its index.
    """
    split = pre_tokenizers.Whitespace()
    texts = [f"user {plain(task)}" for task in ("", *tasks)]
    ids = None if image_token is None else {PIECE: image_token}
    tokenizer = word_tokenizer([*SPECIAL, UNKNOWN], texts, split, ids=ids)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer
