"""The models that come with embodyrl, registered by name; each is imported when it is first used."""

from __future__ import annotations

from typing import Any

from embodyrl.registry import PublicCheckpoint, Requirement, SupportedModel

VLA = [Requirement(module=module, install="pip install 'embodyrl[vla]'") for module in ("transformers", "timm")]

SUITES = {"spatial": "libero_spatial", "object": "libero_object", "goal": "libero_goal", "10": "libero_10"}
"""LIBERO's suites, by the names that checkpoints have for them."""


def on_libero(name: str, *suites: str, **options: Any) -> PublicCheckpoint:
    """Return a checkpoint for suites of LIBERO."""
    return PublicCheckpoint(name=name, tasks=[f"libero/{SUITES[suite]}/*" for suite in suites], options=options)


PI: dict[str, Any] = {
    "usual_chunk": 10,
    "info": "embodyrl.models.pi.check:PiInfo",
    "kept": {"denoising_times": "summed", "normalization": None},
}
"""Fields that pi0 and pi0.5 share."""


def register_family(name: str, policy: str, options: str, **fields: Any) -> None:
    """Register a model whose public checkpoints are read.

    Args:
        name: of the model.
        policy: class in the family's `policy` module, `family:Class`.
        options: class in its `config` module, likewise.
        fields: further ones of the entry.
    """
    target, settings = policy.replace(":", ".policy:"), options.replace(":", ".config:")
    usual = {"requires": VLA, "critic": True, "weighs": True, "blocks": True, "standalone": True}
    SupportedModel.register(
        name, target=f"embodyrl.models.{target}", options=f"embodyrl.models.{settings}", **usual | fields
    )


SupportedModel.register(
    "mlp",
    target="embodyrl.models.mlp.flow:mlp_policy",
    options="embodyrl.models.mlp.options:MLPConfig",
    words=False,
    critic=True,
    weighs=True,
    off_policy=True,
    max_chunk=32,
    blocks=False,
    images=False,
    info="embodyrl.models.mlp.options:MLPInfo",
    summary="policy and value network on state observations; continuous or discrete actions",
)
SupportedModel.register(
    "cnn",
    target="embodyrl.models.cnn.policy:cnn_policy",
    options="embodyrl.models.cnn.options:CNNConfig",
    requires=VLA,
    words=False,
    critic=True,
    weighs=True,
    off_policy=True,
    frames=True,
    max_chunk=32,
    blocks=False,
    info="embodyrl.models.cnn.options:CNNInfo",
    summary="CNN on images, and the robot's state; continuous or discrete actions",
)
register_family(
    "openvla",
    "openvla:OpenVLAPolicy",
    "openvla:OpenVLAConfig",
    max_chunk=1,
    info="embodyrl.models.prismatic.check:PrismaticInfo",
    published="the published OpenVLA 7B",
    checkpoints=[
        *(on_libero(f"hf://openvla/openvla-7b-finetuned-libero-{suite}", suite) for suite in SUITES),
        PublicCheckpoint(name="hf://gen-robot/openvla-7b-rlvla-warmup", tasks=["maniskill/*InScene-v1"]),
        PublicCheckpoint(name="hf://openvla/openvla-7b"),
    ],
    summary="OpenVLA (7B): one image and a task description; an action in tokens, one by one",
)
register_family(
    "openvla_oft",
    "openvla_oft:OpenVLAOFTPolicy",
    "openvla_oft:OpenVLAOFTConfig",
    usual_chunk=8,
    info="embodyrl.models.openvla_oft.config:OpenVLAOFTInfo",
    published="the published OpenVLA-OFT 7B",
    checkpoints=[
        *(
            on_libero(f"hf://Haozhan72/Openvla-oft-SFT-libero-{suite}-traj1", suite, action_head="discrete")
            for suite in ("spatial", "object", "goal")
        ),
        on_libero("hf://Haozhan72/Openvla-oft-SFT-libero10-traj1", "10", action_head="discrete"),
        *(
            on_libero(f"hf://moojink/openvla-7b-oft-finetuned-libero-{suite}", suite, action_head="l1")
            for suite in SUITES
        ),
        PublicCheckpoint(name="hf://RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main", tasks=["maniskill/*InScene-v1"]),
    ],
    summary="OpenVLA-OFT (7B): images, robot state and a task description; a chunk of actions in one pass",
)
register_family(
    "gr00t",
    "gr00t:Gr00tPolicy",
    "gr00t:Gr00tConfig",
    usual_chunk=16,
    info="embodyrl.models.gr00t.check:Gr00tInfo",
    kept={"prompt_length": None},
    published="the published GR00T N1.5 (2.7B)",
    checkpoints=[
        on_libero("hf://RLinf/RLinf-Gr00t-SFT-Spatial", "spatial"),
        on_libero("hf://RLinf/RLinf-Gr00t-SFT-Object", "object"),
        on_libero("hf://RLinf/RLinf-Gr00t-SFT-Goal", "goal"),
        on_libero("hf://RLinf/RLinf-Gr00t-SFT-Long", "10"),
    ],
    summary="GR00T N1.5 (2.7B): images, robot state and a task description; a chunk of actions from noise",
)
GR00T_N17: dict[str, Any] = {
    "usual_chunk": 16,
    "requires": [*VLA, Requirement(module="cv2", install="pip install 'embodyrl[vla]'")],
    "info": "embodyrl.models.gr00t_n17.check:Gr00tN17Info",
    "kept": {"prompt_length": None},
}
"""Fields that GR00T N1.7 and N1.6 share."""
register_family(
    "gr00t_n16",
    "gr00t_n17:Gr00tN17Policy",
    "gr00t_n17:Gr00tN16Config",
    **GR00T_N17,
    published="the published GR00T N1.6 (3.3B)",
    checkpoints=[PublicCheckpoint(name="hf://nvidia/GR00T-N1.6-3B")],
    summary="GR00T N1.6 (3B): images, robot state and a task description; a chunk of actions from noise",
)
register_family(
    "gr00t_n17",
    "gr00t_n17:Gr00tN17Policy",
    "gr00t_n17:Gr00tN17Config",
    **GR00T_N17,
    published="the published GR00T N1.7 (3.1B)",
    checkpoints=[
        *(on_libero(f"hf://nvidia/gr00t17-lerobot-libero_{suite}-640", suite) for suite in SUITES),
        PublicCheckpoint(name="hf://nvidia/GR00T-N1.7-3B"),
    ],
    summary="GR00T N1.7 (3B): images, robot state and a task description; a chunk of actions from noise",
)
register_family(
    "pi0",
    "pi:PiPolicy",
    "pi:Pi0Config",
    **PI,
    published="the published pi0 (3.5B)",
    checkpoints=[
        on_libero("hf://RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "spatial", "object", "goal"),
        on_libero("hf://RLinf/RLinf-Pi0-LIBERO-Long-SFT", "10"),
        PublicCheckpoint(name="hf://RLinf/RLinf-Pi0-MetaWorld-SFT", tasks=["metaworld/*"]),
        PublicCheckpoint(name="hf://lerobot/pi0_base"),
    ],
    summary="pi0 (3B): images, robot state and a task description; a chunk of actions from noise",
)
register_family(
    "pi05",
    "pi:PiPolicy",
    "pi:Pi05Config",
    **PI | {"kept": {**PI["kept"], "padded_state": False}},
    published="the published pi0.5 (3.6B)",
    checkpoints=[
        on_libero("hf://RLinf/RLinf-Pi05-LIBERO-SFT", *SUITES),
        PublicCheckpoint(name="hf://RLinf/RLinf-Pi05-MetaWorld-SFT", tasks=["metaworld/*"]),
    ],
    summary="pi0.5 (3B): images and a task description that may contain the robot state; a chunk of actions from noise",
)
register_family(
    "pi0_fast",
    "pi0_fast:Pi0FastPolicy",
    "pi0_fast:Pi0FastConfig",
    whole_chunks=True,
    usual_chunk=10,
    info="embodyrl.models.pi0_fast.check:Pi0FastInfo",
    kept={"convention": None, "normalization": None},
    published="the published pi0-FAST (2.9B)",
    checkpoints=[
        on_libero("hf://lerobot/pi0fast-libero", *SUITES),
        PublicCheckpoint(name="hf://lerobot/pi0fast-base"),
    ],
    summary="pi0-FAST (2.9B): images, robot state and a task description; a chunk of actions in compressed tokens",
)
register_family(
    "smolvla",
    "smolvla:SmolVLAPolicy",
    "smolvla:SmolVLAConfig",
    requires=[Requirement(module="tokenizers", install="pip install 'embodyrl[vla]'")],
    usual_chunk=50,
    info="embodyrl.models.smolvla.check:SmolVLAInfo",
    published="the published SmolVLA (0.45B)",
    checkpoints=[
        on_libero("hf://HuggingFaceVLA/smolvla_libero", *SUITES),
        PublicCheckpoint(name="hf://lerobot/smolvla_base"),
    ],
    summary="SmolVLA (450M): images, robot state and a task description; a chunk of actions from noise",
)
register_family(
    "act",
    "act:ACTPolicy",
    "act:ACTConfig",
    requires=[],
    words=False,
    usual_chunk=100,
    info="embodyrl.models.act.check:ACTInfo",
    published="the published ACT (52M)",
    checkpoints=[
        PublicCheckpoint(
            name="hf://lerobot/act_aloha_sim_transfer_cube_human", tasks=["aloha/gym_aloha/AlohaTransferCube-v0"]
        ),
        PublicCheckpoint(
            name="hf://lerobot/act_aloha_sim_insertion_human", tasks=["aloha/gym_aloha/AlohaInsertion-v0"]
        ),
    ],
    summary="ACT (52M): images and robot state, no task description; a chunk of actions in one pass",
)
SupportedModel.register(
    "remote",
    target="embodyrl.models.remote.policy:ServedPolicy",
    options="embodyrl.models.remote.options:RemoteConfig",
    requires=[
        Requirement(module=module, install="pip install 'embodyrl[serve]'") for module in ("websockets", "msgpack")
    ],
    critic=False,
    blocks=False,
    info="embodyrl.models.remote.options:RemoteInfo",
    summary="a policy that a server holds (openpi's protocol); it acts in evaluations and recordings",
)
