"""The arithmetic of memory: by hand, and by how it must change with the settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from embodyrl.planning.memory import (
    Learning,
    Line,
    Lines,
    Weights,
    acting_need,
    kept_away,
    optimizer_bytes,
    rollout_need,
    train_need,
)

OPENVLA = 7_541_237_184
BIG = Weights(
    parameters=OPENVLA,
    trainable=OPENVLA,
    weight_bytes=2 * OPENVLA,
    gradient_bytes=2 * OPENVLA,
    half_trainable=OPENVLA,
)
SMALL = Weights(parameters=100, trainable=60, weight_bytes=400, gradient_bytes=240, half_trainable=0)
LINES = Lines(deciding=Line(100.0, 10.0), kept=Line(0.0, 50.0), learning=Line(30.0, 52.0))
SETTINGS = Learning(deciding_samples=4, minibatch=16, micro_batch=8, reference=False, master_weights=True)


def changed(**settings: Any) -> Learning:
    return dataclasses.replace(SETTINGS, **settings)


def test_a_line_goes_through_its_points_and_never_falls() -> None:
    line = Line.through((2, 30.0), (4, 50.0))
    assert (line.at(2), line.at(4), line.at(10), line.at(0)) == (30, 50, 110, 0)
    flat = Line.through((2, 50.0), (4, 30.0))
    assert flat.at(2) == flat.at(100) == 50


def test_full_training_of_openvla_by_hand() -> None:
    """Two bytes for a weight and for its gradient; four for its copy, and four for each of two moments."""
    assert optimizer_bytes(BIG, SETTINGS) == 12 * OPENVLA
    assert optimizer_bytes(BIG, changed(master_weights=False)) == 4 * OPENVLA
    backward = train_need(BIG, LINES, SETTINGS, batch=0)
    assert backward.total == (2 + 12 + 4) * OPENVLA  # a gradient in 16 bits goes when its float32 copy is made
    assert train_need(BIG, LINES, changed(master_weights=False), batch=0).total == 8 * OPENVLA + 30 + 8 * 52


def test_float32_weights_by_hand() -> None:
    assert optimizer_bytes(SMALL, SETTINGS) == 2 * 4 * 60
    need = train_need(SMALL, LINES, SETTINGS, batch=7)
    assert {name: size for name, size in need.parts.items() if size} == {
        "weights": 400,
        "optimiser": 480,
        "batch": 7,
        "gradients": 240,
        "activations": 30 + 52 * 8,
    }
    assert need.total == 400 + 480 + 7 + 240 + 446


def test_gradients_of_a_whole_minibatch_come_while_activations_go() -> None:
    whole = train_need(SMALL, LINES, changed(micro_batch=16), batch=0)
    assert whole.parts["activations"] == 30 + 52 * 16 - 240
    tiny = train_need(SMALL, LINES, changed(micro_batch=1, minibatch=1), batch=0)
    assert tiny.parts["activations"] == (30 + 52) - 50  # what comes on top of all gradients


def test_rolling_out_by_hand() -> None:
    need = rollout_need(SMALL, LINES, 5, SETTINGS)
    assert {name: size for name, size in need.parts.items() if size} == {
        "weights": 400,
        "optimiser": 480,
        "KV cache": 20,
        "activations": 120,
    }


def test_graphs_of_decisions_hold_their_memory_by_hand() -> None:
    """Beside what a decision takes that is not recorded: 100 + 10 x 4 and 100 + 10 x 3."""
    without, held = (rollout_need(SMALL, LINES, 5, changed(graphs=graphs)) for graphs in ((), (4, 3)))
    assert held.parts == {**without.parts, "CUDA graphs": 140 + 130}
    assert acting_need(SMALL, LINES, 5, changed(graphs=(4, 3))).parts["CUDA graphs"] == 140 + 130
    assert train_need(SMALL, LINES, changed(graphs=(4, 3)), batch=7) == train_need(SMALL, LINES, SETTINGS, batch=7)


def test_several_ranks_by_hand() -> None:
    """Each holds half of everything, and what is gathered: all weights to decide, a block and what is in none to learn,
    and a block that is on its way."""
    weights = dataclasses.replace(SMALL, largest_block=80, outside_blocks=30, gradients_of_block=70)
    shares = changed(ranks=2, shards=2, micro_batch=4, reference=True)
    rollout = rollout_need(weights, LINES, 0, shares).parts
    assert (rollout["weights"], rollout["weights of other ranks"], rollout["optimiser"]) == (200, 400 + 80, 240)
    assert rollout["reference policy"] == 200 and rollout["activations"] == 100 + 4 * 10
    train = train_need(weights, LINES, shares, batch=7).parts
    assert (train["weights"], train["weights of other ranks"], train["batch"]) == (200, 80 + 30 + 80, 7)
    assert (train["gradients"], train["gradients on their way"], train["activations"]) == (120, 70, 30 + 52 * 4)
    whole = train_need(weights, LINES, dataclasses.replace(shares, minibatch=8), batch=0)
    assert whole.parts["activations"] == 30 + 52 * 4 - 120  # the last micro-batch: gradients come as activations go
    assert kept_away(weights, dataclasses.replace(shares, offload_optimizer=True, offload_reference=True)) == 240 + 200


def test_machines_that_hold_a_copy_each() -> None:
    """Four ranks on two machines hold what two on one do."""
    weights = dataclasses.replace(SMALL, largest_block=80, outside_blocks=30, gradients_of_block=70)
    of_two, of_four = changed(ranks=2, shards=2, minibatch=16), changed(ranks=4, shards=2, minibatch=32)
    assert rollout_need(weights, LINES, 0, of_four) == rollout_need(weights, LINES, 0, of_two)
    assert train_need(weights, LINES, of_four, batch=7) == train_need(weights, LINES, of_two, batch=7)


def test_ranks_that_hold_everything_add_their_gradients_up_in_one_piece() -> None:
    replicas = changed(ranks=2, micro_batch=1)
    need = train_need(SMALL, LINES, replicas, batch=0)
    assert need.parts["weights"] == 400 and need.parts["gradients"] == need.parts["gradients on their way"] == 240
    assert need.parts["weights of other ranks"] == 0


def test_what_is_offloaded_is_elsewhere() -> None:
    away = changed(offload_optimizer=True, offload_reference=True, reference=True)
    assert rollout_need(SMALL, LINES, 0, away).total == rollout_need(SMALL, LINES, 0, SETTINGS).total - 480
    assert kept_away(SMALL, away) == 480 + 400 and kept_away(SMALL, SETTINGS) == 0


def test_adapters_with_a_reference_keep_the_heads_twice_while_it_scores() -> None:
    """The base model is the reference, but the heads beside the adapters learn: the initial ones are kept, and the
    present ones while the initial ones are in their place."""
    weights = dataclasses.replace(SMALL, head_bytes=1000)
    settings = changed(initial_heads=True)
    assert rollout_need(weights, LINES, 0, settings).parts["reference policy"] == 1000
    scoring = train_need(weights, LINES, settings, batch=0).parts
    assert scoring["reference policy"] == 2000 and "gradients" not in scoring
    learning = train_need(dataclasses.replace(weights, head_bytes=10), LINES, settings, batch=0).parts
    assert learning["reference policy"] == 10 and learning["gradients"] == 240


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"micro_batch": 2}, {"micro_batch": 4}),
        ({"deciding_samples": 2}, {"deciding_samples": 3}),
        ({"reference": False}, {"reference": True}),
        ({"reference": True, "offload_reference": True}, {"reference": True}),
        ({"offload_optimizer": True}, {"offload_optimizer": False}),
        ({"moment_bytes": 1}, {"moment_bytes": 4}),
        ({"master_weights": False}, {"master_weights": True}),
    ],
)
@pytest.mark.parametrize("weights", [SMALL, BIG])
def test_more_never_needs_less(weights: Weights, less: dict[str, Any], more: dict[str, Any]) -> None:
    smaller, larger = changed(**less), changed(**more)
    rollouts = [rollout_need(weights, LINES, 1, each).total for each in (smaller, larger)]
    trainings = [train_need(weights, LINES, each, batch=1).total for each in (smaller, larger)]
    assert rollouts[0] <= rollouts[1] and trainings[0] <= trainings[1]
    decided_elsewhere = (weights is SMALL and "master_weights" in less) or (weights is BIG and "micro_batch" in less)
    assert rollouts[0] < rollouts[1] or trainings[0] < trainings[1] or decided_elsewhere


def test_fewer_weights_that_learn_need_less() -> None:
    needs = [
        train_need(
            dataclasses.replace(BIG, trainable=count, half_trainable=count, gradient_bytes=2 * count),
            LINES,
            SETTINGS,
            batch=0,
        ).total
        for count in (1_000, 100_000_000, OPENVLA)
    ]
    assert needs == sorted(needs) and needs[0] < needs[1] < needs[2]
