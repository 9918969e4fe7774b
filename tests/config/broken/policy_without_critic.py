"""Registers a policy that predicts no values."""

from embodyrl.registry import SupportedModel

SupportedModel.register(
    "policy_without_critic",
    target="policy_without_critic:Policy",
    critic=False,
    summary="a policy that predicts no values",
)
