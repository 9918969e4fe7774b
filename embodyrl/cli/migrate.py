"""`embodyrl migrate`: writes a config of RLinf as one of embodyrl, and accounts for every key of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from embodyrl.cli.arguments import CommandLineError, check_place
from embodyrl.config import ConfigUse, load_config
from embodyrl.config.issues import ConfigError
from embodyrl.config.rules import public_checkpoints
from embodyrl.config.schema import LEFT_OPEN
from embodyrl.errors import shell_command, without_controls
from embodyrl.files import write_whole
from embodyrl.migrate.files import read_rlinf
from embodyrl.migrate.migration import account, to_yaml
from embodyrl.migrate.rlinf import convert


def migrate(path: Path, out: Path | None) -> int:
    """Convert a config of RLinf and check the result; returns the exit code.

    Args:
        path: the YAML file; files that its `defaults` name are looked up in its folder.
        out: where the result goes; None: to stdout. What is said about it goes to stderr then.

    Raises:
        CommandLineError: `out` exists, or cannot be written.
        RLinfError: the file is no config of RLinf, or has nothing that could be converted.
        ConfigError: a file is not legal YAML, or the result has faults; it is written all the same.
    """
    if out is not None and out.exists():
        raise CommandLineError(f"{out} exists: give a name that is free to --out")
    check_place(out, "--out")
    found = convert(read_rlinf(path))
    text = without_controls(to_yaml(found))
    stream = sys.stderr if out is None else sys.stdout
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "migrated.yaml" if out is None else out
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        print(without_controls("\n".join(account(found))), file=stream)
        try:
            loaded = load_config(file, use=ConfigUse.elsewhere)
        except ConfigError:
            print("\nThe result has faults that the conversion could not decide:", file=stream, flush=True)
            raise
    print(f"\n{out or 'The result'}: OK, {loaded.values} values, 0 faults", file=stream)
    if out is not None:
        known = [*public_checkpoints(loaded.config), "WEIGHTS"]
        weights = f" model.checkpoint={known[0]}" if loaded.config.model.checkpoint == LEFT_OPEN else ""
        print(f"next: {shell_command('plan', out)} --elsewhere, then {shell_command('run', out)}{weights}", file=stream)
    return 0
