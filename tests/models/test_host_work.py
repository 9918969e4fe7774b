"""What a policy must not do between its inputs and its actions, so that a GPU need not wait for the host: ask for a
number on the device, or make a tensor on the host. Counted on the CPU, where the same operators run."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embodyrl.config.build import build_section
from embodyrl.config.schema import ModelConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import build_policy
from embodyrl.models.policy import PolicyObservation
from embodyrl.registry import SupportedModel

TASKS = {"push": "push the cube", "pull": "pull it"}
LIMITS = ActionField(name="arm", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0))
SIMULATOR = SimulatorSpec(
    tasks=TASKS,
    actions=(LIMITS,),
    cameras=("front",),
    image_size=(48, 48),
    proprio_dim=3,
    max_episode_steps=10,
    control_frequency=1.0,
)
PRISMATIC: dict[str, Any] = {"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48}
N17: dict[str, Any] = {"image_size": 48, "layers": 1, "action_layers": 4, "action_horizon": 4}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "openvla": ({"scratch": PRISMATIC}, 1),
    "openvla_oft": ({"scratch": PRISMATIC}, 2),
    "pi0": ({"denoising_steps": 2, "scratch": {"layers": 2}}, 2),
    "pi05": ({"denoising_steps": 2, "noise_method": "flow_noise", "scratch": {"layers": 2}}, 2),
    "pi0_fast": ({"scratch": {"layers": 2}}, 2),
    "gr00t": ({"denoising_steps": 2, "scratch": {"layers": 1, "action_layers": 2, "action_horizon": 4}}, 2),
    "gr00t_n16": ({"denoising_steps": 2, "scratch": N17}, 2),
    "gr00t_n17": ({"denoising_steps": 2, "scratch": N17}, 2),
}
ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "multinomial"}
"""Operators whose result, or its shape, is read by the host."""
MADE_ON_THE_HOST = {"lift_fresh"}
"""What torch.tensor(numbers) calls."""


class HostWork(TorchDispatchMode):
    """Collects names of operators that make the device wait, or copy from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if name in ASKING | MADE_ON_THE_HOST or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_a_decision_neither_asks_the_device_nor_uploads(name: str, mode: Literal["train", "eval"]) -> None:
    options, chunk = MODELS[name]
    entry = SupportedModel.entry(name)
    for requirement in entry.missing():
        pytest.skip(f"needs {requirement.module}: {requirement.install}")
    entry.load()
    policy = build_policy(build_section(ModelConfig, {"name": name, **options}), SIMULATOR, chunk_size=chunk, seed=0)
    inputs = policy.preprocess(
        PolicyObservation(
            images=torch.zeros(2, 1, 48, 48, 3, dtype=torch.uint8),
            proprio=torch.zeros(2, 3),
            task_descriptions=list(TASKS.values()),
        )
    )
    with torch.inference_mode(), HostWork() as work:
        policy.act(inputs, mode, torch.Generator().manual_seed(0))
    assert not work.found
