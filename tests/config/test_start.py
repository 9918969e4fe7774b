"""What `embodyrl init` begins with, for simulators, models and algorithms that fit each other."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml

from embodyrl.cli.init import proposals
from embodyrl.config import ConfigUse, load_config
from embodyrl.config.files import group_settings, list_options
from embodyrl.config.start import experiments, family_of, kind_of, start, whats_wrong

PRETRAINED = [model for model in list_options("model") if kind_of(model) == "pretrained"]

MISFITS = (
    "has no scripted expert",
    "chooses the noise that a flow policy turns into actions",
    "differentiable functions of noise",
    "cannot be a classifier of success",
    "cannot be a predictor of progress",
    "learns from the velocities of a flow policy",
    "tells a flow policy in its prompt",
    "needs a small flow policy",
)
"""Why an algorithm that another environment or model can use does not fit, in the words of its rules."""


def settings(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def check(choices: dict[str, str]) -> list[str]:
    """Return what is wrong with a start: that it does not validate, learns hardly at all, or holds what belongs to
    another task."""
    made = start(choices)
    written = settings(made.text)
    run, name = written["run"], f"{choices}"
    wrong = [f"{name}: {fault}" for fault in made.faults]
    if run["iterations"] < 10 or not 0 < run["eval_every"] <= run["iterations"] / 2:
        wrong.append(f"{name}: {run}")
    if made.experiment is None:
        foreign = [env for env in list_options("env") if env != choices["env"] and re.search(rf"\b{env}\b", made.text)]
        wrong += [f"{name}: {word}" for word in (*foreign, "runs/", "tiny") if word in made.text]
        wrong += [f"{name}: {key}" for key in ("dir", "stop_at_success") if key in run]
    pretrained = kind_of(choices["model"]) == "pretrained"
    if pretrained and family_of(choices["algorithm"]) != "imitation" and written["model"]["checkpoint"] != "<weights>":
        wrong.append(f"{name}: starts a pretrained model from random weights")
    return wrong


def test_every_environment_has_a_start() -> None:
    """With what `embodyrl init --yes` proposes."""
    wrong: list[str] = []
    for env in list_options("env"):
        choices = {"env": env}
        for group in ("model", "algorithm"):
            options = proposals(group, choices)
            if group == "model":
                choices[group] = next(
                    each for each in options if whats_wrong({**choices, group: each, "algorithm": "ppo"}) is None
                )
            else:
                choices[group] = next(each for each in options if whats_wrong({**choices, group: each}) is None)
        wrong += check(choices)
        shows_images = bool(group_settings("env", env).get("cameras"))
        if shows_images != (kind_of(choices["model"]) != "states"):
            wrong.append(f"{env}: {choices['model']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "model", [*("mlp", "cnn"), *(pytest.param(each, marks=pytest.mark.slow) for each in PRETRAINED)]
)
def test_every_algorithm_has_a_start(model: str) -> None:
    """For one environment that suits the model; others do not fit for a reason that their rules give."""
    wrong: list[str] = []
    env = {"states": "metaworld/push", "images": "metaworld/reach_pixels"}.get(kind_of(model), "metaworld/reach_rgb")
    for algorithm in list_options("algorithm"):
        choices = {"env": env, "model": model, "algorithm": algorithm}
        reason = whats_wrong(choices)
        if reason is None:
            wrong += check(choices)
        elif not any(words in reason for words in MISFITS):
            wrong.append(f"{choices}: {reason}")
    assert not wrong, "\n".join(wrong)


def environments() -> list[str]:
    """Return the files of `env`, of those that differ in nothing but their tasks one."""
    return [env for env in list_options("env") if not env.startswith("libero_pro/") or env == "libero_pro/goal_lan"]


@pytest.mark.slow
def test_environments_of_images_suit_models_that_read_them() -> None:
    wrong: list[str] = []
    shown = [env for env in environments() if group_settings("env", env).get("cameras")]
    draw = random.Random(0)  # of algorithms, none of which looks at both
    for env in shown:  # with a third of the models each, so that all models see many
        for model in draw.sample(["cnn", *PRETRAINED], 4):
            wrong += check({"env": env, "model": model, "algorithm": draw.choice(["ppo", "grpo", "sft"])})
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_environments_of_states_suit_algorithms_of_states() -> None:
    wrong: list[str] = []
    draw, algorithms = random.Random(0), ["ppo", "grpo", "reinforce_pp", "sac", "sft", "iql", "rlpd", "qc"]
    for env, algorithm in ((env, each) for env in environments() for each in draw.sample(algorithms, 3)):
        choices = {"env": env, "model": "mlp", "algorithm": algorithm}
        reason = whats_wrong(choices)
        if reason is None:
            wrong += check(choices)
        elif "reads no images" not in reason and "discrete" not in reason:
            wrong.append(f"{choices}: {reason}")
    assert not wrong, "\n".join(wrong)


def test_shipped_experiments_that_are_starts_are_taken_as_they_are() -> None:
    names = [each.name for each in experiments() if each.is_start]
    assert {"metaworld_reach", "gym_cartpole", "libero_spatial_ppo_pi0"} <= set(names)
    assert not [name for name in names if name.startswith("tiny_")] and "libero_goal" not in names
    made = start({"env": "metaworld/reach", "model": "mlp", "algorithm": "ppo"})
    assert made.experiment == "metaworld_reach" and settings(made.text)["algorithm"]["gamma"] == 0.95


def test_settings_are_those_of_the_method_the_model_and_the_rewards() -> None:
    cheetah = settings(start({"env": "mujoco/half_cheetah", "model": "mlp", "algorithm": "ppo"}).text)
    steps = cheetah["run"]["iterations"] * cheetah["rollout"]["num_chunks"] * 8
    assert 0.9e6 < steps < 1.1e6 and cheetah["algorithm"]["reward_scale"] == 0.02
    assert cheetah["eval"]["episodes"] == 20  # of 1,000 steps
    oft = settings(start({"env": "libero/object", "model": "openvla_oft", "algorithm": "grpo"}).text)
    assert oft["rollout"]["num_chunks"] * oft["rollout"]["chunk_size"] == 280
    assert oft["rollout"]["group_size"] > 1 and oft["env"]["cameras"] == ["agentview"]
    assert oft["algorithm"]["logprob_level"] == "token" and "reward_scale" not in oft["algorithm"]
    blind = settings(start({"env": "libero/goal", "model": "mlp", "algorithm": "ppo"}).text)
    assert blind["env"] == {"cameras": [], "proprio": "full"}
    cloned = settings(start({"env": "aloha/transfer_cube", "model": "act", "algorithm": "sft"}).text)
    assert cloned["model"]["checkpoint"] is None and cloned["data"]["path"] == "demonstrations"


def test_what_does_not_fit_has_a_reason() -> None:
    assert "pusht/rgb shows its objects only there" in str(
        whats_wrong({"env": "pusht/rgb", "model": "mlp", "algorithm": "ppo"})
    )
    assert "learns continuous actions" in str(whats_wrong({"env": "gym/cartpole", "model": "mlp", "algorithm": "sac"}))
    assert "needs images" in str(whats_wrong({"env": "mujoco/ant", "model": "pi0", "algorithm": "ppo"}))


@pytest.mark.parametrize(
    ("env", "algorithm", "less"),
    [
        ("gym/pendulum", "grpo", ["env.num_envs=8"]),
        ("gym/pendulum", "rlpd", None),
    ],
)
def test_a_start_runs(env: str, algorithm: str, less: list[str] | None, tmp_path: Path) -> None:
    """One iteration of it; one that lacks demonstrations says so before anything starts."""
    file = tmp_path / "my.yaml"
    file.write_text(start({"env": env, "model": "mlp", "algorithm": algorithm}).text)
    fewer = ["run.iterations=1", "run.eval_every=0", "eval.episodes=2", "tracking.report=false"]
    done = programs.run(["-m", "embodyrl", "run", str(file), *fewer, *(less or [])], cwd=tmp_path)
    if less is None:
        assert done.returncode == 2 and "demonstrations do not exist" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert load_config(file, use=ConfigUse.run).config.run.iterations > 400
