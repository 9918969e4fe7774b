"""Registers a policy that predicts no values."""

from embodyrl.registry import SupportedModel

SupportedModel.register(
    "policy_without_critic",
    target="policy_without_critic:Policy",
    facts={"kind": "gaussian", "critic": False},
    summary="a policy that predicts no values",
)
