"""`embodyrl verify`: compares what a run recorded (`runner.reproduction`) with what this machine gives now.

Layers are compared in the order in which data passes them, and each by itself: it gets what the layer before it gave
*then*, not what that gives now. So the first layer that differs is the cause, and those after it are judged all the
same.

Shapes: `M` moments (1 or 2), `T` chunks, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` images.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs.manager import EnvManager, MixedManager
from embodyrl.envs.states import StateError, versions_of_env
from embodyrl.evaluation.results import Pairs
from embodyrl.models.policy import Inputs
from embodyrl.placement.launcher import RemoteError
from embodyrl.rollout.action_queue import Overlap
from embodyrl.rollout.watching import Moment, RecordedStart, StartRecorder, arrays_of
from embodyrl.runner.build import build_acting, open_simulators, settings_of_torch_kept
from embodyrl.runner.evaluation import EpisodeRecord, Evaluation, evaluate, evaluation_noise, held_out_episodes
from embodyrl.runner.reproduction import (
    Lock,
    LockError,
    joined,
    lock_of,
    machine_of,
    outputs_of,
    versions_of,
    weights_of,
)

PHYSICS_ROUNDING = 1e-6
"""Largest distance of physics that counts as rounding, relative to the number where that is above 1: a few units in the
last place of the float32 that observations have, after some steps in which they may add up."""
IMAGE_ROUNDING = 1
"""Largest distance of colours [of 255] that counts as rounding: a shade that lies between two may go either way."""
KERNEL_ROUNDING = {"float32": 1e-5, "bfloat16": 2**-6}
"""Largest distance of network outputs that counts as rounding, relative to the largest of them, by the type that they
were computed in: sums of hundreds of products, in another order. bfloat16 has 8 bits, float32 has 24."""
PAIRED_EPISODES = 10
"""Episodes that are played again where a layer differs, unless the user wants another number."""


class State(StrEnum):
    """Outcome of a comparison."""

    equal = "equal"
    """Bit for bit."""
    rounding = "within rounding"
    differs = "differs"
    absent = "-"
    """There is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Comparison of one layer."""

    name: str
    state: State
    text: str
    """What was compared, and how far it is from what was recorded."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Distances."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that decides numbers and is not what it was."""

    name: str
    before: str
    now: str
    layers: tuple[str, ...]
    """Layers that it can change."""
    is_package: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.now}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found."""

    lock: Path
    iteration: int
    layers: Sequence[Layer]
    changes: Sequence[Change]
    before: Sequence[EpisodeRecord] = ()
    """Episodes that were played again, as they were recorded."""
    now: Sequence[EpisodeRecord] = ()
    """The same episodes, as they are now."""

    @property
    def first(self) -> Layer | None:
        """The first layer whose numbers differ by more than rounding; None if there is none."""
        return next((layer for layer in self.layers if layer.name != PACKAGES and layer.state is State.differs), None)

    @property
    def exit_code(self) -> int:
        """0: the run is reproduced here; 1: something differs."""
        differing = any(one.success != other.success for one, other in zip(self.before, self.now, strict=True))
        return int(self.first is not None or differing)

    @property
    def pairs(self) -> Pairs | None:
        """Outcomes of the episodes then and now; None if none were played, or the simulator tells no success."""
        both = ((one.success, other.success) for one, other in zip(self.before, self.now, strict=True))
        known = [(one, other) for one, other in both if one is not None and other is not None]
        return Pairs.of(known) if known else None

    @property
    def causes(self) -> list[Change]:
        """Changes that can explain the first layer that differs; simulators' packages before others."""
        return [] if self.first is None else [each for each in self.changes if self.first.name in each.layers]

    @property
    def remedies(self) -> list[str]:
        """Commands and settings that may restore what was, the most likely first."""
        packages = [each for each in self.causes if each.is_package and each.name != "python"]
        gone = [each for each in packages if each.before == MISSING]
        pinned = [f"'{each.name}=={each.before}'" for each in packages if each.before != MISSING]
        found = [f"pip install {' '.join(pinned)}"] if pinned else []
        found += [f"pip uninstall {' '.join(each.name for each in gone)}"] if gone and not pinned else []
        return found + [SETTINGS[change.name] for change in self.causes if change.name in SETTINGS]

    def to_plain(self) -> dict[str, Any]:
        """Return everything as JSON values; a distance that is infinite, as of other shapes, is None."""
        pairs = self.pairs
        success = None
        if pairs is not None:
            low, high = pairs.interval
            success = {
                **dataclasses.asdict(pairs),
                "difference": pairs.difference,
                "low": low,
                "high": high,
                "before": [dataclasses.asdict(each) for each in self.before],
                "now": [dataclasses.asdict(each) for each in self.now],
            }
        return {
            "lock": str(self.lock),
            "iteration": self.iteration,
            "same": self.exit_code == 0,
            "first": None if self.first is None else self.first.name,
            "layers": [
                dataclasses.asdict(layer)
                | {"numbers": {name: each if math.isfinite(each) else None for name, each in layer.numbers.items()}}
                for layer in self.layers
            ],
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "remedies": self.remedies,
            "success": success,
        }


PACKAGES, PHYSICS, RENDERING, PREPROCESSING, WEIGHTS, KERNELS = (
    *("packages", "physics", "rendering"),
    *("preprocessing", "weights", "kernels"),
)
MISSING = "missing"
"""Version of what is not installed."""
_OF_IMAGES = ("pillow", "torchvision", "opencv-python", "opencv-python-headless", "transformers", "tokenizers")
_OF_NETWORKS = ("torch", "transformers", "timm", "safetensors")
SETTINGS = {
    "threads": "the number of threads of then: engine.threads, OMP_NUM_THREADS",
    "oneDNN": "torch's kernels of then: torch.backends.mkldnn.enabled, or ONEDNN variables of the environment",
    "precision": "the precision of then: engine.precision",
    "device": "a device like that of then: engine.device",
    "deterministic": "engine.deterministic as it was",
    "MUJOCO_GL": "the renderer of then: the variable MUJOCO_GL",
    "VK_ICD_FILENAMES": "the renderer of then: the variable VK_ICD_FILENAMES",
    "VK_DRIVER_FILES": "the renderer of then: the variable VK_DRIVER_FILES",
}
"""Remedies for changes that are no packages."""


def verify(
    loaded: LoadedConfig, weights: Path | None, lock: Lock, path: Path, episodes: int | None = None
) -> Verification:
    """Compare a lock with this machine.

    Args:
        loaded: config to act with, as for an evaluation.
        weights: folder of a saved policy; None: the config names it.
        lock: of that policy.
        path: of the lock, for messages.
        episodes: to play again, 0: none; None: `PAIRED_EPISODES` where a layer differs, else none.

    Raises:
        LockError: the lock belongs to another simulator or model, or more episodes are wanted than it has.
        UserError, RunError: simulators or policy cannot be started here.
    """
    _check_episodes(lock, path, episodes)
    with _one_env(loaded) as manager, settings_of_torch_kept():
        _check_fit(lock, path, manager)
        engine = build_acting(loaded.config, manager, weights)
        played, renderer = _play_again(lock.seen, manager)
        physics = compare_physics(lock.seen, played)
        rendering = compare_rendering(lock.seen, played, manager, physics)
        layers = [
            physics,
            rendering,
            compare_preprocessing(lock.inputs, engine.preprocess(joined(lock.seen.moments))),
            weights_now := compare_weights(lock.weights, _weights_of_same_model(lock, path, engine)),
            compare_kernels(lock, engine, weights_now),
        ]
        changes = [*changes_of(lock, loaded.config, engine, renderer)]
        found = Verification(
            lock=path, iteration=lock.iteration, layers=[compare_packages(changes), *layers], changes=changes
        )
        del engine
    wanted = episodes if episodes is not None else PAIRED_EPISODES if found.first is not None else 0
    count = min(wanted, len(lock.records))
    if not count:
        return found
    now = play(loaded, weights, count)
    return dataclasses.replace(found, before=list(lock.records[:count]), now=now.records)


def write(loaded: LoadedConfig, weights: Path | None, path: Path, iteration: int) -> Lock:
    """Play the config's evaluation with a policy, and write the lock of what this machine gives.

    Args:
        loaded, weights: see `verify`.
        path: of the lock; an existing one is replaced.
        iteration: iterations that the policy has learned.
    """
    config = loaded.config
    with (
        tempfile.TemporaryDirectory() as logs,
        open_simulators(loaded, Path(logs)) as manager,
        settings_of_torch_kept(),
    ):
        engine, watched = build_acting(config, manager, weights), StartRecorder(manager)
        result = evaluate(
            watched,
            engine,
            held_out_episodes(config),
            noise=evaluation_noise(config, engine),
            overlap=Overlap.of(config),
        )
        seen = watched.seen()
        if seen is None:
            raise LockError("the first episode was lost with its simulator process: try again")
        lock = lock_of(config, engine, seen, iteration, result.records)
        lock.weights = weights_of(engine.policy)
        lock.save(path)
    return lock


def play(loaded: LoadedConfig, weights: Path | None, count: int) -> Evaluation:
    """Play the first `count` episodes of the config's evaluation."""
    config = loaded.config
    if not config.eval.sample:  # with sampled actions the noise depends on the number of envs
        env = dataclasses.replace(config.env, num_envs=min(config.env.num_envs, count), workers="auto")
        config = dataclasses.replace(config, env=env, rollout=dataclasses.replace(config.rollout, blocks=1))
    settings = dataclasses.replace(loaded, config=config)
    with (
        tempfile.TemporaryDirectory() as logs,
        open_simulators(settings, Path(logs)) as manager,
        settings_of_torch_kept(),
    ):
        engine = build_acting(config, manager, weights)
        chosen = held_out_episodes(config)[:count]
        return evaluate(manager, engine, chosen, noise=evaluation_noise(config, engine), overlap=Overlap.of(config))


@contextmanager
def _one_env(loaded: LoadedConfig) -> Iterator[EnvManager | MixedManager]:
    """Start simulators with one env."""
    env = dataclasses.replace(loaded.config.env, num_envs=1, workers=1)
    rollout = dataclasses.replace(loaded.config.rollout, blocks=1)
    single = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, env=env, rollout=rollout))
    with tempfile.TemporaryDirectory() as logs, open_simulators(single, Path(logs)) as manager:
        assert isinstance(manager, EnvManager | MixedManager), "it was started on this machine"
        yield manager


def _check_episodes(lock: Lock, path: Path, episodes: int | None) -> None:
    if episodes and episodes > len(lock.records):
        raise LockError(
            f"{path} holds the outcomes of {len(lock.records)} episodes, and --episodes is {episodes}: ask for at most "
            f"{len(lock.records)}" + ("" if lock.records else " (this policy was not evaluated before it was saved)")
        )


def _check_fit(lock: Lock, path: Path, manager: EnvManager | MixedManager) -> None:
    """Refuse a lock of other simulators."""
    spec, first = manager.spec, lock.seen.moments[0].observation
    now = {
        "tasks": lock.seen.episode.task in spec.tasks,
        "action dims": lock.seen.actions[0].shape[-1] == spec.action_dim,
        "actions in a chunk": lock.seen.actions[0].shape[0] == manager.chunk_size,
        "proprio dims": (0 if first.proprio is None else first.proprio.shape[1]) == spec.proprio_dim,
        "images": (0 if first.images is None else first.images.shape[1]) == spec.num_images,
    }
    if wrong := [name for name, fits in now.items() if not fits]:
        raise LockError(
            f"{path} is no lock of this config: other {', '.join(wrong)}. Give the checkpoint that it belongs to"
        )


def _weights_of_same_model(lock: Lock, path: Path, engine: HybridEngine) -> dict[str, str]:
    """Return the digests of the policy's weights; refuse a lock of another model."""
    found = weights_of(engine.policy)
    if lock.weights and not lock.weights.keys() & found.keys():
        raise LockError(
            f"{path} is the lock of another model: it has no weight with the name of one of {engine.policy.name!r}. "
            "Give the checkpoint that it belongs to"
        )
    return found


def _play_again(seen: RecordedStart, manager: EnvManager | MixedManager) -> tuple[RecordedStart, Mapping[str, str]]:
    """Execute the recorded actions from the recorded episode's start; returns what is seen now."""
    watched, slots = StartRecorder(manager), [0]
    watched.reset(slots, [seen.episode])
    for chunk in seen.actions:
        if watched.step(slots, chunk[None]).ended[0]:
            break
    played = watched.seen()
    if played is None:
        raise LockError("the simulator process was lost while it played the recorded actions: see the messages above")
    return played, played.renderer


def changes_of(lock: Lock, config: Config, engine: HybridEngine, renderer: Mapping[str, str]) -> Iterator[Change]:
    """Yield what decides numbers and has changed: packages, machine, renderer."""
    physical = {*versions_of_env(config.env), "python"}
    now = versions_of(config)
    for name in sorted({*lock.versions, *now}, key=lambda name: (name not in physical, name)):
        before, after = lock.versions.get(name, MISSING), now.get(name, MISSING)
        if before == after:
            continue
        ours = name == "embodyrl" or name.startswith("plug-in")
        layers = [PHYSICS, RENDERING] if ours or name in physical or name == "numpy" else []
        layers += [PREPROCESSING] if ours or name in (*_OF_IMAGES, "numpy", "torch") else []
        layers += [WEIGHTS, KERNELS] if ours or name in _OF_NETWORKS else []
        is_package = not name.startswith("plug-in") and " " not in before
        yield Change(name=name, before=before, now=after, layers=tuple(layers), is_package=is_package)
    for found, current, layers in (
        (lock.machine, machine_of(engine), [KERNELS]),
        (lock.seen.renderer, renderer, [RENDERING]),
    ):
        for name in dict.fromkeys((*found, *current)):
            before, after = found.get(name, MISSING), current.get(name, MISSING)
            if before != after:
                every = [PHYSICS, RENDERING, PREPROCESSING, KERNELS] if name == "processor" else layers
                yield Change(name=name, before=before, now=after, layers=tuple(every))


def compare_packages(changes: Sequence[Change]) -> Layer:
    """Return the layer of packages and machine."""
    if not changes:
        return Layer(name=PACKAGES, state=State.equal, text="versions, plug-ins, machine and renderer")
    return Layer(name=PACKAGES, state=State.differs, text="; ".join(map(str, changes)))


def compare_physics(before: RecordedStart, now: RecordedStart) -> Layer:
    """Compare what the same actions led to."""
    if now.steps != before.steps:
        text = f"the episode ended after {now.steps} steps instead of {before.steps}"
        return Layer(name=PHYSICS, state=State.differs, text=text, numbers={"steps": now.steps - before.steps})
    numbers = {"rewards": _distance(np.stack(before.rewards), np.stack(now.rewards))}
    # The reset is step 0; afterwards one observation for each chunk.
    first = [(one.moments[0].observation.proprio, one.proprio) for one in (before, now)]
    if before.proprio:
        (start, rest), (start_now, rest_now) = first
        assert start is not None and start_now is not None, "proprio in each observation, or in none"
        distances = [_distance(start[0], start_now[0])]
        distances += [_distance(one, other) for one, other in zip(rest, rest_now, strict=True)]
        numbers |= {"reset": distances[0], "proprio": max(distances)}
        chunk = len(before.rewards[0])
        beyond = [number * chunk for number, distance in enumerate(distances) if distance > PHYSICS_ROUNDING]
        numbers |= {"first step": float(beyond[0])} if beyond else {}
    numbers |= {"state": _distance_of_states(before.moments, now.moments)}
    compared = {name: value for name, value in numbers.items() if name in ("rewards", "proprio", "state")}
    state = _state(max(compared.values()), PHYSICS_ROUNDING)
    text = f"{before.steps} steps of {before.episode.task}"
    if state is not State.equal:
        # States also hold accelerations and the solver's memory, which differ much more than where things are.
        seen = any(compared.get(name) for name in ("proprio", "rewards"))
        shown = {name: value for name, value in compared.items() if value and (name != "state" or not seen)}
        far = ", ".join(f"{name} {value:.2g}" for name, value in shown.items())
        step = numbers.get("first step")
        since = "" if step is None else f", from step {step:.0f} on" if step else ", from the reset on"
        text += f": off by at most {far} (simulator's units){since}"
    return Layer(name=PHYSICS, state=state, text=text, numbers=numbers)


def _distance_of_states(before: Sequence[Moment], now: Sequence[Moment]) -> float:
    """Return the largest distance of numbers in the simulator's states; infinite if they have another form."""
    farthest = 0.0
    for one, other in zip(before, now, strict=False):
        if one.state is None or other.state is None:
            continue
        then, after = arrays_of(one.state), arrays_of(other.state)
        if then.keys() != after.keys() or any(then[name].shape != after[name].shape for name in then):
            return float("inf")
        farthest = max(farthest, *(_distance(then[name], after[name]) for name in then), 0.0)
    return farthest


def _distance(before: NDArray[Any], now: NDArray[Any]) -> float:
    """Return the largest distance of numbers, relative to those that are above 1. NaN equals NaN."""
    if before.shape != now.shape:
        return float("inf")
    if before.size == 0 or np.array_equal(before, now, equal_nan=before.dtype.kind == "f"):
        return 0.0
    one, other = np.atleast_1d(before).astype(np.float64), np.atleast_1d(now).astype(np.float64)
    differences = np.abs(one - other) / np.maximum(1.0, np.abs(one))
    differences[np.isnan(one) & np.isnan(other) | (one == other)] = 0.0
    return float("inf") if np.isnan(differences).any() else float(differences.max())


def _state(distance: float, rounding: float) -> State:
    if distance == 0.0:
        return State.equal
    return State.rounding if distance <= rounding else State.differs


def compare_rendering(
    before: RecordedStart, now: RecordedStart, manager: EnvManager | MixedManager, physics: Layer
) -> Layer:
    """Compare images of the recorded states, or where these cannot be set, of the same actions."""
    if before.moments[0].observation.images is None:
        return Layer(name=RENDERING, state=State.absent, text="no cameras")
    images, of_states = _images_now(before, now, manager)
    if images is None:
        text = f"not judged, because the simulator sets no state and physics {physics.state}"
        if not of_states and physics.state is State.differs:
            return Layer(name=RENDERING, state=State.absent, text=text)
        images = [moment.observation.images for moment in now.moments]
    recorded = [moment.observation.images for moment in before.moments]
    pairs = [
        (one, other) for one, other in zip(recorded, images, strict=False) if one is not None and other is not None
    ]
    if any(one.shape != other.shape for one, other in pairs):
        return Layer(name=RENDERING, state=State.differs, text="images of another size")
    differences = np.concatenate([np.abs(one.astype(np.int16) - other).ravel() for one, other in pairs])
    numbers = {
        "most": float(differences.max()),
        "mean": float(differences.mean()),
        "share": float((differences > 0).mean()),
    }
    state = _state(numbers["most"], IMAGE_ROUNDING)
    what = f"{len(pairs)} x {pairs[0][0].shape[1]} images of " + ("recorded states" if of_states else "these steps")
    far = (
        ""
        if state is State.equal
        else (
            f": {numbers['share']:.1%} of values differ, by {numbers['mean']:.2g} of 255 on average, at most "
            f"{numbers['most']:.0f}"
        )
    )
    return Layer(name=RENDERING, state=state, text=what + far, numbers=numbers)


def _images_now(
    before: RecordedStart, now: RecordedStart, manager: EnvManager | MixedManager
) -> tuple[list[NDArray[np.uint8] | None] | None, bool]:
    """Return what the simulator shows of the recorded states, and True; None and False if it sets none of them."""
    if any(moment.state is None for moment in before.moments):
        return None, False
    shown: list[NDArray[np.uint8] | None] = []
    try:
        for moment in before.moments:
            assert moment.state is not None
            images = manager.show([0], [moment.state]).images
            shown.append(None if images is None else images.copy())
    except (RemoteError, StateError):
        return None, False
    return shown, True


def compare_preprocessing(before: Inputs, now: Inputs) -> Layer:
    """Compare the network inputs of the recorded observations."""
    if not before:
        return Layer(name=PREPROCESSING, state=State.absent, text="not recorded (sharded weights)")
    if changed := sorted(before.keys() ^ now.keys()):
        text = f"other inputs: {', '.join(changed)}"
        return Layer(name=PREPROCESSING, state=State.differs, text=text)
    numbers, forms = {}, []
    for name, one in before.items():
        other = now[name].cpu()
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            forms.append(f"{name} {_form(one)} -> {_form(other)}")
            continue
        numbers[name] = _distance(_numpy(one), _numpy(other))
    if forms:
        return Layer(name=PREPROCESSING, state=State.differs, text="; ".join(forms), numbers=numbers)
    state = _state(max(numbers.values()), PHYSICS_ROUNDING)
    far = ", ".join(f"{name} by at most {value:.2g}" for name, value in numbers.items() if value > 0)
    text = f"{', '.join(before)}" if state is State.equal else f"{far} (network's units)"
    return Layer(name=PREPROCESSING, state=state, text=text, numbers=numbers)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _numpy(tensor: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
    return found


def compare_weights(before: Mapping[str, str], now: Mapping[str, str]) -> Layer:
    """Compare the digests of all tensors of the policy."""
    changed = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    if not changed:
        return Layer(name=WEIGHTS, state=State.equal, text=f"{len(now)} tensors")
    shown = ", ".join(sorted(changed)[:3]) + (", ..." if len(changed) > 3 else "")
    text = f"{len(changed)} of {len(before)} tensors differ: {shown}"
    return Layer(name=WEIGHTS, state=State.differs, text=text, numbers={"tensors": len(changed)})


def compare_kernels(lock: Lock, engine: HybridEngine, weights: Layer) -> Layer:
    """Compare what the policy makes of the recorded network inputs."""
    if not lock.outputs:
        return Layer(name=KERNELS, state=State.absent, text="not recorded (sharded weights)")
    now = outputs_of(engine, lock.inputs)
    if now.keys() != lock.outputs.keys() or any(now[name].shape != lock.outputs[name].shape for name in now):
        return Layer(name=KERNELS, state=State.differs, text="outputs of another form")
    numbers = {name: _relative(_numpy(lock.outputs[name]), _numpy(now[name])) for name in now}
    far = ", ".join(f"{name} {value:.2g}" for name, value in numbers.items() if value > 0)
    if weights.state is State.differs:
        text = "not judged, because the weights differ" + (f": {far} of the largest" if far else "")
        return Layer(name=KERNELS, state=State.absent, text=text, numbers=numbers)
    rounding = KERNEL_ROUNDING.get(lock.machine.get("precision", ""), KERNEL_ROUNDING["float32"])
    state = _state(max(numbers.values()), rounding)
    text = ", ".join(now) if state is State.equal else f"off by {far} of the largest; rounding is up to {rounding:.2g}"
    return Layer(name=KERNELS, state=state, text=text, numbers=numbers)


def _relative(before: NDArray[Any], now: NDArray[Any]) -> float:
    """Return the largest distance, relative to the largest number before where that is above 1."""
    if np.array_equal(before, now, equal_nan=True):
        return 0.0
    distance = float(np.abs(before.astype(np.float64) - now).max()) / max(1.0, float(np.abs(before).max()))
    return float("inf") if np.isnan(distance) else distance
