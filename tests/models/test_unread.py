"""Files of a checkpoint that nothing reads are named, with what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import SINGLE_FILE, refuse_other_weights, unread_note

READ = (
    *("config.json", "policy.json", "vlm/tokenizer.json", "merges.txt", "tokenizer.model", "training.yaml"),
    *(
        "flow_heads.safetensors",
        "value_head.safetensors",
        "policy_preprocessor_step_3_normalizer_processor.safetensors",
    ),
    *("policy_preprocessor_step_2_groot_pack_inputs_v3.safetensors", "action_head--latest_checkpoint.pt"),
    *("README.md", "LICENSE", ".gitattributes", ".cache/huggingface/download/x.lock", "assets/robot/norm_stats.json"),
)
FOREIGN = {
    "adapter_model.safetensors": "a LoRA adapter",
    "lora_adapter/adapter_config.json": "a LoRA adapter",
    "params/_METADATA": "weights of openpi in JAX",
    "params/d/0abc": "weights of openpi in JAX",
    "train_state/manifest.ocdbt": "weights of openpi in JAX",
    "pytorch_model.bin": "a pickle",
    "vision_backbone--1000_checkpoint.pt": "a part of the model",
    "model.onnx": "weights in another format",
    "model-00001-of-00002.safetensors": "weights that the index does not name",
    "training_state/optimizer_state.safetensors": "no file of a policy",
    "modeling_prismatic.py": "code, which is never run",
}


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_every_file_that_is_not_read_is_named_and_no_other(tmp_path: Path) -> None:
    assert unread_note(made(tmp_path / "read", SINGLE_FILE, *READ)) is None
    faults = []
    for number, (name, meaning) in enumerate(FOREIGN.items()):
        note = unread_note(made(tmp_path / str(number), SINGLE_FILE, *READ, name)) or ""
        if not note.startswith(f"the checkpoint holds files that are not read: {name} ({meaning}") or ";" in note:
            faults.append((name, note))
    assert not faults


MODELS: dict[str, list[str]] = {
    "mlp": ["env=gym/pendulum"],
    "cnn": ["env=gym/pendulum_rgb"],
    "act": ["env=gym/pendulum_rgb"],
    "smolvla": ["env=gym/pendulum_rgb"],
    "pi0": ["env=gym/pendulum_rgb"],
    "pi05": ["env=gym/pendulum_rgb"],
    "pi0_fast": ["env=gym/pendulum_rgb"],
    "gr00t": ["env=gym/pendulum_rgb"],
    "gr00t_n16": ["env=gym/pendulum_rgb"],
    "gr00t_n17": ["env=gym/pendulum_rgb"],
    "openvla": ["env=gym/pendulum_rgb"],
    "openvla_oft": ["env=gym/pendulum_rgb"],
}


def test_weights_that_no_model_reads_are_explained_by_every_model(tmp_path: Path) -> None:
    """An adapter alone, openpi's folder and a pickle said only what they lacked, such as config.json."""
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    cases: dict[str, tuple[tuple[str, ...], str]] = {
        "adapter": (
            ("config.json", "adapter_config.json", "adapter_model.safetensors"),
            "merge it into its base model",
        ),
        "jax": (("params/_METADATA", "params/d/0", "assets/robot/norm_stats.json"), "convert it with openpi's"),
        "pickle": (("config.json", "pytorch_model.bin"), "take the safetensors of the same model"),
    }
    faults: list[Any] = []
    for case, (names, remedy) in cases.items():
        folder = made(tmp_path / case, *names)
        with pytest.raises(PolicyError, match="holds no safetensors of a model, but"):
            refuse_other_weights(folder)
        for model, words in MODELS.items():
            try:
                load_config("gym_cartpole", [*words, f"model={model}", f"model.checkpoint={folder}"])
            except ConfigError as error:
                faults += [] if remedy in str(error) else [(case, model, str(error))]
            else:
                faults.append((case, model, "nothing"))
    assert not faults
