"""How policies of servers are named: their URLs, what their clients need, and names in messages. Quick to import."""

from __future__ import annotations

from urllib.parse import urlsplit

from embodyrl.errors import MissingPackageError

PROMPT, STATE = "prompt", "state"
"""Names of the task description and of the state, beside those of cameras, where keys of messages are named."""
EPISODE, EXECUTED, DELAY = "episode", "executed", "delay"
"""Keys of whole numbers that a message may have beside an observation: that of the episode, the control steps since the
observation before, and those until the chunk will be there."""
TOKEN = "EMBODYRL_TOKEN"
"""Environment variable with the token of a server."""
SCHEMES = ("ws://", "wss://")
"""Beginnings of a server's URL."""


def is_url(place: object) -> bool:
    """Return whether the place of a policy is the URL of a server."""
    return isinstance(place, str) and place.startswith(SCHEMES)


def why_no_url(url: str) -> str | None:
    """Return why a text is no URL of a server, with what is wanted; None if it is one."""
    try:
        parts = urlsplit(url)
        named = is_url(url) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        named = False
    if not named:
        return "want ws://host:port, as `embodyrl serve` prints it"
    if parts.username is not None or parts.password is not None:
        return f"a URL is written into results, so that it may hold no password: use the variable {TOKEN}"
    return None


def check_packages(what: str) -> None:
    """Check that what talks to policies and robots is installed.

    Args:
        what: needs it, for the message.

    Raises:
        MissingPackageError: it is not.
    """
    try:
        import msgpack  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"{what} needs {error.name}: pip install 'embodyrl[serve]'") from None
