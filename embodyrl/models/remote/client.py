"""A policy that somebody serves: this project, openpi, or a robot's computer.

Shapes: `B` rows of an observation, `C` actions in a chunk, `D` action dims.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import Observation
from embodyrl.errors import RunError, UserError, listed
from embodyrl.files import Closing
from embodyrl.messages import MessageError, pack, unpack
from embodyrl.screen import task
from embodyrl.servers import DELAY, EPISODE, EXECUTED, PROMPT, STATE, TOKEN, check_packages, why_no_url

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

DEADLINE_S = 60.0
"""Seconds within which a chunk must be there, lost connections included [s]."""
GREETING_S = 10.0
"""Seconds that a server may take to say what it is [s]."""
AGAIN_S = 0.2
"""Seconds between two attempts to connect [s]."""
MOST_BYTES = 2**26
"""Bytes of an answer."""
MOST_CONNECTIONS = 16
"""Rows that are asked about at a time: `embodyrl serve` answers as many by one forward pass."""
FACTS = ("model", "chunk_size", "action_dim", "cameras", "image_size", "state_dim")
"""What a server says of its policy, and must say again when a lost connection is opened anew."""
USUAL = ("observation/image", "observation/wrist_image")
"""Keys of images for a server that does not say what it looks for: those of openpi's LIBERO clients."""


class _NobodyError(Exception):
    """Nobody answers now."""


class RemotePolicy(Closing):
    """Acts through a policy server, by openpi's protocol. Each row of an observation, of 16 at a time, has a connection
    of its own, so that the server can answer all of them together.

    Args:
        url: `ws://host:port`.
        token: the server's, if it wants one.
        keys: keys of messages by the name of a camera, `state` or `prompt`; None: those that the server names, else
            those of openpi's LIBERO clients.
        deadline_s: see `DEADLINE_S`.
        cameras: names of an observation's images, in their order; None: those that the server names, else `image` and
            `wrist_image`. Of several, a server that names cameras gets those that it names, or that `keys` has.

    Raises:
        UserError: the URL is none, or the server sees a camera that is not there.
        RunError: nobody answers there in time, or it is no policy server.
    """

    metadata: dict[str, Any]
    """What the server says of its policy."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        keys: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        cameras: Sequence[str] | None = None,
    ) -> None:
        check_packages("a policy of a server")
        if (reason := why_no_url(url)) is not None:
            raise UserError(f"url = {url!r:.80}: {reason}")
        self.url, self._deadline_s = url, deadline_s
        self._headers = None if token is None else {"Authorization": f"Api-Key {token}"}
        self._open: list[ClientConnection] = []
        self._facts: dict[str, str] | None = None
        self._connect(0, time.monotonic() + deadline_s)
        self._name(cameras, keys or {})
        if "+" in self._keys[STATE]:
            raise UserError(f"{url} looks for the state in parts, {self._keys[STATE]}: start it without such a --map")

    def _name(self, cameras: Sequence[str] | None, keys: Mapping[str, str]) -> None:
        """Find the key of each part of an observation, and which images are sent."""
        named = self.metadata.get("cameras")
        seen = [str(each) for each in named] if isinstance(named, list) else None
        told = _told_keys(self.metadata)
        self._cameras = [*(cameras if cameras is not None else ["image", "wrist_image"] if seen is None else seen)]
        for camera in seen or ():
            if camera not in self._cameras and told.get(camera) not in keys.values():
                raise UserError(
                    f"{self.url} sees the camera {camera!r}, and there is none of this name "
                    f"({listed(self._cameras) or 'there are none'}): show it, or name its key in `keys`"
                )
        self._sent = [each for each in self._cameras if seen is None or each in seen or each in keys]
        """Cameras whose images are sent."""
        usual = dict(zip(self._cameras, USUAL, strict=False)) | {STATE: "observation/state", PROMPT: PROMPT}
        self._keys = {**usual, **told, **keys}
        if missing := [name for name in self._sent if name not in self._keys]:
            raise UserError(
                f"{self.url} does not say under which key it looks for {listed(missing)}: name them in `keys`"
            )

    def act(
        self,
        observation: Observation,
        *,
        executed: int | None = None,
        delay: int | None = None,
        episode: int | None = None,
    ) -> NDArray[np.float32]:
        """Return the chunks `[B, C, D]` of an observation with `B` rows. What else is given is said to the server,
        which need not listen; `embodyrl serve` does.

        Args:
            observation: images uint8 `[B, V, H, W, 3]` or None, proprio float32 `[B, S]` or None, task descriptions.
            executed: control steps since the observation before; the chunk then goes on from the last one, if the
                server's policy does (`model.rtc`).
            delay: control steps until the chunk will be executed.
            episode: number of the episode; another one than before begins a new one.

        Raises:
            RunError: the server refuses, is gone, or takes too long.
        """
        beside = {EXECUTED: executed, DELAY: delay, EPISODE: episode}
        told = {name: value for name, value in beside.items() if value is not None}
        messages = [self._message(observation, row, told) for row in range(len(observation.task_descriptions))]
        rounds = [messages[begin : begin + MOST_CONNECTIONS] for begin in range(0, len(messages), MOST_CONNECTIONS)]
        try:
            chunks = [chunk for each in rounds for chunk in self._asked(each)]
            if len(shapes := {chunk.shape for chunk in chunks}) > 1:
                raise RunError(f"{self.url} sent chunks of different shapes: {listed(sorted(map(str, shapes)))}")
            return np.stack(chunks)
        except BaseException:
            self.close()  # or answers that are still to come would be taken for those of the next question
            raise

    def _asked(self, messages: Sequence[bytes]) -> list[NDArray[np.float32]]:
        """Return the answers to some messages, each over a connection of its own."""
        until = time.monotonic() + self._deadline_s
        for row, message in enumerate(messages):
            self._send(row, message, until)
        return [self._receive(row, message, until) for row, message in enumerate(messages)]

    def close(self) -> None:
        """Leave. May be called again."""
        for each in self._open:
            each.close()
        self._open.clear()

    # ---- messages

    def _message(self, observation: Observation, row: int, told: Mapping[str, int]) -> bytes:
        message: dict[str, Any] = {**told, self._keys[PROMPT]: observation.task_descriptions[row]}
        if observation.images is not None:
            views = observation.images[row]
            if len(views) != len(self._cameras):
                raise UserError(f"the observation has {len(views)} images, and {self.url} wants {len(self._cameras)}")
            shown = zip(self._cameras, views, strict=True)
            message |= {self._keys[camera]: view for camera, view in shown if camera in self._sent}
        if observation.proprio is not None:
            message[self._keys[STATE]] = observation.proprio[row]
        return pack(message, bytes_keys=True)

    def _send(self, row: int, message: bytes, until: float) -> None:
        from websockets.exceptions import ConnectionClosed

        while True:
            if row >= len(self._open):
                self._connect(row, until)
            try:
                self._open[row].send(message)
            except ConnectionClosed:
                self._connect(row, until)
            else:
                return

    def _receive(self, row: int, message: bytes, until: float) -> NDArray[np.float32]:
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                answer = self._open[row].recv(timeout=max(until - time.monotonic(), 0.0))
            except ConnectionClosed:  # whoever answers again is asked again: an observation changes nothing there
                self._send(row, message, until)
                continue
            except TimeoutError:
                raise RunError(f"{self.url} has not answered within {self._deadline_s:g} s") from None
            if isinstance(answer, str):
                raise RunError(f"{self.url} cannot answer: {answer:.2000}")
            return self._chunk(answer)

    def _chunk(self, answer: bytes) -> NDArray[np.float32]:
        try:
            found = unpack(answer).get("actions")
        except MessageError as error:
            raise RunError(f"{self.url} sent what cannot be read: {error}") from error
        chunk = np.asarray(found, np.float32) if isinstance(found, np.ndarray | list) else np.empty(0, np.float32)
        if chunk.ndim != 2 or not chunk.size or not np.isfinite(chunk).all():
            raise RunError(f"{self.url} sent actions of shape {list(chunk.shape)}: want finite [chunk, action dims]")
        return chunk

    def _attempt(self, left: float) -> tuple[ClientConnection, dict[str, Any]]:
        """Return a new connection, and what the server says first.

        Args:
            left: seconds that this may take [s].

        Raises:
            _NobodyError: there is no server, or it ends; another may begin.
            RunError: it is no policy server, or lets nobody in.
        """
        from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        opened = ExitStack()
        try:
            connection = opened.enter_context(
                connect(
                    self.url,
                    additional_headers=self._headers,
                    compression=None,
                    max_size=MOST_BYTES,
                    open_timeout=left,
                )
            )
            try:
                first = connection.recv(timeout=min(left, GREETING_S))
            except TimeoutError as error:
                if left < GREETING_S:  # it had no time to say anything
                    raise
                opened.close()
                raise RunError(
                    f"{self.url} lets one in and says nothing for {GREETING_S:g} s: it speaks another protocol than "
                    "openpi's, as `embodyrl serve --protocol vla-eval` does"
                ) from error
            return connection, unpack(first) if isinstance(first, bytes) else {}
        except (OSError, WebSocketException, TimeoutError, MessageError) as error:
            opened.close()
            ends = isinstance(error, InvalidStatus) and error.response.status_code == 503
            if isinstance(error, InvalidHandshake | MessageError) and not ends:
                said = error.response.body if isinstance(error, InvalidStatus) else b""
                why = (said or b"").decode("utf-8", "replace").strip()[:200] or str(error)
                if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
                    raise RunError(f"{self.url} wants a token ({why}): set the variable {TOKEN}, or token=") from error
                raise RunError(f"{self.url} is no policy server that lets one in: {why}") from error
            raise _NobodyError(str(error)) from error

    def _connect(self, row: int, until: float) -> None:
        """Open the connection of a row, in the place of a lost one, and read what the server says first."""
        with task(f"waiting for {self.url}", math.ceil(self._deadline_s), "s") as waiting:
            while True:
                try:
                    connection, metadata = self._attempt(max(until - time.monotonic(), 0.1))
                    break
                except _NobodyError as error:
                    if time.monotonic() + AGAIN_S >= until:
                        raise RunError(
                            f"nobody answers at {self.url} within {self._deadline_s:g} s ({error}): start it "
                            "(`embodyrl serve`), or name another url"
                        ) from error
                waiting.done = int(waiting.seconds)
                time.sleep(AGAIN_S)
        facts = {name: repr(metadata.get(name)) for name in FACTS}
        if self._facts not in (None, facts):
            connection.close()
            raise RunError(f"another policy answers at {self.url} than before the connection was lost: serve that one")
        self.metadata, self._facts = metadata, facts
        if row < len(self._open):
            with suppress(Exception):
                self._open[row].close()
            self._open[row] = connection
        else:
            self._open.append(connection)


def _told_keys(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the first key that a server looks for each part of an observation under, as far as it says so."""
    named = metadata.get("keys")
    lists = {name: ways for name, ways in named.items() if isinstance(ways, list)} if isinstance(named, dict) else {}
    return {name: ways[0] for name, ways in lists.items() if ways and isinstance(ways[0], str)}
