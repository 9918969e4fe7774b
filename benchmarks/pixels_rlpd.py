"""Learn MetaWorld reach-v3 from pixels, success alone and twenty demonstrations; and from the simulator's reward.

For every seed: the demonstrations, metaworld_reach_pixels_rlpd, and the policy that imitation alone gave (the same run
after one iteration, before it has learned from rollouts). Both are evaluated on held-out start states, with most likely
and with sampled actions, and with black images. `--dense` runs metaworld_reach_pixels_sac instead. About six
minutes for each seed on two cores. Runs that are in the folder already are not made again.

    python benchmarks/pixels_rlpd.py --seeds 1 2 3 --work DIR       # writes benchmarks/results/pixels_rlpd.json
    python benchmarks/pixels_rlpd.py --dense --seeds 1 2 3 --work DIR
    python benchmarks/pixels_rlpd.py --report                       # prints the tables of docs/results/pixels_sac.md
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS, seeds_and_work

from embodyrl.tracking.intervals import rate_text

RLPD, DENSE = "metaworld_reach_pixels_rlpd", "metaworld_reach_pixels_sac"
DEMONSTRATIONS, EPISODES = 20, 200
WAYS = {"as it is": {}, "sampled": {"sample": True}, "black images": {"blind": True}}


def success(run: Path, *, sample: bool = False, blind: bool = False) -> float:
    """Success of a run's last checkpoint on its held-out episodes."""
    from tiny_vla_controls import blindfold

    from embodyrl.runner.build import build_acting, open_simulators
    from embodyrl.runner.checkpoint import POLICY, find_and_tell
    from embodyrl.runner.evaluation import evaluate, evaluation_noise, held_out_episodes
    from embodyrl.runner.rundir import read_saved

    checkpoint = find_and_tell(run)
    loaded = read_saved(checkpoint, [f"eval.sample={str(sample).lower()}", f"eval.episodes={EPISODES}"])
    with tempfile.TemporaryDirectory() as logs, open_simulators(loaded, Path(logs)) as manager:
        engine = build_acting(loaded.config, manager, checkpoint / POLICY)
        if blind:
            blindfold(engine.policy)
        noise = evaluation_noise(loaded.config, engine)
        played = evaluate(manager, engine, held_out_episodes(loaded.config), noise=noise)
        assert played.success_once is not None, "MetaWorld says what success is"
        return played.success_once


def one_seed(seed: int, work: Path, *, dense: bool) -> dict[str, Any]:
    """Run all parts of a seed."""
    demonstrations, seconds = work / "demonstrations", Seconds()
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    folder = work / ("dense" if dense else "rlpd")
    runs = {folder.name: folder}
    if dense:
        once(folder, seconds, "run", DENSE, *common, f"run.dir={folder}")
    else:
        teaching, runs["cloned"] = [RLPD, *common, f"data.path={demonstrations}"], work / "cloned"
        collect = ["collect", *teaching, "--episodes", str(DEMONSTRATIONS)]
        once(demonstrations, seconds, *collect)
        once(folder, seconds, "run", *teaching, f"run.dir={folder}")
        brief = [f"run.dir={runs['cloned']}", "run.iterations=1", "run.eval_every=0"]
        once(runs["cloned"], seconds, "run", *teaching, *brief)
    summary = json.loads((folder / "summary.json").read_text())
    found = {
        "seed": seed,
        "env_steps": summary["env_steps"],
        "wall_s": summary["wall_s"],
        "evaluations": {step: each["eval/success_once"] for step, each in summary["evaluations"].items()},
        "success": {name: {way: success(run, **how) for way, how in WAYS.items()} for name, run in runs.items()},
        "seconds": seconds,
    }
    if not dense:
        info = json.loads((demonstrations / "meta" / "info.json").read_text())
        found["demonstrated_steps"] = info["total_frames"]
    return found


def report() -> None:
    """Print a table for each of the results there are."""
    for name in ("pixels_rlpd", "pixels_sac"):
        path = RESULTS / f"{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        for row in rows:
            for policy, ways in row["success"].items():
                cells = [rate_text(round(rate * EPISODES), EPISODES) for rate in ways.values()]
                print(f"| {row['seed']} | {policy} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run all seeds, or print the tables."""
    parser = seeds_and_work(__doc__)
    parser.add_argument("--dense", action="store_true", help="the simulator's reward, without demonstrations")
    arguments = parser.parse_args()
    if arguments.report:
        report()
        return
    path = RESULTS / ("pixels_sac.json" if arguments.dense else "pixels_rlpd.json")
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        rows.append(one_seed(seed, arguments.work / f"seed{seed}", dense=arguments.dense))
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
