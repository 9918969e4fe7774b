"""Policy losses that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import LOSSES

LOSSES.register(
    "ppo",
    target="embodyrl.algorithms.losses:ppo",
    options="embodyrl.algorithms.options:PPOLossConfig",
    whole=False,
    summary="clipped surrogate (Schulman et al. 2017), with separate lower and upper clip and dual clip",
)
LOSSES.register(
    "decoupled_ppo",
    target="embodyrl.algorithms.losses:decoupled_ppo",
    options="embodyrl.algorithms.options:DecoupledPPOLossConfig",
    whole=False,
    summary="PPO for decisions of an older policy, clipped around a proximal one (Hilton et al. 2021)",
)
LOSSES.register(
    "cpgd",
    target="embodyrl.algorithms.losses:cpgd",
    options="embodyrl.algorithms.options:CPGDLossConfig",
    whole=False,
    summary="clipped policy gradient with policy drift (Liu et al. 2025); no probability ratio",
)
LOSSES.register(
    "gspo",
    target="embodyrl.algorithms.losses:gspo",
    options="embodyrl.algorithms.options:GSPOLossConfig",
    whole=True,
    summary="clipped ratio of whole episodes (Zheng et al. 2025)",
)
