"""Supervised fine-tuning, from the settings to a run that is resumed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import programs
import pytest
import torch

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

from demonstrations import write_numbered, write_pendulum

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.manager import EnvManager
from embodyrl.models.errors import PolicyError
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.runner.build import build_engine, build_method, open_demonstrations

SMALL = [
    "experiment/gym_pendulum",
    "algorithm=sft",
    "env.num_envs=2",
    "env.workers=1",
    "env.max_episode_steps=10",
    "rollout.chunk_size=2",
    "model.hidden_sizes=[32]",
    "eval.episodes=2",
    "engine.optimizer.lr=0.01",
    "engine.optimizer.schedule=constant",
    "data.batch_size=32",
    "data.steps=20",
]


def settings(folder: Path, *overrides: str):
    return load_config(SMALL[0], [*SMALL[1:], f"data.path={folder}", *overrides]).config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sft") / "demos"
    write_pendulum(place)
    return place


@pytest.fixture(scope="module")
def pendulum(folder: Path):
    with EnvManager(settings(folder).env, chunk_size=2) as manager:
        yield manager


def learn(manager: EnvManager, config, iterations: int) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Run the graph; returns the metrics and the weights afterwards, in one row."""
    learner = build_method(config, manager, weights=None)
    engine = learner.engine
    demonstrations = open_demonstrations(config, manager, engine)
    pipeline, history = build_pipeline(config), []
    for _ in range(iterations):
        iteration = Iteration(
            config=config, learner=learner, collector=None, engine=engine, demonstrations=demonstrations
        )
        pipeline.run(iteration)
        history.append(iteration.metrics)
    return history, torch.cat([each.detach().flatten() for each in engine.policy.parameters()])


def test_the_demonstrated_actions_are_learned_and_the_noise_stays(pendulum: EnvManager, folder: Path) -> None:
    config = settings(folder, "rollout.chunk_size=1", "model.log_std_init=-1.5")
    learner = build_method(config, pendulum, weights=None)
    engine = learner.engine
    before = engine.policy.head.log_std.clone()
    demonstrations = open_demonstrations(config, pendulum, engine)
    losses = []
    for number in range(15):
        batches = demonstrations.batches(20 * number, 20)
        losses.append(learner.imitation.learn(batches)["train/loss"])
    assert losses[-1] < 0.05 * losses[0]
    assert torch.equal(engine.policy.head.log_std, before)
    batch = next(demonstrations.batches(0, 1))
    actions = engine.act(batch.observation, "eval").actions
    assert float((actions - torch.from_numpy(batch.actions)).abs().mean()) < 0.15


@pytest.mark.parametrize(
    "change", ["data.batch_size=16", "data.steps=19", "data.at_end=drop", "seed=2", "engine.optimizer.lr=0.02"]
)
def test_every_setting_changes_what_is_learned(change: str, pendulum: EnvManager, folder: Path) -> None:
    usual, same = (learn(pendulum, settings(folder), 2)[1] for _ in range(2))
    assert torch.equal(usual, same)
    assert not torch.equal(learn(pendulum, settings(folder, change), 2)[1], usual)


@pytest.mark.parametrize(
    ("schedule", "shares"), [("constant", [1, 1, 1]), ("linear", [1, 2 / 3, 1 / 3]), ("cosine", [1, 0.75, 0.25])]
)
def test_the_learning_rate_follows_its_schedule(
    schedule: str, shares: list[float], pendulum: EnvManager, folder: Path
) -> None:
    config = settings(folder, f"engine.optimizer.schedule={schedule}", "run.iterations=3", "data.steps=1")
    rates = [metrics["train/learning_rate"] for metrics in learn(pendulum, config, 3)[0]]
    assert rates == pytest.approx([0.01 * share for share in shares])


def test_a_choice_is_learned_from_its_number(tmp_path: Path) -> None:
    config = load_config("experiment/gym_cartpole", ["env.num_envs=1", "env.workers=1"]).config
    with EnvManager(config.env, chunk_size=1) as manager:
        policy = build_engine(config, manager, weights=None).policy
    inputs = {"proprio": torch.randn(64, 4)}
    chosen = (inputs["proprio"][:, :1] > 0).float().unsqueeze(1)
    optimizer = torch.optim.Adam(policy.parameters(), 0.01)
    assert policy.sft_loss(inputs, chosen, {}).item() == pytest.approx(0.693, abs=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        policy.sft_loss(inputs, chosen, {}).backward()
        optimizer.step()
    assert torch.equal(policy.act(inputs, "eval", None).actions, chosen)


def test_a_model_that_cannot_says_so(pendulum: EnvManager, folder: Path) -> None:
    from embodyrl.models.policy import Policy

    policy = build_engine(settings(folder), pendulum, weights=None).policy
    with pytest.raises(PolicyError, match="model 'mlp' cannot learn from demonstrations"):
        Policy.sft_loss(policy, {}, torch.zeros(1), {})


def test_numbers_that_do_not_fit_are_refused(pendulum: EnvManager, tmp_path: Path) -> None:
    write_numbered(tmp_path / "wide", [5], action_names=("a", "b"))
    write_numbered(tmp_path / "long", [5])
    with pytest.raises(ConfigError, match="have 2 numbers, those of the simulator 1"):
        settings(tmp_path / "wide")
    # A simulator that tells its sizes only when it runs is compared then.
    fitting = settings(tmp_path / "long")
    config = dataclasses.replace(fitting, data=dataclasses.replace(fitting.data, path=str(tmp_path / "wide")))
    engine = build_engine(config, pendulum, weights=None)
    with pytest.raises(ValueError, match=r"have 2 numbers \(a, b\), the simulator takes 1"):
        open_demonstrations(config, pendulum, engine)
    engine.policy.spec = type(engine.policy.spec)(**{**vars(engine.policy.spec), "proprio_dim": 4})
    with pytest.raises(ValueError, match="have 3 numbers, the policy expects 4"):
        open_demonstrations(settings(tmp_path / "long"), pendulum, engine)


def embodyrl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], cwd=cwd)


def test_a_resumed_run_learns_bit_for_bit_what_an_uninterrupted_one_does(folder: Path, tmp_path: Path) -> None:
    words = [*SMALL, f"data.path={folder}", "run.save_every=2", "tracking.sinks=[jsonl]", "tracking.report=false"]
    whole = embodyrl("run", *words, "run.iterations=4", "run.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert f"4 iterations of 20 x 32 chunks of 2 actions from {folder}" in whole.stdout
    half = embodyrl("run", *words, "run.iterations=2", "run.dir=half", cwd=tmp_path)
    resumed = embodyrl("resume", "half", "run.iterations=4", cwd=tmp_path)
    assert (half.returncode, resumed.returncode) == (0, 0), half.stderr + resumed.stderr
    manifests = [
        json.loads((tmp_path / name / "checkpoints/000004/manifest.json").read_text()) for name in ("whole", "half")
    ]
    weights, optimiser = "policy/model.safetensors", "trainer/engine.safetensors"
    assert manifests[0]["files"][weights] == manifests[1]["files"][weights]
    assert manifests[0]["files"].keys() == manifests[1]["files"].keys() and optimiser in manifests[0]["files"]
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/loss"] < rows[1]["train/loss"]


def test_what_is_wrong_with_demonstrations_is_said_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    missing = embodyrl("run", *SMALL, "data.path=nowhere", cwd=tmp_path)
    assert missing.returncode == 2 and "demonstrations in nowhere do not exist" in missing.stderr
    assert "embodyrl collect" in missing.stderr and not (tmp_path / "runs").exists()
    rgb = [word for word in SMALL if "rollout" not in word and "model" not in word]
    blind = embodyrl("validate", *rgb, "env=gym/pendulum_rgb", f"data.path={folder}", cwd=tmp_path)
    assert blind.returncode == 2 and "have no images of camera" in blind.stderr
    write_numbered(tmp_path / "small", [4], cameras=("render",), image_size=(16, 16))
    other = embodyrl("validate", *rgb, "env=gym/pendulum_rgb", "data.path=small", cwd=tmp_path)
    assert other.returncode == 2 and "16x16 pixels, those of the simulator" in other.stderr
