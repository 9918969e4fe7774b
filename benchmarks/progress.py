"""Learn MetaWorld reach-v3 from pixels, paid by predicted progress alone, and by success alone.

For every seed: twenty demonstrations that pushes disturb, reward_progress learned from them, and
metaworld_reach_pixels_sac with that as its only reward, which never learns from the demonstrations themselves and is
never paid for success. Beside it stands what success alone gives: benchmarks/results/pixels_rlpd.json (RLPD with twenty
demonstrations), and with `--success` the same soft actor-critic paid for success. Seven to nine minutes of a core for
each run.

    python benchmarks/progress.py --seeds 1 2 3 --work DIR [--success]    # writes benchmarks/results/progress.json
    python benchmarks/progress.py --report                                # prints the table of docs/off_policy.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS, seeds_and_work

from embodyrl.tracking.intervals import rate_text

SAC, LEARN = "metaworld_reach_pixels_sac", "reward_progress"
EPISODES = 200
PATH = RESULTS / "progress.json"
PAID = ("algorithm.reward.name=progress", "algorithm.reward_scale=4.0")
"""A progress of 1 is worth what the simulator's reward at the goal is worth with its scale and discount."""


def one_seed(seed: int, work: Path, *, success: bool, more: list[str]) -> dict[str, Any]:
    """Run all parts of a seed."""
    seconds, shown, learned = Seconds(), work / "demonstrations", work / "predictor"
    common = [f"seed={seed}", "tracking.sinks=[jsonl]"]
    evaluated = [*common, f"eval.episodes={EPISODES}", "run.eval_every=0", "run.save_every=0"]
    teaching = [LEARN, *common, f"data.path={shown}"]
    once(shown, seconds, "collect", *teaching, "--episodes", "20", "--pushes", "4", "--after-success", "5")
    once(learned, seconds, "run", *teaching, f"run.dir={learned}")
    runs = {"progress": [*PAID, f"algorithm.reward.path={learned}", *more]}
    runs |= {"success": ["algorithm.reward=success", "env.end_at_success=true"]} if success else {}
    found: dict[str, Any] = {"seed": seed, "held_out": _json(learned / "progress" / "progress.json")["held_out"]}
    found["demonstrated_steps"] = _json(shown / "meta" / "info.json")["total_frames"]
    for name, words in runs.items():
        folder = work / name
        once(folder, seconds, "run", SAC, *evaluated, *words, f"run.dir={folder}")
        summary = _json(folder / "summary.json")
        found[name] = {
            "env_steps": summary["env_steps"],
            "wall_s": summary["wall_s"],
            "success": {step: each["eval/success_once"] for step, each in summary["evaluations"].items()},
        }
    return found | {"seconds": seconds}


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def report() -> None:
    """Print the table."""
    rows = _json(PATH)
    beside = {row["seed"]: row["success"]["rlpd"]["as it is"] for row in _json(RESULTS / "pixels_rlpd.json")}
    for row in rows:
        rates = {"RLPD, success": beside[row["seed"]]}
        rates |= {
            f"SAC, {name}": [*row[name]["success"].values()][-1] for name in ("progress", "success") if name in row
        }
        for name, rate in rates.items():
            print(f"| {row['seed']} | {name} | {rate_text(round(rate * EPISODES), EPISODES)} |")
        held = row["held_out"]
        print(
            f"| {row['seed']} | held out | {held['mean']:.3f} (constant {held['constant']:.3f}) {held['ordered']:.2f} |"
        )


def main() -> None:
    """Run all seeds, or print the table."""
    parser = seeds_and_work(__doc__)
    parser.add_argument("--success", action="store_true", help="also the same method paid for success")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the run that is paid by progress")
    arguments = parser.parse_args()
    if arguments.report:
        report()
        return
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        work = arguments.work / f"seed{seed}"
        rows.append(one_seed(seed, work, success=arguments.success, more=arguments.set))
        PATH.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
