"""`embodyrl init`: asks for simulator, model and algorithm, and writes a config that begins as an experiment."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from embodyrl.cli.arguments import CommandLineError
from embodyrl.cli.listing import first_sentence
from embodyrl.config import ConfigError, load_config
from embodyrl.config.files import builtin_folder, list_experiments, list_options
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import ConfigUse
from embodyrl.config.swap import SwapError, swap
from embodyrl.errors import UserError, did_you_mean, shell_command
from embodyrl.registry import ALGORITHMS, SIMULATORS, Registry, SupportedModel

GROUPS = ("env", "model", "algorithm")
QUESTIONS = {
    "env": "Which tasks, in which simulator?",
    "model": "Which model learns them?",
    "algorithm": "How does it learn?",
}
FIRST = {"env": "metaworld/reach", "model": "mlp", "algorithm": "ppo"}
"""What is proposed where nothing says otherwise, if it is there."""


@dataclass(frozen=True)
class Experiment:
    """A shipped experiment, and what it chooses."""

    name: str
    text: str
    choices: Mapping[str, str]


@dataclass(frozen=True)
class Draft:
    """A config that is not yet written."""

    text: str
    origin: str
    """The experiment that it begins as."""
    faults: Sequence[ConfigIssue]


@cache
def experiments() -> list[Experiment]:
    """Read the shipped experiments."""
    found = []
    for name in list_experiments():
        text = (builtin_folder() / f"{name}.yaml").read_text()
        entries = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
        choices = {group: option for entry in entries for group, option in entry.items() if group in GROUPS}
        if len(choices) == len(GROUPS):
            found.append(Experiment(name.partition("/")[2], text, choices))
    return found


def nearest(choices: Mapping[str, str]) -> Experiment:
    """Return the experiment that has most in common with some choices; the tasks count most, then the model. Of equal
    ones the one with the shortest name, which is the plainest."""

    def distance(each: Experiment) -> tuple[bool, bool, bool, bool, int]:
        env, model, algorithm = (each.choices[group] != choices[group] for group in GROUPS)
        family = each.choices["env"].partition("/")[0] != choices["env"].partition("/")[0]
        return model, env, algorithm, family, len(each.name)

    return min(experiments(), key=distance)


@cache
def _draft(env: str, model: str, algorithm: str) -> Draft:
    wanted = {"env": env, "model": model, "algorithm": algorithm}
    base = nearest(wanted)
    changes = {group: option for group, option in wanted.items() if base.choices[group] != option}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "my.yaml"
        file.write_text(base.text)
        if changes:
            try:
                swapped = swap(str(file), changes, use=ConfigUse.elsewhere)
            except SwapError as error:
                return Draft(base.text, base.name, [ConfigIssue((), str(error))])
            return Draft(swapped.after, base.name, swapped.faults)
        return Draft(base.text, base.name, _faults(file, ConfigUse.elsewhere))


def draft(choices: Mapping[str, str]) -> Draft:
    """Return a config with these choices: the nearest experiment, with what has to follow."""
    return _draft(*(choices[group] for group in GROUPS))


def _faults(file: Path, use: ConfigUse) -> Sequence[ConfigIssue]:
    try:
        load_config(file, use=use)
    except ConfigError as error:
        return error.faults
    return ()


def simulator_of(env: str) -> str:
    """Return the simulator of an option of the group `env`."""
    return str(yaml.safe_load((builtin_folder() / "env" / f"{env}.yaml").read_text())["name"])


def offered(group: str, choices: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options of a group that can be used here with what is chosen already, and how to install what the
    others lack."""
    missing: dict[str, str] = {}
    found = []
    for option in list_options(group):
        lacks = _lacks(group, option)
        if lacks:
            missing[lacks[0]] = lacks[1]
        elif _is_possible(group, option, choices):
            found.append(option)
    return found, missing


def _lacks(group: str, option: str) -> tuple[str, str] | None:
    """Return the name of a component that lacks packages, and the command that installs them; None if it lacks none."""
    if group == "algorithm":
        return None
    registry = SIMULATORS if group == "env" else SupportedModel
    settings = yaml.safe_load((builtin_folder() / group / f"{option}.yaml").read_text())
    entry = registry.entry(settings["name"])
    needs = entry.missing()
    return (entry.name, needs[0].install) if needs else None


def _is_possible(group: str, option: str, choices: Mapping[str, str]) -> bool:
    """Return whether an option makes a valid config with those before it, and some of those after it."""
    if group == "env":
        return True
    if group == "algorithm":
        return not draft({**choices, group: option}).faults
    shipped = [each.choices for each in experiments() if each.choices["model"] == option]
    algorithms = dict.fromkeys([*(each["algorithm"] for each in shipped), "ppo", "grpo", "sft"])
    return any(not draft({**choices, "model": option, "algorithm": name}).faults for name in algorithms)


def proposal(group: str, options: Sequence[str], choices: Mapping[str, str]) -> str:
    """Return the option to propose: that of a shipped experiment with what is chosen already, if there is one."""
    if FIRST[group] in options:
        return FIRST[group]
    for each in experiments():
        if each.choices[group] in options and all(each.choices[key] == value for key, value in choices.items()):
            return each.choices[group]
    return options[0]


def choose(given: Mapping[str, str | None], *, agreed: bool) -> dict[str, str]:
    """Return an option of each group: as given, else as answered, else (`agreed`) as proposed.

    Raises:
        CommandLineError: something given is not possible, or nobody can be asked.
    """
    asks = sys.stdin.isatty() and not agreed
    left = [f"--{group}" for group in GROUPS if given[group] is None]
    choices: dict[str, str] = {}
    for group in GROUPS:
        wanted = given[group]
        if wanted is None and not asks and not agreed:
            raise CommandLineError(f"nobody can be asked here: give {', '.join(left)}, or --yes for what is proposed")
        choices[group] = _asked(group, choices, asks=asks) if wanted is None else _checked(group, wanted, choices)
    return choices


def _asked(group: str, choices: Mapping[str, str], *, asks: bool) -> str:
    """Return the answer to a group's question, or what is proposed if nobody is asked."""
    first = FIRST[group]
    if not asks and _lacks(group, first) is None and _is_possible(group, first, choices):
        return first  # trying all of them takes seconds
    options, missing = offered(group, choices)
    if not options:
        raise UserError(f"nothing of the group {group} can be used here: {'; '.join(missing.values())}")
    proposed = proposal(group, options, choices)
    return _ask(group, options, missing, proposed) if asks else proposed


def _checked(group: str, wanted: str, choices: Mapping[str, str]) -> str:
    """Return an option that was given.

    Raises:
        CommandLineError: there is no such option, it is not installed, or does not fit what is chosen already.
    """
    known = list_options(group)
    if wanted not in known:
        hint = did_you_mean(wanted, known, otherwise=f"one of {', '.join(known)}")
        raise CommandLineError(f"--{group} {wanted!r} is no option of the group {group} - {hint}")
    if (lacks := _lacks(group, wanted)) is not None:
        raise CommandLineError(f"--{group} {wanted}: {lacks[0]} is not installed here: {lacks[1]}")
    if _is_possible(group, wanted, choices):
        return wanted
    beside = ", ".join(f"{key} {value}" for key, value in choices.items())
    faults = draft({**choices, group: wanted}).faults if group == "algorithm" else ()
    fault = f" ({faults[0].message})" if faults else ""
    others = ", ".join(offered(group, choices)[0])
    raise CommandLineError(f"--{group} {wanted} does not fit {beside}{fault}: choose one of {others}")


def _ask(group: str, options: Sequence[str], missing: Mapping[str, str], proposed: str) -> str:
    """Ask on the terminal; a number, a name or Enter answers. The end of the input (Ctrl-D) is an error."""
    print(f"\n{QUESTIONS[group]}")
    for number, option in enumerate(options, start=1):
        print(shortened(f"  {number:>2}  {option:<24} {_described(group, option)}"))
    for name, install in missing.items():
        print(f"   -  {name} is not installed: {install}")
    while True:
        try:
            answer = input(f"[{proposed}] ").strip()
        except EOFError as error:
            print()
            raise CommandLineError("the input has ended, and nothing was written") from error
        if not answer:
            return proposed
        if answer.isdigit() and 1 <= int(answer) <= len(options):
            return options[int(answer) - 1]
        if answer in options:
            return answer
        hint = did_you_mean(answer, options, otherwise=f"a number from 1 to {len(options)}")
        print(f"{answer!r} is none of them: {hint}")


def _described(group: str, option: str) -> str:
    """Return what an option is, in a sentence."""
    text = (builtin_folder() / group / f"{option}.yaml").read_text()
    if sentence := first_sentence(text):
        return sentence
    registries: Mapping[str, Registry[Any]] = {"env": SIMULATORS, "model": SupportedModel, "algorithm": ALGORITHMS}
    return str(registries[group].entry(yaml.safe_load(text)["name"]).summary)


def shortened(line: str) -> str:
    """Return a line that fits the terminal."""
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else f"{line[: width - 3]}..."


def run(out: Path, given: Mapping[str, str | None], *, agreed: bool) -> int:
    """Ask, write the config, and say what to do next; returns the exit code.

    Raises:
        CommandLineError: the file exists, or see `choose`.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise CommandLineError(f"{out} is no YAML file: choose a name that ends in .yaml")
    if out.exists() or out.is_symlink():
        raise CommandLineError(f"{out} exists already and is never overwritten: give another name")
    choices = choose(given, agreed=agreed)
    made = draft(choices)
    if made.faults:
        raise CommandLineError(f"{', '.join(choices.values())} do not fit: {made.faults[0]}")
    text = headed(made, choices, out)
    try:
        with out.open("x") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    said = "  ".join(f"{group} {option}" for group, option in choices.items())
    print(f"written to {out}: {said} (begins as the experiment {made.origin})")
    show_next(out)
    return 0


def headed(made: Draft, choices: Mapping[str, str], out: Path) -> str:
    """Return the text of the config, with a line about its origin, and with its own name for runs."""
    what = ", ".join(choices.values())
    text = re.sub(r"(?m)^(run:\n(?:  .*\n)*?  name: ).*$", lambda found: found[1] + run_name(out), made.text, count=1)
    return (
        f"# Written by embodyrl init: {what}. All settings, with comments: embodyrl run {out} --print-config\n"
        f"# It begins as the experiment {made.origin}, whose comment follows.\n#\n{text}"
    )


def run_name(out: Path) -> str:
    """Return a name for runs that is legal as a folder's name and as YAML."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", out.stem).strip("-") or "run"


def show_next(out: Path) -> None:
    """Say what is missing before it can run, if anything is, and the next command."""
    faults = _faults(out, ConfigUse.run if _is_offline(out) else ConfigUse.check)
    for fault in faults:
        print(f"before it runs: {fault}")
    print(f"next: {shell_command('validate' if faults else 'run', out)}")


def _is_offline(out: Path) -> bool:
    """Return whether checking a config as for a run downloads nothing."""
    return "hf://" not in out.read_text()
