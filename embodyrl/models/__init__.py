"""Models: the `Policy` interface, and one folder per model. Torch is imported when a policy class is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embodyrl.registry import SupportedModel

if TYPE_CHECKING:
    from embodyrl.models.build import build_policy, load_policy
    from embodyrl.models.errors import PolicyError
    from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy, PolicyObservation, PolicySpec

__all__ = [
    "ActOutput",
    "EvalOutput",
    "Inputs",
    "Policy",
    "PolicyError",
    "PolicyObservation",
    "PolicySpec",
    "SupportedModel",
    "build_policy",
    "load_policy",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the registry can be read without torch."""
    if name in ("build_policy", "load_policy"):
        import embodyrl.models.build as build

        return getattr(build, name)
    if name in __all__:
        import embodyrl.models.policy as policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
