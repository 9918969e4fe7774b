"""The simulators that come with embodyrl, declared by name; nothing is imported until one is used."""

from __future__ import annotations

from collections.abc import Sequence

from embodyrl.envs.gymnasium.families import FAMILIES
from embodyrl.registry import SIMULATORS, Requirement, SystemLibrary

INSTALL_LIBERO = (
    "make libero   (or: pip install 'embodyrl[libero]', and then "
    "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1)"
)

SIMULATORS.register(
    "metaworld",
    target="embodyrl.envs.metaworld.simulator:MetaWorld",
    options="embodyrl.envs.options:MetaWorldConfig",
    info="embodyrl.envs.metaworld.info:MetaWorldInfo",
    requires=[Requirement(module="metaworld", install="pip install 'embodyrl[metaworld]'")],
    graphics="opengl",
    preload=(
        "embodyrl.envs.mujoco.rendering:import_mujoco",
        "embodyrl.envs.metaworld.simulator",
        "embodyrl.envs.metaworld.driver",
    ),
    summary="MetaWorld 3: 50 tabletop tasks of a Sawyer arm (MuJoCo, CPU)",
)
SIMULATORS.register(
    "libero",
    target="embodyrl.envs.libero.simulator:Libero",
    options="embodyrl.envs.options:LiberoConfig",
    info="embodyrl.envs.libero.info:LiberoInfo",
    requires=[Requirement(module=module, install=INSTALL_LIBERO) for module in ("libero", "robosuite", "bddl")],
    graphics="opengl",
    preload=(
        "embodyrl.envs.libero.simulator",
        "embodyrl.envs.libero.driver:load",
        "embodyrl.envs.libero.driver:load_kernels",
    ),
    summary="LIBERO: 130 tabletop tasks of a Panda arm, and 320 of LIBERO-PRO (robosuite, MuJoCo, CPU)",
)
SIMULATORS.register(
    "maniskill",
    target="embodyrl.envs.maniskill.simulator:open_simulator",
    options="embodyrl.envs.options:ManiSkillConfig",
    info="embodyrl.envs.maniskill.info:ManiSkillInfo",
    requires=[
        Requirement(module="mani_skill", install="pip install 'embodyrl[maniskill]'"),
        SystemLibrary(module="libX11.so.6", install="apt install libx11-6  (as root; SAPIEN links to it)"),
    ],
    graphics="vulkan",
    preload=("torch", "embodyrl.envs.maniskill.simulator", "mani_skill.envs"),
    summary="ManiSkill 3: manipulation with many robots (SAPIEN, PhysX on the CPU or a GPU)",
)
SIMULATORS.register(
    "mix",
    target="embodyrl.envs.manager.mixed:MixedManager",
    options="embodyrl.config.mix:MixConfig",
    info="embodyrl.envs.mix:MixInfo",
    summary="several of these in a run, each for a share of the episodes",
)


def _register_gymnasium(name: str, summary: str, requires: Sequence[Requirement], preload: Sequence[str]) -> None:
    """Declare a simulator whose tasks are Gymnasium environments."""
    SIMULATORS.register(
        name,
        target="embodyrl.envs.gymnasium.simulator:Gymnasium",
        options="embodyrl.envs.options:GymnasiumConfig",
        info="embodyrl.envs.gymnasium.info:GymnasiumInfo",
        requires=requires,
        graphics="opengl",
        preload=preload,
        summary=summary,
    )


_register_gymnasium(
    "gymnasium",
    "any registered Gymnasium environment: numbers, images, or both",
    [Requirement(module="gymnasium", install="pip install gymnasium")],
    ("embodyrl.envs.gymnasium.simulator",),
)
for _name, _family in FAMILIES.items():
    _register_gymnasium(
        _name,
        _family.summary,
        _family.requires,
        (*_family.modules, "embodyrl.envs.gymnasium.simulator"),
    )
