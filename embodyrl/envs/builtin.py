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
    requires=[Requirement(module="metaworld", install="pip install 'embodyrl[metaworld]'")],
    tasks="embodyrl.envs.metaworld.tasks:known_tasks",
    cameras="embodyrl.envs.metaworld.tasks:known_cameras",
    state_dim="embodyrl.envs.metaworld.tasks:state_dim",
    action_dim="embodyrl.envs.metaworld.tasks:action_dim",
    control_frequency="embodyrl.envs.metaworld.tasks:control_frequency",
    time_limit="embodyrl.envs.metaworld.tasks:time_limit",
    task_description="embodyrl.envs.metaworld.tasks:task_description",
    graphics="opengl",
    rendering_checks="embodyrl.envs.mujoco.rendering:checks",
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
    requires=[Requirement(module=module, install=INSTALL_LIBERO) for module in ("libero", "robosuite", "bddl")],
    tasks="embodyrl.envs.libero.tasks:known_tasks",
    cameras="embodyrl.envs.libero.tasks:known_cameras",
    state_dim="embodyrl.envs.libero.tasks:state_dim",
    action_dim="embodyrl.envs.libero.tasks:action_dim",
    control_frequency="embodyrl.envs.libero.tasks:control_frequency",
    task_description="embodyrl.envs.libero.tasks:task_description",
    further_tasks="embodyrl.envs.libero.task_files:further_tasks",
    initial_state="embodyrl.envs.libero.tasks:official_state",
    graphics="opengl",
    rendering_checks="embodyrl.envs.mujoco.rendering:checks",
    check="embodyrl.envs.libero.checks:check",
    check_here="embodyrl.envs.libero.checks:check_here",
    assets="embodyrl.envs.libero.tasks:assets_report",
    preload=("embodyrl.envs.libero.simulator", "embodyrl.envs.libero.driver:load"),
    summary="LIBERO: 130 tabletop tasks of a Panda arm with task descriptions (robosuite, MuJoCo, CPU)",
)
SIMULATORS.register(
    "maniskill",
    target="embodyrl.envs.maniskill.simulator:open_simulator",
    options="embodyrl.envs.options:ManiSkillConfig",
    requires=[
        Requirement(module="mani_skill", install="pip install 'embodyrl[maniskill]'"),
        SystemLibrary(module="libX11.so.6", install="apt install libx11-6  (as root; SAPIEN links to it)"),
    ],
    tasks="embodyrl.envs.maniskill.tasks:known_tasks",
    time_limit="embodyrl.envs.maniskill.tasks:time_limit",
    assets="embodyrl.envs.maniskill.tasks:assets_report",
    check="embodyrl.envs.maniskill.tasks:check",
    check_here="embodyrl.envs.maniskill.tasks:check_here",
    fills_gpu="embodyrl.envs.maniskill.tasks:fills_gpu",
    graphics="vulkan",
    rendering_checks="embodyrl.envs.maniskill.tasks:rendering_checks",
    preload=("torch", "embodyrl.envs.maniskill.simulator", "mani_skill.envs"),
    summary="ManiSkill 3: manipulation with many robots (SAPIEN, PhysX on the CPU or a GPU)",
)


def _register_gymnasium(name: str, summary: str, requires: Sequence[Requirement], preload: Sequence[str]) -> None:
    """Declare a simulator whose tasks are Gymnasium environments."""
    SIMULATORS.register(
        name,
        target="embodyrl.envs.gymnasium.simulator:Gymnasium",
        options="embodyrl.envs.options:GymnasiumConfig",
        requires=requires,
        listed_tasks="embodyrl.envs.gymnasium.tasks:known_tasks",
        state_dim="embodyrl.envs.gymnasium.checks:state_dim",
        environment_state="embodyrl.envs.gymnasium.checks:environment_state",
        action_dim="embodyrl.envs.gymnasium.checks:action_dim",
        control_frequency="embodyrl.envs.gymnasium.checks:control_frequency",
        discrete="embodyrl.envs.gymnasium.checks:discrete",
        time_limit="embodyrl.envs.gymnasium.tasks:time_limit",
        task_description="embodyrl.envs.gymnasium.families:task_description",
        check_here="embodyrl.envs.gymnasium.checks:check_here",
        graphics="opengl",
        rendering_checks="embodyrl.envs.mujoco.rendering:checks",
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
