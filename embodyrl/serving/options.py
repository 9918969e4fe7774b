"""How a policy is served. Imports neither torch nor websockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embodyrl.errors import UserError, did_you_mean, listed
from embodyrl.servers import check_packages

PROTOCOLS = ("openpi", "vla-eval")
"""How clients may speak."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a policy server."""

    host: str = "127.0.0.1"
    """Address to listen at; any but a loopback one lets other machines in."""
    port: int = 8000
    """0: any that is free."""
    protocol: str = "openpi"
    """How clients speak, one of `PROTOCOLS`."""
    keys: Mapping[str, str] | None = None
    """Key of a message by the name of a camera, `state` or `prompt`, for those that are called otherwise."""
    resize: bool = False
    """Scale images that have another size than the policy sees."""
    token: str | None = None
    """What clients must send; None: whoever reaches the port may ask."""
    sample: bool = False
    """Draw actions from the policy's distribution; then clients are answered one by one."""
    seed: int | None = None
    """Of what is drawn; None: the policy's own seed."""
    max_batch: int = 16
    """Most clients that one forward pass answers."""
    wait_ms: float = 2.0
    """Milliseconds that a request waits for others [ms]."""

    def check(self) -> None:
        """Check all that can be known before a policy is loaded.

        Raises:
            UserError: a value is none.
            MissingPackageError: websockets or msgpack are not installed.
        """
        check_packages("serving")
        if self.protocol not in PROTOCOLS:
            hint = did_you_mean(self.protocol, PROTOCOLS, lead=" - ")
            raise UserError(f"protocol {self.protocol!r} is unknown{hint} (protocols: {listed(PROTOCOLS)})")
        for name, low, high, kinds in (
            ("port", 0, 65535, int),
            ("max_batch", 1, 1024, int),
            ("seed", 0, 2**63 - 1, int),
            ("wait_ms", 0, 1000, int | float),
        ):
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise UserError(f"{name} = {value!r}: want {low} .. {high}")
        if self.token is not None and not self.token.strip():
            raise UserError("the token is empty: give one that cannot be guessed, or none")
