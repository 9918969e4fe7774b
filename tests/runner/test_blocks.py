"""What is rolled out depends on the number of blocks, not on the number of ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import Runs, copy_of, resumed

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


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs that the tests share, and only read."""
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "note_digest.py").write_text(PLUGIN)
    (folder / "my.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGESTS", str(folder))
        yield Runs(folder, folder / "my.yaml")


def rolled_out(blocks: Runs, *settings: str) -> tuple[str, dict[str, float]]:
    """Digest and metrics of the first iteration."""
    metrics = blocks(*settings).metrics()[-1]
    shown = {key: metrics[key] for key in metrics if key.startswith(("env", "roll"))}
    return (blocks.folder / "digest_0").read_text(), shown


@pytest.mark.parametrize(("case", "ranks"), rest_slow([("states", 2), ("images", 2), ("whole episodes, pipeline", 4)]))
def test_ranks_that_share_blocks_roll_out_the_same(case: str, ranks: int, blocks: Runs) -> None:
    if "model=openvla_oft" in CASES[case] and SupportedModel.entry("openvla_oft").missing():
        pytest.skip("openvla_oft is not installed")
    one = rolled_out(blocks, *CASES[case])
    assert one == rolled_out(blocks, *CASES[case], f"engine.parallel.world_size={ranks}")
    if case == "states":
        assert one[0] != rolled_out(blocks, *CASES[case], "rollout.blocks=auto")[0]


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_rollout_on_other_ranks(tmp_path: Path, blocks: Runs) -> None:
    begun, digests = blocks.fresh(tmp_path / "begun", *CASES["states"]), [(blocks.folder / "digest_0").read_text()]
    for ranks in (1, 2):
        path = copy_of(begun, tmp_path / f"on_{ranks}")
        resumed(path, "run.iterations=2", f"engine.parallel.world_size={ranks}")
        digests.append((blocks.folder / "digest_1").read_text())
        (blocks.folder / "digest_1").unlink()
    assert digests[0] != digests[1] == digests[2]
