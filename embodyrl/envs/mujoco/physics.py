"""Exact copies of a MuJoCo scene in the middle of an episode.

The state that MuJoCo integrates is not enough: after a step most poses, forces and sensors are those of the last
substep's beginning, and rewards, controllers and images read them before the next step computes them anew. So they are
kept too, as are the parts of the model that environments move or recolour while they play.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOVED = ("body_pos", "body_quat", "site_pos", "site_quat", "site_rgba", "geom_rgba", "mat_rgba")
"""Parts of the model that environments change while they play."""


def save(model: Any, data: Any) -> dict[str, NDArray[Any]]:
    """Return everything that decides how the simulation of `data`, a `mujoco.MjData`, continues, as copies."""
    state = np.empty(_mujoco().mj_stateSize(model, _whole()))
    _mujoco().mj_getState(model, data, state, _whole())
    views = _views(model, data)
    return {"physics": state, **{name: view.copy() for name, view in views.items()}}


def restore(model: Any, data: Any, saved: Mapping[str, NDArray[Any]]) -> None:
    """Continue from what `save` returned for a model made from the same XML. Simulates nothing.

    Raises:
        KeyError, ValueError: it is of another model.
    """
    views, state = _views(model, data), saved["physics"]
    want = {"physics": (_mujoco().mj_stateSize(model, _whole()),), **{name: each.shape for name, each in views.items()}}
    for name, shape in want.items():
        if saved[name].shape != shape:
            raise ValueError(f"{name} has shape {saved[name].shape}, want {shape}")
    _mujoco().mj_setState(model, data, state, _whole())
    _mujoco().mj_forward(model, data)  # contacts and constraints, whose number varies, so that they are not saved
    for name, view in views.items():
        view[...] = saved[name]
    _mujoco().mj_setState(model, data, state, _whole())  # mj_forward changed the solver's warm start


def _views(model: Any, data: Any) -> dict[str, NDArray[Any]]:
    """Return what is saved besides the state, as views of MuJoCo's memory."""
    return {
        **{f"model.{name}": getattr(model, name) for name in MOVED},
        **{f"data.{name}": getattr(data, name) for name in _computed()},
    }


@cache
def _computed() -> tuple[str, ...]:
    """Return the names of all arrays of floats in `mujoco.MjData` whose size does not depend on contacts."""
    empty = _mujoco().MjData(_mujoco().MjModel.from_xml_string("<mujoco/>"))
    arrays = {name: getattr(empty, name) for name in dir(empty) if name[0] != "_" and not name.startswith("efc_")}
    return tuple(name for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype == np.float64)


def _whole() -> int:
    """Return the bits of the whole state, with controls, mocap bodies, user data and the solver's warm start."""
    return int(_mujoco().mjtState.mjSTATE_INTEGRATION)


def _mujoco() -> Any:
    """Return the module, which the environment has imported."""
    return sys.modules["mujoco"]


def is_view(value: object) -> bool:
    """Return whether an array is a view of memory that is not numpy's, such as that of a `mujoco.MjData`."""
    while isinstance(value, np.ndarray):
        if value.flags.owndata:
            return False
        value = value.base
        if not isinstance(value, np.ndarray):
            return True
    return False
