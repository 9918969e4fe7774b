"""Rules between the settings of a run's processes and machines; see `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import rule
from embodyrl.config.schema import Config, PlacementBackend

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")
"""`host:port`."""


@rule
def ray_has_an_address(config: Config) -> Iterator[ConfigIssue]:
    """Check that a Ray cluster is named exactly: whatever cluster is found could be anybody's."""
    placement = config.placement
    if placement.backend is not PlacementBackend.ray:
        return
    if placement.address is None:
        yield ConfigIssue(
            ("placement.backend", "placement.address"),
            "placement.backend is ray, but no cluster is named",
            "set placement.address to host:port of its head, as in 10.0.0.1:6379",
        )
    elif not _ADDRESS.fullmatch(placement.address):
        yield ConfigIssue(
            ("placement.address",),
            f"placement.address = {placement.address!r} is not the host:port of a cluster's head",
            "set it as in 10.0.0.1:6379 (neither auto nor ray://...: the run takes part in the cluster itself)",
        )


@rule
def shared_gpus_are_on_one_machine(config: Config) -> Iterator[ConfigIssue]:
    """Check that rollout workers that share GPUs with ranks are not on other machines."""
    rollout, ranks = config.placement.rollout, config.placement.ranks
    if rollout.share_gpus and rollout.nodes != ranks.nodes:
        yield ConfigIssue(
            ("placement.rollout.share_gpus", "placement.rollout.nodes"),
            "placement.rollout.share_gpus is true, but the machines of workers and ranks are not the same",
            "give placement.rollout.nodes and placement.ranks.nodes the same value, or leave share_gpus out",
        )
