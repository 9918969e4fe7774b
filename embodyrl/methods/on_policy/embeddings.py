"""Embeddings of episodes, for rewards that compare what they look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from embodyrl.algorithms.columns import (
    OutputError,
    function_name,
    require_finite,
    require_output,
)
from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.engine.exchange import Exchange
from embodyrl.engine.parallel import Ranks
from embodyrl.rollout.batch import TrajectoryBatch, type_name
from embodyrl.rollout.spread import is_here, rows_here


def episode_embeddings(
    batch: TrajectoryBatch, encode: Callable[..., Tensor], settings: EncodingRewardConfig, exchange: Exchange
) -> Tensor:
    """Return a vector for every slot's episode, `[B, E]`, from frames spread evenly over its chunks; 0 for an episode
    that was lost. Where images lie with several ranks, each encodes the episodes that it has collected."""
    embeddings: dict[int, Tensor] = {}
    for slot in range(batch.size[1]):
        decided = torch.nonzero(batch["valid"][:, slot]).squeeze(1)
        if not len(decided) or not is_here(batch, exchange, int(decided[0]), slot):
            continue
        frames = decided[torch.linspace(0, len(decided) - 1, settings.frames).round().long()]
        images = rows_here(batch, exchange, "images", frames, slot)
        proprio = batch["proprio"][frames, slot] if "proprio" in batch else None
        embeddings[slot] = _embedding(encode, encode(images, proprio, dim=settings.dim), embeddings)
    return joined_embeddings(embeddings, batch.size[1], settings.dim, exchange.ranks)


def _embedding(encode: Callable[..., Tensor], vector: object, others: Mapping[int, Tensor]) -> Tensor:
    """Return the vector of an episode, after checking that it is one, as long as those before and finite."""
    what = f"encoder {function_name(encode)} returned an embedding"
    if not isinstance(vector, Tensor) or vector.dim() != 1:
        found = f"of shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else f"as {type(vector).__name__}"
        raise OutputError(f"{what} {found}, expected a torch tensor [E]: return one vector for the episode")
    like = next(iter(others.values()), vector)
    require_output(what, vector, like, "as many numbers for every episode")
    require_finite(what, vector, torch.ones_like(vector, dtype=torch.bool), {})
    return vector


def joined_embeddings(own: Mapping[int, Tensor], slots: int, usual: int, ranks: Ranks) -> Tensor:
    """Return the vectors of all slots `[B, E]`, of which each rank has its own; 0 where none has one.

    Args:
        own: by slot.
        slots: `B`.
        usual: `E` if there is no vector.
        ranks: those of the run.
    """
    example = next(iter(own.values()), None)
    known = ranks.gather_values(None if example is None else [len(example), type_name(example.dtype)])
    size, kind = next((each for each in known if each is not None), (usual, "float32"))
    found = torch.zeros(slots, size, dtype=getattr(torch, kind))
    for slot, vector in own.items():
        found[slot] = vector
    return ranks.sum(found) if ranks.size > 1 else found
