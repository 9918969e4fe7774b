"""Arguments and options that several commands share, or that take one of a few values. Quick to import."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from embodyrl.cli.completion import config_words
from embodyrl.errors import UserError
from embodyrl.files import why_no_place

SavedPolicy = Annotated[
    str,
    typer.Argument(
        help="A checkpoint folder, a run directory (its last checkpoint), or an exported policy, also on the hub: "
        "hf://owner/name[@revision]."
    ),
]
SavedOrServed = Annotated[
    str,
    typer.Argument(
        help="A checkpoint folder, a run directory (its last checkpoint), or an exported policy, also on the hub: "
        "hf://owner/name[@revision]. With --config also public weights, or a server's policy: ws://host:port.",
    ),
]
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


SpecOnly = Annotated[
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


def check_words(arguments: Sequence[str], app: typer.Typer) -> None:
    """Answer a command or an option of an earlier version or of another library with what it is here, before the parser
    calls it unknown.

    Raises:
        CommandLineError: a word is one of these.
    """
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if "--help" in options or not command:  # answered at once, without the config's modules
        return
    from embodyrl.config.renames import COMMANDS

    if command in COMMANDS:
        raise CommandLineError(f"no command {command!r} - in embodyrl: `embodyrl {COMMANDS[command]}`")
    commands = typer.main.get_group(app).commands if options else {}
    if command not in commands:
        return
    known = {name for each in commands[command].params for name in (*each.opts, *each.secondary_opts)}
    for option in sorted(options - known - {"--", "--help"}):
        if remedy := _remedy_for_option(option):
            raise CommandLineError(f"unknown option {option!r} - {remedy}")


def _remedy_for_option(option: str) -> str:
    """Return what an unknown option is: another option, or a setting; "" if it is neither."""
    from embodyrl.config.fields import all_paths
    from embodyrl.config.issues import dotted
    from embodyrl.config.renames import OPTIONS, PEERS, newest_name
    from embodyrl.config.schema import Config

    if option in OPTIONS:
        return f"renamed to {newest_name(option, OPTIONS)!r}"
    name = option.removeprefix("--").replace("-", "_")
    paths = {dotted(path): path[-1] for path in all_paths(Config, {})}
    words = [PEERS[word] for word in name.split(".") if word in PEERS]
    if words and name not in paths:
        return f"settings are KEY=VALUE, without dashes; in embodyrl: {words[-1]}"
    found = name if name in paths else next((path for path, last in paths.items() if last == name), None)
    return f"settings are KEY=VALUE, without dashes: {found}=..." if found else ""


def check_place(path: Path | None, option: str) -> None:
    """Check that what an option asks for can be written where it says; what is there already is not checked.

    Raises:
        CommandLineError: it cannot.
    """
    if path is not None and not os.path.lexists(path) and (reason := why_no_place(path)) is not None:
        raise CommandLineError(f"{path} cannot be made, because {reason}: give another place to {option}")


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("+", "~"))


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()


# --------------------------------------------------------------------------------------------------------------- errors


class CommandLineError(UserError):
    """Raised when the arguments of a command are illegal."""

    exit_code = 2
