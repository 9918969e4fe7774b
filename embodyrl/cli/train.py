"""Commands for runs: run, resume, eval, export, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodyrl import api
from embodyrl.config import LoadedConfig
from embodyrl.errors import UserError
from embodyrl.models.saved import own_folder_settings
from embodyrl.runner.checkpoint import find_and_tell
from embodyrl.runner.rundir import CONFIG_FILE, read_saved
from embodyrl.runner.session import go_on, start
from embodyrl.tracking.report import SUMMARY_FILE, write_report
from embodyrl.tracking.sinks import METRICS_FILE, read_rows


def run(loaded: LoadedConfig) -> int:
    """Train from the start; returns the exit code."""
    return start(loaded).exit_code


def resume(run_dir: Path, overrides: Sequence[str], *, trust: bool = False) -> int:
    """Continue a run from its last checkpoint; returns the exit code. `trust` runs its plug-ins, whoever wrote them."""
    return go_on(run_dir, overrides, trust=trust).exit_code


def evaluate(path: str, overrides: Sequence[str], video: Path | None = None, *, trust: bool = False) -> int:
    """Evaluate a checkpoint; returns the exit code. `video` is the file for a video of the first episodes; `trust` runs
    the checkpoint's plug-ins, whoever wrote them."""
    api.evaluate(path, overrides, video=video, progress=True, trust=trust)
    return 0


def export(path: Path, out: Path, *, adapter: bool = False, trust: bool = False) -> int:
    """Export the policy of a checkpoint, or of a run's last checkpoint; returns the exit code."""
    checkpoint = find_and_tell(path)
    loaded = read_saved(checkpoint, [], trust=trust)

    from embodyrl.runner.export import export as write

    checked = write(checkpoint, loaded, out, adapter=adapter)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"exported {checkpoint} to {out}  ({size / 2**20:.1f} MiB; {checked})")
    if not adapter:
        settings = own_folder_settings(loaded.config.model, str(out))
        print(f"next: embodyrl run {out}/training.yaml {' '.join(settings)} run.dir=NEW")
    return 0


def report(run_dir: Path) -> int:
    """Write report.html of a run directory again; returns the exit code."""
    for name in (CONFIG_FILE, SUMMARY_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} holds no {name}: give the directory of a run that ended or was stopped")
    print(f"written to {write_report(run_dir)}")
    metrics = run_dir / METRICS_FILE
    if metrics.exists() and (odd := read_rows(metrics)[1]):
        print(f"warning: left out what is no row of metrics: {odd} line(s) of {metrics}")
    return 0
