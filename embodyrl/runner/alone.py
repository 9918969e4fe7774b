"""Runs of methods that learn in one process from data alone: no simulators, no checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config
from embodyrl.runner.build import ProgramInfo, open_sinks, settings_of_torch_kept
from embodyrl.runner.rundir import RunDir

if TYPE_CHECKING:
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.envs import SimulatorSpec


def learn_alone(loaded: LoadedConfig, directory: RunDir, host: ProgramInfo) -> None:
    """Learn, and write the result into a run directory.

    Args:
        loaded: the config.
        directory: of the run.
        host: settings of the program that the run is part of.

    Raises:
        DatasetError: the demonstrations do not suffice.
    """
    from embodyrl.methods.learner import alone_class
    from embodyrl.runner.build import SpecOnly, build_engine
    from embodyrl.runner.checkpointing import is_due

    def build(config: Config, spec: SimulatorSpec) -> HybridEngine:
        return build_engine(config, SpecOnly(spec), weights=None, folder=directory.path)

    started, run = time.monotonic(), loaded.config.run
    with open_sinks(loaded, directory, 0, host) as sinks, settings_of_torch_kept():

        def message(text: str) -> None:
            directory.note(text)
            for sink in sinks:
                sink.message(text)

        method = alone_class(loaded.config.algorithm)(loaded.config, build)
        message(method.describe())
        for iteration in range(1, run.iterations + 1):
            begun = time.perf_counter()
            metrics = method.iterate(iteration)
            metrics["time/iteration"] = time.perf_counter() - begun
            if iteration == run.iterations or is_due(iteration, run.eval_every):
                metrics |= method.evaluate(message)
            directory.keep()
            for sink in sinks:
                sink.log(iteration, metrics)
        method.write(directory.path)
        first, *others = method.closing(directory.path)
        message(f"done in {time.monotonic() - started:.1f} s   {first}")
        for line in others:
            message(line)


def written_by(config: Config, run_dir: Path) -> Path:
    """Return the place of what such a run writes at its end."""
    from embodyrl.methods.learner import alone_class

    return run_dir / alone_class(config.algorithm).written
