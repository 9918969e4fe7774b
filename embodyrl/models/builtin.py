"""The models that come with embodyrl, registered by name; each is imported when it is first used."""

from __future__ import annotations

from typing import Any

from embodyrl.registry import Requirement, SupportedModel

VLA = [Requirement(module=module, install="pip install 'embodyrl[vla]'") for module in ("transformers", "timm")]

PI: dict[str, Any] = {
    "critic": True,
    "weighs": True,
    "usual_chunk": 10,
    "blocks": True,
    "standalone": True,
    "check": "embodyrl.models.pi.check:check",
    "flow": "embodyrl.models.pi.check:flow_sizes",
    "notes": "embodyrl.models.pi.check:notes",
    "kept": {"denoising_times": "summed"},
}
"""Fields that pi0 and pi0.5 share."""

SupportedModel.register(
    "mlp",
    target="embodyrl.models.mlp.policy:MLPPolicy",
    options="embodyrl.models.mlp.options:MLPConfig",
    critic=True,
    weighs=True,
    off_policy=True,
    max_chunk=32,
    blocks=False,
    images=False,
    check="embodyrl.models.mlp.options:check",
    summary="policy and value network on state observations; continuous or discrete actions",
)
SupportedModel.register(
    "cnn",
    target="embodyrl.models.cnn.policy:CNNPolicy",
    options="embodyrl.models.cnn.options:CNNConfig",
    requires=VLA,
    critic=True,
    weighs=True,
    off_policy=True,
    frames=True,
    max_chunk=32,
    blocks=False,
    check="embodyrl.models.cnn.options:check",
    summary="CNN on images, and the robot's state; continuous or discrete actions",
)
SupportedModel.register(
    "openvla",
    target="embodyrl.models.openvla.policy:OpenVLAPolicy",
    options="embodyrl.models.openvla.config:OpenVLAConfig",
    requires=VLA,
    critic=True,
    weighs=True,
    max_chunk=1,
    blocks=True,
    standalone=True,
    check="embodyrl.models.openvla.config:check",
    published="the published OpenVLA 7B",
    summary="OpenVLA (7B): one image and a task description; an action in tokens, one by one",
)
SupportedModel.register(
    "openvla_oft",
    target="embodyrl.models.openvla_oft.policy:OpenVLAOFTPolicy",
    options="embodyrl.models.openvla_oft.config:OpenVLAOFTConfig",
    requires=VLA,
    critic=True,
    weighs=True,
    usual_chunk=8,
    blocks=True,
    standalone=True,
    check="embodyrl.models.openvla_oft.config:check",
    published="the published OpenVLA-OFT 7B",
    summary="OpenVLA-OFT (7B): images, robot state and a task description; a chunk of actions in one pass",
)
SupportedModel.register(
    "gr00t",
    target="embodyrl.models.gr00t.policy:Gr00tPolicy",
    options="embodyrl.models.gr00t.config:Gr00tConfig",
    requires=VLA,
    critic=True,
    weighs=True,
    usual_chunk=16,
    blocks=True,
    standalone=True,
    check="embodyrl.models.gr00t.check:check",
    flow="embodyrl.models.gr00t.check:flow_sizes",
    kept={"prompt_length": None},
    published="the published GR00T N1.5 (2.7B)",
    summary="GR00T N1.5 (2.7B): images, robot state and a task description; a chunk of actions out of noise",
)
SupportedModel.register(
    "pi0",
    target="embodyrl.models.pi.policy:PiPolicy",
    options="embodyrl.models.pi.config:Pi0Config",
    requires=VLA,
    **PI,
    published="the published pi0 (3.5B)",
    summary="pi0 (3B): images, robot state and a task description; a chunk of actions out of noise",
)
SupportedModel.register(
    "pi05",
    target="embodyrl.models.pi.policy:PiPolicy",
    options="embodyrl.models.pi.config:Pi05Config",
    requires=VLA,
    **PI | {"kept": {"denoising_times": "summed", "padded_state": False}},
    published="the published pi0.5 (3.6B)",
    summary="pi0.5 (3B): images and a task description that may tell the robot state; a chunk of actions out of noise",
)
SupportedModel.register(
    "smolvla",
    target="embodyrl.models.smolvla.policy:SmolVLAPolicy",
    options="embodyrl.models.smolvla.config:SmolVLAConfig",
    requires=[Requirement(module="tokenizers", install="pip install 'embodyrl[vla]'")],
    critic=True,
    weighs=True,
    usual_chunk=50,
    blocks=True,
    standalone=True,
    check="embodyrl.models.smolvla.check:check",
    flow="embodyrl.models.smolvla.check:flow_sizes",
    published="the published SmolVLA (0.45B)",
    summary="SmolVLA (450M): images, robot state and a task description; a chunk of actions out of noise",
)
SupportedModel.register(
    "act",
    target="embodyrl.models.act.policy:ACTPolicy",
    options="embodyrl.models.act.config:ACTConfig",
    critic=True,
    weighs=True,
    usual_chunk=100,
    blocks=True,
    standalone=True,
    check="embodyrl.models.act.check:check",
    notes="embodyrl.models.act.check:notes",
    published="the published ACT (52M)",
    summary="ACT (52M): images and robot state, no task description; a chunk of actions in one pass",
)
