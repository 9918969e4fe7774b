"""What the versions of GR00T share as policies: the velocity of their head, and what is sharded or adapted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embodyrl.models.flow.policy import Denoised, FlowPolicy
from embodyrl.models.gr00t.head import Condition
from embodyrl.models.policy import ParallelPlan


class Gr00tFlow(FlowPolicy):
    """A flow policy whose network is a vision-language model, `backbone`, and an `ActionHead`, `action_head`."""

    network: Any

    def denoise(self, condition: Condition, x: Tensor, time: Tensor) -> Denoised:
        """See `FlowPolicy.denoise`; the network's velocity points from noise to data."""
        head = self.network.action_head
        # The network knows time as one of a few whole numbers, rounded down as in Isaac-GR00T.
        bucket = (time * self.network.sizes.buckets).long()
        hidden = head.hidden(x.to(self.dtype), bucket, condition)
        return Denoised(velocity=-head.velocity(hidden, condition).float(), hidden=hidden)

    def parallel_plan(self) -> ParallelPlan:
        """See `Policy.parallel_plan`: blocks are all transformer layers; adapters go to the vision-language model, and
        the action head is trained in full beside them."""
        return ParallelPlan(
            blocks=self.modules_named(r"network\..*\.(layers|blocks|transformer_blocks)\.\d+"),
            adaptable=self.linear_layers("network.backbone."),
            heads=self.parts_beside("network.backbone"),
            root="network",
        )
