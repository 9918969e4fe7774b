"""One ManiSkill environment with many scenes: what a batch of slots needs from it, as numpy arrays.

Shapes: `N` scenes, `D` action dims, `S` proprio dims, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.actions import action_fields
from embodyrl.envs.maniskill.slots import spoken, start_of
from embodyrl.envs.options import ManiSkillConfig, Proprio
from embodyrl.envs.types import ActionField, EpisodeSpec

SEPARATOR = "\x1f"
"""Between the parts of an array's name; names of bodies may hold any printable character."""


class Outcome(NamedTuple):
    """What one action led to in every scene."""

    rewards: NDArray[np.float32]
    """`[N]`"""
    success: NDArray[np.bool_]
    """`[N]`: the task's success condition holds now."""
    failed: NDArray[np.bool_]
    """`[N]`: the task reports failure, from which nothing leads back."""


class Scenes(Protocol):
    """`count` scenes that are stepped together."""

    count: int
    fields: tuple[ActionField, ...]
    sentence: str
    control_frequency: float

    def start(self, scene: int, episode: EpisodeSpec) -> None:
        """Put one scene to the start of an episode; the others stay as they are."""
        ...

    def step(self, actions: NDArray[np.float32]) -> Outcome:
        """Execute one action per scene, `[N, D]`."""
        ...

    def proprio(self) -> NDArray[np.float32]:
        """Current numbers, `[N, S]`."""
        ...

    def pictures(self) -> NDArray[np.uint8]:
        """What the cameras see now, `[N, V, H, W, 3]`."""
        ...

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """Poses, velocities and controller targets by name, each `[N, ...]`."""
        ...

    def restore(self, scenes: Sequence[int], rows: Mapping[str, NDArray[np.float32]]) -> None:
        """Put these scenes to rows of a snapshot, each `[len(scenes), ...]`."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """What the task's camera for people sees, `[N, H, W, 3]`; None if it has none."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class ManiSkillScenes:
    """See `Scenes`. One scene runs on the CPU as well.

    Raises:
        UserError: see `loading.build`.
    """

    def __init__(self, task: str, config: ManiSkillConfig, count: int) -> None:
        import torch

        torch.set_num_threads(1)  # what is done on the CPU is tiny
        self._torch = torch
        self._robot_only = config.proprio is Proprio.robot
        self._env = loading.build(task, config, count)
        from embodyrl.envs.maniskill import driver  # imports ManiSkill, which `build` had to prepare first

        driver.trust_actions(self._env)
        self.count = count
        self.fields = action_fields(self._env, task)
        self.sentence = spoken(self._env, task)
        self.control_frequency = float(self._env.control_freq)
        self._state: Any = self._env.get_obs()
        if config.cameras:
            self.pictures()  # the first pictures take seconds: shaders are compiled

    def start(self, scene: int, episode: EpisodeSpec) -> None:
        """See `Scenes`. Each scene draws its layout alone, so that the start state decides it, and not the slot."""
        start = start_of(self._env, episode)
        index = self._torch.tensor([scene], device=self._env.device)
        options = {**start.get("options", {}), "env_idx": index}
        with self._torch.inference_mode():
            targets = dict(_leaves(self._targets()))
            kept = {name: target.clone() for name, target in targets.items()}
            self._env.reset(seed=[start["seed"]] * self.count, options=options)
            others = [other for other in range(self.count) if other != scene]
            if others and kept:  # ManiSkill resets the controllers of all scenes
                self._set_targets(others, {name: target[others] for name, target in kept.items()})
            self._state = self._env.get_obs()

    def step(self, actions: NDArray[np.float32]) -> Outcome:
        """See `Scenes`."""
        torch = self._torch
        with torch.inference_mode():
            self._state, reward, _, _, info = self._env.step(torch.from_numpy(actions).to(self._env.device))
            nothing = torch.zeros(self.count, device=self._env.device)
            columns = [reward, info.get("success", nothing), info.get("fail", nothing)]
            rewards, success, failed = torch.stack([column.float() for column in columns]).cpu().numpy()
        return Outcome(rewards, success > 0, failed > 0)

    def proprio(self) -> NDArray[np.float32]:
        """See `Scenes`."""
        with self._torch.inference_mode():
            values = self._env.robot_state() if self._robot_only else self._state
            return values.float().cpu().numpy().copy()

    def pictures(self) -> NDArray[np.uint8]:
        """See `Scenes`."""
        with self._torch.inference_mode():
            return self._env.pictures().cpu().numpy()

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """See `Scenes`."""
        clock = self._env.elapsed_steps[:, None]
        state = {**self._env.scene.get_sim_state(), "controller": self._targets(), "clock": clock}
        return {name: value.float().cpu().numpy().copy() for name, value in _leaves(state)}

    def restore(self, scenes: Sequence[int], rows: Mapping[str, NDArray[np.float32]]) -> None:
        """See `Scenes`."""
        torch, device = self._torch, self._env.device
        order = np.argsort(scenes)  # ManiSkill takes the rows for the scenes in ascending order
        tree = _tree({name: torch.from_numpy(row[order]).to(device) for name, row in rows.items()})
        targets = dict(_leaves(tree.pop("controller", {})))
        index = torch.from_numpy(np.asarray(scenes)[order]).to(device)
        with torch.inference_mode():
            self._env._elapsed_steps[index] = tree.pop("clock")[:, 0].to(self._env.elapsed_steps.dtype)
            self._env.set_state_dict(tree, index)
            if targets:
                self._set_targets(index, targets)
            self._state = self._env.get_obs()

    def render(self) -> NDArray[np.uint8] | None:
        """See `Scenes`."""
        with self._torch.inference_mode():
            pictures = self._env.render_rgb_array()
            return None if pictures is None else pictures.to(self._torch.uint8).cpu().numpy()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _targets(self) -> dict[str, Any]:
        """What the controllers keep between steps."""
        state: dict[str, Any] = self._env.agent.get_controller_state()
        return state

    def _set_targets(self, scenes: Any, rows: Mapping[str, Any]) -> None:
        """Put rows of targets, one for each of `scenes` (a list or tensor of indices)."""
        everything = {name: target.clone() for name, target in _leaves(self._targets())}
        for name, row in rows.items():
            everything[name][scenes] = row
        self._env.agent.set_controller_state(_tree(everything))


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in nested dictionaries, by the names on the way to them."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}{SEPARATOR}")
        else:
            yield f"{path}{name}", value


def _tree(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dictionaries that `_leaves` was given."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, name = path.split(SEPARATOR)
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[name] = value
    return tree
