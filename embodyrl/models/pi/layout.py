"""How weights are called in public files of pi0 and pi0.5. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from embodyrl.models.shards import open_shard, shard_files

BOTH = "paligemma_with_expert."
PARTS = {
    "vision.": f"{BOTH}paligemma.model.vision_tower.vision_model.",
    "projector.": f"{BOTH}paligemma.model.multi_modal_projector.linear.",
    "language.": f"{BOTH}paligemma.model.language_model.",
    "expert.": f"{BOTH}gemma_expert.model.",
    "expert_lm_head.": f"{BOTH}gemma_expert.lm_head.",
}
"""Beginnings of names in the network, and in public files; other names are the same."""
EMBEDDING = "embed_tokens.weight"
WORDS = f"{BOTH}paligemma.model.language_model.embed_tokens.weight"
HEAD = f"{BOTH}paligemma.lm_head.weight"
LEROBOT = "model."
MARKS = {"action_time_mlp_in.weight": "pi0", "time_mlp_in.weight": "pi05"}
"""Weights that tell the two models apart, where config.json does not."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """In what public files differ."""

    prefix: str = ""
    """Of every name: `model.` in lerobot's files, nothing in openpi's."""
    embedding: str = HEAD
    """What the word embedding is called. It is tied to the language model's output layer, and safetensors keeps one."""
    expert_head: bool = True
    """Whether the action expert's output layer is there, which nothing uses."""
    model: str | None = None
    """`pi0` or `pi05`, by the layers that only one of them has; None: neither."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Layout:
        """The layout of a file with these names."""
        known = set(names)
        prefix = LEROBOT if any(name.startswith(LEROBOT + BOTH) for name in known) else ""
        return cls(
            prefix=prefix,
            embedding=HEAD if prefix + HEAD in known else WORDS,
            model=next((model for name, model in MARKS.items() if prefix + name in known), None),
            expert_head=any(name.startswith(prefix + PARTS["expert_lm_head."]) for name in known),
        )

    @classmethod
    def read(cls, folder: Path) -> Layout:
        """The layout of a checkpoint's weights; see `models.shards` for what is raised."""
        names: list[str] = []
        for path in shard_files(folder):
            with open_shard(path, "np") as shard:
                names += shard.keys()
        return cls.of(names)

    def public(self, name: str) -> str:
        """From a name in the network to that in a file."""
        if name == EMBEDDING:
            return self.prefix + self.embedding
        for own, public in PARTS.items():
            if name.startswith(own):
                return self.prefix + public + name.removeprefix(own)
        return self.prefix + name

    def own(self, public: str) -> str:
        """From a name in a file to that in the network."""
        name = public.removeprefix(self.prefix)
        if name in (HEAD, WORDS):
            return EMBEDDING
        for own, beginning in PARTS.items():
            if name.startswith(beginning):
                return own + name.removeprefix(beginning)
        return name
