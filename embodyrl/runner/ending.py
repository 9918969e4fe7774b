"""What a run leaves when it ends: its summary, and its report."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from embodyrl.config import config_hash
from embodyrl.errors import UserError, shell_command
from embodyrl.files import write_whole
from embodyrl.runner.context import RunContext
from embodyrl.runs import REPORT_FILE, SUMMARY_FILE
from embodyrl.tracking.machine import machine_facts, memory_mib
from embodyrl.tracking.report import write_report
from embodyrl.version import __version__


def write_ending(context: RunContext, summary: Mapping[str, Any]) -> None:
    """Write summary and report into the run directory.

    Args:
        context: of the run.
        summary: see `summary_of`.
    """
    write_whole(context.run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    (context.run_dir / REPORT_FILE).unlink(missing_ok=True)  # of a run that ended earlier
    if not context.config.tracking.report:
        return
    try:
        write_report(context.run_dir)
    except (UserError, OSError) as error:  # what was learned is saved
        remedy = shell_command("report", context.run_dir)
        context.message(f"warning: no {REPORT_FILE}: {error}. Once that is fixed: {remedy}")


def summary_of(context: RunContext, stopped_by: str | None) -> dict[str, Any]:
    """Return the contents of `summary.json`.

    Args:
        context: of the run.
        stopped_by: what ended it early; None: nothing did.
    """
    progress = context.progress
    evaluations, baseline = progress.evaluations, context.learner.baseline
    final = evaluations[max(evaluations, key=int)] if evaluations else {}
    return {
        "name": context.loaded.written.run.name,
        **final,
        "iterations": progress.iteration,
        "env_steps": progress.env_steps,
        "wall_s": round(context.wall_s, 3),
        "phases_s": {phase: round(seconds, 3) for phase, seconds in progress.phases_s.items()},
        "env_steps_per_s": round(progress.env_steps / max(progress.train_s, 1e-9), 1),
        "seed": context.config.seed,
        "stopped_by": stopped_by,
        **({} if baseline is None else {baseline.key: evaluations.get("0")}),
        "evaluations": evaluations,
        "config_hash": config_hash(context.loaded.written),
        "versions": {"embodyrl": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine_facts(),
        "memory_mib": memory_mib(),
    }
