"""What a run needs to go on, apart from the policy's weights: counters, optimiser, random streams, simulators' states,
and what was collected and not learned from yet."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.runner.checkpoint import DamageError
from embodyrl.runner.tree_file import cloned, load_tree, map_tensors, save_tree, tensors_in

COUNTERS = "counters.json"
ENGINE = "engine"
SIMULATORS = "simulators"
SURPLUS = "surplus.safetensors"


@dataclass(kw_only=True)
class TrainerState:
    """Everything a run needs to go on, apart from the policy's weights."""

    counters: dict[str, Any]
    """JSON: iteration, env steps, collector, first evaluation, ..."""
    engine: dict[str, Any]
    """`HybridEngine.state_dict`: optimiser and random streams."""
    simulators: list[bytes]
    """State of every slot; empty if no episode is in progress."""
    surplus: TrajectoryBatch | None = None
    """What was collected and not learned from yet."""

    def save(self, folder: Path) -> None:
        """Write into an existing folder."""
        (folder / COUNTERS).write_text(json.dumps(self.counters, indent=2) + "\n")
        save_tree(self.engine, folder, ENGINE)
        (folder / SIMULATORS).mkdir()
        for slot, state in enumerate(self.simulators):
            (folder / SIMULATORS / f"slot_{slot:04d}.bin").write_bytes(state)
        if self.surplus is not None:
            self.surplus.save(folder / SURPLUS)

    def apart(self) -> TrainerState:
        """The same in memory of its own, on the CPU."""
        waiting = self.surplus
        return TrainerState(
            counters=copy.deepcopy(self.counters),
            engine=map_tensors(cloned, self.engine),
            simulators=list(self.simulators),
            surplus=None if waiting is None else waiting.take(torch.arange(waiting.size[1]), "B"),
        )

    @property
    def nbytes(self) -> int:
        """About the size of its files."""
        surplus = () if self.surplus is None else self.surplus.data.values(True, True)
        return sum(each.nbytes for each in [*tensors_in(self.engine), *surplus]) + sum(map(len, self.simulators))

    @classmethod
    def load(cls, folder: Path) -> TrainerState:
        """Read what `save` wrote; nothing that the files hold is executed.

        Raises:
            DamageError: they are not what `save` writes.
        """
        try:
            return cls(
                counters=dict(json.loads((folder / COUNTERS).read_text())),
                engine=dict(load_tree(folder, ENGINE)),
                simulators=[path.read_bytes() for path in sorted((folder / SIMULATORS).glob("slot_*.bin"))],
                surplus=TrajectoryBatch.load(folder / SURPLUS) if (folder / SURPLUS).exists() else None,
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DamageError(
                f"{folder} does not hold the state of a run ({type(error).__name__}: {error}): use another checkpoint"
            ) from error


def check_alike(found: Any, expected: Any, where: str) -> None:
    """Compare what a checkpoint says with what a run of the same config says at its start.

    Raises:
        DamageError: names every value that is missing, unknown, of another type, or of another length.
    """
    if faults := list(_differences(found, expected, "")):
        raise DamageError(f"{where} does not fit this run: {'; '.join(faults)}. Use another checkpoint")


def _differences(found: Any, expected: Any, name: str) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict) and expected:
        yield from (f"{name}{key} is missing" for key in expected.keys() - found.keys())
        yield from (f"{name}{key} is unknown" for key in found.keys() - expected.keys())
        for key in expected.keys() & found.keys():
            yield from _differences(found[key], expected[key], f"{name}{key}.")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{name[:-1]} has {len(found)} entries instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(one, other, f"{name}{index}.")
    elif not isinstance(found, int | float if isinstance(expected, float) else type(expected)):
        yield f"{name[:-1]} is {found!r} instead of a {type(expected).__name__}"
