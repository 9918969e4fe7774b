"""The reference case of pi0-FAST: a checkpoint in LeRobot's layout, beside the numbers of the public code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.models import PolicyObservation, load_policy
from embodyrl.models.pi0_fast.network import Read

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
FOLDER = REFERENCE / "pi0_fast"
ABSENT = "empty_camera"


class Case:
    """One folder of reference cases."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        arrays = np.load(folder / "reference.npz")
        self.arrays = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        self.facts = json.loads((folder / "reference.json").read_text())
        features = json.loads((folder / "checkpoint" / "config.json").read_text())["input_features"]
        self.images = [name.rpartition(".")[2] for name in features if name.startswith("observation.images.")]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.arrays[key]

    def policy(self, **options: Any) -> Any:
        """The checkpoint, in float32."""
        cameras = ["absent" if name.startswith(ABSENT) else name for name in self.images]
        return load_policy(
            "pi0_fast",
            checkpoint=self.folder / "checkpoint",
            chunk_size=self["raw/action"].shape[1],
            **{"cameras": cameras, "decoding": "all", "dtype": "float32"} | options,
        )

    def observations(self) -> list[PolicyObservation]:
        """Each row by itself, because cameras have several sizes: one observation for each camera."""
        tasks, state = list(self.facts["tasks"]), self["raw/state"]
        return [
            PolicyObservation(images=self[f"raw/{name}"].unsqueeze(1), proprio=state, task_descriptions=tasks)
            for name in self.images
            if not name.startswith(ABSENT)
        ]

    def read(self, policy: Any, answer: torch.Tensor) -> Read:
        """What the network reads in every case: images, of which one is absent, prompt, and an answer."""
        names = ("in/images", "in/image_masks_used", "in/tokens", "in/token_mask")
        read: Read = policy.network.read(*(self[name] for name in names), answer)
        return read

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of the answer behind `<bos>`, and which of them are there."""
        return self["in/action_tokens"][:, 1:], self["in/action_token_mask"][:, 1:]

    def predicted(self, policy: Any) -> tuple[Read, torch.Tensor]:
        """The outputs for the whole answer, and the hidden states that predict its tokens, in the policy's order."""
        tokens, _ = self.targets
        read = self.read(policy, torch.cat([policy.begin.expand(len(tokens), -1), tokens[:, :-1]], dim=1))
        if len(policy.begin):
            return read, read.answer
        return read, torch.cat([read.last.unsqueeze(1), read.answer], dim=1)

    def losses(self, policy: Any) -> torch.Tensor:
        """Negative log-probabilities of the tokens, `[B, T]`."""
        tokens, _ = self.targets
        logits = policy.network.logits(self.predicted(policy)[1])
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
