"""Writes the README's console samples, which stand between `<!-- sample: NAME -->` and `<!-- end of sample -->`.

    python scripts/readme_samples.py             # what takes a second: faults, and the first screen of the first run
    embodyrl run > first.txt
    python scripts/readme_samples.py first.txt   # the first run as well, from its output

`tests/test_readme.py` compares what does not depend on the machine and the hour with what the program says now.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from embodyrl.config import ConfigError, load_config
from embodyrl.runner.session import header

ROOT = Path(__file__).resolve().parent.parent

README = ROOT / "README.md"
SAMPLE = re.compile(r"(<!-- sample: ([\w-]+) -->\n```\w*\n)(.*?)(```\n<!-- end of sample -->)", re.DOTALL)
OF_MACHINE = ("machine", "placement", "output", "starting")
"""Lines of the first screen that depend on the machine or the hour."""


def samples(text: str) -> dict[str, str]:
    """Return the samples of a README by name."""
    return {name: sample for _, name, sample, _ in SAMPLE.findall(text)}


def my_yaml(text: str) -> str:
    """Return the config that a README shows."""
    [found] = re.findall(r"^```yaml\n(# my\.yaml\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


MISTAKES = (
    ("metaworld/reach", "metawrld/reach"),
    ("seed: 3", 'seed: "3"'),
    ("gamma: 0.98", "gama: 0.98"),
    ("reward_scale: 0.02", "reward_scale: 0"),
)
"""What is wrong in the sample of faults: parts of my.yaml, and what stands in their place."""


def faults(text: str) -> str:
    """Return what `embodyrl run my.yaml` says of the README's config with mistakes."""
    config = my_yaml(text)
    for right, wrong in MISTAKES:
        assert right in config, f"my.yaml has no {right}"
        config = config.replace(right, wrong)
    with in_folder() as folder:
        (folder / "my.yaml").write_text(config)
        try:
            load_config("my.yaml")
        except ConfigError as error:
            said = re.sub(r"\(options: [^)]*\)", "(options: ...)", str(error))
            return f"$ embodyrl run my.yaml\n{said}\n"
    raise AssertionError("my.yaml has no faults")


def validated(text: str) -> str:
    """Return what `embodyrl validate my.yaml` says of the README's config."""
    with in_folder() as folder:
        (folder / "my.yaml").write_text(my_yaml(text))
        return f"$ embodyrl validate my.yaml\nmy.yaml: OK, {load_config('my.yaml').values} values, 0 faults\n"


def first_screen() -> list[str]:
    """Return the first lines of `embodyrl run`, without those of the machine."""
    lines = header(load_config(None), Path("runs")).splitlines()
    return [line for line in lines if line.split()[0] not in OF_MACHINE]


def refreshed(text: str) -> str:
    """Return the sample of the first run with the lines that the program prints first now."""
    now = {line.split()[0]: line for line in first_screen()}
    lines = samples(text)["first-run"].splitlines()
    return "\n".join(now.get(line.split()[0], line) for line in lines) + "\n"


def first_run(log: str) -> str:
    """Return the sample of the first run from all that it printed."""
    lines = [line for line in log.splitlines() if not re.match(r"evaluating|collecting|saving|iteration|Saved", line)]
    iterations = [index for index, line in enumerate(lines) if re.match(r" +\d+ +[\d,]+ ", line)]
    evaluations = [line for line in lines if line.startswith("evaluation ")]
    done = next(index for index, line in enumerate(lines) if line.startswith("done in"))
    first = lines[: iterations[0] + 1]
    last = [evaluations[-1], lines[iterations[-1]], lines[done]]
    return "\n".join([*first, "  ...", *last]) + "\n"


@contextlib.contextmanager
def in_folder() -> Iterator[Path]:
    """Work in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def main() -> None:
    """Write the samples into the README."""
    text = README.read_text()
    found = {"faults": faults(text), "validate": validated(text)}
    found["first-run"] = first_run(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else refreshed(text)
    README.write_text(SAMPLE.sub(lambda match: match[1] + found.get(match[2], match[3]) + match[4], text))


if __name__ == "__main__":
    main()
