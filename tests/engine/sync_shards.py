"""Trainers that share their weights, and a process that gets them, for the tests of weight sync."""

from __future__ import annotations

import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from engines import make_policy
from sync_peers import PATIENCE_S, Outcome, outcome
from torch import Tensor

from embodyrl.config.schema import LoraConfig
from embodyrl.engine import sharding
from embodyrl.engine.lora import add_adapters
from embodyrl.engine.parallel import Ranks, connected
from embodyrl.engine.sync import SharedReceiver, SharedSender
from embodyrl.models import Policy
from embodyrl.placement.ranks import RankInfo

SHARDS = 2
VERSIONS = 2


def policy_of(kind: str) -> Policy:
    """The same in every process: layers of odd sizes, all or some of which learn, or a tiny VLA with adapters."""
    if kind == "lora":
        import vla

        policy = vla.make_oft()
        add_adapters(policy, LoraConfig(rank=2), seed=1)
        return policy
    policy = make_policy(hidden_sizes=[7, 33])
    for number, weight in enumerate(policy.parameters()):
        weight.requires_grad_(kind == "full" or number % 3 == 0)
    return policy


@torch.no_grad()
def learn(policy: Policy) -> None:
    """The same change of each number, whether a tensor holds all or some of them."""
    for weight in policy.parameters():
        if weight.requires_grad:
            part = weight.to_local() if isinstance(weight, sharding.DTensor) else weight
            part.mul_(1.5).add_(0.25)


class Watch:
    """What lives of the tensors that are gathered."""

    def __init__(self) -> None:
        self.alive = self.peak = self.largest = 0
        self._gather, sharding.gathered = sharding.gathered, self

    def __call__(self, weight: sharding.DTensor) -> Tensor:
        found = self._gather(weight)
        self.alive += found.nbytes
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, found.nbytes)
        weakref.finalize(found, self._gone, found.nbytes)
        return found

    def _gone(self, size: int) -> None:
        self.alive -= size


def train(line: Connection, rank: int, size: int, folder: Path, kinds: list[str]) -> Outcome:
    """Learn and send; returns bytes, errors and what was gathered."""
    place = RankInfo(rank=rank, size=size, local_rank=rank % SHARDS, local_size=SHARDS, meeting=str(folder / "ranks"))
    with connected(place, torch.device("cpu"), PATIENCE_S, lambda gone: None) as ranks:
        watch = Watch()
        store = dist.FileStore(str(folder / "transfer"), 2)
        return [send_all(ranks, kind, store) for kind in kinds] + [(watch.peak, watch.largest)]


def send_all(ranks: Ranks, kind: str, store: dist.Store) -> Outcome:
    policy = policy_of(kind)
    copy = SharedSender(policy, timeout_s=PATIENCE_S)
    assert (copy.send(0) > 0) == ranks.is_first, "of ranks that hold copies, the first alone takes memory"
    copy.close()
    sharding.Shards(policy, ranks, torch.device("cpu"), SHARDS)
    shared = [SharedSender(policy, timeout_s=PATIENCE_S, whole=whole) for whole in (True, False)]
    if ranks.is_first:
        store.set(f"addresses {kind}", " ".join(each.address for each in shared))
    else:
        assert outcome(lambda: shared[0].address) == (
            "SyncError",
            f"weights are offered by the first rank, and this is rank {ranks.rank}",
        )
    found = []
    for version in range(VERSIONS):
        found.append([each.send(version) for each in shared])
        if ranks.is_first:
            store.get(f"received {kind} {version}")
        learn(policy)
    ranks.barrier()
    return found


def receive(line: Connection, folder: Path, kinds: list[str]) -> Outcome:
    """Receive in both ways; returns names of tensors that are not, bit for bit, those of a policy that is whole."""
    store = dist.FileStore(str(folder / "transfer"), 2)
    return [receive_all(kind, store) for kind in kinds]


def receive_all(kind: str, store: dist.Store) -> Outcome:
    expected = policy_of(kind)
    policies = [policy_of(kind) for _ in range(2)]
    for policy in policies:
        learn(policy)
        learn(policy)
    addresses = store.get(f"addresses {kind}").decode().split()
    shared = [
        SharedReceiver(policy, address, timeout_s=PATIENCE_S)
        for policy, address in zip(policies, addresses, strict=True)
    ]
    wrong = []
    for version in range(VERSIONS):
        for each in shared:
            each.receive(version)
        store.set(f"received {kind} {version}", "")
        for number, policy in enumerate(policies):
            states = zip(expected.state_dict().items(), policy.state_dict().values(), strict=True)
            wrong += [f"{number} {name}" for (name, one), other in states if not torch.equal(one, other)]
        learn(expected)
    return wrong
