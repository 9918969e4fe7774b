"""Tensors that say `cuda:0` and keep their numbers in a tensor of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embodyrl.planning.shapes import ShapeTensor
from standin.events import Kind, line, note, note_copy
from standin.graphs import CUDAGraph
from standin.nested import leaves, mapped

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class WrongDeviceError(RuntimeError):
    """Raised where a GPU would refuse: an operation on both devices, a generator of the wrong device, numpy."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{line()}: {message}")


class CudaTensor(torch.Tensor):
    """A tensor that is on the GPU, or that was and had its `data` replaced by a tensor of the CPU (as offloading does).

    Args:
        inner: its numbers, on the CPU.
    """

    inner: Tensor
    place: torch.device
    """Where it says it is."""

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> CudaTensor:
        # A view of an ordinary tensor is an ordinary one, also in inference mode.
        with torch.inference_mode(inner.is_inference()):
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=CUDA,
                requires_grad=requires_grad,
            )
        self.inner, self.place = inner, CUDA
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, nullcontext)

    device = property(lambda self: self.place)
    is_cuda = property(lambda self: self.place.type == "cuda")
    is_cpu = property(lambda self: self.place.type == "cpu")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, CudaTensor):
            self.inner, self.place = value.inner, value.place
        else:
            self.inner, self.place = value.detach(), CPU

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        if self.is_cuda and not force:
            raise WrongDeviceError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")
        return self.cpu().detach().numpy() if force else self.inner.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def tolist(self) -> Any:
        if self.is_cuda:
            note_copy("cuda", "cpu", waits=True)
        return self.inner.tolist()

    def pin_memory(self, *_: Any) -> Tensor:
        raise WrongDeviceError("cannot pin a tensor of the GPU, only tensors of the CPU can be pinned")

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        if id(self) not in memo:
            made = CudaTensor(self.inner.detach().clone())
            made.place = self.place
            if getattr(self, "_is_param", False):  # what torch knows a parameter of a subclass by
                made._is_param = True
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.place})"


GENERATORS: WeakValueDictionary[int, Generator] = WeakValueDictionary()
"""By address, since torch hands another Python object for the same generator to an operation."""


class Generator(torch._C.Generator):
    """A generator of the CPU, which may say that it is the GPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, "cpu")
        self.place = CUDA if torch.device(device).type == "cuda" else CPU
        GENERATORS[self._cdata] = self
        return self

    def __init__(self, device: Any = "cpu") -> None:
        pass

    device = property(lambda self: self.place)


class Device(TorchDispatchMode):
    """Inside, `device="cuda"` makes tensors of the stand-in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, lambda: self)


def place_of(tensor: Tensor) -> str:
    """Return the type of device that a tensor says it is on."""
    return tensor.place.type if isinstance(tensor, CudaTensor) else tensor.device.type


# ---- an operation

COPIES = {"_to_copy", "copy_", "copy", "_copy_from", "_copy_from_and_resize"}
KEEPING_PLACE = {"detach", "alias", "set_", "lift_fresh", "_has_compatible_shallow_copy_type", "_local_scalar_dense"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
NEED_SIZE = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "argwhere",
    "equal",
    "is_nonzero",
}
"""Operations whose result has a size or value that the CPU must know."""


def compute(func: Any, args: Any, kwargs: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Compute an operation on the CPU as the device would be asked to: refuse what it would refuse, and count what
    waits and what copies."""
    name = func.overloadpacket.__name__
    if name == "_fused_sdp_choice":
        return 0  # attention by its formula: the kernels are the GPU's
    if name == "_pin_memory":
        return args[0].clone()
    given = leaves((args, kwargs))
    if any(isinstance(each, ShapeTensor) for each in given):
        return func(*args, **kwargs)  # a plan of what would be computed
    if name not in KEEPING_PLACE and is_composite(func):
        with mode():
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found

    tensors = [each for each in given if isinstance(each, Tensor)]
    on_gpu = any(place_of(tensor) == "cuda" for tensor in tensors)
    asked = asked_device(given, kwargs)
    if asked is not None and asked.type == "meta":
        return func(*args, **kwargs)
    to_gpu = on_gpu if asked is None else asked.type == "cuda"
    if on_gpu:
        check_devices(func, name, args, tensors)
    check_generators(func, given, to_gpu)
    count(name, args, kwargs, tensors, to_gpu)
    if not to_gpu and not any(isinstance(tensor, CudaTensor) for tensor in tensors):
        return func(*args, **kwargs)

    plain_args, plain_kwargs = mapped(on_cpu, (args, kwargs))
    plain_kwargs |= {"pin_memory": False} if "pin_memory" in kwargs else {}
    if CUDAGraph.recording is None:
        made = func(*plain_args, **plain_kwargs)
    else:
        numbers = [tensor for tensor in tensors if place_of(tensor) != "cuda"]
        made = CUDAGraph.recording.write_down(func, plain_args, plain_kwargs, numbers)
    return results(func, args, kwargs, made, to_gpu)


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is made of others for all devices."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return kernel and func._can_decompose()


def asked_device(given: list[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that an operation names."""
    asked = [each for each in given if isinstance(each, torch.device)]
    if not asked and isinstance(kwargs.get("device"), str):
        asked = [torch.device(kwargs["device"])]
    if asked and asked[0].type == "cuda" and asked[0].index not in (None, 0):
        raise WrongDeviceError(f"CUDA error: invalid device ordinal {asked[0]}")
    return asked[0] if asked else None


def on_cpu(value: Any) -> Any:
    """Return an argument as the CPU takes it."""
    if isinstance(value, CudaTensor):
        return value.inner
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def results(func: Any, args: Any, kwargs: dict[str, Any], made: Any, to_gpu: bool) -> Any:
    """Return what an operation made as tensors of the stand-in; what it wrote to are the arguments themselves."""
    written = [
        kwargs.get(name) if by_name or number >= len(args) else args[number]
        for number, name, by_name in arguments_written(func)
    ]
    if written and not func._schema.returns:
        return None
    if written and isinstance(made, Tensor) and isinstance(written[0], Tensor):
        return written[0]
    known = {id(each.inner): each for each in leaves(written) if isinstance(each, CudaTensor)}

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, CudaTensor):
            return value
        return known.get(id(value)) or (CudaTensor(value) if to_gpu else value)

    return mapped(outside, made)


@cache
def arguments_written(func: Any) -> list[tuple[int, str, bool]]:
    """Return place and name of the arguments that an operation writes to, and whether it takes them by name alone."""
    return [
        (number, each.name, each.kwarg_only)
        for number, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def check_devices(func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Refuse an operation on the GPU that also names a tensor of the CPU, unless CUDA allows it."""
    strangers = [tensor for tensor in tensors if place_of(tensor) != "cuda"]
    if not strangers or name in COPIES or name in KEEPING_PLACE:
        return
    single = all(tensor.dim() == 0 for tensor in strangers)
    if name in INDEXING:
        # Indices may be on the CPU (they are copied), and a single number that is written.
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        allowed = all(each.dim() == 0 or any(each is index for index in indices) for each in strangers)
        if place_of(args[0]) == "cuda" and allowed:
            return
    elif single and (torch.Tag.pointwise in func.tags or name.startswith(("_foreach", "masked_fill", "where", "fill"))):
        return
    shapes = ", ".join(f"{place_of(tensor)} {tuple(tensor.shape)}" for tensor in tensors)
    raise WrongDeviceError(f"Expected all tensors to be on the same device ({func}: {shapes})")


def check_generators(func: Any, given: list[Any], to_gpu: bool) -> None:
    """Refuse a generator of another device than the numbers that it draws."""
    for generator in given:
        if isinstance(generator, torch._C.Generator):
            found = GENERATORS[generator._cdata].device.type if generator._cdata in GENERATORS else "cpu"
            wanted = "cuda" if to_gpu else "cpu"
            if found != wanted:
                raise WrongDeviceError(f"Expected a {wanted!r} device type for generator but found {found!r} ({func})")


def count(name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], to_gpu: bool) -> None:
    """Note whether an operation waits or copies."""
    if name in ("_to_copy", "copy_"):
        here = place_of(args[0] if name == "_to_copy" else args[1])
        there = ("cuda" if to_gpu else "cpu") if name == "_to_copy" else place_of(args[0])
        note_copy(here, there, waits=not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
    if not any(place_of(tensor) == "cuda" for tensor in tensors):
        return
    if name == "_local_scalar_dense":
        note(Kind.sync, "one number")
    elif name in NEED_SIZE or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note(Kind.sync, name)
    elif name in INDEXING:
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            note(Kind.sync, "index by a mask")
        if any(place_of(index) != "cuda" and index.dim() > 0 for index in indices):
            note(Kind.upload, "index by a tensor of the CPU")
