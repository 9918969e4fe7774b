"""Measure what late chunks cost a policy, and what wins it back: real-time chunking, ensembling, learning under delay.

For every seed: 300 demonstrations of the two faucets, a tiny pi0 and a tiny SmolVLA that learn chunks of eight actions
from them (tiny_pi0_sft, tiny_smolvla_sft), and GRPO of that pi0 for 75 iterations without delay and under a delay of
four steps. All decide every four steps, and their chunks are there 0, 1, 2 or 4 steps after the observation (after GRPO
0 or 4, where the chunk before goes on); 256 held-out episodes each. About 40 minutes of two cores for each seed. What
is there is kept, and what was stopped with Ctrl-C goes on with the same command.

    python benchmarks/delay.py --work DIR    # writes benchmarks/results/delay.json
    python benchmarks/delay.py --report      # writes docs/results/delay.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from robustness import with_interval
from tiny_vla import Seconds, once
from tiny_vla_report import PAGES, RESULTS, TEXTS, seeds_and_work

DELAYS = (0, 1, 2, 4)
TRAINED_UNDER = 4
WAYS = {"the chunk before goes on": [], "real-time chunking": ["model.rtc=5"], "ensembling": ["eval.ensemble=0.01"]}
COMMON = ["tracking.sinks=[jsonl]", "rollout.chunk_size=8"]
EVERY = ["eval.actions=4", "eval.episodes=256"]

Rates = dict[str, dict[str, dict[str, float]]]
"""Success by policy, way and delay."""


def policies(seed: int, work: Path, seconds: Seconds) -> dict[str, Path]:
    """Train the policies of a seed; returns their runs by name."""
    demonstrations, common = work / "demonstrations", [f"seed={seed}", *COMMON]
    recording = ["env.end_at_success=false", "--episodes", "300", "--pushes", "1.5", "--after-success", "7"]
    once(demonstrations, seconds, "collect", "tiny_pi0_sft", *common, f"data.path={demonstrations}", *recording)
    found = {}
    for model in ("pi0", "smolvla"):
        found[model] = run = work / model
        words = [f"tiny_{model}_sft", *common, f"data.path={demonstrations}", f"run.dir={run}"]
        once(run, seconds, "run", *words)
    start = f"model.checkpoint={found['pi0']}/checkpoints/last/policy"
    for delay in (0, TRAINED_UNDER):
        found[f"GRPO, delay {delay}"] = run = work / f"grpo_{delay}"
        words = ["tiny_pi0_grpo", *common, start, f"rollout.delay={delay}", "run.eval_every=0", f"run.dir={run}"]
        once(run, seconds, "run", *words)
    return found


def one_seed(seed: int, work: Path) -> dict[str, Any]:
    """Train and evaluate the policies of a seed."""
    seconds: Seconds = {}
    rates: Rates = {}
    for name, run in policies(seed, work, seconds).items():
        learned_by_grpo = run.name.startswith("grpo")
        for way, words in list(WAYS.items())[: 1 if learned_by_grpo else None]:
            for delay in (0, TRAINED_UNDER) if learned_by_grpo else DELAYS:
                if way == "ensembling" and delay == TRAINED_UNDER:
                    continue  # four of eight actions are executed, and four are late: nothing overlaps
                out = work / "evaluations" / f"{run.name}_{[*WAYS].index(way)}_{delay}"
                once(out, seconds, "eval", str(run), *EVERY, f"eval.delay={delay}", *words, "--out", str(out))
                [row] = json.loads((out / "results.json").read_text())["evaluations"]
                rates.setdefault(name, {}).setdefault(way, {})[str(delay)] = row["success"]
    return {"seed": seed, "success": rates, "seconds": seconds}


# ---- the page


def rates_of(seeds: Sequence[dict[str, Any]], name: str, way: str, delay: int) -> str:
    """Return the success of each seed in a case, and their mean in bold [points of 100]."""
    row = [each["success"][name][way].get(str(delay)) for each in seeds]
    if None in row:
        return "-"
    return f"**{100 * fmean(row):.0f}** ({', '.join(f'{100 * rate:.0f}' for rate in row)})"


def table(seeds: Sequence[dict[str, Any]], name: str) -> str:
    """Return the success of a policy by way and delay: mean over seeds, and each of them."""
    lines = ["| | " + " | ".join(f"delay {delay}" for delay in DELAYS) + " |", "|---" * (len(DELAYS) + 1) + "|"]
    lines += [f"| {way} | {' | '.join(rates_of(seeds, name, way, delay) for delay in DELAYS)} |" for way in WAYS]
    return "\n".join(lines)


def table_of_learning(seeds: Sequence[dict[str, Any]]) -> str:
    """Return the success of pi0 before and after GRPO, without and under delay."""
    plain, found = next(iter(WAYS)), ["| | acts without delay | acts 4 steps late |", "|---|---|---|"]
    names = {"pi0": "from demonstrations", "GRPO, delay 0": "GRPO without delay", "GRPO, delay 4": "GRPO under delay 4"}
    for name, text in names.items():
        found.append(f"| {text} | {' | '.join(rates_of(seeds, name, plain, delay) for delay in (0, TRAINED_UNDER))} |")
    return "\n".join(found)


def gains(seeds: Sequence[dict[str, Any]], one: tuple[str, str, int], two: tuple[str, str, int]) -> str:
    """Return by how much the second of two cases (policy, way, delay) is better, with its interval [points of 100]."""

    def rate(each: dict[str, Any], case: tuple[str, str, int]) -> Any:
        return each["success"][case[0]][case[1]].get(str(case[2]))

    if rate(seeds[0], two) is None:
        return "-"
    return with_interval([rate(each, two) - rate(each, one) for each in seeds])


def differences(seeds: Sequence[dict[str, Any]]) -> str:
    """Return what a delay costs each policy, and what each way wins back."""
    plain, *others = WAYS
    lines = ["| policy | delay | costs | " + " | ".join(f"{way} wins back" for way in others) + " |"]
    lines.append("|---" * (3 + len(others)) + "|")
    for name in ("pi0", "smolvla"):
        for delay in DELAYS[1:]:
            late = (name, plain, delay)
            cells = [name, str(delay), gains(seeds, (name, plain, 0), late)]
            cells += [gains(seeds, late, (name, way, delay)) for way in others]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report() -> None:
    """Write the page from the committed numbers."""
    seeds = json.loads((RESULTS / "delay.json").read_text())["seeds"]
    plain = next(iter(WAYS))
    parts: dict[str, Any] = {name: table(seeds, name) for name in ("pi0", "smolvla")}
    parts["grpo"] = table_of_learning(seeds)
    untrained, trained = ((name, plain, TRAINED_UNDER) for name in ("GRPO, delay 0", f"GRPO, delay {TRAINED_UNDER}"))
    parts |= {"differences": differences(seeds), "learned": gains(seeds, untrained, trained)}
    (PAGES / "delay.md").write_text((TEXTS / "delay.md").read_text().format(**parts))


def main() -> None:
    """Run all seeds, or write the page."""
    asked = seeds_and_work(__doc__).parse_args()
    if asked.report:
        report()
        return
    found = []
    for seed in asked.seeds:
        found.append(one_seed(seed, asked.work / f"seed{seed}"))
        (RESULTS / "delay.json").write_text(json.dumps({"seeds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
