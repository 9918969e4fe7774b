"""What simulator, model and algorithm promise together: the smallest run of a config, from its rollout to its
checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.checking.promises import Bench, Broken, DoesNotApply, Promise, needed, promise
from embodyrl.checking.simulators import LIMIT
from embodyrl.config import LoadedConfig
from embodyrl.config.algorithm_rules import PARTS
from embodyrl.config.build import with_values
from embodyrl.config.issues import KeyPath, key_path
from embodyrl.config.schema import Config, PlacementBackend, RolloutMode
from embodyrl.errors import line_of
from embodyrl.registry import SIMULATORS, SupportedModel
from embodyrl.runner.build import ProgramInfo, SpecOnly, build_acting, settings_of_torch_kept
from embodyrl.runner.checkpoint import POLICY, verify
from embodyrl.runner.reproduction import LOCK_FILE, Lock, outputs_of
from embodyrl.runner.session import Ending, start
from embodyrl.runner.stopping import raise_interrupt
from embodyrl.runs import CHECKPOINTS, LAST, LOG_FILE, METRICS_FILE
from embodyrl.runs.metrics import read_rows

EPISODES = 2
"""Episodes of the evaluation."""
BATCH = 4
"""Decisions in a minibatch from a replay."""
TOLERANCE = 1e-5
"""Largest difference of what a loaded policy makes of the same inputs."""

PROMISES: list[Promise[LearningBench]] = []
_promise = functools.partial(promise, PROMISES)


def smallest(config: Config, folder: Path) -> Config:
    """Return the smallest run of a config: an iteration of short episodes in one simulator process."""
    rollout, group = config.rollout, config.rollout.group_size
    values: dict[str, Any] = {
        "run.dir": str(folder),
        "run.iterations": 1,
        "run.eval_every": 0,
        "run.save_every": 1,
        "run.save_async": False,
        "run.stop_at_success": None,
        "env.num_envs": group if group > 1 else 2,
        "env.workers": 1,
        "env.max_episode_steps": LIMIT,
        "eval.episodes": EPISODES,
        "rollout.num_chunks": math.ceil(LIMIT / rollout.chunk_size),
        "rollout.episodes_per_slot": 1,
        "rollout.blocks": "auto",
        "rollout.mode": RolloutMode.sync,
        "engine.micro_batch_size": None,
        "engine.parallel.world_size": 1,
        "placement.backend": PlacementBackend.local,
        "placement.rollout.workers": 0,
        "data.batch_size": BATCH,
        "data.steps": 1,
        "tracking.sinks": ["jsonl"],
        "tracking.report": False,
        "tracking.video.episodes": 0,
        **config.algorithm.smallest(),
    }
    found: Mapping[KeyPath, Any] = {key_path(key): value for key, value in values.items() if _has(config, key)}
    changed: Config = with_values(config, found)
    return changed


def _has(config: Config, key: str) -> bool:
    """Return whether a config has a setting."""
    section: Any = config
    for name in key.split("."):
        if not hasattr(section, name):
            return False
        section = getattr(section, name)
    return True


class LearningBench(Bench):
    """The smallest run of a config."""

    def __init__(self, loaded: LoadedConfig, folder: Path, modules: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self.loaded = dataclasses.replace(loaded, config=smallest(loaded.config, folder / "run"))

    def owners(self) -> list[type]:
        """Return the classes whose methods promises name."""
        target = SupportedModel.entry(self.loaded.config.model.name).target
        slots = SIMULATORS.entry(self.loaded.config.env.name).target
        return [each for each in (target, slots) if isinstance(each, type)] + super().owners()

    def place(self, error: BaseException, method: str) -> str:
        """Return the line of the loss, reward, advantage or filter that an error names, or see `Bench.place`."""
        for kind, part in self.loaded.config.algorithm.parts().items():
            registry = PARTS[kind]
            entry = registry.entry(part.name)
            if entry.source != "built-in" and (function := entry.load()).__module__ in str(error):
                return line_of(function)
        return super().place(error, method)

    @needed
    def ending(self) -> Ending:
        """The smallest run."""
        if self.loaded.config.algorithm.needs(self.loaded.config).alone:
            raise DoesNotApply("it learns no policy")
        return start(self.loaded, ProgramInfo(progress=False, leave=raise_interrupt))

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the run."""
        return (self.ending.run_dir / CHECKPOINTS / LAST).resolve()


@_promise("one iteration runs: rollout, update, evaluation", "act")
def one_iteration_runs(bench: LearningBench) -> None:
    """Check that the run comes to its end."""
    assert bench.ending.exit_code == 0


@_promise("the update gives finite losses and gradients", "evaluate")
def update_is_finite(bench: LearningBench) -> None:
    """Check the metrics of the iteration."""
    rows, _ = read_rows(bench.ending.run_dir / METRICS_FILE)
    (row,) = [each for each in rows if each["iteration"] == 1][-1:]
    wrong = [name for name, value in row.items() if name in ("train/loss", "train/grad_norm") and value is None]
    remedy = "see train/loss by algorithm.epochs=1; keep log-probs and values in float32"
    if row.get("train/skipped_steps"):
        raise Broken("the optimizer step was skipped: loss or gradient is NaN or infinite", remedy)
    if wrong:
        raise Broken(f"{' and '.join(wrong)} are NaN or infinite", remedy)


@_promise("a checkpoint is saved, whole and with its record of reproduction", "save")
def checkpoint_is_whole(bench: LearningBench) -> None:
    """Check its files."""
    verify(bench.checkpoint)
    if not (bench.checkpoint / LOCK_FILE).is_file():
        log = (bench.ending.run_dir / LOG_FILE).read_text().splitlines()
        why = next((line.partition("failed: ")[2] for line in log if "no record of reproduction" in line), "")
        raise Broken(f"it has no record of reproduction: {why or 'see run.log'}", "", method="act")


@_promise("the checkpoint loads, and its policy decides as the one that was saved", "load")
def checkpoint_loads(bench: LearningBench) -> None:
    """Check what the loaded policy makes of the inputs of the record."""
    import torch

    place = bench.checkpoint
    if not (place / LOCK_FILE).is_file():
        raise DoesNotApply("there is no record to compare with")
    lock = Lock.load(place / LOCK_FILE)
    assert bench.ending.spec is not None
    with settings_of_torch_kept():
        engine = build_acting(bench.loaded.config, SpecOnly(bench.ending.spec), place / POLICY)
        found = outputs_of(engine, lock.inputs)
    for name, wanted in lock.outputs.items():
        if not torch.allclose(found[name], wanted, atol=TOLERANCE, rtol=TOLERANCE):
            difference = float((found[name] - wanted).abs().max())
            remedy = "register what decides actions as nn.Parameter, nn.Module or with register_buffer"
            raise Broken(f"{name} of the loaded policy differ by up to {difference:.2g}", remedy, method="save")
