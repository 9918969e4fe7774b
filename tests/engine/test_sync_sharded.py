"""Weights that several trainers share go to other processes as the bytes of a policy that is whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from slow import rest_slow
from sync_peers import peers
from sync_shards import SHARDS, policy_of, receive, train

CASES = rest_slow(
    [(SHARDS, ["full", "frozen"]), (2 * SHARDS, ["full", "frozen"]), (SHARDS, ["lora"]), (2 * SHARDS, ["lora"])]
)


@pytest.mark.parametrize(("size", "kinds"), CASES, ids=["fsdp", "hsdp", "fsdp lora", "hsdp lora"])
def test_receivers_hold_what_all_shards_together_are(tmp_path: Path, size: int, kinds: list[str]) -> None:
    if "lora" in kinds and importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft: pip install 'embodyrl[vla]'")
    calls = [(train, rank, size, tmp_path, kinds) for rank in range(size)]
    with peers((receive, tmp_path, kinds), *calls) as [receiver, *trainers]:
        wrong = receiver.get()
        first, *others = [trainer.get() for trainer in trainers]
    assert wrong == [[]] * len(kinds), (wrong, first, others)
    most = max(weight.nbytes for kind in kinds for weight in policy_of(kind).parameters())
    for *_, (peak, largest) in (first, *others):
        assert 0 < peak == largest == most, "more than one whole tensor at a time"
    for *sent, _ in others:
        assert sent == [[[0, 0], [0, 0]]] * len(kinds)
    for kind, ((whole, part), again) in zip(kinds, first[:-1], strict=True):
        weights = list(policy_of(kind).parameters())
        frozen = sum(weight.nbytes for weight in weights if not weight.requires_grad)
        assert whole >= sum(weight.nbytes for weight in weights), kind
        assert whole - part >= frozen and again == [part, part], kind
