"""The reproduction lock: what simulators, preprocessing and policy of a run gave, to be compared with what they give
later.

It costs a run almost nothing, because nothing is simulated for it: the first episode of an evaluation is watched
(`StartRecorder`), and every checkpoint holds what was seen there, together with what its policy makes of it (`Lock`).
`runner.verification` compares. Layers, in the order in which data passes them: packages, physics, rendering,
preprocessing, weights, kernels.

Shapes: `T` chunks, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` images, `M` moments (1 or 2).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from embodyrl.config.schema import Config
from embodyrl.engine.compute import convolves_in_tf32
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.parallel import Replicas
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.states import installed_version, version_of_file, versions_of_env
from embodyrl.errors import UserError, at_line, line_of_plugin
from embodyrl.files import replacing
from embodyrl.models.policy import Inputs, Policy
from embodyrl.rollout.watching import Moment, RecordedStart
from embodyrl.runner.evaluation import EpisodeRecord

LOCK_FILE = "lock.safetensors"
FORMAT = 1
"""Incremented with every change after which an older version would misread a lock."""
NUMERIC = (
    *("torch", "numpy", "scipy", "torchvision", "pillow", "opencv-python", "opencv-python-headless"),
    *("transformers", "tokenizers", "timm", "gymnasium", "safetensors"),
)
"""Packages that decide numbers, beside those of the simulator."""


class LockError(UserError):
    """Raised when a lock is missing, damaged, or of another version."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an episode of an evaluation."""

    success: bool | None
    total_reward: float


def place_beside(checkpoint: Path) -> Path:
    """Return the path of a lock that was written after its checkpoint, which is never changed."""
    return checkpoint.with_name(f"{checkpoint.name}.{LOCK_FILE}")


def find_lock(folder: Path) -> Path:
    """Return the path of the lock of a checkpoint or an exported policy: the one beside it, or its own.

    Raises:
        LockError: there is none.
    """
    for path in (place_beside(folder), folder / LOCK_FILE):
        if path.is_file():
            return path
    raise LockError(
        f"{folder} has no lock ({LOCK_FILE}): it was saved before its run was evaluated, or by an older version. Write "
        f"one of what this machine gives, to compare others with: embodyrl verify --write {folder}"
    )


@dataclass(kw_only=True)
class Lock:
    """What a run gave."""

    iteration: int
    """Iterations that the policy had learned."""
    seen: RecordedStart
    inputs: Inputs
    """What preprocessing made of the moments, `[M, ...]`; empty if it is not known."""
    outputs: Inputs
    """What the policy made of `inputs`: `actions [M, C, D]`, `logprobs [M, N]`, `values [M]`; empty if not known."""
    records: Sequence[EpisodeRecord]
    """Episodes of the evaluation of this policy, in its order; empty if there was none."""
    versions: Mapping[str, str]
    """Of packages and plug-ins."""
    machine: Mapping[str, str]
    """Processor, device, number of threads, ..."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each tensor of the policy."""

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        seen, moments = self.seen, self.seen.moments
        tensors: dict[str, Any] = {"actions": np.stack(seen.actions), "rewards": np.stack(seen.rewards)}
        tensors |= {"proprio": np.stack(seen.proprio)} if seen.proprio else {}
        for number, moment in enumerate(moments):
            parts = {"images": moment.observation.images, "proprio": moment.observation.proprio}
            parts["state"] = None if moment.state is None else np.frombuffer(moment.state, np.uint8)
            tensors |= {f"moments.{number}.{name}": value for name, value in parts.items() if value is not None}
        texts = {
            "format": FORMAT,
            "iteration": self.iteration,
            "episode": seen.episode.to_plain(),
            "steps": seen.steps,
            "task_descriptions": [moment.observation.task_descriptions[0] for moment in moments],
            "renderer": dict(seen.renderer),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "weights": dict(self.weights),
            "records": [asdict(record) for record in self.records],
        }
        converted = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
        converted |= {f"inputs.{name}": _apart(value) for name, value in self.inputs.items()}
        converted |= {f"outputs.{name}": _apart(value) for name, value in self.outputs.items()}
        with replacing(path) as temporary:
            save_file(converted, temporary, {"lock": json.dumps(texts)})

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read what `save` wrote; nothing that the file holds is executed.

        Raises:
            LockError: it is damaged, or of another version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                texts = json.loads((file.metadata() or {})["lock"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if texts["format"] != FORMAT:
                raise LockError(
                    f"{path} is a lock of format {texts['format']!r}, and this version of embodyrl reads {FORMAT}: "
                    "install the version that wrote it, or write it anew with --write"
                )
            return cls._of(texts, tensors)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, LockError):
                raise
            raise LockError(
                f"{path} cannot be read as a lock ({type(error).__name__}: {error}): restore it from a copy, or write "
                "one of what this machine gives now, with --write"
            ) from error

    @classmethod
    def _of(cls, texts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Lock:
        moments = []
        for number, description in enumerate(texts["task_descriptions"]):
            found = {name: tensors.get(f"moments.{number}.{name}") for name in ("images", "proprio", "state")}
            arrays = {name: None if value is None else value.numpy() for name, value in found.items()}
            state = arrays.pop("state")
            observation = Observation(**arrays, task_descriptions=[str(description)])
            moments.append(Moment(observation=observation, state=None if state is None else state.tobytes()))
        if not moments:
            raise ValueError("it holds no observation")
        seen = RecordedStart(
            episode=EpisodeSpec.from_plain(texts["episode"]),
            moments=moments,
            actions=list(tensors["actions"].numpy()),
            proprio=list(tensors["proprio"].numpy()) if "proprio" in tensors else [],
            rewards=list(tensors["rewards"].numpy()),
            steps=int(texts["steps"]),
            renderer=_texts(texts["renderer"]),
        )
        return cls(
            iteration=int(texts["iteration"]),
            seen=seen,
            inputs=_part(tensors, "inputs."),
            outputs=_part(tensors, "outputs."),
            records=[EpisodeRecord(**each) for each in texts["records"]],
            versions=_texts(texts["versions"]),
            machine=_texts(texts["machine"]),
            weights=_texts(texts["weights"]),
        )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> Inputs:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in found.items()}


def _apart(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def joined(moments: Sequence[Moment]) -> Observation:
    """Return the observations of moments as one of as many envs."""
    return Observation.concat([moment.observation for moment in moments])


def lock_of(
    config: Config, engine: HybridEngine, seen: RecordedStart, iteration: int, records: Sequence[EpisodeRecord]
) -> Lock:
    """Return the lock of a policy, without its weights, which are read when it is saved.

    Args:
        config: of the run.
        engine: has the policy.
        seen: by an evaluation.
        iteration: iterations that the policy has learned.
        records: of an evaluation of this very policy; empty if there was none.
    """
    # All ranks would have to compute with sharded weights, and only the first has seen anything.
    acts_alone = type(engine.weights) is Replicas
    # As they are stored: in another layout of memory, networks sum in another order.
    inputs = (
        {name: _apart(value) for name, value in engine.preprocess(joined(seen.moments)).items()} if acts_alone else {}
    )
    return Lock(
        iteration=iteration,
        seen=seen,
        inputs=inputs,
        outputs=outputs_of(engine, inputs) if inputs else {},
        records=records,
        versions=versions_of(config),
        machine=machine_of(engine),
    )


def seen_before(checkpoint: Path, config: Config) -> RecordedStart | None:
    """Return what an evaluation showed before a checkpoint was saved; None if there was none, or if other versions of
    packages showed it.

    Raises:
        LockError: see `Lock.load`.
    """
    if not (checkpoint / LOCK_FILE).is_file():
        return None
    lock = Lock.load(checkpoint / LOCK_FILE)
    return lock.seen if lock.versions == versions_of(config) else None


def without_record(error: Exception) -> str:
    """Return the warning that a checkpoint has no lock, because making or writing it failed."""
    place = line_of_plugin(error)
    where = "" if place is None else f" ({at_line(*place)})"
    return (
        f"the checkpoint has no record of reproduction ({LOCK_FILE}), which embodyrl verify needs; all else is saved. "
        f"Making it failed: {type(error).__name__}: {error}{where}"
    )


def outputs_of(engine: HybridEngine, inputs: Inputs) -> Inputs:
    """Return what the policy makes of network inputs, on the CPU."""
    decision = engine.decide({name: tensor.to(engine.device) for name, tensor in inputs.items()})
    found = {"actions": decision.actions, "logprobs": decision.logprobs}
    found |= {} if decision.values is None else {"values": decision.values}
    return {name: _apart(value) for name, value in found.items()}


def versions_of(config: Config) -> dict[str, str]:
    """Return the versions of the packages that decide numbers, and hashes of the config's plug-ins."""
    found = {name: version for name in NUMERIC if (version := installed_version(name)) is not None}
    plugins = {f"plug-in {name}": version_of_file(name) for name in config.plugins if name in sys.modules}
    return {"python": platform.python_version(), **found, **versions_of_env(config.env), **plugins}


def machine_of(engine: HybridEngine) -> dict[str, str]:
    """Return what else decides the numbers of a policy's kernels."""
    device = engine.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found = {
        "processor": _processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "device": gpu or device.type,
        "precision": str(engine.precision).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "oneDNN": "on" if torch.backends.mkldnn.enabled else "off",
        "float32 products": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }
    if gpu is not None:
        convolutions = "tf32" if convolves_in_tf32() else "float32"
        found |= {
            "float32 convolutions": convolutions,
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    return found


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_DIGESTS = WeakTensorKeyDictionary()
"""Digests of weights that never change, so that a checkpoint of adapters does not read a whole model again."""


def weights_of(policy: Policy) -> dict[str, str]:
    """Return the SHA-256 of each tensor of a policy: its type, shape and bytes."""
    frozen = {name: weight for name, weight in policy.named_parameters() if not weight.requires_grad}
    found = {}
    for name, tensor in policy.state_dict().items():
        known = _DIGESTS.get(frozen.get(name)) if name in frozen else None
        found[name] = known or digest_of(tensor)
        if name in frozen:
            _DIGESTS[frozen[name]] = found[name]
    return found


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes."""
    described = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    described.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return described.hexdigest()
