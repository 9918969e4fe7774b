"""Values of a group file, an experiment or a saved config that hold for its own tasks alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from embodyrl.cli.main import app
from embodyrl.config import ConfigError, ConfigUse, load_config

OTHER = "env.tasks=[MountainCarContinuous-v0]"
STALE = (
    "command line: env.success_return = -400.0 was written for [Pendulum-v1] (env: gym/pendulum), not for "
    "[MountainCarContinuous-v0] - write env.success_return=... on the command line, "
    "with what holds for these tasks (if the same holds, that)"
)


def faults(*overrides: str, source: str | Path = "gym_pendulum") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return [str(fault) for fault in caught.value.faults]


def test_the_return_that_is_success_does_not_go_over_to_another_task() -> None:
    assert faults(OTHER) == [STALE]
    mixed = faults("env.tasks=[Pendulum-v1,MountainCarContinuous-v0]")
    shapes, stale = mixed
    assert "of different shapes" in shapes and "was written for [Pendulum-v1]" in stale


@pytest.mark.parametrize("told", ["-400.0", "90.0", "null"])
def test_what_is_written_for_the_new_task_is_accepted(told: str) -> None:
    config = load_config("gym_pendulum", [OTHER, f"env.success_return={told}"]).config
    assert config.env.success_return == (None if told == "null" else float(told))  # type: ignore[attr-defined]


def test_the_same_tasks_again_are_no_other_tasks() -> None:
    loaded = load_config("gym_pendulum", ["env.tasks=[Pendulum-v1]"])
    assert loaded.config.env.success_return == -400.0 and not loaded.notes  # type: ignore[attr-defined]


def test_a_file_of_ones_own_is_asked_like_a_group_file(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    head = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\nenv:\n  tasks: [Acrobot-v1]\n"
    own.write_text(head)
    assert faults(source=own) == [
        f"{own}:3:10: env.success_return = -400.0 was written for [Pendulum-v1] (env: gym/pendulum), not for "
        "[Acrobot-v1] - write env.success_return=... beside them, with what holds for these tasks (if the same "
        "holds, that)"
    ]
    own.write_text(head + "  success_return: -400.0\n  kwargs: {render_mode: null}\n")
    load_config(own)
    said = faults("env.tasks=[Pendulum-v1]", source=own)
    assert len(said) == 2 and all(f"was written for [Acrobot-v1] ({own})" in each for each in said)
    assert "env.kwargs" in said[0] and "env.success_return" in said[1]
    load_config(own, ["env.tasks=[Pendulum-v1]"], use=ConfigUse.show)  # it can be looked at


def test_time_limits_that_stay_are_noted() -> None:
    loaded = load_config("metaworld_reach", ["env.tasks=[push-v3]"])
    assert loaded.notes == (
        "env.max_episode_steps = 100 was written for [reach-v3] (env: metaworld/reach), not for [push-v3]: "
        "write env.max_episode_steps=... on the command line, with what holds for these tasks (if the same holds, "
        "that)",
    )
    assert not load_config("metaworld_reach", ["env.tasks=[push-v3]", "env.max_episode_steps=100"]).notes
    assert not load_config("metaworld_reach").notes
    shown = CliRunner().invoke(app, ["validate", "metaworld_reach", "env.tasks=[push-v3]"])
    assert shown.exit_code == 0 and f"note: {loaded.notes[0]}" in shown.output
