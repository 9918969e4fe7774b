"""What clients show, by the keys of their messages, as the policy sees it.

Shapes: `V` cameras, `S` numbers of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import Observation, SimulatorSpec
from embodyrl.errors import UserError, did_you_mean, listed
from embodyrl.servers import PROMPT, STATE

STATES: tuple[tuple[str, ...], ...] = (
    ("observation/state",),
    ("state",),
    ("states",),
    ("observation/joint_position", "observation/gripper_position"),
)
"""Keys of the state: of LIBERO's clients, of ALOHA's, of vla-eval's, and of DROID's, which send it in two parts."""
PROMPTS = ("prompt", "task_description")
"""Keys of the task description: of openpi's clients, and of vla-eval's."""
FIRST_CAMERA = ("observation/image", "observation/exterior_image_1_left")
WRIST_CAMERA = ("observation/wrist_image", "observation/wrist_image_left")
LONGEST_PROMPT = 4096
"""Characters of a task description."""


class RequestError(UserError):
    """A request that cannot be answered; the client is told why, and may go on."""


class Observer:
    """Reads observations out of messages.

    Args:
        simulator: what the policy sees: cameras with their size, and the numbers of the state.
        keys: key of a message by the name of a camera, `state` or `prompt`, for those that are called otherwise.
            The parts of a state are joined by `+`.

        resize: images may have another size than the policy sees; they are scaled, keep their proportions, and what
            is missing is black.

    Raises:
        UserError: a name is none of these.
    """

    def __init__(
        self, simulator: SimulatorSpec, keys: Mapping[str, str] | None = None, *, resize: bool = False
    ) -> None:
        self.simulator = simulator
        self._resize = resize
        self._keys = dict(keys or {})
        names = [*simulator.cameras, *([STATE] if simulator.proprio_dim else []), PROMPT]
        for name in self._keys:
            if name not in names:
                hint = did_you_mean(name, names, lead=" - ")
                raise UserError(f"--map {name}=...: the policy sees no {name!r}{hint} (it sees {listed(names)})")
        if simulator.frames > 1:
            raise UserError(
                f"the policy sees {simulator.frames} frames of each camera (env.frames), and clients send one: serve a "
                "policy of a single frame"
            )
        self._ways = self.keys()

    def keys(self) -> dict[str, tuple[str, ...]]:
        """Return the keys under which each part of an observation is looked for, the first that is there counts."""
        found = {camera: self._camera_keys(camera, number) for number, camera in enumerate(self.simulator.cameras)}
        if self.simulator.proprio_dim:
            found[STATE] = (self._keys[STATE],) if STATE in self._keys else tuple("+".join(keys) for keys in STATES)
        return found | {PROMPT: (self._keys[PROMPT],) if PROMPT in self._keys else PROMPTS}

    def read(self, message: Mapping[str, Any]) -> Observation:
        """Return the observation of a message, one row.

        Raises:
            RequestError: a part is missing, or has another shape or type than the policy sees.
        """
        message = dict(_flat(message))
        images = [self._image(message, number) for number in range(len(self.simulator.cameras))]
        return Observation(
            images=np.stack(images)[None] if images else None,
            proprio=self._state(message)[None] if self.simulator.proprio_dim else None,
            task_descriptions=[self._prompt(message)],
        )

    def _camera_keys(self, camera: str, number: int) -> tuple[str, ...]:
        if camera in self._keys:
            return (self._keys[camera],)
        usual = WRIST_CAMERA if "wrist" in camera or "hand" in camera else FIRST_CAMERA if number == 0 else ()
        return (f"observation/{camera}", f"images/{camera}", f"observation/images/{camera}", camera, *usual)

    def _image(self, message: Mapping[str, Any], number: int) -> NDArray[np.uint8]:
        camera = self.simulator.cameras[number]
        key, image = _first(message, self._ways[camera], f"the image of camera {camera!r}")
        if (
            not isinstance(image, np.ndarray)
            or image.ndim != 3
            or not image.size
            or 3 not in (image.shape[0], image.shape[-1])
        ):
            raise RequestError(f"{key} is {_shape(image)}: want an image, uint8 [height, width, 3]")
        if image.shape[-1] != 3:  # channels first, as ALOHA's clients send it
            image = image.transpose(1, 2, 0)
        if image.dtype.kind == "f":
            low, high_end = image.min(), image.max()
            if not (low >= 0.0 and high_end <= 1.0):  # also NaN
                raise RequestError(f"{key} has floats from {low:g} to {high_end:g}: want 0 to 1, or uint8")
            image = (image * 255.0).astype(np.uint8)
        if image.dtype != np.uint8:
            raise RequestError(f"{key} has numbers of type {image.dtype}: want uint8, or floats from 0 to 1")
        if image.shape[:2] != self.simulator.image_size:
            high, wide = self.simulator.image_size
            if self._resize:
                return resized(image, high, wide)
            raise RequestError(
                f"{key} is {image.shape[0]} x {image.shape[1]} pixels, but the policy sees {high} x {wide}: resize it "
                "before it is sent (openpi_client.image_tools.resize_with_pad), or start the server with --resize"
            )
        seen: NDArray[np.uint8] = image
        return seen

    def _state(self, message: Mapping[str, Any]) -> NDArray[np.float32]:
        ways = self._ways[STATE]
        way = next((each for each in ways if all(key in message for key in each.split("+"))), None)
        if way is None:
            raise _missing("the state", [key for each in ways for key in each.split("+")], message)
        parts = [_numbers(message[key], key) for key in way.split("+")]
        state = np.concatenate(parts)
        if len(state) != self.simulator.proprio_dim:
            raise RequestError(f"{way} has {len(state)} numbers, but the policy sees {self.simulator.proprio_dim}")
        return state

    def _prompt(self, message: Mapping[str, Any]) -> str:
        keys, only = self._ways[PROMPT], set(self.simulator.tasks.values())
        if len(only) == 1 and not any(key in message for key in keys):
            return only.pop()
        _, prompt = _first(message, keys, "the task description")
        if not isinstance(prompt, str) or len(prompt) > LONGEST_PROMPT:
            raise RequestError(f"the task description is {_shape(prompt)}: want a text of up to {LONGEST_PROMPT}")
        return prompt


def resized(image: NDArray[np.uint8], high: int, wide: int) -> NDArray[np.uint8]:
    """Return an image scaled to fit `high` x `wide` (bilinear), in the middle of a black one of that size."""
    from PIL import Image

    share = min(high / image.shape[0], wide / image.shape[1])
    size = max(1, round(share * image.shape[0])), max(1, round(share * image.shape[1]))
    small = Image.fromarray(np.ascontiguousarray(image)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    top, left = (high - size[0]) // 2, (wide - size[1]) // 2
    canvas = np.zeros((high, wide, 3), np.uint8)
    canvas[top : top + size[0], left : left + size[1]] = np.asarray(small)
    return canvas


def _flat(message: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a message, those of nested maps by `outer/inner`."""
    for name, value in message.items():
        if isinstance(value, Mapping) and depth < 3:
            yield from _flat(value, f"{before}{name}/", depth + 1)
        else:
            yield f"{before}{name}", value


def _first(message: Mapping[str, Any], keys: Sequence[str], what: str) -> tuple[str, Any]:
    for key in keys:
        if key in message:
            return key, message[key]
    raise _missing(what, keys, message)


def _missing(what: str, keys: Sequence[str], message: Mapping[str, Any]) -> RequestError:
    there = listed(sorted(message)[:20]) if message else "nothing"
    return RequestError(f"{what} is missing: it is looked for under {listed(keys)}, and the message has {there:.600}")


def _numbers(value: Any, key: str) -> NDArray[np.float32]:
    try:
        found = np.asarray(value)
    except ValueError:
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf" or found.ndim > 1:
        raise RequestError(f"{key} is {_shape(value)}: want a row of numbers")
    with np.errstate(over="ignore"):
        numbers = np.atleast_1d(found).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise RequestError(f"{key} has a number that is not finite (at {int(np.argmin(np.isfinite(numbers)))})")
    return numbers


def _shape(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return (
        f"{type(value).__name__} of {len(value):,}" if isinstance(value, str | bytes | list) else type(value).__name__
    )
