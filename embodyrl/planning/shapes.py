"""Tensors with a shape and a type but without numbers, on which a policy's own code runs while its memory is counted.

torch has such tensors, too (`FakeTensorMode`); every operation on them takes several times as long.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

CPU, META = torch.device("cpu"), torch.device("meta")
DEVICE_OF: Any = torch.ops.prim.device.default
CONVOLUTIONS: frozenset[Any] = frozenset(
    {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
)
"""Operations that keep channels last on the CPU but not on the meta device."""
RUNS = object()
"""Stands for results that share memory with arguments, as views do: there the operation is run each time."""


class Made(NamedTuple):
    """A tensor that an operation returns in memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class ShapeTensor(Tensor):
    """A tensor without numbers that says it is on the CPU, where torch chooses the same attention kernels as on a GPU,
    whereas on `meta` it chooses one that stores all attention weights.

    Args:
        meta: tensor on the meta device of this shape and type.
    """

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, meta: Tensor) -> Self:
        """See the class."""
        made: Self = Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        made.meta = meta
        if LiveBytes.counts is not None:
            LiveBytes.counts.note(meta)
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> Tensor:
        """Return one with the shape and type of a tensor on any device."""
        return cls(tensor.to(META))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what `func` does, without numbers."""
        if func is DEVICE_OF:
            return CPU
        # Layers are alike, so that most operations were seen before, with arguments of the same shapes.
        named = {name: META if name == "device" else value for name, value in (kwargs or {}).items()}
        key = func, _key(args), _key(tuple(named.items()))
        known = _KNOWN.get(key, RUNS)
        if known is not RUNS:
            return _remade(known)
        given: dict[int, ShapeTensor] = {}
        returned = func(*_bare(args, given), **{name: _bare(value, given) for name, value in named.items()})
        if func in CONVOLUTIONS and any(map(_channels_last, given.values())):
            returned = tuple(map(_like_images, returned)) if isinstance(returned, tuple) else _like_images(returned)
        if key not in _KNOWN:
            _KNOWN[key] = _described(returned, {_memory(each.meta) for each in given.values()})
        return _wrapped(returned, given)


_KNOWN: dict[Any, Any] = {}
"""What operations return for arguments of some shapes, see `_described`, or `RUNS`."""


def _key(value: Any) -> Any:
    """Return what the shapes of an operation's results depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(each) for each in value)
    return type(value), value  # 1 and 1.0 are equal


def _bare(value: Any, given: dict[int, ShapeTensor]) -> Any:
    """Return an argument with tensors of the meta device; adds to `given` which of them is whose."""
    if isinstance(value, ShapeTensor):
        given[id(value.meta)] = value
        return value.meta
    if isinstance(value, Tensor):
        return value.to(META)
    return type(value)(_bare(each, given) for each in value) if isinstance(value, list | tuple) else value


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _like_images(returned: Any) -> Any:
    """Return what a convolution returns with channels last."""
    images = isinstance(returned, Tensor) and returned.dim() == 4
    return returned.contiguous(memory_format=torch.channels_last) if images else returned


def _memory(meta: Tensor) -> Any:
    """Return what stands for the memory of a tensor."""
    return meta.untyped_storage()._cdata


def _described(returned: Any, given: set[Any]) -> Any:
    """Return `returned` with `Made` in the place of tensors; `RUNS` if one of them shares memory with an argument."""
    if isinstance(returned, Tensor):
        return RUNS if _memory(returned) in given else Made(returned.shape, returned.stride(), returned.dtype)
    if isinstance(returned, list | tuple):
        several = [_described(each, given) for each in returned]
        return RUNS if any(each is RUNS for each in several) else type(returned)(several)
    return returned


def _remade(known: Any) -> Any:
    if isinstance(known, Made):
        return ShapeTensor(torch.empty_strided(known.shape, known.strides, dtype=known.dtype, device=META))
    return type(known)(_remade(each) for each in known) if isinstance(known, list | tuple) else known


def _wrapped(returned: Any, given: Mapping[int, ShapeTensor]) -> Any:
    """Return results as `ShapeTensor`; an argument that was changed in place as itself."""
    if isinstance(returned, Tensor):
        itself = given.get(id(returned))
        return ShapeTensor(returned) if itself is None else itself
    return (
        type(returned)(_wrapped(each, given) for each in returned) if isinstance(returned, list | tuple) else returned
    )


ASSUMED: dict[Any, Any] = {Tensor.__bool__: False, Tensor.__int__: 0}


class Assuming(TorchFunctionMode):
    """Evaluates conditions on tensors without data as false, copies of them to the CPU and numbers as zeros, and
    arrays as if they were normalised actions, drawn from -1 .. 1."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if function in ASSUMED and (args[0].is_meta or isinstance(args[0], ShapeTensor)):
            return ASSUMED[function]
        if function is Tensor.numpy and isinstance(args[0], ShapeTensor):
            return np.random.default_rng(0).uniform(-1.0, 1.0, args[0].shape)
        if function is Tensor.cpu and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return function(*args, **(kwargs or {}))


MAKERS = frozenset(_device_constructors())


class Shapes(Assuming):
    """Makes new tensors as `ShapeTensor`, and assumes what `Assuming` does."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if function in MAKERS and not (args and isinstance(args[0], Tensor)):
            named = {name: value for name, value in kwargs.items() if name != "generator"}
            return ShapeTensor(function(*args, **{**named, "device": META}))
        return super().__torch_function__(function, types, args, kwargs)


class LiveBytes:
    """Counts the bytes of every `ShapeTensor` that is made inside the block, while it is alive.

    Args:
        known: existing tensors; they and tensors that share their memory are not counted.
    """

    counts: LiveBytes | None = None
    """The one whose block this is."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._alive: dict[int, int] = {id(storage): 0 for storage in self._known}

    def __enter__(self) -> Self:
        LiveBytes.counts = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        LiveBytes.counts = None

    def note(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is counted."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._alive:
            self._alive[id(storage)] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, id(storage))

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)
