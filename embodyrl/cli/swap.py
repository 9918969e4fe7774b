"""`embodyrl swap`: chooses another algorithm, model or simulator in a file, and shows what changes before it writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from embodyrl.cli.arguments import CommandLineError
from embodyrl.config.rules import ConfigUse
from embodyrl.config.swap import Swapped, swap
from embodyrl.errors import shell_command, without_controls
from embodyrl.runner.start_rules import start_rules
from embodyrl.screen import counted

EXAMPLE = "for instance: embodyrl swap algorithm=grpo my.yaml"


def run(words: Sequence[str], *, write: bool, elsewhere: bool) -> int:
    """Show the changes, ask, and write them; returns the exit code: 2 while there are faults."""
    choices = dict(word.split("=", 1) for word in words if "=" in word)
    files = [word for word in words if "=" not in word]
    if len(files) != 1 or not choices:
        raise CommandLineError(f"name one file and what to choose in it, {EXAMPLE}")
    use, also = (ConfigUse.elsewhere, []) if elsewhere else (ConfigUse.run, [start_rules])
    swapped = swap(files[0], choices, use=use, also=also)
    if swapped.after == swapped.before:
        print(f"{files[0]}: nothing to change")
    else:
        print(without_controls(swapped.diff()), end="")
        print(_save(swapped, write=write), flush=True)
        if {"algorithm", "model"} & set(choices):
            print(f"note: other settings stay as they were; {shell_command('init')} writes what a choice begins with")
    for fault in swapped.faults:
        sys.stderr.write(without_controls(f"{fault}\n"))
    if swapped.faults:
        sys.stderr.write(f"{counted(len(swapped.faults), 'fault')} left for you.\n")
    return 2 if swapped.faults else 0


def _save(swapped: Swapped, *, write: bool) -> str:
    """Write the file if that is agreed; returns what was done."""
    if not (write or _agrees(f"write this to {swapped.path}? [y/N] ")):
        return f"{swapped.path} is as before" + ("" if sys.stdin.isatty() else "; --write writes it")
    swapped.write()
    return f"written to {swapped.path}"


def _agrees(question: str) -> bool:
    """Ask on the terminal; where there is none, nobody agrees."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
