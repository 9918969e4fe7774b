"""Device, precision, determinism, gradient checkpointing and random streams of the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from embodyrl.config.schema import Device, Precision
from embodyrl.errors import UserError
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import Policy
from embodyrl.models.saved import LARGE
from embodyrl.placement.cuda import PRODUCTS, set_up_products, why_no_cuda
from embodyrl.placement.plan import inventory
from embodyrl.seeding import derive_seed


def choose_device(device: Device) -> torch.device:
    """Return the torch device for `engine.device`.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        reason = why_no_cuda() or "see nvidia-smi, or set engine.device=cpu"
        raise UserError(f"engine.device is cuda, but torch finds no CUDA device here: {reason}")
    if device is Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def choose_precision(precision: Precision, policy: Policy, device: torch.device) -> torch.dtype:
    """Return the data type for `engine.precision`.

    auto is bfloat16 for weights that are stored in it, and for models of many layers (those whose `parallel_plan` names
    blocks) on a GPU that multiplies it natively; else float32, because small networks gain nothing from fewer bits.
    """
    if precision is Precision.float32:
        return torch.float32
    held = any(parameter.dtype is torch.bfloat16 for parameter in policy.parameters())
    if precision is Precision.bfloat16 or held or (has_bfloat16(device) and policy.parallel_plan().blocks):
        return torch.bfloat16
    return torch.float32


def choose_threads(threads: int | str, policy: Policy, ranks_here: int) -> int:
    """Return the number of torch's CPU threads for `engine.threads`.

    Args:
        threads: the setting.
        policy: for `auto`, which is 1 for a small one.
        ranks_here: ranks that share this machine's cores.
    """
    if threads != "auto":
        return int(threads)
    return threads_for(sum(parameter.numel() for parameter in policy.parameters()), inventory().cores, ranks_here)


def threads_for(weights: int, cores: int, ranks_here: int) -> int:
    """Return what `engine.threads: auto` is for a number of weights, on a machine with so many cores and ranks."""
    return max(1, cores // ranks_here) if weights >= LARGE else 1


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU that multiplies bfloat16 natively."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Compute matrix products in `dtype` inside a block; operations that need float32 stay in it (torch.autocast)."""
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def set_up_torch(device: torch.device, *, deterministic: bool) -> None:
    """Set what holds for the whole process. On a GPU float32 is float32, in convolutions as well: torch's default for
    these is TF32, with 10 of its 23 bits.

    Raises:
        UserError: see `be_deterministic`.
    """
    if device.type == "cuda":
        set_up_products()
        torch.backends.cudnn.allow_tf32 = False
    if deterministic:
        be_deterministic(device)


def convolves_in_tf32() -> bool:
    """Return whether float32 convolutions on a GPU are in TF32. Of torch's two names for it, this one can be read
    whatever a program has set, and the other one be set."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def be_deterministic(device: torch.device) -> None:
    """Make torch choose algorithms that give the same bits every time on the same machine, and raise an error where it
    has none.

    Raises:
        UserError: the process has used the GPU before `PRODUCTS` was set (`placement.cuda`), or with another value.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        _try_a_product(device)


def _try_a_product(device: torch.device) -> None:
    """Compute what torch would refuse later, amid the run."""
    try:
        torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    except RuntimeError as error:
        settings = " ".join(f"{name}={value}" for name, value in PRODUCTS.items())
        if not any(name in str(error) for name in PRODUCTS):
            raise
        raise UserError(
            "engine.deterministic cannot hold, because this process has computed on the GPU before, without the "
            f"setting that this needs: set {settings} before the program starts"
        ) from error


def recompute_blocks(policy: Policy) -> None:
    """Keep only the inputs of the policy's blocks (`parallel_plan`) for the backward pass, which recomputes the rest
    (Chen et al. 2016, arXiv:1604.06174). Gradients stay the same.

    Raises:
        PolicyError: the policy has no blocks.
    """
    blocks = policy.parallel_plan().blocks
    if not blocks:
        raise PolicyError(
            f"engine.gradient_checkpointing: model {policy.name!r} does not say which blocks it consists of "
            "(Policy.parallel_plan): set engine.gradient_checkpointing=false"
        )
    for name in blocks:
        block = policy.get_submodule(name)
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of envs that a process decides for; see `rollout.blocks`."""

    here: range = range(1)
    """Their numbers in the run."""
    count: int = 1
    """Blocks of the run."""


class Streams:
    """Random streams: noise in the actions of each block of envs (see `rollout.blocks`); the order of minibatches and
    the noise in learning from demonstrations, which are the same on all ranks.

    Args:
        seed: the run's seed.
        device: of the noise.
        blocks: numbers of the blocks that this process decides for.
    """

    def __init__(self, seed: int, device: torch.device, blocks: range) -> None:
        self.actions = {number: torch.Generator(device) for number in blocks}
        """By the number of the block."""
        self.shuffling = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
        self.imitation = torch.Generator(device).manual_seed(derive_seed(seed, "imitation"))
        self._seed = seed
        for number, stream in self.actions.items():
            stream.manual_seed(derive_seed(seed, "actions", *block_indices(number)))

    def noise_state(self) -> dict[str, Any]:
        """Return the state of the noise in actions, by block."""
        return {
            "device": self.imitation.device.type,
            "actions": [stream.get_state() for stream in self.actions.values()],
        }

    def load_noise(self, state: Mapping[str, Any], version: int) -> None:
        """Continue from the joint `noise_state` of a run. A block that did not exist then begins a new stream, and so
        do all of them on another type of device, whose generators are others.

        Args:
            state: of any number of blocks.
            version: updates done; part of a new stream's seed.
        """
        same = self.imitation.device.type == state["device"]
        for number, stream in self.actions.items():
            if same and number < len(state["actions"]):
                stream.set_state(state["actions"][number])
            else:
                stream.manual_seed(derive_seed(self._seed, "actions", number, version))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all other streams."""
        return {
            "device": self.imitation.device.type,
            "shuffling": self.shuffling.get_state(),
            "imitation": self.imitation.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> str | None:
        """Continue from `state_dict`. Noise on another type of device begins anew; returns a warning about it.

        Args:
            state: of the streams.
            version: updates done; part of a new stream's seed.
        """
        self.shuffling.set_state(state["shuffling"])
        here, there = self.imitation.device.type, _device_type(state)
        if here != there:
            self.imitation.manual_seed(derive_seed(self._seed, "imitation", version))
            return (
                f"the checkpoint was saved on {there} and the run continues on {here}, where random numbers differ: "
                "noise in actions and in learning from demonstrations begins anew, so results differ as between seeds"
            )
        self.imitation.set_state(state["imitation"])
        return None


def block_indices(number: int) -> tuple[int, ...]:
    """Return further indices of `derive_seed` for a random stream of a block's own. Empty for the first, which has the
    stream of a run that is not divided."""
    return (number,) if number else ()


def noise_in(streams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the noise of all blocks from the streams in a checkpoint, see `Streams.noise_state`."""
    return {"device": _device_type(streams), "actions": streams["actions"]}


def _device_type(state: Mapping[str, Any]) -> str:
    """Return the type of device that the streams in a state were on."""
    # Older checkpoints do not name it. The CPU's generator keeps 5056 bytes (Mersenne Twister), CUDA's 16 (Philox).
    return str(state.get("device", "cpu" if len(state["imitation"]) > 1000 else "cuda"))
