"""The rollouts of all ranks as one, which every rank gets whole."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from embodyrl.engine.parallel import Ranks
from embodyrl.rollout.batch import TrajectoryBatch, concat, leaves
from embodyrl.rollout.columns import BatchError, type_name
from embodyrl.rollout.episodes import FinishedEpisode


@dataclass(kw_only=True)
class Rollout:
    """What a collection gave."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, by the decision in which they did, then slot; with several ranks, by rank before that."""
    env_steps: int
    """Control steps executed."""


def gather_rollouts(own: Rollout, ranks: Ranks, episodes_per_slot: int) -> Rollout:
    """What one rank would have collected in the slots of all of them.

    Args:
        own: what this rank collected.
        ranks: all of them.
        episodes_per_slot: the columns of a batch are the first episodes of all slots, then their second ones, ...

    Raises:
        BatchError: the ranks have different columns.
    """
    if ranks.size == 1:
        return own
    ranks.meet()
    slots = own.batch.size[1] // episodes_per_slot
    told = {
        "chunks": own.batch.size[0],
        "env_steps": own.env_steps,
        "finished": [dataclasses.asdict(episode) for episode in own.finished],
        "columns": {name: [type_name(leaf.dtype), *leaf.shape[1:]] for name, leaf in leaves(own.batch).items()},
    }
    every = ranks.gather_values(told)
    if any(each["columns"] != told["columns"] for each in every):
        raise BatchError(f"the ranks have collected different columns: {[each['columns'] for each in every]}")
    batches = _gather_batches(own.batch.pad(max(each["chunks"] for each in every), "K"), ranks)
    rounds = [batch.chunk(episodes_per_slot, "B") for batch in batches]
    finished = [
        FinishedEpisode(**episode | {"slot": episode["slot"] + rank * slots})
        for rank, each in enumerate(every)
        for episode in each["finished"]
    ]
    return Rollout(
        batch=concat([parts[index] for index in range(episodes_per_slot) for parts in rounds], "B"),
        finished=finished,
        env_steps=sum(each["env_steps"] for each in every),
    )


def _gather_batches(own: TrajectoryBatch, ranks: Ranks) -> list[TrajectoryBatch]:
    """Every rank's batch, of the same size on each."""
    columns = {name: ranks.gather(leaf) for name, leaf in leaves(own).items()}
    return [
        TrajectoryBatch.from_leaves({name: found[rank] for name, found in columns.items()}, own.size, own.sentences)
        for rank in range(ranks.size)
    ]
