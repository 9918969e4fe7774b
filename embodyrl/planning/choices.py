"""Settings that are `auto`: the values that a run takes, the fastest that fit into memory, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config.build import with_values
from embodyrl.config.issues import KeyPath, dotted
from embodyrl.config.schema import AUTO, Config, ModelConfig, ParallelBackend
from embodyrl.models.saved import LARGE
from embodyrl.registry import SupportedModel

BACKEND: KeyPath = ("engine", "parallel", "backend")
CHECKPOINTING: KeyPath = ("engine", "gradient_checkpointing")
FILLED = 0.9
"""Share of the memory that a choice may fill: activations are estimates, and allocators lose some to fragments."""
GB = 10**9
FASTEST = {BACKEND: "each rank has room for a copy", CHECKPOINTING: "the update fits as it is"}
OTHERWISE = {BACKEND: "a copy on each rank", CHECKPOINTING: "without it the run"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value of a setting that the config leaves to the program."""

    setting: str
    value: bool | int | str
    why: str

    def __str__(self) -> str:
        """Return the choice as an override, and the reason."""
        return f"{self.setting}={str(self.value).lower() if isinstance(self.value, bool) else self.value} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory of the place that is filled the most."""

    need: float
    """Its peak [bytes]."""
    limit: float | None
    """What there is [bytes]; None: unknown."""

    @property
    def fits(self) -> bool:
        """Whether the estimate leaves room for its errors."""
        return self.limit is None or self.need <= FILLED * self.limit

    def __str__(self) -> str:
        """Return the memory for people, as in `31 of 80 GB`."""
        of = "" if self.limit is None else f" of {self.limit / GB:.3g}"
        return f"{self.need / GB:.3g}{of} GB"


def is_large(model: ModelConfig) -> bool:
    """Return whether a model has a checkpoint of about `LARGE` weights or more; its files' sizes tell. A smaller one is
    built sooner than planned, and its memory does not matter."""
    if model.checkpoint is None:
        return False
    folder = Path(model.checkpoint)
    if not folder.is_dir():
        return SupportedModel.entry(model.name).published is not None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) >= 2 * LARGE


def candidates(config: Config, ranks: int, ranks_here: int) -> Iterator[dict[KeyPath, Any]]:
    """Yield values for the settings that share out memory, the fastest first; those that are not `auto` as they are.

    Replicas exchange gradients alone, shards all weights several times per minibatch, so that computing activations
    again, a third of an update, costs less."""
    parallel, engine = config.engine.parallel, config.engine
    backends = [parallel.backend]
    if parallel.backend is ParallelBackend.auto:
        backends = [ParallelBackend.none]
        if ranks > 1 and engine.optimizer.name != "adamw_8bit":  # which cannot step shards
            several = 1 < ranks_here < ranks and ranks % ranks_here == 0
            backends += [ParallelBackend.hsdp, ParallelBackend.fsdp] if several else [ParallelBackend.fsdp]
    checkpointing = [engine.gradient_checkpointing]
    if engine.gradient_checkpointing == AUTO:
        checkpointing = [False, True] if SupportedModel.entry(config.model.name).blocks else [False]
    for backend in backends:
        for recomputed in checkpointing:
            yield {BACKEND: backend, CHECKPOINTING: recomputed}


def choose_memory(
    config: Config, options: Sequence[Mapping[KeyPath, Any]], fit: Callable[[Config], Fit]
) -> tuple[Mapping[KeyPath, Any], list[Choice]]:
    """Return the first option that fits, else the last, and the reasons; for a small model the first."""
    left = [path for path in (BACKEND, CHECKPOINTING) if len({option[path] for option in options}) > 1]
    if not left or not is_large(config.model):
        return options[0], [Choice(setting=dotted(path), value=options[0][path], why="a small model") for path in left]
    tried: list[tuple[Mapping[KeyPath, Any], Fit]] = []
    for option in options:
        tried.append((option, fit(with_values(config, option))))
        if tried[-1][1].fits:
            break
    chosen, need = tried[-1]
    return chosen, [
        Choice(setting=dotted(path), value=chosen[path], why=_why(path, chosen, need, tried)) for path in left
    ]


def _why(
    path: KeyPath, chosen: Mapping[KeyPath, Any], need: Fit, tried: Sequence[tuple[Mapping[KeyPath, Any], Fit]]
) -> str:
    """Return why a setting has its value: the fastest fits, or it would not."""
    fastest = tried[0][0][path]
    if need.limit is None:
        return "the memory is not known"
    if chosen[path] == fastest:
        return f"{FASTEST[path]}: {need}"
    without = next(fit for option, fit in reversed(tried) if option[path] == fastest)
    return f"{OTHERWISE[path]} would need {without}"
