"""Show that a change of the code changes no number: hashes of the weights that runs of every method end with.

    python scripts/same_weights.py --out before.json          # at the commit before
    python scripts/same_weights.py --against before.json      # after the change; exit code 1 if a hash differs

Runs: three iterations of shipped experiments of every family (from states, on MetaWorld and PushT, with demonstrations
collected for it), with two ranks, with two rollout workers that are ahead of learning, from a replay on the disk; and
the small runs of all learners that the tests hold to their promises (`tests/runner/learners.py`). About two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "runner"), str(ROOT / "tests")]

SHORT = ["run.iterations=3", "run.eval_every=0", "eval.episodes=2", "tracking.sinks=[jsonl]", "tracking.report=false"]
REPLAY = ["algorithm.off_policy.replay.start_after=256", "algorithm.off_policy.updates_per_step=0.25"]
SHIPPED: dict[str, list[str]] = {
    "metaworld_reach": [],
    "metaworld_reach, two ranks": ["engine.parallel.world_size=2"],
    "metaworld_reach, two workers ahead": [
        "placement.rollout.workers=2",
        "rollout.mode=async",
        "algorithm.loss=decoupled_ppo",
        "env.workers=2",
    ],
    "metaworld_reach_grpo": [],
    "metaworld_reach_dapo": [],
    "metaworld_reach_sft": ["data.path=REACH", "data.steps=20"],
    "metaworld_reach_sac": REPLAY,
    "metaworld_reach_sac, on the disk": [
        *REPLAY,
        "algorithm.off_policy.replay.memory_mib=1",
        "algorithm.off_policy.replay.capacity=20000",
    ],
    "push_rlpd": [*REPLAY, "data.path=PUSH", "algorithm.off_policy.imitation.first_steps=20"],
    "push_iql": [*REPLAY, "data.path=PUSH", "data.steps=20", "algorithm.off_policy.offline_iterations=1"],
    "push_dagger": ["algorithm.off_policy.imitation.first_steps=20", "data.path=PUSH"],
}


def run(arguments: list[str]) -> None:
    """Run a command, silently unless it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl", *arguments], env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"embodyrl {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def hash_of(run_dir: Path) -> str:
    """Return the hash of the weights that a run ended with."""
    folders = [run_dir / "checkpoints" / "last" / "policy", run_dir / "classifier"]
    folder = next(each for each in folders if each.is_dir())
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def shipped(folder: Path) -> dict[str, str]:
    """Return the hashes of shipped experiments."""
    for name, experiment in (("REACH", "metaworld_reach_sft"), ("PUSH", "push_rlpd")):
        data = ["collect", experiment, "--out", str(folder / name), "--episodes", "6"]
        run(data)
    found = {}
    for title, overrides in SHIPPED.items():
        place = folder / title.replace(", ", "-").replace(" ", "_")
        given = [each.replace("REACH", f"{folder}/REACH").replace("PUSH", f"{folder}/PUSH") for each in overrides]
        run(["run", title.partition(",")[0], *SHORT, *given, f"run.dir={place}"])
        found[title] = hash_of(place)
        print(f"{found[title]}  {title}", flush=True)
    return found


def small(folder: Path) -> dict[str, str]:
    """Return the hashes of the learners' small runs."""
    from learners import LEARNERS  # type: ignore[import-not-found]

    found = {}
    for name, learner in LEARNERS.items():
        place = folder / f"small {name}"
        place.mkdir()
        run(["run", str(learner.write(place)), f"run.dir={place / 'run'}"])
        found[f"small: {name}"] = hash_of(place / "run")
        print(f"{found[f'small: {name}']}  small: {name}", flush=True)
    return found


def main() -> int:
    """Compare, or keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the hashes")
    parser.add_argument("--against", type=Path, help="file with those of another commit")
    parser.add_argument("--small", action="store_true", help="only the small runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-weights-") as temporary:
        found = ({} if options.small else shipped(Path(temporary))) | small(Path(temporary))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    differing = [name for name in found if before.get(name) != found[name]]
    print(f"{len(found) - len(differing)} of {len(found)} are the same", *differing, sep="\n  ")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
