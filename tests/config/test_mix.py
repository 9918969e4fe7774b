"""`env.mix`: how its entries become whole sections, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.config.build import to_commented_yaml

HEAD = "defaults: [model: mlp, algorithm: ppo, _self_]\nenv:\n"
ONE = "{env: gym/pendulum, share: 2}"


def config(tmp_path: Path, entries: list[str], further: str = "") -> Path:
    lines = [f"  {line}\n" for line in further.splitlines()]
    path = tmp_path / "mixed.yaml"
    path.write_text(HEAD + "".join(lines) + "  mix:\n" + "".join(f"    - {each}\n" for each in entries))
    return path


def test_what_is_said_once_holds_for_all_and_an_entry_may_say_otherwise(tmp_path: Path) -> None:
    own = "{env: gym/pendulum, share: 6, name: other, simulator: {max_episode_steps: 30, start_states: 5}}"
    path = config(tmp_path, [ONE, own], "num_envs: 6\nmax_episode_steps: 50\nstart_states: 20\n")
    env = load_config(path).config.env
    assert env.name == "mix" and env.tasks == ["gym/pendulum/Pendulum-v1", "other/Pendulum-v1"]
    first, second = env.sources
    assert (first.share, second.share) == (0.25, 0.75)
    assert (first.env.max_episode_steps, first.env.start_states, first.env.num_envs) == (50, 20, 6)
    assert (second.env.max_episode_steps, second.env.start_states, second.env.num_envs) == (30, 5, 6)
    assert env.start_states == 20 and env.known_time_limit == 50
    changed = load_config(path, ["env.max_episode_steps=10", "env.num_envs=2"]).config.env
    assert [(each.env.max_episode_steps, each.env.num_envs) for each in changed.sources] == [(10, 2), (10, 2)]


def test_a_whole_config_loads_as_itself(tmp_path: Path) -> None:
    loaded = load_config(config(tmp_path, [ONE, "{env: gym/pendulum, share: 1, name: other}"])).config
    (tmp_path / "whole.yaml").write_text(to_commented_yaml(loaded))
    assert load_config(tmp_path / "whole.yaml").config == loaded


@pytest.mark.parametrize(
    ("entries", "further", "wanted"),
    [
        (["{env: gym/pendulm, share: 1}"], "", "has no option 'gym/pendulm' - did you mean 'gym/pendulum'"),
        (["{share: 1}"], "", "env.mix[0] names no simulator"),
        (["{env: gym/pendulum, share: 0}"], "", "env.mix[0].share"),
        (["{env: gym/pendulum}"], "", "env.mix[0].share is missing"),
        ([ONE, ONE], "", "two simulators named 'gym/pendulum'"),
        (["{env: gym/pendulum, share: 1, simulator: {max_episode_step: 3}}"], "", "did you mean"),
        (["{env: gym/pendulum, share: 1, simulator: {num_envs: 3}}"], "", "write env.num_envs = 3"),
        (
            ["{env: gym/pendulum, share: 1, simulator: {task_descriptions: {swing: up}}}"],
            "",
            "gym/pendulum: env.task_desc",
        ),
        (["{env: gym/pendulum, sare: 1}"], "", "env.mix[0].share"),
        ([ONE], "name: gymnasium", "is another one"),
        ([ONE], "tasks: [Pendulum-v1]", "are not the tasks of env.mix"),
        ([ONE, "{env: gym/cartpole, share: 1}"], "", "gym/pendulum and gym/cartpole cannot be mixed"),
        (["gym/pendulum"], "", 'env.mix[0] = "gym/pendulum" is no section - write {env: gym/pendulum, share: 1}'),
        ([], "", "env.mix is empty"),
        (
            ["{env: gym/pendulum, share: 1}", "{env: gym/pendulum_rgb, share: 1}"],
            "",
            "cameras is [] in gym/pendulum and",
        ),
        (
            ["{env: gym/pendulum_rgb, share: 1}", "{env: gym/pendulum, share: 1}"],
            "",
            "in gym/pendulum_rgb and [] in gym/pendulum",
        ),
        (
            ["{env: metaworld/reach, share: 1}", "{env: metaworld/push, share: 1}"],
            "",
            "write `simulator: {action_repeat: 1}` for metaworld/push, or",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(
    tmp_path: Path, entries: list[str], further: str, wanted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(config(tmp_path, entries, further))
    assert wanted in str(refused.value)
    assert all(f"{fault.location}".startswith(str(tmp_path)) or fault.location for fault in refused.value.faults)


def test_a_map_in_place_of_the_list_is_one_fault(tmp_path: Path) -> None:
    path = config(tmp_path, [ONE])
    (tmp_path / "map.yaml").write_text(re.sub(r"mix:\n.*\n", "mix: {gym/pendulum: 1}\n", path.read_text()))
    for file, overrides in ((tmp_path / "map.yaml", []), (path, ["env.mix.0.share=0.5"])):
        with pytest.raises(ConfigError, match=r"env\.mix = .* is no list of simulators - write all of them") as refused:
            load_config(file, overrides)
        assert len(refused.value.faults) == 1


def test_a_mix_beside_a_choice_of_the_defaults_list_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, [ONE])
    path.write_text(path.read_text().replace("[model", "[env: gym/pendulum, model"))
    with pytest.raises(ConfigError, match=r"leave out `env: ...` in the defaults list"):
        load_config(path)


def test_schedules_that_wait_for_one_simulator_are_refused(tmp_path: Path) -> None:
    path = config(tmp_path, [ONE, "{env: gym/pendulum, share: 1, name: other}"])
    with pytest.raises(ConfigError, match=r"set rollout\.schedule to lockstep or pipeline"):
        load_config(path, ["rollout.schedule=ready_batch"])
