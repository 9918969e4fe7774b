"""What `test_spread.py` has several processes do: python spread_program.py RANK RANKS FOLDER. Each rank collects a
share of a batch that all of them know; what they get from each other is compared with it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.engine.exchange import Exchange
from embodyrl.engine.parallel import Ranks, connected
from embodyrl.methods.on_policy.embeddings import episode_embeddings
from embodyrl.pipelines.pipeline import Iteration, Pipeline, Stage
from embodyrl.placement.ranks import RankInfo
from embodyrl.rollout.batch import BatchError, TrajectoryBatch, concat, leaves
from embodyrl.rollout.episodes import Rollout
from embodyrl.rollout.spread import bring_large, forget_all_but, gather_rollouts, leave_share

SLOTS, ROUNDS, CHUNKS = 4, 2, 3
"""Slots of each rank, episodes of each slot, most chunks of an episode."""


def whole_batch(ranks: int, seed: int = 0) -> TrajectoryBatch:
    """The batch that one rank would have collected; rows that do not count are 0."""
    slots, draw = ranks * SLOTS * ROUNDS, torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, CHUNKS + 1, (slots,), generator=draw)
    lengths[0] = CHUNKS  # some rank needs all rows
    valid = torch.arange(CHUNKS).unsqueeze(1) < lengths
    size = (CHUNKS, slots)

    def numbers(*shape: int) -> Tensor:
        found = torch.rand(*size, *shape, generator=draw)
        found[~valid] = 0
        return found

    columns: dict[str, Any] = {
        "task_index": torch.zeros(size, dtype=torch.int64),
        "actions": numbers(2, 1),
        "logprobs": numbers(2),
        "rewards": numbers(2),
        "success": numbers(2) > 0.5,
        "terminated": torch.zeros(size, dtype=torch.bool),
        "truncated": torch.zeros(size, dtype=torch.bool),
        "steps": 2 * valid.long(),
        "valid": valid,
        "episode": torch.arange(slots).expand(size) * valid,
        "group": torch.arange(slots).expand(size) // 2 * valid,
        "version": torch.zeros(size, dtype=torch.int64),
        "proprio": numbers(3),
        "images": (255 * numbers(1, 16, 16, 3)).byte(),
        "trace": {"sample": numbers(4), "chain": numbers(10, 20)},
    }
    return TrajectoryBatch(columns, ["wave"])


def own_share(whole: TrajectoryBatch, ranks: Ranks) -> TrajectoryBatch:
    """What this rank collects of it: its slots, cut to their longest episode."""
    slots = torch.arange(SLOTS) + ranks.rank * SLOTS
    own = whole.take(torch.cat([slots + number * ranks.size * SLOTS for number in range(ROUNDS)]), "B")
    return own.take(torch.arange(int(own["steps"].gt(0).sum(0).max())), "K")


def everybody(ranks: Ranks) -> list[bool]:
    return [True] * ranks.size


def equal(one: TrajectoryBatch, other: TrajectoryBatch) -> bool:
    """Whether task descriptions, columns, types and every number are the same."""
    left, right = leaves(one), leaves(other)
    return (
        (one.task_descriptions, one.size, left.keys()) == (other.task_descriptions, other.size, right.keys())
        and all(column.dtype == right[name].dtype for name, column in left.items())
        and all(torch.equal(column, right[name]) for name, column in left.items())
    )


def held_bytes(exchange: Exchange) -> int:
    """Bytes that this rank holds for others."""
    return sum(column.nbytes for held in exchange._held for column in held.columns.values())


def check_joining(ranks: Ranks) -> None:
    whole, exchange = whole_batch(ranks.size), Exchange(ranks)
    joint = gather_rollouts(Rollout(batch=own_share(whole, ranks), finished=[], env_steps=1), exchange, ROUNDS)
    batch = joint.batch
    assert joint.env_steps == ranks.size and "images" not in batch and batch["trace"].keys() == {"sample"}
    assert exchange.names == ("images", "trace/chain") and batch.may_lie_apart("images")
    assert equal(bring_large(batch, exchange, everybody(ranks)), whole)

    # On one rank, and one of the columns.
    first = bring_large(batch, exchange, [rank == 0 for rank in range(ranks.size)], ["images"])
    assert ("images" in first) == ranks.is_first and "chain" not in first["trace"]

    # Cut and joined as a filter does it, with rows of two rollouts.
    other = whole_batch(ranks.size, seed=1)
    again = gather_rollouts(Rollout(batch=own_share(other, ranks), finished=[], env_steps=1), exchange, ROUNDS).batch
    chosen = torch.tensor([SLOTS * ROUNDS * ranks.size - 1, 0, 2])
    mixed = concat([batch.take(chosen, "B"), again.take(chosen[:1], "B")], "B")
    wanted = concat([whole.take(chosen, "B"), other.take(chosen[:1], "B")], "B")
    forget_all_but([mixed], exchange)
    assert equal(bring_large(mixed, exchange, everybody(ranks)), wanted)
    kept = torch.tensor([float(held_bytes(exchange))])
    assert float(ranks.sum(kept)) == int(mixed["valid"].sum()) * (16 * 16 * 3 + 10 * 20 * 4)
    try:
        bring_large(batch, exchange, everybody(ranks))
    except KeyError as error:
        assert "not held any more" in str(error)
    else:
        raise AssertionError("rows were forgotten")


def check_sharing_out(ranks: Ranks) -> None:
    """A surplus comes back from a checkpoint, which all ranks read."""
    whole, exchange = whole_batch(ranks.size), Exchange(ranks)
    for count in (3, 1):  # a rank may get none
        surplus = whole.take(torch.arange(count), "B")
        left = leave_share(surplus, exchange)
        assert equal(bring_large(left, exchange, everybody(ranks)), surplus)


def check_encoding(ranks: Ranks) -> None:
    whole, exchange = whole_batch(ranks.size), Exchange(ranks)
    settings = EncodingRewardConfig(name="srpo", encoder="", dim=5, frames=2)
    encoded = []

    def encode(images: Tensor | None, proprio: Tensor | None, *, dim: int) -> Tensor:
        assert images is not None and proprio is not None
        encoded.append(1)
        return torch.cat([images.float().mean((1, 2, 3)).flatten(), proprio.flatten()])

    wanted = episode_embeddings(whole, encode, settings, Exchange(Ranks()))
    encoded.clear()
    batch = gather_rollouts(Rollout(batch=own_share(whole, ranks), finished=[], env_steps=1), exchange, ROUNDS).batch
    assert torch.equal(episode_embeddings(batch, encode, settings, exchange), wanted)
    assert len(encoded) == SLOTS * ROUNDS and exchange.received == 0


def check_stages(ranks: Ranks) -> None:
    whole, exchange = whole_batch(ranks.size), Exchange(ranks)
    rollout = Rollout(batch=own_share(whole, ranks), finished=[], env_steps=1)
    seen = []

    def begin(iteration: Iteration) -> None:
        iteration.batch = gather_rollouts(rollout, exchange, ROUNDS).batch

    def look(iteration: Iteration) -> None:
        assert iteration.batch is not None
        seen.append(torch.equal(iteration.batch["images"], whole["images"]))

    def darken(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch["images"] = iteration.batch["images"] // 2

    def look_again(iteration: Iteration) -> None:
        assert iteration.batch is not None
        seen.append(torch.equal(iteration.batch["images"], whole["images"] // 2))
        seen.append(torch.equal(iteration.batch["trace"]["chain"], whole["trace"]["chain"]))

    def peek(iteration: Iteration) -> None:
        assert iteration.batch is not None
        try:
            iteration.batch["images"]
        except BatchError as error:
            seen.append("a stage gets it if it declares it in `reads`" in str(error))

    engine: Any = SimpleNamespace(exchange=exchange, ranks=ranks)
    iteration = Iteration(config=None, learner=None, collector=None, engine=engine)  # type: ignore[arg-type]
    columns = tuple(whole.columns())
    Pipeline(
        [
            Stage("begin", begin, writes=columns),
            Stage("look", look, reads=("images",)),
            Stage("peek", peek),
            Stage("darken", darken, changes=("images",)),
            Stage("look_again", look_again, reads=("images", "trace")),
        ]
    ).run(iteration)
    assert seen == [True] * 4 and iteration.batch is not None
    assert torch.equal(iteration.batch["images"], whole["images"] // 2), "what a stage changes stays"
    assert "trace/chain" not in leaves(iteration.batch)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, size=size, local_rank=rank, local_size=size, meeting=str(folder / "meeting"))
    with connected(place, torch.device("cpu"), 60.0, lambda ranks: None) as ranks:
        for check in (check_joining, check_sharing_out, check_encoding, check_stages):
            check(ranks)


if __name__ == "__main__":
    main()
