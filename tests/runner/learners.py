"""Learners that `test_learners.py` holds to their promises: one small config for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from small_runs import THREE_OF_FOUR, WEIGHTS, Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.writer import DatasetWriter
from embodyrl.runner.checkpoint import verify
from embodyrl.runner.export import export

COUNTER = {"counter_simulator.py": (Path(__file__).parents[1] / "rollout" / "counter_simulator.py").read_text()}


TWO_RANKS = ("engine.parallel.world_size=2", "env.workers=2")


@dataclass(frozen=True)
class Learner:
    """A config, and what has to be there for it."""

    config: str
    """In which `FOLDER` is the folder of what `make` makes."""
    iterations: int
    saved: int
    """The iteration after which a checkpoint is saved before the end: where the run is cut."""
    shows: Callable[[Run], None] = lambda run: None
    """Checks what makes the comparison of two such runs mean something."""
    make: Callable[[Path], None] = lambda folder: None
    """Makes what a run needs beside its config."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Files beside the config, by name."""
    needs: tuple[str, ...] = ()
    """Packages without which it cannot be tried."""
    uses: Callable[[Run], None] = lambda run: None
    """Does more with such a run."""

    def write(self, folder: Path) -> Path:
        """Write the config and what it needs into a folder; returns the config's file."""
        for name, text in self.plugins.items():
            (folder / name).write_text(text)
        self.make(folder)
        (folder / "my.yaml").write_text(self.config.replace("FOLDER", str(folder)))
        return folder / "my.yaml"


def write_demonstrations(folder: Path) -> None:
    """Four episodes of random states, and a torque that depends on them."""
    rng = np.random.default_rng(0)
    spec = DatasetSpec(action_names=("torque",), state_dim=3, fps=20, outcome=True, ends=True)
    with DatasetWriter(folder / "demonstrations", spec) as writer:
        for _ in range(4):
            state = rng.normal(size=(31, 3)).astype(np.float32)
            writer.add(
                Episode(
                    task="swing up",
                    proprio=state[:-1],
                    last_proprio=state[-1],
                    actions=np.clip(-state[:-1, 1:2], -2, 2),
                    rewards=-np.abs(state[:-1, 0]),
                    success=np.zeros(30, np.bool_),
                )
            )


# ------------------------------------------------------------------------------------------------------------ on policy

PPO = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
env: {num_envs: 4, workers: 2, max_episode_steps: 40}
model: {hidden_sizes: [16]}
rollout: {num_chunks: 24, blocks: 2}
algorithm: {epochs: 2, minibatches: 2}
engine: {optimizer: {schedule: linear}}
run: {name: small-ppo, iterations: 4, save_every: 2, eval_every: 2}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (40 steps) straddle rollouts (24), and the learning rate falls."""

DAPO = """
defaults: [env: gym/pendulum, model: mlp, algorithm: dapo, _self_]
plugins: [three_of_four]
env: {num_envs: 8, workers: 1, max_episode_steps: 20}
model: {hidden_sizes: [16]}
rollout: {episodes: whole, num_chunks: 20, group_size: 2, blocks: 2}
algorithm: {reward: dense, filter: three_of_four, loss: decoupled_ppo, kl_coef: 0.1, epochs: 2, minibatches: 2}
engine: {optimizer: {schedule: constant}}
run: {name: small-dapo, iterations: 3, save_every: 1, eval_every: 0}
eval: {episodes: 4}
tracking: {sinks: [jsonl], report: false}
"""
"""Groups wait from one iteration to the next, and the policy stays near a reference."""


def show_waiting_groups(run: Run) -> None:
    rows = run.merged()
    assert [rows[number]["filter/groups_waiting"] for number in (1, 2, 3)] == [2, 1, 0]
    assert all(rows[number]["train/grad_norm"] for number in (1, 2, 3)) and rows[3]["train/reference_kl"] > 0


FRAMES = """
defaults: [model: cnn, algorithm: ppo, _self_]
plugins: [counter_simulator]
env: {name: counter, tasks: [count], num_envs: 4, workers: 1, max_episode_steps: 5, start_states: 50,
  cameras: [top], image_size: [32, 32], frames: 2}
model: {encoder: test_resnet, image_features: 16, hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
algorithm: {epochs: 2, minibatches: 2}
run: {name: frames, iterations: 2, save_every: 1, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""


def show_two_frames(run: Run) -> None:
    weights = load_file(run.path / "checkpoints/last" / WEIGHTS)
    assert weights["features.encoders.0.backbone.conv1.0.weight"].shape[1] == 6


SFT = """
defaults: [env: gym/pendulum, model: mlp, algorithm: sft, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 40}
model: {hidden_sizes: [16]}
data: {path: FOLDER/demonstrations, batch_size: 31, steps: 5}
engine: {optimizer: {schedule: constant, lr: 0.01}}
run: {name: small-sft, iterations: 4, save_every: 2, eval_every: 2}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""


def show_less_loss(run: Run) -> None:
    rows = run.metrics()
    assert rows[-1]["train/loss"] < 0.9 * rows[1]["train/loss"]


# ------------------------------------------------------------------------------------------------------- from a replay

SAC = """
defaults: [env: gym/pendulum, model: mlp, algorithm: sac, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 40}
model: {head: squashed, hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 200, start_after: 90}
    updates_per_step: 0.4
    actor_every: 2
    batch_size: 32
    critics: {count: 3, hidden_sizes: [16]}
run: {name: small-sac, iterations: 6, save_every: 3, eval_every: 4}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (40 steps) straddle rollouts (12), the replay wraps, and steps are owed in fractions."""


def show_the_replay_wraps(run: Run) -> None:
    row = run.metrics()[-1]
    assert 150 < row["replay/decisions"] <= 200 and row["train/updates"] == int(0.4 * 48 * 5)


PIXELS = """
defaults: [model: cnn, algorithm: sac, _self_]
plugins: [counter_simulator]
env:
  name: counter
  tasks: [count]
  num_envs: 4
  workers: 1
  max_episode_steps: 5
  start_states: 50
  cameras: [top]
  image_size: [16, 16]
  frames: 2
model:
  encoder: drq
  channels: [4, 4]
  strides: [2, 2]
  head: squashed
  image_features: 8
  state_features: 4
  hidden_sizes: [16]
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 1000, start_after: 90, memory_mib: 1}
    updates_per_step: 0.4
    actor_every: 2
    augment_pixels: 2
    batch_size: 32
    critics: {count: 3, hidden_sizes: [16]}
run: {name: pixels, iterations: 6, save_every: 2, eval_every: 0}
eval: {episodes: 4}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (up to 5 steps) straddle rollouts (12); images of the replay (1.5 MiB) lie on the disk."""


def show_images_on_the_disk(run: Run) -> None:
    weights = load_file(run.path / "checkpoints/last" / WEIGHTS)
    assert weights["features.encoders.0.backbone.0.weight"].shape[1] == 6, "two frames"
    row = run.metrics()[-1]
    assert row["train/updates"] == int(0.4 * 48 * 5) and row["replay/decisions"] == 288
    assert "in the run's folder" in run.log()
    # Each checkpoint adds what is new to those before, also the first one after a resume.
    sizes = [file.stat().st_size for file in sorted((run.checkpoint(6) / "trainer/replay").glob("*.safetensors"))]
    assert len(sizes) == 3 and max(sizes) < 1.3 * min(sizes)


DEMONSTRATED = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ALGORITHM, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 40}
model: {head: squashed, hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
data: {path: FOLDER/demonstrations, STEPS}
algorithm:
  reward: dense
  off_policy: {replay: {capacity: 200, start_after: 90}, updates_per_step: 0.4, batch_size: 32, MORE}
run: {name: small, iterations: 6, save_every: 3, eval_every: 3}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
RLPD = (
    DEMONSTRATED.replace("ALGORITHM", "rlpd")
    .replace("STEPS", "batch_size: 16")
    .replace("MORE", "critics: {count: 3, hidden_sizes: [16]}, imitation: {first_steps: 60, coef: 1, cloned_coef: 0.5}")
)
IQL = (
    DEMONSTRATED.replace("ALGORITHM", "iql")
    .replace("STEPS", "steps: 15")
    .replace("MORE", "critics: {count: 2, hidden_sizes: [16]}, offline_iterations: 2")
)
WEIGHED = IQL.replace("head: squashed", "head: gaussian")
"""A policy that shows critics nothing imitates by its own loss."""

CHUNKED = (
    DEMONSTRATED.replace("STEPS", "steps: 15")
    .replace("num_chunks: 12", "num_chunks: 6, chunk_size: 2")
    .replace("start_after: 90", "start_after: 40")
)
QC = (
    CHUNKED.replace("ALGORITHM", "qc")
    .replace("head: squashed", "head: flow, denoising_steps: 2")
    .replace("MORE", "critics: {count: 3, hidden_sizes: [16]}, offline_iterations: 2, candidates: 3")
)
QC_FQL = (
    CHUNKED.replace("ALGORITHM", "qc_fql")
    .replace("head: squashed", "head: one_step, denoising_steps: 2")
    .replace("MORE", "critics: {count: 2, hidden_sizes: [16]}, offline_iterations: 2")
)

EXPERT = '''
import dataclasses

import numpy as np

from embodyrl.registry import EXPERTS


class Swinger:
    """Pushes with the rotation, which no policy sees, and changes its mind every third time."""

    def __init__(self, env):
        self.env, self.asked = env, {}

    def begin(self, slot, episode):
        self.asked[slot] = episode.start_state % 3

    def act(self, slots, observation):
        turns = []
        for slot, state in zip(slots.tolist(), observation.proprio, strict=True):
            self.asked[slot] += 1
            turns.append([3.0 * np.sign(state[2]) * (-1.0 if self.asked[slot] % 3 == 0 else 1.0)])
        return np.array(turns, np.float32)

    def recorded(self, observation):
        return dataclasses.replace(observation, proprio=observation.proprio[:, :2])

    def memory(self, slot):
        return str(self.asked[slot])

    def remember(self, slot, memory):
        self.asked[slot] = int(memory)


EXPERTS.register("gymnasium", target=Swinger, summary="pushes a pendulum")
'''
DAGGER = """
defaults: [env: gym/pendulum, model: mlp, algorithm: dagger, _self_]
plugins: [swinger]
env: {num_envs: 4, workers: 1, max_episode_steps: 40}
model: {hidden_sizes: [16]}
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 200}
    updates_per_step: 0.4
    batch_size: 32
    imitation: {first_steps: 0}
    intervene: {share: 0.2, after: 25, labels: executed}
run: {name: small-dagger, iterations: 6, save_every: 3, eval_every: 0}
eval: {episodes: 4}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (40 steps) straddle rollouts (12), and so does what the expert takes over."""


def show_interventions(run: Run) -> None:
    rows = [row for row in run.metrics() if "env/interventions" in row]
    assert len(rows) == 6 and len({row["env/interventions"] for row in rows}) > 3
    # Labels are those of what the expert executed, and each asks for 0.4 steps.
    executed = sum(round(row["env/interventions"] * 48) for row in rows)
    assert rows[-1]["train/updates"] == int(0.4 * executed + 1e-6) and rows[0]["train/updates"] > 0


BASE = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: ppo, _self_]
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [32, 32]}
model: {denoising_steps: 2, value_sizes: [8], scratch: {image_size: 32, layers: 1}}
rollout: {num_chunks: 2, chunk_size: 2}
algorithm: {minibatches: 1, epochs: 1}
run: {iterations: 1, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""
STEERED = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: dsrl, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 10, image_size: [32, 32], success_return: -70.0}
model: {denoising_steps: 2, value_sizes: [8], checkpoint: FOLDER/base}
rollout: {num_chunks: 6, chunk_size: 2, blocks: 2}
algorithm:
  reward: dense
  off_policy:
    replay: {capacity: 80, start_after: 40}
    updates_per_step: 0.5
    actor_every: 2
    batch_size: 32
    critics: {count: 3, subset: 2, hidden_sizes: [16]}
    steering: {rows: 1, hidden_sizes: [16]}
run: {name: steered, iterations: 4, save_every: 2, eval_every: 0}
eval: {episodes: 3}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (5 chunks) straddle rollouts (6), and the replay wraps."""


TOLD = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: recap, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 10, image_size: [32, 32], success_return: -70.0}
model: {denoising_steps: 2, value_sizes: [8], checkpoint: FOLDER/base, prompt_length: 8,
  indicator: {guidance: 1.5, better: '1', worse: '0'}}
rollout: {num_chunks: 6, chunk_size: 2, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 80, start_after: 8}
    batch_size: 8
    value_steps: 3
    policy_steps: 3
    augment_pixels: 2
    value: {bins: 21, hidden_sizes: [16]}
run: {name: told, iterations: 4, save_every: 2, eval_every: 0}
eval: {episodes: 3}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (5 chunks) straddle rollouts (6), so that some are known only later, and the replay wraps."""


def show_that_rounds_learn(run: Run) -> None:
    rows = run.metrics()
    assert [row["train/updates"] for row in rows if "train/updates" in row] == [3, 6, 9, 12]
    judged = [row for row in rows if "train/better" in row]
    assert all(0.0 < row["train/better"] < 1.0 and row["train/value_loss"] > 0.0 for row in judged)


MATCHED = """
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: nft, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 8, image_size: [32, 32]}
model: {denoising_steps: 2, value_sizes: [8], noise_method: none}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2, blocks: 2}
algorithm: {reward: dense, points: 3, epochs: 2, minibatches: 2}
run: {name: matched, iterations: 4, save_every: 2, eval_every: 0}
eval: {episodes: 3}
tracking: {sinks: [jsonl], report: false}
"""


STEERING = "policy/steering.safetensors"


def write_base(folder: Path) -> None:
    """The checkpoint of a pi0 with random weights."""
    from embodyrl.envs import ActionField, SimulatorSpec
    from embodyrl.models.build import build_policy

    (folder / "base.yaml").write_text(BASE)
    config = load_config(folder / "base.yaml").config
    torque = ActionField(name="torque", meaning="native", unit="1", low=(-2.0,), high=(2.0,))
    spec = SimulatorSpec(
        tasks={"Pendulum-v1": "swing the pendulum up"},
        actions=(torque,),
        proprio_dim=3,
        max_episode_steps=8,
        control_frequency=20.0,
        cameras=("render",),
        image_size=(32, 32),
    )
    (folder / "base").mkdir()
    build_policy(config.model, spec, chunk_size=2, seed=0).save(folder / "base", config.model)


def show_that_noise_learns(run: Run) -> None:
    rows = run.metrics()
    assert "train/updates" not in rows[0] and rows[-1]["train/updates"] == int(0.5 * 24 * 3)
    assert 60 < rows[-1]["replay/decisions"] <= 80
    first, last = (load_file(run.checkpoint(number) / STEERING) for number in (2, 4))
    assert not torch.equal(first["steering.actor.0.weight"], last["steering.actor.0.weight"])
    counts = [int(each["steering.normalizer.count"]) for each in (first, last)]
    assert counts == [24 * 2, 24 * 4], "what scales features has seen all of them"
    config = load_config(run.checkpoint(4) / "config.yaml")
    base = Path(str(config.config.model.checkpoint)) / "model.safetensors"
    assert (run.path / "checkpoints/last" / WEIGHTS).read_bytes() == base.read_bytes()
    moments = run.replay()
    assert moments["features"].dtype is torch.float16 and moments["noise"].shape[1:] == (1, 1)
    assert not {"images", "actions", "proprio"} & moments.keys()


def use_steered(run: Run) -> None:
    """What it learned is evaluated, exported and loaded."""
    from embodyrl.models import load_policy
    from embodyrl.models.flow.steering import SteeredPolicy

    config, last = load_config(run.checkpoint(4) / "config.yaml"), load_file(run.checkpoint(4) / STEERING)
    assert train.evaluate(str(run.path), []) == 0
    exported = run.path.with_name(f"{run.path.name} exported")
    assert "loaded again as a policy" in export(run.checkpoint(4), config, exported)
    assert verify(run.checkpoint(4)).iteration == 4
    policy = load_policy("pi0", checkpoint=exported)
    assert isinstance(policy, SteeredPolicy) and policy.has_begun
    assert torch.equal(policy.steering.actor[0].weight, last["steering.actor.0.weight"])


# --------------------------------------------------------------------------------------------- paid by what was learned

LEARN = """
defaults: [env: gym/pendulum, model: mlp, algorithm: reward_classifier, _self_]
model: {hidden_sizes: [32], activation: relu}
data: {path: FOLDER/judged, steps: 40, batch_size: 64}
run: {name: judge, iterations: 5, eval_every: 2}
engine: {optimizer: {lr: 0.01}}
tracking: {sinks: [jsonl], report: false}
"""
PAID = """
defaults: [env: gym/pendulum, model: mlp, algorithm: sac, _self_]
env: {num_envs: 4, workers: 1, max_episode_steps: 40}
model: {hidden_sizes: [16], head: squashed}
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  reward: {name: classifier, path: FOLDER/judge, threshold: 0.8}
  off_policy: {replay: {capacity: 400, start_after: 60}, batch_size: 32, critics: {hidden_sizes: [16]}}
run: {name: paid, iterations: 6, save_every: 3, eval_every: 0}
eval: {episodes: 3}
tracking: {sinks: [jsonl], report: false}
"""
LEAST = 0.3
"""Height of the pendulum (cosine) from which on it counts as solved."""


def write_judge(folder: Path) -> None:
    """A run that has learned that a high pendulum is what is wanted."""
    rng = np.random.default_rng(0)
    spec = DatasetSpec(action_names=("torque",), state_dim=3, fps=20, outcome=True, ends=True)
    with DatasetWriter(folder / "judged", spec) as writer:
        for _ in range(20):
            angle = rng.uniform(-np.pi, np.pi, 31)
            states = np.stack([np.cos(angle), np.sin(angle), rng.uniform(-8, 8, 31)], 1).astype(np.float32)
            writer.add(
                Episode(
                    task="swing up",
                    proprio=states[:-1],
                    last_proprio=states[-1],
                    actions=np.zeros((30, 1), np.float32),
                    rewards=np.zeros(30, np.float32),
                    success=states[1:, 0] > LEAST,
                )
            )
    (folder / "learn.yaml").write_text(LEARN.replace("FOLDER", str(folder)))
    assert train.run(load_config(folder / "learn.yaml", [f"run.dir={folder / 'judge'}"])) == 0


FORESEEN = PAID.replace("classifier, path: FOLDER/judge, threshold: 0.8", "progress, path: FOLDER/judge").replace(
    "{name: paid", "{name: foreseen"
)
"""The same, paid by predicted progress."""


def write_predictor(folder: Path) -> None:
    """A run that has learned how far a pendulum is that rises at a constant speed; others fall."""
    rng = np.random.default_rng(0)
    spec = DatasetSpec(action_names=("torque",), state_dim=3, fps=20, outcome=True, ends=True)
    with DatasetWriter(folder / "judged", spec) as writer:
        for number in range(20):
            angle = np.linspace(rng.uniform(2.0, 3.0), 0.0 if number % 5 else 3.1, 31) * rng.choice([-1, 1])
            states = np.stack([np.cos(angle), np.sin(angle), rng.uniform(-8, 8, 31)], 1).astype(np.float32)
            writer.add(
                Episode(
                    task="swing up",
                    proprio=states[:-1],
                    last_proprio=states[-1],
                    actions=np.zeros((30, 1), np.float32),
                    rewards=np.zeros(30, np.float32),
                    success=states[1:, 0] > 0.99,
                )
            )
    text = LEARN.replace("FOLDER", str(folder)).replace("reward_classifier", "reward_progress")
    (folder / "learn.yaml").write_text(text)
    assert train.run(load_config(folder / "learn.yaml", [f"run.dir={folder / 'judge'}"])) == 0


def show_that_progress_is_paid(run: Run) -> None:
    moments = run.replay()
    paid = moments["progress"][moments["decided"]]
    assert (paid > 0.02).any() and (paid < -0.02).any() and paid.abs().max() <= 1.0


def show_that_judged_episodes_end(run: Run) -> None:
    moments = run.replay()
    judged, ended = (moments[name][moments["decided"]] for name in ("judged", "terminated"))
    assert judged.any() and torch.equal(judged.any(1), ended), "nothing else ends a pendulum's episode but time"
    rows = [row for row in run.metrics() if "env/judged_success" in row]
    assert rows and max(row["env/judged_success"] for row in rows) > 0


DATA = ("pyarrow",)
LEARNERS: dict[str, Learner] = {
    "ppo": Learner(PPO, 4, 2),
    "groups that wait": Learner(DAPO, 3, 1, show_waiting_groups, plugins={"three_of_four.py": THREE_OF_FOUR}),
    "frames": Learner(FRAMES, 2, 1, show_two_frames, plugins=COUNTER, needs=("timm",)),
    "sft": Learner(SFT, 4, 2, show_less_loss, write_demonstrations, needs=DATA),
    "sac": Learner(SAC, 6, 3, show_the_replay_wraps),
    "pixels": Learner(
        PIXELS,
        6,
        2,
        show_images_on_the_disk,
        plugins=COUNTER,
        needs=("timm",),
    ),
    "rlpd": Learner(RLPD, 6, 3, make=write_demonstrations, needs=DATA),
    "iql": Learner(IQL, 6, 3, make=write_demonstrations, needs=DATA),
    "weighed": Learner(WEIGHED, 6, 3, make=write_demonstrations, needs=DATA),
    "qc": Learner(QC, 6, 3, make=write_demonstrations, needs=DATA),
    "qc_fql": Learner(QC_FQL, 6, 3, make=write_demonstrations, needs=DATA),
    "dagger": Learner(DAGGER, 6, 3, show_interventions, plugins={"swinger.py": EXPERT}),
    "steered": Learner(
        STEERED, 4, 2, show_that_noise_learns, write_base, needs=("transformers", "pygame"), uses=use_steered
    ),
    "told": Learner(TOLD, 4, 2, show_that_rounds_learn, write_base, needs=("transformers", "pygame")),
    "matched": Learner(MATCHED, 4, 2, needs=("transformers", "pygame")),
    "paid": Learner(PAID, 6, 3, show_that_judged_episodes_end, write_judge, needs=DATA),
    "foreseen": Learner(FORESEEN, 6, 3, show_that_progress_is_paid, write_predictor, needs=DATA),
}
