"""The clients that robots and benchmarks have, as their projects publish them, each in an environment of its own."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

import embodyrl

STATES = [[0.1 * number, 0.5 - 0.1 * number, 0.3 * number] for number in range(5)]
OPENPI = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="secret")
assert policy.get_server_metadata()["chunk_size"] == 3
states = [np.array(state, np.float32) for state in json.loads(sys.argv[2])]
print(json.dumps([policy.infer({"observation/state": state, "prompt": "go"})["actions"].tolist() for state in states]))
"""
OPENPI_PACKAGES = ("openpi-client==0.1.2", "numpy<2", "typing_extensions")
OPENPI_OF_VLAS = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy, found = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1])), []
with np.load(sys.argv[2]) as sent:
    for number in range(len(sent["images"])):
        seen = {"observation/image": sent["images"][number], "observation/state": sent["states"][number]}
        found.append(policy.infer(seen | {"prompt": str(sent["prompts"][number])})["actions"].tolist())
print(json.dumps(found))
"""
VLA_EVAL_PACKAGES = ("vla-eval==0.8.0", "gymnasium>=1.1")
VLA_EVAL = """
import asyncio, json, sys
import numpy as np
from vla_eval.connection import Connection

async def play():
    async with Connection(f"ws://127.0.0.1:{sys.argv[1]}") as connection:
        found = []
        for state in json.loads(sys.argv[2]):
            await connection.start_episode({"task": {"name": "swing up"}})
            observation = {"states": np.array(state, np.float32), "task_description": "go"}
            found.append([(await connection.act(observation))["actions"].tolist() for _ in range(3)])
            await connection.end_episode({"success": False})
        print(json.dumps(found))

asyncio.run(play())
"""
BENCHMARK = """
import gymnasium
import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.specs import RAW


class CartPole(StepBenchmark):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.env, self.first, self.total = gymnasium.make("CartPole-v1"), first, 0.0

    def get_tasks(self):
        return [{"name": "balance"}]

    def reset(self, task):
        self.total = 0.0
        return self.env.reset(seed=self.first + int(task["episode_idx"]))[0]

    def step(self, action):
        seen, reward, ended, cut, _ = self.env.step(round(float(np.asarray(action["actions"])[0])))
        self.total += reward
        return StepResult(obs=seen, reward=reward, done=ended or cut, info={})

    def make_obs(self, raw_obs, task):
        return {"states": np.asarray(raw_obs, np.float32), "task_description": task["name"]}

    def get_step_result(self, step_result):
        return {"success": self.total >= 100.0}

    def get_metadata(self):
        return {"max_steps": 500}

    def get_action_spec(self):
        return {"actions": RAW}

    def get_observation_spec(self):
        return {"state": RAW}
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Interpreters of environments with some packages, each made once."""
    return functools.cache(lambda *packages: environment(tmp_path_factory.mktemp("environment"), *packages))


def environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--retries", "0", *packages], capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        pytest.skip(f"cannot install {' '.join(packages)} here: {(done.stderr.splitlines() or ['?'])[-1]}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "program", "packages"),
    [
        ("openpi", OPENPI, OPENPI_PACKAGES),
        ("vla-eval", VLA_EVAL, VLA_EVAL_PACKAGES),
    ],
)
def test_published_clients_get_what_the_policy_does_bit_for_bit(
    protocol: str,
    program: str,
    packages: tuple[str, ...],
    server: Callable[..., embodyrl.PolicyServer],
    policy: embodyrl.LoadedPolicy,
    environments: Callable[..., Path],
) -> None:
    if sys.version_info >= (3, 13) and protocol == "openpi":
        pytest.skip("openpi-client needs numpy < 2, which this Python has no build of")
    python = environments(*packages)
    there = server(protocol=protocol, token="secret" if protocol == "openpi" else None)
    command = [python, "-c", program, str(there.port), json.dumps(STATES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for found, state in zip(json.loads(done.stdout), STATES, strict=True):
        proprio = np.array([state], np.float32)
        wanted = policy.act(embodyrl.Observation(proprio=proprio, task_descriptions=["go"]))[0]
        assert np.array_equal(np.array(found, np.float32), wanted)


@pytest.mark.slow
def test_what_is_pasted_from_the_docs_runs(
    environments: Callable[..., Path], server: Callable[..., embodyrl.PolicyServer]
) -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("openpi-client needs numpy < 2, which this Python has no build of")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    [script] = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "get_server_metadata" in block]
    pasted = script.replace("8000", str(server().port))
    done = subprocess.run([environments(*OPENPI_PACKAGES), "-c", pasted], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and re.fullmatch(r"\[(\s*\[\s*-?[0-9.e-]+\s*\]){3}\]\n", done.stdout), (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_the_published_client_gets_the_chunks_of_vlas_bit_for_bit(
    environments: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    from tests.serving.vlas import TINY, message, observation, tiny

    if sys.version_info >= (3, 13):
        pytest.skip("openpi-client needs numpy < 2, which this Python has no build of")
    python, sent = environments(*OPENPI_PACKAGES), [message(number) for number in range(4)]
    keys = {"images": "observation/image", "states": "observation/state", "prompts": "prompt"}
    np.savez(tmp_path / "sent.npz", **{name: np.array([each[key] for each in sent]) for name, key in keys.items()})
    for model in TINY:
        policy = tiny(model)
        with embodyrl.serve(policy, port=0) as there:
            command = [python, "-c", OPENPI_OF_VLAS, str(there.port), str(tmp_path / "sent.npz")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        for number, found in enumerate(json.loads(done.stdout)):
            assert np.array_equal(np.array(found, np.float32), policy.act(observation(number))[0]), model


@pytest.mark.slow
def test_a_benchmark_of_vla_eval_plays_the_episodes_of_an_evaluation(
    environments: Callable[..., Path], tmp_path: Path
) -> None:
    """Not the success alone: each episode takes as many steps."""
    python = environments(*VLA_EVAL_PACKAGES)
    brief = ["run.iterations=2", "run.eval_every=0", "tracking.report=false", "tracking.sinks=[jsonl]"]
    run = embodyrl.train("gym_cartpole", [*brief, f"run.dir={tmp_path / 'run'}", "eval.episodes=12"])
    (tmp_path / "cartpole.py").write_text(BENCHMARK)
    entry = {"benchmark": "cartpole:CartPole", "episodes_per_task": 12, "max_steps": 500, "params": {"first": 10_000}}
    with embodyrl.serve(run.path, port=0, protocol="vla-eval") as there:
        config = {"server": {"url": there.url}, "output_dir": str(tmp_path / "results"), "benchmarks": [entry]}
        (tmp_path / "benchmark.yaml").write_text(json.dumps(config))
        command = [python.with_name("vla-eval"), "run", "--no-docker", "--config", "benchmark.yaml"]
        surroundings = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=surroundings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (results,) = (tmp_path / "results").glob("*_aggregate.json")
    played = json.loads(results.read_text())["tasks"][0]["episodes"]
    wanted = sorted(embodyrl.evaluate(run.path).records, key=lambda each: each.start_state)
    assert [each.start_state for each in wanted] == list(range(10_000, 10_012))
    assert [each["steps"] for each in played] == [each.length for each in wanted]
    assert len({each["steps"] for each in played}) > 6, "episodes that differ say more"
