"""What is known of every simulator on MuJoCo without importing it."""

from __future__ import annotations

from collections.abc import Sequence

from embodyrl.config.infos import Env, SimulatorInfo
from embodyrl.placement.graphics import RenderingCheck
from embodyrl.placement.plan import Inventory


class MuJoCoInfo(SimulatorInfo[Env]):
    """A simulator that renders with OpenGL."""

    def _shown(self, env: Env) -> list[str]:
        """Return the kinds of perturbation that are shown in a scene; none without cameras."""
        return ["camera", "light", "texture"] if env.cameras else []

    def rendering_checks(self, machine: Inventory) -> Sequence[RenderingCheck]:
        """Return the checks that MuJoCo renders; none without MuJoCo."""
        from embodyrl.envs.mujoco.rendering import checks

        return checks(machine)
