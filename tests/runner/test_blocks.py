"""What is rolled out depends on the number of blocks, not on the number of ranks that share them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.registry import SupportedModel

PLUGIN = """
import hashlib
import os
from pathlib import Path

from embodyrl.registry import STAGES
from embodyrl.rollout.batch import COLUMNS, leaves

READS = [name if column.required else f"{name}?" for name, column in COLUMNS.items() if name != "address"]


def note_digest(iteration):
    batch = iteration.batch
    path = Path(os.environ["DIGESTS"]) / f"digest_{iteration.engine.version}"
    digest = hashlib.sha256()
    for name, column in sorted(leaves(batch).items()):
        if name != "address":
            rows = column[batch["valid"]]
            digest.update(f"{name} {list(rows.shape)} {rows.dtype}".encode() + rows.contiguous().numpy().tobytes())
    if iteration.engine.ranks.is_first:
        path.write_text(digest.hexdigest())


STAGES.register("note_digest", target=note_digest, reads=(*READS, "trace"), summary="hash of a rollout")
"""
CONFIG = """
defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]
plugins: [note_digest]
pipeline: {insert: [{name: note, stage: note_digest, after: [rollout]}]}
env: {num_envs: 8, workers: auto, max_episode_steps: 6}
rollout: {chunk_size: 2, num_chunks: 5, blocks: 4}
algorithm: {epochs: 1, minibatches: 2}
engine: {threads: 1}
run: {name: blocks, iterations: 1, save_every: 0, eval_every: 0}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
"""
SIZES = ["image_size=32", "hidden_size=32", "layers=1", "mlp_size=48"]
CASES = {
    "images": ["env=gym/pendulum_rgb", "model=openvla_oft", *[f"model.scratch.{size}" for size in SIZES]],
    "states": ["rollout.num_chunks=40"],
    "whole episodes, pipeline": ["rollout.episodes=whole", "rollout.schedule=pipeline", "env.num_envs=16"],
}


@pytest.fixture
def roll_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Digest and metrics of the first iteration."""
    (tmp_path / "note_digest.py").write_text(PLUGIN)
    (tmp_path / "my.yaml").write_text(CONFIG)

    def run(name: str, *overrides: str) -> tuple[str, dict[str, float]]:
        path = tmp_path / name
        settings = [f"run.dir={path}", *overrides]
        monkeypatch.setenv("DIGESTS", str(path))
        assert train.run(load_config(str(tmp_path / "my.yaml"), settings, trust=True)) == 0
        metrics = Run(path).metrics()[-1]
        return (path / "digest_0").read_text(), {
            key: metrics[key] for key in metrics if key.startswith(("env", "roll"))
        }

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", rest_slow(["states", "images", "whole episodes, pipeline"]))
def test_ranks_that_share_blocks_roll_out_the_same(case: str, roll_out) -> None:  # type: ignore[no-untyped-def]
    if "model=openvla_oft" in CASES[case] and SupportedModel.entry("openvla_oft").missing():
        pytest.skip("openvla_oft is not installed")
    one = roll_out("one", *CASES[case])
    ranks = 4 if case == "states" else 2
    assert one == roll_out("shared", *CASES[case], f"engine.parallel.world_size={ranks}")
    if case == "states":
        assert one[0] != roll_out("undivided", *CASES[case], "rollout.blocks=auto")[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_with_the_same_rollout_on_other_ranks(  # type: ignore[no-untyped-def]
    tmp_path: Path, roll_out, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_out("begun", *CASES["states"])
    digests = []
    for ranks in (1, 2):
        path = tmp_path / f"on_{ranks}"
        shutil.copytree(tmp_path / "begun", path, symlinks=True)
        monkeypatch.setenv("DIGESTS", str(path))
        assert train.resume(path, ["run.iterations=2", f"engine.parallel.world_size={ranks}"]) == 0
        digests.append((path / "digest_1").read_text())
    assert len(set(digests)) == 1 and digests[0] != (tmp_path / "begun" / "digest_0").read_text()
