"""The commands that start simulators: run, resume, eval."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl.cli.follow import follow, leading
from embodyrl.cli.header import header
from embodyrl.config import LoadedConfig
from embodyrl.config.build import differences
from embodyrl.config.schema import Config
from embodyrl.errors import UserError, without_controls
from embodyrl.placement.ranks import Place, is_follower, place_here
from embodyrl.runner.checkpoint import POLICY, Manifest, find, find_and_tell
from embodyrl.runner.rundir import (
    CONFIG_FILE,
    SOURCES,
    RunDir,
    mend,
    read_config,
    read_saved,
    sources_not_needed,
    write_config,
)
from embodyrl.runner.stopping import Interrupted

RESUMABLE = (
    *("run.", "tracking.", "env.workers", "env.numa", "env.offload", "env.max_restarts"),
    *("engine.offload", "engine.micro_batch_size", "engine.gradient_checkpointing", "engine.parallel."),
)
"""Settings that may change when a run goes on, because they do not change what is learned (micro-batches: but for
rounding); a dot at the end stands for the whole section."""
FIXED = ("run.name", "run.dir")
"""Settings of those sections that may not."""
FILMED = 4
"""Episodes that `embodyrl eval --video` films where the config films none."""


def run(loaded: LoadedConfig) -> int:
    """Train from the start."""
    started = time.monotonic()
    place = place_here(loaded.config)
    if is_follower():
        return follow(loaded.config, place, started=started)
    with held(RunDir.create(loaded.config)) as directory:
        write_config(directory.path, loaded)
        show(directory, header(loaded, directory.path))
        return _train(loaded, directory, place, started=started, checkpoint=None)


def resume(run_dir: Path, overrides: Sequence[str], *, trust: bool = False) -> int:
    """Go on from the last checkpoint of a run directory; `trust` runs its plug-ins, whoever made it."""
    started = time.monotonic()
    if is_follower():
        config = read_config(run_dir, overrides, SOURCES, trust=trust).config
        return follow(config, place_here(config), started=started)
    with held(RunDir.open(run_dir)) as directory:
        found = find(run_dir)
        if (mended := mend(run_dir, found.place)) is not None:
            show(directory, mended)
        sources = sources_not_needed(found.place)
        loaded = read_config(run_dir, overrides, sources, trust=trust)
        if loaded.config.algorithm.kl_coef > 0.0:  # the policy stays near the one that the run began with
            loaded = read_config(run_dir, overrides, trust=trust)
        refuse_another_run(read_config(found.place, [], sources, trust=trust).config, loaded.config)
        if is_over(Manifest.read(found.place), loaded.config) and _has_summary(run_dir):
            show(directory, f"{run_dir} is done. For more: embodyrl resume {run_dir} run.iterations=N")
            return 0
        write_config(run_dir, loaded)  # what was changed stays changed when the run goes on once more
        show(directory, f"{header(loaded, run_dir)}\n  {'resume':<11}from {found.place}")
        if found.warning is not None:
            show(directory, found.warning)
        place = place_here(loaded.config)
        return _train(loaded, directory, place, started=started, checkpoint=found.place)


def _has_summary(run_dir: Path) -> bool:
    """Whether the run has left its summary, undamaged."""
    from embodyrl.tracking.report import SummaryError, read_summary

    try:
        read_summary(run_dir)
    except SummaryError:
        return False
    return True


def is_over(manifest: Manifest, config: Config) -> bool:
    """Whether a run has nothing left to do: it has come to its end, and what that is worth is known."""
    success, target = manifest.metrics.get("eval/success_once"), config.run.stop_at_success
    enough = manifest.iteration >= config.run.iterations or (target is not None and (success or 0.0) >= target)
    return success is not None and enough


def refuse_another_run(saved: Config, wanted: Config) -> None:
    """Compare the settings of a checkpoint with those that the run is to go on with.

    Raises:
        UserError: some that make it a different run have changed; names them.
    """
    changed = [
        f"{key} = {now!r} (it was {before!r})"
        for key, (before, now) in differences(saved, wanted).items()
        if key in FIXED or not key.startswith(RESUMABLE)
    ]
    if changed:
        raise UserError(
            f"{', '.join(changed)} cannot change when a run goes on: only settings of the sections run and tracking, "
            f"{', '.join(key.rstrip('.') for key in RESUMABLE[2:])} can; start a new run for anything else"
        )


@contextmanager
def held(directory: RunDir) -> Iterator[RunDir]:
    """Release a run directory at the end; what goes wrong meanwhile goes into its log as well."""
    try:
        yield directory
    except Exception as error:
        directory.note(without_controls(f"failed: {error}"))
        raise
    except Interrupted as error:
        directory.note(str(error))
        raise
    finally:
        directory.close()


def _train(loaded: LoadedConfig, directory: RunDir, place: Place, *, started: float, checkpoint: Path | None) -> int:
    from embodyrl.runner.build import open_runner

    print(f"  {'starting':<11}simulators and torch, a few seconds ...", flush=True)
    with (
        leading(loaded.config, place, directory.path, checkpoint) as ranks,
        open_runner(loaded, directory, started=started, checkpoint=checkpoint, place=place, ranks=ranks) as runner,
    ):
        code = runner.run()
        summary = runner.summary()
    show(directory, closing_lines(summary, directory.path))
    return code


def show(directory: RunDir, text: str) -> None:
    """Put text on the screen and into run.log."""
    text = without_controls(text)
    print(text, flush=True)
    directory.note(text)


def report(run_dir: Path) -> int:
    """Build report.html of a run directory anew."""
    from embodyrl.tracking.jsonl import METRICS_FILE, read_rows
    from embodyrl.tracking.report import SUMMARY_FILE, write_report

    for name in (CONFIG_FILE, SUMMARY_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} holds no {name}: give the directory of a run that ended or was stopped")
    print(f"written to {write_report(run_dir)}")
    metrics = run_dir / METRICS_FILE
    if metrics.exists() and (odd := read_rows(metrics)[1]):
        print(f"warning: left out what is no row of metrics: {odd} line(s) of {metrics}")
    return 0


def closing_lines(summary: dict[str, Any], run_dir: Path) -> str:
    """The last lines on the screen: what came of it, and what to do next."""
    evaluations = summary["evaluations"]
    rates = [f"{evaluations[key]['eval/success_once']:.2f}" for key in sorted(evaluations, key=int)]
    success = f"   success {' -> '.join(rates)}" if rates else ""
    ending = "done" if summary["stopped_by"] is None else f"stopped by {summary['stopped_by']}, saved"
    return (
        f"{ending} in {summary['wall_s']:.1f} s   {summary['env_steps']} env steps, "
        f"{summary['env_steps_per_s']:.0f} per second{success}\n"
        f"report: {run_dir / 'report.html'}\n"
        f"next: embodyrl eval {run_dir}   |   "
        f"embodyrl resume {run_dir} run.iterations={2 * summary['iterations']}   |   tensorboard --logdir {run_dir}"
    )


def evaluate(path: Path, overrides: Sequence[str], video: Path | None = None, *, trust: bool = False) -> int:
    """Evaluate a checkpoint; `video` is where a film of its first episodes goes, `trust` runs its plug-ins, whoever
    made it."""
    if video is not None and video.suffix != ".mp4":
        raise UserError(f"--video {video}: films are MP4 files, so name one that ends in .mp4")
    checkpoint = find_and_tell(path)
    loaded = read_saved(checkpoint, overrides, trust=trust)

    from embodyrl.runner.build import build_saved, open_simulators
    from embodyrl.runner.evaluation import evaluate as play
    from embodyrl.runner.evaluation import evaluation_noise, held_out_episodes
    from embodyrl.runner.film import Film

    config = loaded.config
    what = f"evaluating {checkpoint}: {config.eval.episodes} episodes of {', '.join(config.env.tasks)}"
    print(without_controls(what), flush=True)
    with tempfile.TemporaryDirectory() as logs, open_simulators(loaded, Path(logs)) as manager:
        engine = build_saved(config, manager, checkpoint / POLICY)
        episodes, noise = held_out_episodes(config), evaluation_noise(config, engine)
        if video is None:
            print(play(manager, engine, episodes, noise=noise).line(), flush=True)
        else:
            with Film(manager, video, episodes[: config.tracking.video.episodes or FILMED]) as film:
                print(play(manager, engine, episodes, film, noise).line(), flush=True)
            print(f"filmed the first {film.count}: {video}", flush=True)
    return 0
