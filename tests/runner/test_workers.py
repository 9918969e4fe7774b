"""Rollout workers play what the ranks themselves would play, bit for bit, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from learners import COUNTER
from slow import rest_slow
from small_runs import THREE_OF_FOUR, Run, Runs, kill_in, resumed

from embodyrl.registry import SIMULATORS, SupportedModel

PENDULUM = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
env: {num_envs: 8, workers: auto, max_episode_steps: 12}
rollout: {chunk_size: 2, num_chunks: 5, blocks: 4}
algorithm: {epochs: 2, minibatches: 2}
engine: {threads: 1}
run: {name: apart, iterations: 3, save_every: 1, eval_every: 1}
eval: {episodes: 5}
tracking: {sinks: [jsonl], report: false}
"""
SEEN = PENDULUM.replace("env: gym/pendulum, ", "").replace(
    "env: {",
    "plugins: [counter_simulator]\n"
    "env: {name: counter, tasks: [count], start_states: 50, cameras: [top], image_size: [16, 16], ",
)
WHOLE = ["rollout.episodes=whole", "rollout.num_chunks=6", "rollout.episodes_per_slot=2", "rollout.schedule=pipeline"]
DRQ = ["model=cnn", "model.encoder=drq", "model.channels=[4,4]", "model.strides=[2,2]", "model.image_features=8"]
OFT = [f"model.scratch.{size}" for size in ("image_size=32", "hidden_size=32", "layers=1", "mlp_size=48")]
CASES = {
    "continuous": (PENDULUM, []),
    "images": (SEEN, DRQ),
    "metaworld": (PENDULUM, ["env=metaworld/reach", "env.max_episode_steps=12", *WHOLE, "eval.sample=true"]),
    "adapters": (SEEN, ["model=openvla_oft", *OFT, "engine.lora.rank=4"]),
}
NEEDS = {
    "images": (SupportedModel, "cnn"),
    "metaworld": (SIMULATORS, "metaworld"),
    "adapters": (SupportedModel, "openvla_oft"),
}

Take = Callable[[str], Runs]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Take:
    """Runs of a case, which the tests share and only read."""
    made: dict[str, Runs] = {}

    def take(case: str) -> Runs:
        registry, name = NEEDS.get(case, (SupportedModel, "mlp"))
        if registry.entry(name).missing():  # type: ignore[attr-defined]
            pytest.skip(f"{name} is not installed")
        if case == "adapters":
            programs.run(["-c", ""], preload=programs.VLA)  # so that ranks and workers need not import it each
        if case not in made:
            config, settings = CASES[case]
            folder = tmp_path_factory.mktemp("apart")
            (folder / "my.yaml").write_text(config)
            for file, text in {"three_of_four.py": THREE_OF_FOUR, **COUNTER}.items():
                (folder / file).write_text(text)
            made[case] = Runs(folder, folder / "my.yaml", settings)
        return made[case]

    return take


def workers(count: int) -> str:
    return f"placement.rollout.workers={count}"


def outcome(run: Run) -> tuple[object, ...]:
    """Metrics and final weights."""
    weights = sorted((run.path / "checkpoints" / "last" / "policy").glob("*.safetensors"))
    rows = [{key: row[key] for key in row if not key.startswith("traffic/")} for row in run.metrics()]
    return rows, [path.read_bytes() for path in weights]


@pytest.mark.parametrize("case", rest_slow(CASES, 2))
def test_workers_give_the_metrics_and_weights_of_the_ranks_themselves(case: str, apart: Take) -> None:
    runs = apart(case)
    assert outcome(runs(workers(2))) == outcome(runs())


@pytest.mark.slow
def test_ranks_with_shards_learn_from_workers_what_they_learn_from_themselves(apart: Take) -> None:
    runs, ranks = apart("adapters"), ["engine.parallel.world_size=2", "engine.parallel.backend=fsdp"]
    assert outcome(runs(*ranks, workers(1))) == outcome(runs(*ranks))


@pytest.mark.faults
def test_a_run_that_was_killed_goes_on_with_fewer_workers_to_the_same_weights(apart: Take, tmp_path: Path) -> None:
    runs, path = apart("continuous"), tmp_path / "killed"
    kill_in(3, path, runs.words(path, workers(2)))
    assert outcome(resumed(path, workers(1))) == outcome(runs())  # 1 plays the same, too
