"""`embodyrl verify` names the first layer that differs, on a run whose layers are changed one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import strangers
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import embodyrl
from embodyrl.api import write_lock
from embodyrl.cli.main import app
from embodyrl.cli.train import export
from embodyrl.cli.verify import closing_lines
from embodyrl.evaluation.verification import Verification
from embodyrl.runner.reproduction import LOCK_FILE, Lock, LockError

CONFIG = """
plugins: [verified]
seed: 1
run: {iterations: 2, eval_every: 1, save_every: 1}
env: {name: planes, tasks: [middle], num_envs: 2, workers: 1, max_episode_steps: 30, start_method: fork}
eval: {episodes: 6}
model: {name: small}
rollout: {num_chunks: 8}
algorithm: {name: ppo, minibatches: 2, epochs: 1}
tracking: {sinks: [jsonl], report: false}
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two iterations."""
    folder = tmp_path_factory.mktemp("verified")
    with strangers.copied(Path(__file__).parent, ("verified", "verified_model"), folder):
        (folder / "config.yaml").write_text(CONFIG)
        yield embodyrl.train(folder / "config.yaml", [f"run.dir={folder / 'run'}"]).path


@pytest.fixture
def exported(run_dir: Path, tmp_path: Path) -> Path:
    """The exported policy of the run, to be changed: no manifest guards it."""
    assert export(run_dir, tmp_path / "policy") == 0
    return tmp_path / "policy"


def states(found: Verification) -> dict[str, str]:
    return {layer.name: str(layer.state) for layer in found.layers}


EQUAL = dict.fromkeys(["packages", "physics", "rendering", "preprocessing", "weights", "kernels"], "equal")


def test_the_same_machine_gives_the_same_bits(run_dir: Path) -> None:
    found = embodyrl.verify(run_dir, episodes=6)
    assert states(found) == EQUAL and found.exit_code == 0 and found.first is None
    # Not only rates: every episode ends as it did, with the same return.
    assert list(found.now) == list(found.before) and len(found.now) == 6
    assert found.pairs is not None and found.pairs.difference == 0.0


def test_physics(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of then are shown as then, and seen by the policy as then: what follows is judged by itself."""
    monkeypatch.setenv("CHANGED_PHYSICS", "0.01")
    found = embodyrl.verify(run_dir)
    assert states(found) == EQUAL | {"physics": "differs"} and found.exit_code == 1
    assert found.first is not None and found.first.name == "physics"
    # The reset is not simulated, the first step is.
    assert found.first.numbers["first step"] == 1.0 and found.first.numbers["reset"] == 0.0
    # One step differs by 0.2 * 0.01 * the action; twenty of them cannot be further away than what they all add up to.
    first = Lock.load(found.lock).seen.actions[0]
    assert 0.2 * 0.01 * np.abs(first).max() * 0.99 < found.first.numbers["proprio"] < 0.01 * 15
    assert found.pairs is not None and found.pairs.count == 6


def test_a_slight_change_of_physics_is_rounding(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_PHYSICS", "5e-8")
    found = embodyrl.verify(run_dir)
    assert states(found) == EQUAL | {"physics": "within rounding"} and found.exit_code == 0


def test_rendering(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_RENDERING", "-7")
    found = embodyrl.verify(run_dir, episodes=0)
    assert states(found) == EQUAL | {"rendering": "differs"} and found.pairs is None
    layer = found.layers[2]
    assert layer.numbers["most"] == 7.0
    assert layer.numbers["share"] == pytest.approx(16 / 256)  # the point covers 4 x 4 of 16 x 16 pixels


def test_preprocessing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_PREPROCESSING", "0.25")
    found = embodyrl.verify(run_dir, episodes=0)
    assert states(found) == EQUAL | {"preprocessing": "differs"}
    assert found.layers[3].numbers == pytest.approx({"images": 0.25, "proprio": 0.0})


def test_kernels(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_KERNELS", "0.001")
    found = embodyrl.verify(run_dir, episodes=0)
    assert states(found) == EQUAL | {"kernels": "differs"}
    assert found.layers[5].numbers["actions"] == pytest.approx(0.001, rel=0.01)


def test_other_kernels_of_torch_are_named(run_dir: Path) -> None:
    """Without oneDNN the convolution sums in another order, if at all: that is rounding, whose cause is shown."""
    with torch.backends.mkldnn.flags(enabled=False):
        found = embodyrl.verify(run_dir, episodes=0)
    assert [str(change) for change in found.changes] == ["oneDNN on -> off"]
    assert states(found) | {"packages": "", "kernels": ""} == EQUAL | {"packages": "", "kernels": ""}
    assert found.exit_code == 0


def test_one_weight(exported: Path) -> None:
    weights = load_file(exported / "model.safetensors")
    weights["mean.bias"][1] += 1e-3
    save_file(weights, exported / "model.safetensors")
    found = embodyrl.verify(exported, trust=True, episodes=0)
    assert states(found) == EQUAL | {"weights": "differs", "kernels": "-"}
    assert "1 of 6 tensors differ: mean.bias" in found.layers[4].text
    assert found.layers[5].numbers["actions"] == pytest.approx(1e-3, rel=0.01) and found.exit_code == 1


def test_a_changed_plug_in_is_a_cause(exported: Path) -> None:
    lock = Lock.load(exported / LOCK_FILE)
    lock.versions = dict(lock.versions) | {"plug-in verified": "another hash", "numpy": "1.0.0"}
    lock.seen.proprio[3] += 0.5  # as if another version had moved it
    lock.save(exported / LOCK_FILE)
    found = embodyrl.verify(exported, trust=True, episodes=0)
    assert states(found) == EQUAL | {"packages": "differs", "physics": "differs"}
    assert found.first is not None and found.first.numbers["first step"] == 4.0
    assert {change.name for change in found.causes} == {"plug-in verified", "numpy"}
    assert found.remedies == ["pip install 'numpy==1.0.0'"]


def test_a_change_without_consequences_is_said_to_have_none(exported: Path) -> None:
    lock = Lock.load(exported / LOCK_FILE)
    lock.versions = dict(lock.versions) | {"pillow": "1.0.0"}
    lock.save(exported / LOCK_FILE)
    found = embodyrl.verify(exported, trust=True)
    assert states(found) == EQUAL | {"packages": "differs"} and found.exit_code == 0
    [line] = closing_lines(found)
    assert line.endswith("what the run recorded, bit for bit; what changed since makes no difference to it")


def test_a_lock_survives_being_saved(run_dir: Path, tmp_path: Path) -> None:
    before = Lock.load(run_dir / "checkpoints" / "last" / LOCK_FILE)
    before.save(tmp_path / LOCK_FILE)
    again = Lock.load(tmp_path / LOCK_FILE)
    assert (tmp_path / LOCK_FILE).read_bytes() == (run_dir / "checkpoints" / "last" / LOCK_FILE).read_bytes()
    assert again.iteration == 2 and len(again.records) == 6 and again.seen.steps == 15 == len(again.seen.actions)


def test_checkpoints_after_a_resume_have_a_lock(run_dir: Path, tmp_path: Path) -> None:
    """What was seen before is kept, although this process evaluates nothing before it saves."""
    run = shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    embodyrl.resume(run, ["run.iterations=4", "run.eval_every=0"])
    before, after = (Lock.load(run / "checkpoints" / name / LOCK_FILE) for name in ("000002", "000003"))
    assert after.iteration == 3 and after.records == [] and after.weights != before.weights
    np.testing.assert_array_equal(after.seen.actions, before.seen.actions)


class TestWrongUses:
    def test_no_lock(self, exported: Path) -> None:
        (exported / LOCK_FILE).unlink()
        with pytest.raises(LockError, match=r"has no lock.*embodyrl verify --write"):
            embodyrl.verify(exported, trust=True)
        assert write_lock(exported, trust=True) == exported / LOCK_FILE
        assert embodyrl.verify(exported, trust=True, episodes=6).exit_code == 0
        with pytest.raises(LockError, match="never overwritten"):
            write_lock(exported, trust=True)

    @pytest.mark.parametrize("kept", [0, 5, 200, -20])
    def test_damaged(self, exported: Path, kept: int) -> None:
        whole = (exported / LOCK_FILE).read_bytes()
        (exported / LOCK_FILE).write_bytes(whole[:kept])
        with pytest.raises(LockError, match=r"cannot be read as a lock.*restore it from a copy"):
            embodyrl.verify(exported, trust=True)

    def test_lock_of_a_later_version(self, exported: Path) -> None:
        file = exported / LOCK_FILE
        texts = json.dumps({"format": 99})
        save_file(load_file(file), file, {"lock": texts})
        with pytest.raises(LockError, match=r"format 99.*reads 1"):
            embodyrl.verify(exported, trust=True)

    def test_lock_of_another_model(self, exported: Path) -> None:
        lock = Lock.load(exported / LOCK_FILE)
        lock.weights = {"other.weight": "0"}
        lock.save(exported / LOCK_FILE)
        with pytest.raises(LockError, match=r"the lock of another model.*'small'"):
            embodyrl.verify(exported, trust=True)

    def test_more_episodes_than_recorded(self, run_dir: Path) -> None:
        with pytest.raises(LockError, match="outcomes of 6 episodes, and --episodes is 7: ask for at most 6"):
            embodyrl.verify(run_dir, episodes=7)


def test_command_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CHANGED_RENDERING", "40")
    shown = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert shown.exit_code == 1, shown.output
    assert "rendering      differs" in shown.output and "rendering is the first layer that differs" in shown.output
    assert "success: " in shown.output and "(95 %, the same start states" in shown.output
    plain = CliRunner().invoke(app, ["verify", str(run_dir), "--json", "--episodes", "0"])
    assert plain.exit_code == 1 and json.loads(plain.output)["first"] == "rendering"
