"""A policy of the reference cases of pi0 and pi0.5, beside the numbers of the public code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from embodyrl.models import load_policy
from embodyrl.models.pi.policy import EncodedPrefix
from embodyrl.models.pi.prompts import new_tokenizer

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
EXECUTED, ENTRIES, STEPS = 5, 5, 4
"""Of the cases: actions and entries that log-probabilities are trimmed to, and denoising steps."""
METHODS: dict[str, dict[str, Any]] = {
    "flow_sde": {"noise_level": 0.5},
    "flow_cps": {"noise_level": 0.3},
    "flow_noise": {"joint_logprob": True},
}


class Case:
    """One folder of reference cases."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.folder = name, REFERENCE / name
        arrays = np.load(self.folder / "reference.npz")
        self.arrays = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        ones = {"mean": [0.0] * ENTRIES, "std": [1.0] * ENTRIES, "q01": [-1.0] * ENTRIES, "q99": [1.0] * ENTRIES}
        (place / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": ones, "actions": ones}}))
        (place / "tokenizer.json").write_text(new_tokenizer(["pick"]).to_str())
        self.place = place

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.arrays[key]

    def policy(self, *, layout: str = "checkpoint", **options: Any) -> Any:
        """The checkpoint, with the public code's critic and noise network; it sees the case's inputs."""
        policy: Any = load_policy(
            self.name,
            checkpoint=self.folder / layout,
            chunk_size=EXECUTED,
            statistics=str(self.place / "norm_stats.json"),
            tokenizer=str(self.place / "tokenizer.json"),
            **{"denoising_steps": STEPS} | options,
        )
        heads = load_file(self.folder / "checkpoint" / "rl_heads.safetensors")
        policy.value_head.load_state_dict(
            {key.removeprefix("value_head."): value for key, value in heads.items() if key.startswith("value_head.")}
        )
        if policy.noise_network is not None:
            layers = "noise_head.mlp_logvar.moduleList"
            policy.noise_network.load_state_dict(
                {
                    f"mlp.{2 * number}.{kind}": heads[f"{layers}.{number}.linear_1.{kind}"]
                    for number in range(3)
                    for kind in ("weight", "bias")
                }
            )
        policy.condition = lambda _: self.seen(policy)
        return policy

    def seen(self, policy: Any) -> EncodedPrefix:
        """What the policy knows before any action."""
        names = ("in/images", "in/image_masks", "in/tokens", "in/token_mask")
        return EncodedPrefix(policy.network.read(*(self[name] for name in names)), self["in/state"])

    def loss(self, policy: Any) -> torch.Tensor:
        """Of the case's noise and times."""
        time = self["in/time"]
        return policy.flow_errors(self.seen(policy), self["in/actions"], self["in/noise"], time, time)
