"""Commands for runs: run (also sweeps), resume, eval, export."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodyrl import api
from embodyrl.cli.arguments import CommandLineError, check_place
from embodyrl.config import ConfigUse, LoadedConfig, load_config
from embodyrl.errors import shell_command
from embodyrl.evaluation.journal import is_journal, read_command
from embodyrl.hub import parse_repo, push, readable_size
from embodyrl.models.saved import own_folder_settings
from embodyrl.runner.checkpoint import find_and_tell, to_act
from embodyrl.runner.rundir import read_saved
from embodyrl.runner.session import go_on, start
from embodyrl.runner.start_rules import start_rules
from embodyrl.screen import counted, say
from embodyrl.sweeps.axes import split_words
from embodyrl.sweeps.folder import is_sweep
from embodyrl.sweeps.session import SweepOptions
from embodyrl.sweeps.session import go_on as go_on_with_sweep
from embodyrl.sweeps.session import start as start_sweep


def run(loaded: LoadedConfig) -> int:
    """Train from the start; returns the exit code."""
    return start(loaded).exit_code


def asks_for_sweep(overrides: Sequence[str], seeds: str | None, at_once: int | None, *, print_config: bool) -> bool:
    """Return whether arguments ask for several runs.

    Raises:
        CommandLineError: they contradict each other.
    """
    axes = split_words(overrides)[1]
    if seeds is None and not axes:
        if at_once is not None:
            raise CommandLineError("--at-once is for several runs: add --seeds N, or settings with several values")
        return False
    if print_config:
        what = f"{axes[0].key} has several values" if axes else "--seeds asks for several runs"
        raise CommandLineError(f"--print-config prints one config, and {what}: give one")
    return True


def sweep(source: str | None, overrides: Sequence[str], *, seeds: str | None, at_once: int | None, trust: bool) -> int:
    """Run all combinations of settings with several values, and seeds; returns the exit code."""

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(source, more, use=ConfigUse.run, also=[start_rules], trust=trust)

    return start_sweep(load, overrides, seeds=seeds, options=SweepOptions(at_once=at_once, trust=trust)).exit_code


def resume(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    at_once: int | None = None,
    without_replay: bool = False,
    trust: bool = False,
) -> int:
    """Continue a run from its last checkpoint, a sweep, or evaluations; returns the exit code. `without_replay`
    continues with an empty one; `trust` runs its plug-ins, whoever wrote them."""
    if without_replay and (is_journal(run_dir) or is_sweep(run_dir)):
        raise CommandLineError(f"--without-replay is for a run, and {run_dir} is none: give the folder of one run")
    if is_journal(run_dir):
        return _resume_evaluations(run_dir, overrides, at_once=at_once, trust=trust)
    if is_sweep(run_dir):
        return go_on_with_sweep(run_dir, SweepOptions(at_once=at_once, overrides=overrides, trust=trust)).exit_code
    if at_once is not None:
        raise CommandLineError(f"--at-once is for sweeps, and {run_dir} is none")
    return go_on(run_dir, overrides, without_replay=without_replay, trust=trust).exit_code


def _resume_evaluations(folder: Path, overrides: Sequence[str], *, at_once: int | None, trust: bool) -> int:
    """Play the episodes that evaluations lack; returns the exit code."""
    if overrides or at_once is not None:
        what = ", ".join([*overrides, *([] if at_once is None else ["--at-once"])])
        raise CommandLineError(
            f"{folder} is an evaluation, which continues as it began: leave out {what}, or evaluate into another folder"
        )
    asked = read_command(folder)
    if asked.has_config:
        raise CommandLineError(
            f"{folder} was begun in Python with a config of its own: continue it there, with the same arguments and "
            f"embodyrl.compare(..., out={str(folder)!r}, resume=True)"
        )
    if missing := asked.missing():
        raise CommandLineError(
            f"{folder} names {missing[0]} from {asked.directory}, and there is none here: "
            f"cd {shlex.quote(asked.directory)} && {shell_command('resume', folder.absolute())}"
        )
    if asked.perturb is not None:
        api.resume_robustness(folder, asked, progress=True, trust=trust)
        return 0
    api.compare(
        asked.policy,
        asked.other,
        asked.overrides,
        protocols=asked.protocols,
        video=asked.video,
        config=asked.config,
        out=folder,
        resume=True,
        progress=True,
        trust=trust,
    )
    return 0


def evaluate(
    path: str,
    overrides: Sequence[str],
    *,
    protocols: Sequence[str] = (),
    other: str | None = None,
    sample: bool = False,
    config: str | None = None,
    video: Path | None = None,
    out: Path | None = None,
    trust: bool = False,
) -> int:
    """Evaluate a policy; returns the exit code. See `embodyrl.compare`; without protocols, a second policy and a
    folder for the results it is one evaluation with the checkpoint's own settings."""
    check_place(out, "--out")
    check_place(video, "--video")
    if not protocols and other is None and out is None:
        api.evaluate(path, overrides, sample=sample, config=config, video=video, progress=True, trust=trust)
        return 0
    api.compare(
        path,
        other,
        overrides,
        protocols=protocols or ("own",),
        sample=sample,
        config=config,
        video=video,
        out=out,
        progress=True,
        trust=trust,
    )
    return 0


def delay(path: str, milliseconds: float, overrides: Sequence[str], config: str | None, *, trust: bool) -> str:
    """Return the override that lets chunks be so late, and say how many control steps that is."""
    steps = api.steps_of_delay(path, milliseconds, overrides, config=config, trust=trust)
    say(f"{milliseconds:g} ms are {counted(steps, 'control step')}: eval.delay={steps}")
    return f"eval.delay={steps}"


@dataclass(frozen=True)
class RobustnessOptions:
    """Arguments of `embodyrl eval --robustness`."""

    kinds: str | None
    levels: str | None


def robustness(
    path: str,
    overrides: Sequence[str],
    options: RobustnessOptions,
    *,
    sample: bool = False,
    config: str | None = None,
    out: Path | None = None,
    trust: bool = False,
) -> int:
    """Evaluate a policy without and with perturbations; returns the exit code. See `embodyrl.robustness`."""
    check_place(out, "--out")
    api.robustness(
        path,
        overrides,
        kinds=options.kinds,
        levels=options.levels,
        sample=sample,
        config=config,
        out=out,
        progress=True,
        trust=trust,
    )
    return 0


@dataclass(frozen=True)
class Upload:
    """Destination of an export on the hub."""

    repo: str
    """`owner/name`."""
    public: bool
    is_agreed: bool
    """Whether nobody is asked."""


def export(
    path: Path, out: Path | None, *, adapter: bool = False, upload: Upload | None = None, trust: bool = False
) -> int:
    """Export the policy of a checkpoint, or of a run's last checkpoint, to a folder, the hub or both; returns the exit
    code."""
    if upload is not None:
        check_upload(upload)
    elif out is None:
        raise CommandLineError("nothing says where the policy goes: give --out DIR, --push OWNER/NAME or both")
    checkpoint = find_and_tell(path, to_act)
    loaded = read_saved(checkpoint, [], trust=trust)

    from embodyrl.runner.export import export as write

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy" if out is None else out
        checked = write(checkpoint, loaded, folder, adapter=adapter)
        size = readable_size(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
        place = "" if out is None else f" to {out}"
        say(f"exported {checkpoint}{place}  ({size}; {checked})")
        if out is not None and not adapter:
            settings = own_folder_settings(loaded.config.model, str(out))
            say(f"next: {shell_command('run', out / 'training.yaml', *settings, 'run.dir=NEW')}")
        if upload is not None:
            agreed = agrees(upload, size)
            print(f"uploaded: {push(folder, upload.repo, public=upload.public)}" if agreed else "nothing was uploaded")
    return 0


def check_upload(upload: Upload) -> None:
    """Check before any work that an upload can be asked for.

    Raises:
        HubError: the name is malformed.
        CommandLineError: stdin is no terminal, and `--yes` is not given.
    """
    parse_repo(upload.repo)
    if not upload.is_agreed and not sys.stdin.isatty():
        raise CommandLineError(f"stdin is no terminal: add --yes to agree to the upload to {upload.repo}")


def agrees(upload: Upload, size: str) -> bool:
    """Ask on the terminal whether to upload, unless that is agreed. The end of the input (Ctrl-D) is a no."""
    who = "public" if upload.public else "private"
    question = f"upload {size} to {upload.repo} ({who} if it is new)? [y/N] "
    try:
        return upload.is_agreed or input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
