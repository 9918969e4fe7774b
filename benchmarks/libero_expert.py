"""Learn one task of LIBERO from twelve demonstrations of the scripted expert, then by reinforcement from success alone.

For every seed: the demonstrations, and libero_expert_rlpd, which imitates them, says what that solves, and goes on by
RLPD. Evaluations are of the start states that neither showed. Runs that are in the folder already are not made again.

    python benchmarks/libero_expert.py --seeds 1 2 3 --work DIR     # writes benchmarks/results/libero_expert.json
    python benchmarks/libero_expert.py --report                     # writes docs/results/libero_expert.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, once
from tiny_vla_report import PAGES, RESULTS, TEXTS, seeds_and_work

from embodyrl.tracking.intervals import rate_text

NAME = "libero_expert_rlpd"
RESULT = RESULTS / "libero_expert.json"
DEMONSTRATIONS = ["--episodes", "12", "--pushes", "3"]


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Run all parts of a seed."""
    demonstrations, run, seconds = work / "demonstrations", work / "run", Seconds()
    words = [NAME, f"seed={seed}", "tracking.sinks=[jsonl]", f"data.path={demonstrations}"]
    once(demonstrations, seconds, "collect", *words, *DEMONSTRATIONS)
    once(run, seconds, "run", *words, f"run.dir={run}")
    summary = json.loads((run / "summary.json").read_text())
    evaluations = summary["evaluations"]
    return {
        "seed": seed,
        "demonstrated_steps": json.loads((demonstrations / "meta" / "info.json").read_text())["total_frames"],
        "iterations": summary["iterations"],
        "env_steps": summary["env_steps"],
        "episodes": round(summary["eval/episodes"]),
        "success": {step: each["eval/success_once"] for step, each in evaluations.items()},
        "length": {step: round(each["eval/episode_length"]) for step, each in evaluations.items()},
        "wall_s": round(summary["wall_s"]),
        "seconds": seconds,
    }


def report() -> None:
    """Write the page from the committed numbers."""
    found = json.loads(RESULT.read_text())
    rows = found["seeds"]
    steps = [step for step in rows[0]["success"] if all(step in row["success"] for row in rows)]
    per_iteration = rows[0]["env_steps"] / rows[0]["iterations"]
    heads = ["seed", "imitation", *(f"{round(int(step) * per_iteration, -3):,.0f} steps" for step in steps[1:])]
    lines = ["| " + " | ".join([*heads, "gain", "best", "wall s"]) + " |", "|---" * (len(heads) + 3) + "|"]
    for row in rows:
        rates, episodes = [row["success"][step] for step in steps], row["episodes"]
        ends = [rate_text(round(rate * episodes), episodes) for rate in rates]
        cells = [str(row["seed"]), ends[0], *(f"{rate:.2f}" for rate in rates[1:-1]), f"**{ends[-1]}**"]
        ended = [f"{100 * (rates[-1] - rates[0]):+.0f}", f"{max(row['success'].values()):.2f}", f"{row['wall_s']:,}"]
        lines.append("| " + " | ".join([*cells, *ended]) + " |")
    text = (TEXTS / "libero_expert.md").read_text()
    filled = text.format(
        table="\n".join(lines),
        episodes=rows[0]["episodes"],
        env_steps=f"{rows[0]['env_steps']:,}",
        remark=found.get("remark", ""),
    )
    (PAGES / "libero_expert.md").write_text(filled)


def main() -> None:
    """Run all seeds, or write the page."""
    asked = seeds_and_work(__doc__).parse_args()
    if asked.report:
        report()
        return
    # Parts that are not made again keep their times.
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {"seeds": []}
    before = {row["seed"]: row["seconds"] for row in found["seeds"]}
    rows: list[dict[str, Any]] = []
    for seed in asked.seeds:
        rows.append(one_seed(seed, asked.work / f"seed{seed}"))
        rows[-1]["seconds"] = before.get(seed, {}) | rows[-1]["seconds"]
        RESULT.write_text(json.dumps(found | {"seeds": rows}, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
