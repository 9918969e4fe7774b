"""`embodyrl export`: a policy for others."""

from __future__ import annotations

from pathlib import Path

from embodyrl.models.saved import own_folder_settings
from embodyrl.runner.checkpoint import find_and_tell
from embodyrl.runner.rundir import read_saved


def run(path: Path, out: Path, *, adapter: bool = False, trust: bool = False) -> int:
    """Export the policy of a checkpoint or of a run's last one; returns the exit code."""
    checkpoint = find_and_tell(path)
    loaded = read_saved(checkpoint, [], trust=trust)

    from embodyrl.runner.export import export

    checked = export(checkpoint, loaded, out, adapter=adapter)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"exported {checkpoint} to {out}  ({size / 2**20:.1f} MiB; {checked})")
    if not adapter:
        settings = own_folder_settings(loaded.config.model, str(out))
        print(f"next: embodyrl run {out}/training.yaml {' '.join(settings)} run.dir=NEW")
    return 0
