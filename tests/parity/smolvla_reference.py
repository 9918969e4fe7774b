"""Policies of the reference cases of SmolVLA, beside the numbers of LeRobot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.models import load_policy
from embodyrl.models.smolvla.network import Prefix, Rotation, SmolVLA, joined

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "smolvla"
KEYS = REFERENCE.parent / "smolvla-expected-keys.json"


class Case:
    """The folder of reference cases."""

    def __init__(self) -> None:
        arrays = np.load(REFERENCE / "reference.npz")
        self.arrays = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        self.about = json.loads((REFERENCE / "reference.json").read_text())
        self.horizon = self["in/actions"].shape[1]
        self.entries = self["raw/actions"].shape[2]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.arrays[key]

    def policy(self, **options: Any) -> Any:
        """The checkpoint as a policy that executes its whole horizon."""
        return load_policy(
            "smolvla",
            **{"checkpoint": REFERENCE / "checkpoint", "chunk_size": self.horizon, "frozen": "nothing"} | options,
        )

    def changed(self, folder: Path, **settings: Any) -> Path:
        """A copy of the checkpoint with other entries in config.json."""
        shutil.copytree(REFERENCE / "checkpoint", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    def embedded(self, network: SmolVLA) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and task descriptions before the language model, and their mask."""
        seen = network.see(self["in/images"])
        return network.embed(seen, self["in/image_masks"], self["in/tokens"], self["in/token_mask"])

    def prefix(self, network: SmolVLA) -> Prefix:
        """What actions read."""
        embedded, mask = self.embedded(network)
        return network.add_state(network.read(embedded, mask), mask, self["in/state"])

    def velocity(self, network: SmolVLA) -> torch.Tensor:
        """At the case's point."""
        return network(self.prefix(network), self["x_t"], self["in/time"])[0]

    def seeing(self, policy: Any) -> Any:
        """The policy, which sees the case's inputs and begins with its noise."""
        policy.condition = lambda _: self.prefix(policy.network)
        policy.start = self["in/noise"]
        return policy

    def streams(self, network: SmolVLA) -> dict[str, torch.Tensor]:
        """The residual streams after each layer, the last one of the language model included, which no action reads."""
        embedded, mask = self.embedded(network)
        state = network.state_proj(self["in/state"]).unsqueeze(1)
        whole = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        width = network.architecture.language.head_dim
        places = Rotation(mask.long().cumsum(1) - 1, width), Rotation(mask.sum(1, keepdim=True), width)
        found = {}
        for number, layer in enumerate(network.text.layers):
            embedded, own = layer(embedded, mask[:, None, None, :], places[0], None)
            state, last = layer(state, whole[:, None, None, :], places[1], own)
            found[f"layers/{number}/prefix"] = torch.cat([embedded, state], dim=1)
            keys, values = joined(own, last)
            found |= {f"cache/{number}/keys": keys, f"cache/{number}/values": values}
        found["prefix_out"] = network.text.norm(found[f"layers/{len(network.text.layers) - 1}/prefix"])
        return found | self._of_actions(network)

    def _of_actions(self, network: SmolVLA) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def noting(number: int) -> Callable[..., None]:
            def note(module: Any, given: Any, output: Any) -> None:
                if output[0] is not None:
                    found[f"layers/{number}/suffix"] = output[0]

            return note

        handles = [layer.register_forward_hook(noting(number)) for number, layer in enumerate(network.expert.layers)]
        found["velocity"], found["suffix_out"] = network(self.prefix(network), self["x_t"], self["in/time"])
        for handle in handles:
            handle.remove()
        return found


def excess(found: torch.Tensor, wanted: torch.Tensor, *, absolute: float, relative: float, largest: bool) -> float:
    """By how many tolerances `found` differs at most; `largest`: relative to the array's largest entry."""
    found, wanted = found.detach().double(), wanted.double().reshape(found.shape)
    size = wanted.abs().max() if largest else wanted.abs()
    return float(((found - wanted).abs() / (absolute + relative * size)).max())
