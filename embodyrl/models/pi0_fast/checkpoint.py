"""Files of a pi0-FAST checkpoint beside the weights: names of weights, statistics, two tokenizers. Also builds these
files for models with random weights, and for the published size. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.files import is_plain_name
from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.checkpoint import (
    EMBEDDING,
    HEAD,
    TOKENIZERS,
    WORDS,
    Layout,
    PaliGemmaFiles,
    new_companions,
    published_ranges,
    simulator_ranges,
)
from embodyrl.models.pi.config import StateInput
from embodyrl.models.pi.prompts import TextTokenizer, read_tokenizer
from embodyrl.models.pi0_fast.config import EXPLICIT, NAME, Architecture, Pi0FastConfig
from embodyrl.models.pi0_fast.fast import PROCESSOR, FastTokenizer, new_fast
from embodyrl.models.pi0_fast.prompts import Prompts, new_tokenizer
from embodyrl.models.vla.folder import CONFIG, as_json
from embodyrl.models.vla.prompts import TOKENIZER

OUTPUT = "lm_head.weight"
"""Name in the network of the vocabulary matrix that logits are computed with."""
MATRICES = {EMBEDDING: WORDS, OUTPUT: HEAD}
"""The two vocabulary matrices, by the network's names, and their public names."""
FAST_FOLDER = "fast"
"""Folder of the FAST tokenizer in a saved policy that got it from elsewhere."""
TEXT_NAME, FAST_NAME = "text_tokenizer_name", "action_tokenizer_name"
"""Entries of config.json that name the tokenizers: on the hub, or a folder in the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class FastLayout(Layout):
    """Names of weights. LeRobot learns both vocabulary matrices; a file with one of them means that they are equal."""

    matrices: tuple[str, ...] = tuple(MATRICES)
    """Those that the files hold, by the network's names."""
    has_expert: bool = False
    """Whether the files have weights of an action expert, as those of pi0."""

    @classmethod
    def of(cls, names: Iterable[str]) -> FastLayout:
        """See `Layout.of`."""
        known = set(names)
        layout = Layout.of(known)
        held = tuple(own for own, public in MATRICES.items() if layout.prefix + public in known)
        return cls(prefix=layout.prefix, matrices=held, has_expert=any("gemma_expert." in name for name in known))

    def public(self, name: str) -> str:
        """See `Layout.public`."""
        return self.prefix + MATRICES[name] if name in MATRICES else super().public(name)

    def own(self, public: str) -> str:
        """See `Layout.own`."""
        name = public.removeprefix(self.prefix)
        return next((own for own, given in MATRICES.items() if given == name), None) or super().own(public)


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(PaliGemmaFiles):
    """All files of a pi0-FAST except the weights."""

    MODELS = "pi0-FAST"

    layout: FastLayout
    """Names of the weights."""

    @classmethod
    def read(cls, config: Pi0FastConfig) -> CheckpointFiles:
        """See `CheckpointFolder.read`; tokenizers are those that the options name, if they do."""
        content, found = cls.read_companions(config)
        folder = Path(str(config.checkpoint))
        for name in _folders(content):
            found |= {f"{name}/{path.name}": path.read_bytes() for path in sorted((folder / name).glob("*.json"))}
        if config.action_tokenizer is not None:
            found |= {f"{FAST_FOLDER}/{name}": content for name, content in _fast_files(config.action_tokenizer)}
        found[CONFIG] = (folder / CONFIG).read_bytes()  # written again as it was
        layout = FastLayout.read(folder)
        assert isinstance(layout, FastLayout)
        return cls(config=content, companions=found, layout=layout)

    @classmethod
    def scratch(cls, config: Pi0FastConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        fast = new_fast(config.scratch.scale)
        codes = FastTokenizer.read(fast).size
        tokenizer = new_tokenizer(simulator.tasks.values(), codes)
        text = read_tokenizer(TOKENIZER, tokenizer.to_str().encode())
        state = np.zeros(simulator.proprio_dim) if config.state is StateInput.prompt else None
        prompts, sizes = Prompts(text, 0, lower=False), config.scratch
        longest = chunk_size * simulator.action_dim + 1
        language = {
            "hidden_size": sizes.hidden_size,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": int(sizes.hidden_size * sizes.mlp_ratio),
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": 1,
            "head_dim": sizes.hidden_size // sizes.heads // 2 * 2,
            "vocab_size": text.size,
        }
        description = {
            "type": NAME,
            "chunk_size": chunk_size,
            "tokenizer_max_length": max(len(prompts.ids(task, state)) for task in simulator.tasks.values()),
            "max_action_tokens": longest + 4,
            "max_decoding_steps": longest + 4,
            "fast_skip_tokens": 0,
            "image_resolution": [sizes.image_size] * 2,
            "input_features": {f"observation.images.{camera}": {"type": "VISUAL"} for camera in simulator.cameras},
            EXPLICIT: {
                "text_config": language,
                "vision_config": {
                    "hidden_size": sizes.vision_size,
                    "intermediate_size": int(sizes.vision_size * sizes.mlp_ratio),
                    "num_hidden_layers": sizes.layers,
                    "num_attention_heads": sizes.heads,
                    "patch_size": sizes.patch_size,
                },
            },
        }
        companions = new_companions(simulator_ranges(simulator), tokenizer)
        return cls._new(description, companions, fast)

    @classmethod
    def published(cls, config: Pi0FastConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`; an empty config.json stands for LeRobot's sizes."""
        fast = new_fast(config.scratch.scale)
        tokenizer = new_tokenizer([], FastTokenizer.read(fast).size + Architecture.from_config({}).skipped)
        return cls._new({}, new_companions(published_ranges(), tokenizer), fast)

    @classmethod
    def nothing(cls) -> CheckpointFiles:
        """Return no files, for checks of a model without a checkpoint."""
        return cls(config={}, companions={}, layout=FastLayout())

    @classmethod
    def _new(
        cls, description: Mapping[str, Any], companions: Mapping[str, bytes], fast: Mapping[str, bytes]
    ) -> CheckpointFiles:
        files = {**companions, **{f"{FAST_FOLDER}/{name}": content for name, content in fast.items()}}
        files[CONFIG] = as_json(description)
        return cls(config=description, companions=files, layout=FastLayout(prefix="model."))

    @property
    def tokenizer(self) -> tuple[str, bytes]:
        """Return name and contents of the text tokenizer's file, in the folder itself or in the one that config.json
        names.

        Raises:
            PolicyError: there is none.
        """
        named = _inside(self.config.get(TEXT_NAME))
        for name in TOKENIZERS:
            if named is not None and name not in self.companions and f"{named}/{name}" in self.companions:
                return name, self.companions[f"{named}/{name}"]
        return super().tokenizer

    @property
    def fast(self) -> FastTokenizer:
        """Return the FAST tokenizer.

        Raises:
            PolicyError: there is none, or it is damaged.
        """
        for folder in (FAST_FOLDER, _inside(self.config.get(FAST_NAME))):
            found = {name: self.companions.get(f"{folder}/{name}") for name in (TOKENIZER, PROCESSOR)}
            files = {name: content for name, content in found.items() if content is not None}
            if folder is not None and files:
                return FastTokenizer.read(files)
        named = self.config.get(FAST_NAME)
        raise PolicyError(
            f"the checkpoint's folder has no FAST tokenizer (config.json: {FAST_NAME} is {named!r:.80})",
            "set model.action_tokenizer to a folder with its tokenizer.json and processor_config.json, such as a copy "
            "of physical-intelligence/fast",
        )

    @property
    def architecture(self) -> Architecture:
        """Return the network's shape; raises what `Architecture.from_config` raises."""
        return Architecture.from_config(self.config)


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that answers are made of."""

    text: TextTokenizer
    prefix: tuple[int, ...]
    """Ids of `Action: `."""
    stop: int
    """Id of `|`, which ends the codes."""
    end: int
    """Id of the token behind it."""
    first: int
    """Id of code 0; that of code c is c less."""
    codes: int
    """Number of codes."""

    @property
    def lowest(self) -> int:
        """Id of the last code."""
        return self.first - self.codes + 1

    @classmethod
    def of(cls, text: TextTokenizer, sizes: Architecture, codes: int) -> Vocabulary:
        """Return the ids for a text tokenizer and a number of codes.

        Raises:
            PolicyError: the text tokenizer lacks a token, or it or the codes do not fit into the vocabulary.
        """
        stop = text.encode("|")
        if len(stop) != 1:
            raise PolicyError(
                f"the text tokenizer writes '|', which ends an answer, with {len(stop)} tokens, one was expected",
                "set model.tokenizer to PaliGemma's",
            )
        if text.end is None:
            raise PolicyError("the text tokenizer has no token <eos>", "set model.tokenizer to PaliGemma's")
        if text.size > sizes.vocabulary:
            raise PolicyError(
                f"the text tokenizer has {text.size} tokens, the network {sizes.vocabulary}",
                "set model.tokenizer to the one that the weights were trained with",
            )
        first = text.size - 1 - sizes.skipped
        if first - codes + 1 <= max(stop[0], text.end):
            raise PolicyError(
                f"{codes} codes of the action tokenizer and {sizes.skipped} ids behind them (fast_skip_tokens) do not "
                f"fit into the {text.size} tokens of the text tokenizer",
                "set model.action_tokenizer and model.tokenizer to those that the weights were trained with",
            )
        return cls(text, tuple(text.encode("Action: ")), stop[0], text.end, first, codes)

    def ids(self, codes: Iterable[int]) -> list[int]:
        """Return the ids of codes."""
        return [self.first - code for code in codes]


def _inside(name: object) -> str | None:
    """Return the folder in the checkpoint's that an entry of config.json names; None if it names something else."""
    plain = name.removeprefix("./") if isinstance(name, str) else ""
    return plain if is_plain_name(plain) else None


def _folders(config: Mapping[str, Any]) -> list[str]:
    """Return the names of folders that may hold tokenizers."""
    named = [_inside(config.get(key)) for key in (TEXT_NAME, FAST_NAME)]
    return list(dict.fromkeys([*(name for name in named if name is not None), FAST_FOLDER]))


def _fast_files(path: str) -> list[tuple[str, bytes]]:
    """Return names and contents of the files in the folder `model.action_tokenizer`."""
    folder = Path(path)
    found = [folder / name for name in (TOKENIZER, PROCESSOR)]
    if missing := [each.name for each in found if not each.is_file()]:
        raise PolicyError(
            f"model.action_tokenizer = {path!r} has no {' and no '.join(missing)}",
            "name the folder of a FAST tokenizer, such as a copy of physical-intelligence/fast",
        )
    return [(each.name, each.read_bytes()) for each in found]
