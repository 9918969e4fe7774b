"""FAST (Pertsch et al. 2025, arXiv:2501.09747): a chunk of actions as few tokens.

A chunk `[H, A]` is transformed along time by an orthonormal DCT-II, multiplied by a scale and rounded. These numbers,
all of the lowest frequency first, minus the smallest one that there is, are code points of a text, which a byte-level
BPE compresses into codes. No code of a tokenizer's folder runs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import parse_json
from embodyrl.models.vla.folder import as_json, check_real, check_whole, wrong
from embodyrl.models.vla.prompts import TOKENIZER, read_tokenizer

if TYPE_CHECKING:  # options of models are read where the package is not installed
    from tokenizers import Tokenizer

PROCESSOR = "processor_config.json"
HIGHEST = 0x10FFFF
"""Largest code point."""
SURROGATES = (0xD800, 0xDFFF)
"""Code points that are no characters."""
SMALLEST, LARGEST = -64, 63
"""Coefficients that a new tokenizer has codes for, all of one byte."""
MOST = "max_token"
"""Entry of a new tokenizer's processor_config.json with the largest coefficient; public ones have none."""
RUNS = 3
"""Codes of a new tokenizer for 2, 4, 8 zeros."""
TRAINED = ("scale", "min_token", "vocab_size")
"""Numbers of processor_config.json that a tokenizer was trained with."""


def byte_characters() -> dict[str, int]:
    """Return the character that stands for each byte in the vocabulary of a byte-level BPE (Radford et al. 2019):
    itself if it can be printed, else one from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


def dct_matrix(length: int) -> NDArray[np.float64]:
    """Return the orthonormal DCT-II `[H, H]` along time: its product with a chunk are the coefficients, that of its
    transpose with coefficients the chunk."""
    frequency, time = np.arange(length)[:, None], np.arange(length)[None, :]
    matrix: NDArray[np.float64] = np.cos(np.pi * (time + 0.5) * frequency / length) * np.sqrt(2.0 / length)
    matrix[0] /= np.sqrt(2.0)
    return matrix


@dataclass(frozen=True, eq=False)
class FastTokenizer:
    """The text half of FAST: rounded coefficients as codes, and back."""

    tokenizer: Tokenizer
    scale: float
    """Multiplies coefficients before they are rounded."""
    smallest: int
    """Smallest coefficient that has a code point, `min_token`."""
    largest: int
    """Largest one that is written; larger ones become that one."""

    @classmethod
    def read(cls, files: Mapping[str, bytes]) -> FastTokenizer:
        """Read the tokenizer.json and processor_config.json of a folder.

        Raises:
            PolicyError: a file is missing or damaged, or both belong to different tokenizers.
        """
        for name in (TOKENIZER, PROCESSOR):
            if name not in files:
                raise PolicyError(
                    f"the action tokenizer has no {name}",
                    "give its whole folder (model.action_tokenizer): tokenizer.json and processor_config.json",
                )
        settings = parse_json(files[PROCESSOR], PROCESSOR)
        for name in TRAINED:
            if settings.get(name) is None:
                raise PolicyError(
                    f"{PROCESSOR} lacks {name} (has: {', '.join(settings) or 'nothing'})",
                    "download the action tokenizer again: without it codes mean nothing",
                )
        scale = check_real(settings["scale"], "scale", above=0.0, file=PROCESSOR)
        smallest, largest = (_coefficient(settings, name) for name in ("min_token", MOST))
        stated = check_whole(settings["vocab_size"], "vocab_size", file=PROCESSOR)
        tokenizer = read_tokenizer(files[TOKENIZER], f"the action tokenizer's {TOKENIZER}")
        _check_kind(parse_json(files[TOKENIZER], TOKENIZER))
        if tokenizer.get_vocab_size() != stated:
            raise PolicyError(
                f"the action tokenizer's {TOKENIZER} has {tokenizer.get_vocab_size()} codes, its {PROCESSOR} says "
                f"vocab_size = {stated}",
                "keep the files of one and the same tokenizer together: download it again",
            )
        if sorted(tokenizer.get_vocab().values()) != [*range(stated)]:
            raise PolicyError(
                f"the action tokenizer's {TOKENIZER} does not number its codes from 0 to {stated - 1}",
                "download it again",
            )
        return cls(tokenizer, scale, smallest, largest)

    @property
    def size(self) -> int:
        """Number of codes."""
        return int(self.tokenizer.get_vocab_size())

    def coefficients(self, chunk: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the rounded coefficients `[..., H, A]` of normalised chunks `[..., H, A]`, half ones to even."""
        exact = np.einsum("ft,...ta->...fa", dct_matrix(chunk.shape[-2]), chunk.astype(np.float64))
        rounded: NDArray[np.int64] = np.rint(exact * self.scale).astype(np.int64)
        return rounded

    def encode(self, chunk: NDArray[np.floating]) -> list[int]:
        """Return the codes of a normalised chunk `[H, A]`. Coefficients below the smallest become that
        one."""
        places = np.clip(self.coefficients(chunk).reshape(-1), None, self.largest) - self.smallest
        places = np.clip(places, 0, HIGHEST)
        places[(places >= SURROGATES[0]) & (places <= SURROGATES[1])] = SURROGATES[0] - 1  # no text can have these
        return list(self.tokenizer.encode("".join(map(chr, places.tolist())), add_special_tokens=False).ids)

    @cached_property
    def texts(self) -> tuple[bytes, ...]:
        """Bytes of the text that each code stands for."""
        known = byte_characters()
        texts: list[bytes] = []
        for number in range(self.size):
            token = self.tokenizer.id_to_token(number) or ""
            spelled = [known.get(character) for character in token]
            texts.append(token.encode(errors="replace") if None in spelled else bytes(spelled))  # type: ignore[arg-type]
        return tuple(texts)


def _coefficient(settings: Mapping[str, Any], name: str) -> int:
    """Return an end of the range of coefficients; the highest where the file has none."""
    found = settings.get(name, HIGHEST)
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) > HIGHEST:
        raise wrong(f"{PROCESSOR}: {name}", found, f"a whole number from -{HIGHEST} to {HIGHEST}")
    return found


def _check_kind(content: Mapping[str, Any]) -> None:
    """Raise a `PolicyError` if a tokenizer.json is not that of a byte-level BPE."""
    for part, kind in (("model", "BPE"), ("decoder", "ByteLevel")):
        found = content.get(part)
        named = found.get("type") if isinstance(found, Mapping) else found
        if named != kind:
            raise PolicyError(
                f"the action tokenizer's {TOKENIZER} has the {part} {named!r:.60}, FAST's is a byte-level BPE ({kind})",
                "set model.action_tokenizer to the folder of a FAST tokenizer",
            )


def new_fast(scale: float) -> dict[str, bytes]:
    """Return the files of a tokenizer for a model with random weights: a code for each coefficient from -64 to 63, and
    for runs of zeros, because most coefficients of high frequencies are zero.

    Args:
        scale: multiplies coefficients before they are rounded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelled = {byte: character for character, byte in byte_characters().items()}
    runs = [spelled[-SMALLEST] * 2**power for power in range(RUNS + 1)]
    codes = [*(spelled[place] for place in range(LARGEST - SMALLEST + 1)), *runs[1:]]
    merges = [(run, run) for run in runs[:-1]]
    tokenizer = Tokenizer(models.BPE({code: number for number, code in enumerate(codes)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"scale": scale, "min_token": SMALLEST, MOST: LARGEST, "vocab_size": len(codes)}
    return {TOKENIZER: tokenizer.to_str().encode(), PROCESSOR: as_json(settings)}
