"""Errors of the command line itself."""

from embodyrl.errors import UserError


class CommandLineError(UserError):
    """Raised when the arguments of a command are illegal."""

    exit_code = 2
