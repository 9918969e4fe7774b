"""Load thousands of mutated configs: each must be accepted or reported with faults, within a time limit.

The composed YAML of every shipped experiment, the experiments' own files and group files are mutated one to four
times: keys misspelt, removed, doubled and moved; values of other types and sizes, nan, unicode, control codes, deep
nesting, interpolations, aliases and tags; lines shifted, cut and swapped; defaults lists and overrides broken. Every
config depends only on `--seed` and its number. A traceback, or more than 5 s of processor time, counts as a failure,
and the exit code is then 1. A share goes through `embodyrl validate` itself.

    nice python benchmarks/config_mutations.py [--count 10000] [--programs 100] [--seed 1] [--processes 1] [--only N]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import yaml

from embodyrl.config import ConfigError, ConfigUse, list_experiments, load_config, to_commented_yaml
from embodyrl.config.files import builtin_folder
from embodyrl.version import __version__

SLOW_S = 5.0
"""Limit of processor time per config [s]."""

VALUES = [
    *("null", "~", "true", "no", "on", "''", '""', "0", "-1", "1", "7", "0.5", "-0.0", "1e-400", "1e400", "007"),
    *(".nan", ".inf", "-.inf", "nan", "1e308", "99999999999999999999", "-9223372036854775809", "0x10", "1_000"),
    *("2024-01-01", "12:30:45", "1e5", "text", "a b", "[]", "{}", "[[]]", "[1, two, .nan]", "{a: {b: {c: 1}}}"),
    *("{name: ppo}", "{name: 3}", "{name: [mlp]}", "{? [1, 2] : 3}", "{1: 2}", "{null: 1}", "{true: x}", "[{}]"),
    *("é", "日本語", "🤖", "\u202eabc", "\ufeff", "\u2028", '"\\u0000"', '"\\e[31mred"', "a\x1b[2Jb", "\x00", "\x7f"),
    *('"\\uD800"', "'unclosed", '"unclosed', "[unclosed", "{unclosed", "a: b: c", "- x", "? x", "@x", "`x`", "%x"),
    *("${seed}", "${env}", "${env.num_envs}", "${.name}", "${..seed}", "${nowhere}", "${env.${seed}}", "${", "${}"),
    *("${oc.env:HOME}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:NOT_SET,3}", "${oc.decode:'{'}", "${hydra:runtime}"),
    *(
        "${now:%Y}",
        "'$${seed}'",
        "'\\${seed}'",
        "???",
        "&a [*a]",
        "&a {b: *a}",
        "*nobody",
        "&b 3",
        "<<",
        "{<<: {a: 1}}",
    ),
    *("!!python/object/apply:os.getcwd []", "!!python/name:os.system", "!!binary aGk=", "!!set {a, b}", "!own 3"),
    *(
        "!!int x",
        "!!float y",
        "!!timestamp z",
        "!!null 3",
        "!!omap [a: 1]",
        "|",
        ">-",
        "| x",
        "# nothing",
        "---",
        "...",
    ),
    *(
        "[" * 40 + "]" * 40,
        "[" * 3000 + "]" * 3000,
        "{a: " * 300 + "1" + "}" * 300,
        "x" * 20000,
        "[" + "1, " * 3000 + "]",
    ),
    *(
        "../../escape",
        "/dev/null",
        "/",
        ".",
        "~root",
        "a/b/c",
        "con\\nul",
        "metaworld",
        "gymnasium",
        "mlp",
        "pi0",
        "grpo",
    ),
    *(
        "Pendulum-v9",
        "module:Pendulum-v1",
        "reach-v3",
        "reech-v3",
        "auto",
        "<weights>",
        "yes:",
        "a:b",
        ":",
        "no_module:f",
    ),
]
"""Wrong values; none of them names an existing module."""
LETTERS = "abcdefghijklmnopqrstuvwxyz_ABZ019-.:/ \t'\"#[]{}*&!|>%@,?~é\u200b"


@dataclass(frozen=True)
class Mutant:
    """One config with mistakes."""

    files: dict[str, str]
    """Texts by their paths; `main.yaml` is the config."""
    overrides: list[str]
    """Overrides on the command line."""


@dataclass
class Outcome:
    """Result of one config."""

    number: int
    kind: str
    """`valid`, `faults` or `traceback`."""
    cpu_s: float
    """Processor time [s]."""
    what: str = ""
    """The traceback."""


@cache
def originals() -> dict[str, str]:
    """The texts that are mutated, by name: of every experiment its own file and the whole config."""
    texts = {}
    for experiment in list_experiments():
        own = (builtin_folder() / f"{experiment}.yaml").read_text()
        texts[experiment] = "\n".join(line for line in own.splitlines() if not line.lstrip().startswith("#")) + "\n"
        whole = to_commented_yaml(load_config(experiment, use=ConfigUse.show).config)
        texts[f"{experiment}, whole"] = re.sub(r"(?m)^\s*#.*\n|^\s*\n", "", whole)
    return texts


@cache
def groups() -> list[tuple[str, str]]:
    """Every group file: its name below the folder of configs, and its text."""
    folder = builtin_folder()
    found = sorted(path for kind in ("env", "model", "algorithm") for path in (folder / kind).rglob("*.yaml"))
    return [(str(path.relative_to(folder)), path.read_text()) for path in found]


@cache
def paths() -> list[str]:
    """Names of settings, for overrides."""
    found: set[str] = set()
    for name, text in originals().items():
        if name.endswith("whole"):
            found |= set(_names(yaml.safe_load(text), ""))
    return sorted(found)


def _names(section: object, prefix: str) -> Iterator[str]:
    for key, value in section.items() if isinstance(section, dict) else ():
        yield prefix + key
        yield from _names(value, f"{prefix}{key}.")


def mutant(seed: int, number: int) -> Mutant:
    """The config of that number."""
    draw = random.Random(f"{seed}:{number}")
    text = originals()[draw.choice(list(originals()))]
    files, overrides = {}, []
    for _ in range(draw.choice([1, 1, 1, 2, 3, 4])):
        kind = draw.random()
        if kind < 0.65:
            text = broken_text(draw, text)
        elif kind < 0.75:
            name, group = draw.choice(groups())
            folder, _, _ = name.removesuffix(".yaml").partition("/")
            files[f"{folder}/mutated.yaml"] = broken_text(draw, group)
            text = re.sub(rf"(?m)^(\s*- {folder}: ).*$", r"\g<1>mutated", text)
            if f"{folder}: mutated" not in text:
                text = f"defaults: [env: metaworld/reach, model: mlp, algorithm: ppo, {folder}: mutated]\n{text}"
        else:
            overrides.append(_override(draw))
    return Mutant({"main.yaml": text, **files}, overrides)


def broken_text(draw: random.Random, text: str) -> str:
    """`text` with one mistake in it."""
    lines = text.splitlines() or [""]
    at = draw.randrange(len(lines))
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    key, colon, _ = line.lstrip().partition(":")
    match draw.choice(["key", "value", "value", "value", "line", "defaults", "letters"]):
        case "key":
            lines[at] = f"{indent}{_misspelt(draw, key)}{line[len(indent) + len(key) :]}"
        case "value":
            below = at + 1
            while draw.random() < 0.9 and below < len(lines) and lines[below].startswith(indent + " "):
                below += 1  # what stood below a section goes
            lines[at:below] = [f"{indent}{key}{colon or ':'} {draw.choice(VALUES)}"]
        case "line":
            _move(draw, lines, at)
        case "defaults":
            entry = draw.choice(
                ["env", "model", "algorithm", "modle", "override env", "env@model", "optional env", "/env"]
            )
            option = draw.choice([*VALUES, *(name.partition("/")[2].removesuffix(".yaml") for name, _ in groups())])
            entries = [number for number, each in enumerate(lines) if re.match(r"\s*- ", each)]
            lines[draw.choice(entries) if entries else 0] = draw.choice(
                [f"  - {entry}: {option}", f"  - {option}", f"defaults: {option}", f"  - {option}: {entry}", "  - main"]
            )
        case "letters":
            whole = "\n".join(lines)
            start = draw.randrange(len(whole) + 1)
            return whole[:start] + draw.choice(LETTERS) + whole[start + draw.choice([0, 1, 1, 30]) :] + "\n"
    return "\n".join(lines) + "\n"


def _move(draw: random.Random, lines: list[str], at: int) -> None:
    """Remove, double, move, swap or shift a line, or cut off what follows."""
    other = draw.randrange(len(lines))
    match draw.choice(["remove", "double", "move", "swap", "shift", "cut", "tab"]):
        case "remove":
            del lines[at]
        case "double":
            lines.insert(at, lines[at])
        case "move":
            lines.insert(other, lines.pop(at))
        case "swap":
            lines[at], lines[other] = lines[other], lines[at]
        case "shift":
            lines[at] = " " * draw.choice([1, 2, 4]) + lines[at] if draw.random() < 0.5 else lines[at].strip()
        case "cut":
            lines[at:] = [lines[at][: draw.randrange(len(lines[at]) + 1)]]
        case "tab":
            lines[at] = "\t" + lines[at].lstrip()


def _misspelt(draw: random.Random, word: str) -> str:
    at = draw.randrange(len(word) + 1)
    letter = draw.choice(LETTERS)
    return draw.choice(
        [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word.upper(), word[::-1], word * 2, letter]
    )


def _override(draw: random.Random) -> str:
    """Return overrides with mistakes."""
    path, value = draw.choice(paths()), draw.choice(VALUES).replace("\x00", "")  # no argument of a program has that
    match draw.choice(["value", "value", "value", "key", "broken", "group"]):
        case "value":
            return f"{path}={value}"
        case "key":
            return f"{_misspelt(draw, path)}={value}"
        case "group":
            return f"{draw.choice(['env', 'model', 'algorithm', 'algorithm.loss', 'modle'])}={value}"
    broken = [
        path,
        f"{path}=",
        f"={value}",
        f"{path}=={value}",
        f"{path}: {value}",
        f"+{path}={value}",
        f"~{path}",
        value,
    ]
    return draw.choice([*broken, f"{path}.{path}={value}", f"{path}.0={value}", f".{path}={value}", f"{path}.=1", "="])


def write(made: Mutant, folder: Path) -> None:
    """Write its files into an empty folder."""
    for name, text in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")


def load(number: int, made: Mutant) -> Outcome:
    """Load it in this process, every other one for another machine, and return the result."""
    use = ConfigUse.elsewhere if number % 2 else ConfigUse.check
    with tempfile.TemporaryDirectory() as name:
        write(made, Path(name))
        began = time.process_time()
        kind, what = "valid", ""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                to_commented_yaml(load_config(Path(name, "main.yaml"), made.overrides, use=use).config)
        except ConfigError as error:
            kind = "faults" if error.faults and str(error) else "traceback"
        except Exception:  # what this is looking for
            kind, what = "traceback", traceback.format_exc()
        return Outcome(number, kind, time.process_time() - began, what)


def validate(number: int, made: Mutant) -> Outcome:
    """Load it with `embodyrl validate`."""
    with tempfile.TemporaryDirectory() as name:
        write(made, Path(name))
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-m", "embodyrl", "validate", "main.yaml", *made.overrides],
            cwd=name,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        after = os.times()
    said = done.stdout + done.stderr
    is_sound = done.returncode in (0, 2) and "Traceback" not in said and "\x1b" not in said and said.strip()
    kind = {0: "valid", 2: "faults"}[done.returncode] if is_sound else "traceback"
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Outcome(number, kind, cpu_s, "" if is_sound else f"exit code {done.returncode}: {said}")


def share(seed: int, numbers: Sequence[int]) -> list[Outcome]:
    """Load those configs in this process."""
    return [load(number, mutant(seed, number)) for number in numbers]


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Count results."""
    times = sorted(outcome.cpu_s for outcome in outcomes)
    return {
        "configs": len(outcomes),
        **{kind: Counter(outcome.kind for outcome in outcomes)[kind] for kind in ("valid", "faults", "traceback")},
        "slow": sum(outcome.cpu_s > SLOW_S for outcome in outcomes),
        "cpu_s": {"median": round(times[len(times) // 2], 4), "max": round(times[-1], 3)} if times else {},
        "failures": [asdict(each) for each in outcomes if each.kind == "traceback" or each.cpu_s > SLOW_S][:50],
    }


def main() -> None:
    """Draw, load, count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="configs that are loaded in this program")
    parser.add_argument("--programs", type=int, default=100, help="further ones that `embodyrl validate` is given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="show the config of that number and what comes of it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/config_mutations.json"))
    args = parser.parse_args()
    if args.only is not None:
        made = mutant(args.seed, args.only)
        print(*made.files.values(), made.overrides, load(args.only, made), sep="\n")
        return
    began = time.perf_counter()
    shares = [range(start, args.count, args.processes * 10) for start in range(args.processes * 10)]
    loaded: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for part in [pool.apply_async(share, (args.seed, numbers)) for numbers in shares]:
            loaded += part.get()
            bad = sum(each.kind == "traceback" or each.cpu_s > SLOW_S for each in loaded)
            print(f"{len(loaded)} configs, {bad} failures, {time.perf_counter() - began:.0f} s", flush=True)
    numbers = range(args.count, args.count + args.programs)
    asked = [validate(number, mutant(args.seed, number)) for number in numbers]
    found = {
        "version": __version__,
        "python": platform.python_version(),
        "seed": args.seed,
        "loaded": summary(loaded),
        "embodyrl validate": summary(asked),
    }
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    if any(each.kind == "traceback" or each.cpu_s > SLOW_S for each in [*loaded, *asked]):
        sys.exit(1)


if __name__ == "__main__":
    main()
