"""Arguments and options that several commands share, or that take one of a few values. Quick to import."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodyrl.cli.completion import config_words
from embodyrl.errors import UserError

Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the plug-ins of a checkpoint, run directory or exported policy that you did not make here."
    ),
]
ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file or a shipped experiment (`embodyrl list configs`), then settings to change, "
        "e.g. seed=2 run.iterations=50 env=gym/pendulum. Without CONFIG: the built-in default.",
        show_default=False,
        autocompletion=config_words,
    ),
]


Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="It will run on another machine: what this one lacks is no fault."),
]


AtOnce = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Runs of a sweep at once; without: as many as fit this machine.", show_default=False
    ),
]


class Keep(StrEnum):
    """Episodes to keep."""

    successes = "successes"
    all = "all"


class ImageFormat(StrEnum):
    """Format of images in a dataset."""

    image = "image"
    video = "video"


class CommandLineError(UserError):
    """Raised when the arguments of a command are illegal."""

    exit_code = 2


def split_arguments(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments into the config and the overrides. The first is the config unless it is KEY=VALUE and no file.

    Raises:
        CommandLineError: a later argument is not KEY=VALUE.
    """
    rest = list(words or [])
    source = rest.pop(0) if rest and (not _is_override(rest[0]) or _is_file(rest[0])) else None
    for word in rest:
        if not _is_override(word):
            raise CommandLineError(
                f"{word!r} is neither the config (that comes first, once) nor KEY=VALUE, for instance seed=2"
            )
    return source, rest


def check_options(arguments: Sequence[str]) -> None:
    """Answer an option's old name with its new one, before the parser calls it unknown.

    Raises:
        CommandLineError: an option was renamed.
    """
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    if options <= {"--help", "--version"}:  # they answer at once, without the config's modules
        return
    from embodyrl.config.renames import OPTIONS, newest_name

    for old in sorted(options & OPTIONS.keys()):
        raise CommandLineError(f"unknown option {old!r} - renamed to {newest_name(old, OPTIONS)!r}")


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("+", "~"))


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()
