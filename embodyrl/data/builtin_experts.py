"""The scripted experts that come with embodyrl, registered by the name of their simulator."""

from __future__ import annotations

from embodyrl.registry import EXPERTS, Requirement

EXPERTS.register(
    "metaworld",
    target="embodyrl.envs.metaworld.expert:MetaWorldExpert",
    requires=[Requirement(module="metaworld", install="pip install 'embodyrl[metaworld]'")],
    summary="MetaWorld's own scripted policies, one for each task",
)
