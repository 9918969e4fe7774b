"""`embodyrl init`: asks for simulator, model and algorithm, and writes a config to start with."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.cli.arguments import CommandLineError
from embodyrl.cli.listing import first_sentence
from embodyrl.config import ConfigError, load_config
from embodyrl.config.compose import nearest_option
from embodyrl.config.files import builtin_folder, group_settings, list_options
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.start import GROUPS, Start, experiments, kind_of, start, whats_wrong
from embodyrl.config.swap import use_of_run
from embodyrl.errors import UserError, did_you_mean, shell_command
from embodyrl.registry import ALGORITHMS, SIMULATORS, Registry, SupportedModel
from embodyrl.runner.start_rules import start_rules

QUESTIONS = {
    "env": "Which tasks, in which simulator?",
    "model": "Which model learns them?",
    "algorithm": "How does it learn?",
}
PLAIN = {
    "env": ["metaworld/reach", "gym/pendulum", "metaworld/reach_rgb"],
    "model": ["mlp", "cnn"],
    "algorithm": ["ppo", "sft"],
}
"""What is proposed where no shipped experiment says otherwise, if it is installed and fits."""
REGISTRIES: Mapping[str, Registry[Any]] = {"env": SIMULATORS, "model": SupportedModel, "algorithm": ALGORITHMS}


def offered(group: str, choices: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options of a group that can be used here with what is chosen already, and how to install what the
    others lack."""
    missing: dict[str, str] = {}
    found = []
    for option in list_options(group):
        lacks = _lacks(group, option)
        if lacks:
            missing[lacks[0]] = lacks[1]
        elif _unfit(group, option, choices) is None:
            found.append(option)
    return found, missing


def _lacks(group: str, option: str) -> tuple[str, str] | None:
    """Return the name of a component that lacks packages, and the command that installs them; None if it lacks none."""
    entry = REGISTRIES[group].entry(group_settings(group, option)["name"])
    needs = entry.missing()
    return (entry.name, needs[0].install) if needs else None


def _unfit(group: str, option: str, choices: Mapping[str, str]) -> str | None:
    """Return why an option makes no valid config with those before it, and any of those after it; None if it does."""
    if group == "env":
        return None
    if group == "algorithm":
        return whats_wrong({**choices, group: option})
    reason = None
    for name in PLAIN["algorithm"]:
        reason = whats_wrong({**choices, "model": option, "algorithm": name})
        if reason is None:
            break
    return reason


def proposals(group: str, choices: Mapping[str, str]) -> list[str]:
    """Return what to propose of a group, best first; some of it may not be installed or not fit."""
    if group == "env":
        return [*PLAIN["env"]]
    env = group_settings("env", choices["env"])
    shipped = [each.choices for each in experiments() if each.is_start]
    shipped = [each for each in shipped if group_settings("env", each["env"])["name"] == env["name"]]
    if group == "algorithm":
        return [*(each["algorithm"] for each in shipped if each["model"] == choices["model"]), *PLAIN["algorithm"]]
    if not env.get("cameras"):
        return [*PLAIN["model"]]
    plain = [each for each in PLAIN["model"] if kind_of(each) == "images"]
    pretrained = [each["model"] for each in shipped if kind_of(each["model"]) == "pretrained"]
    # Only models that read task descriptions can distinguish several tasks.
    return [*pretrained, *plain] if len(env["tasks"]) > 1 else [*plain, *pretrained]


def choose(given: Mapping[str, str | None], *, agreed: bool) -> dict[str, str]:
    """Return an option of each group: as given, else as answered, else (`agreed`) as proposed.

    Raises:
        CommandLineError: something given is not possible, or stdin is no terminal.
    """
    asks = sys.stdin.isatty() and not agreed
    if agreed and given["algorithm"] is not None:  # which not every model fits that would be proposed without it
        fitting = next((each for each in _around(given, {}) if whats_wrong(each) is None), None)
        if fitting is not None:
            return fitting
    left = [f"--{group}" for group in GROUPS if given[group] is None]
    choices: dict[str, str] = {}
    for group in GROUPS:
        wanted = given[group]
        if wanted is None and not asks and not agreed:
            raise CommandLineError(f"stdin is no terminal: give {', '.join(left)}, or --yes for what is proposed")
        choices[group] = _asked(group, choices, asks=asks) if wanted is None else _checked(group, wanted, choices)
    return choices


def _around(given: Mapping[str, str | None], choices: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield what can be proposed around the options that are given, best first; not all of it fits each other."""
    if len(choices) == len(GROUPS):
        yield dict(choices)
        return
    group = GROUPS[len(choices)]
    wanted, known = given[group], list_options(group)
    if wanted is not None:
        options = [wanted] if wanted in known else []
    else:
        options = [*dict.fromkeys([*proposals(group, choices), *(known if group == "model" else [])])]
    for option in options:
        if _lacks(group, option) is None:
            yield from _around(given, {**choices, group: option})


def _asked(group: str, choices: Mapping[str, str], *, asks: bool) -> str:
    """Return the answer to a group's question, or what is proposed if nobody is asked."""
    best = proposals(group, choices)
    fitting = (each for each in best if _lacks(group, each) is None and _unfit(group, each, choices) is None)
    proposed = next(fitting, None)
    if proposed is not None and not asks:
        return proposed  # trying all options takes seconds
    options, missing = offered(group, choices)
    if not options:
        raise UserError(f"nothing of the group {group} can be used here: {'; '.join(missing.values())}")
    proposed = proposed or options[0]
    return _ask(group, options, missing, proposed) if asks else proposed


def _checked(group: str, wanted: str, choices: Mapping[str, str]) -> str:
    """Return an option that was given.

    Raises:
        CommandLineError: there is no such option, it is not installed, or does not fit what is chosen already.
    """
    known = list_options(group)
    if wanted not in known:
        raise CommandLineError(
            f"--{group} {wanted!r} is no option of the group {group} - {nearest_option(wanted, known)}"
        )
    if (lacks := _lacks(group, wanted)) is not None:
        raise CommandLineError(f"--{group} {wanted}: {lacks[0]} is not installed here: {lacks[1]}")
    if (reason := _unfit(group, wanted, choices)) is None:
        return wanted
    beside = ", ".join(f"{key} {value}" for key, value in choices.items())
    others = ", ".join(offered(group, choices)[0])
    raise CommandLineError(f"--{group} {wanted} does not fit {beside} ({reason}): choose one of {others}")


def _ask(group: str, options: Sequence[str], missing: Mapping[str, str], proposed: str) -> str:
    """Ask on the terminal; a number, a name or Enter answers. The end of the input (Ctrl-D) is an error."""
    print(f"\n{QUESTIONS[group]}")
    width = max(map(len, options))
    for number, option in enumerate(options, start=1):
        print(shortened(f"  {number:>2}  {option:<{width}}  {_described(group, option)}"))
    for name, install in missing.items():
        print(f"   -  {name} is not installed: {install}")
    print("A number or a name; Enter takes what is in brackets.")
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
    return str(REGISTRIES[group].entry(group_settings(group, option)["name"]).summary)


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
    made = start(choices)
    if made.faults:
        raise CommandLineError(f"{', '.join(choices.values())} do not fit: {made.faults[0]}")
    try:
        with out.open("x") as file:
            file.write(headed(made, out))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    said = "  ".join(f"{group} {option}" for group, option in choices.items())
    print(f"written to {out}: {said}{f' (the experiment {made.experiment})' if made.experiment else ''}")
    show_next(out)
    return 0


def headed(made: Start, out: Path) -> str:
    """Return the text of the config, with a line about its origin, and with its own name for runs."""
    text = re.sub(r"(?m)^(run:\n(?:  .*\n)*?  name: ).*$", lambda found: found[1] + run_name(out), made.text, count=1)
    head = f"# Written by embodyrl init. All settings, with comments: embodyrl run {out} --print-config\n"
    return (
        head
        + (f"# It began as the experiment {made.experiment}, whose comment follows.\n#\n" if made.experiment else "")
        + text
    )


def run_name(out: Path) -> str:
    """Return a name for runs that is legal as a folder's name and as YAML."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", out.stem).strip("-") or "run"


def show_next(out: Path) -> None:
    """Say what is missing before it can run, if anything is, and the next command."""
    faults = _faults(out)
    for fault in faults:
        print(f"before it runs: {fault}")
    print(f"next: {shell_command('validate' if faults else 'run', out)}")


def _faults(out: Path) -> Sequence[ConfigIssue]:
    """Return what a run would refuse."""
    try:
        load_config(out, use=use_of_run(out.read_text()), also=[start_rules])
    except ConfigError as error:
        return error.faults
    return ()
