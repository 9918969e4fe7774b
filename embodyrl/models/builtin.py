"""The models that come with embodyrl, declared by name; nothing is imported until one is used."""

from __future__ import annotations

from embodyrl.registry import SupportedModel

SupportedModel.register(
    "mlp",
    target="embodyrl.models.mlp.policy:MLPPolicy",
    options="embodyrl.models.mlp.options:MLPConfig",
    facts={"critic": True, "max_chunk": 32},
    summary="policy and value network on state observations; continuous or discrete actions",
)
