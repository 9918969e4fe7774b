"""Mutate checkpoints of every family, and configs for `embodyrl swap`, and see that each is accepted or refused in a
sentence.

A tiny checkpoint of each family is made, pi0.5 as openpi and as LeRobot write it. One to three times, a value of one of
its JSON files gets another type or size, an entry is removed, renamed or nested, the text is cut or filled with odd
bytes, or a safetensors file is damaged. Then its files are checked as by `embodyrl validate`, and the policy is loaded.
Configs with mistakes (those of `config_mutations.py`) are given to `embodyrl swap`. Every case depends only on `--seed`
and its number. A traceback, more than 5 s of processor time, more than 1 GB of memory or the end of the process counts
as a failure, and the exit code is then 1.

    nice python benchmarks/checkpoint_mutations.py [--count 5000] [--swaps 500] [--first 0] [--seed 1] [--only N]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config_mutations import broken_text

from embodyrl.config import ConfigUse, load_config
from embodyrl.config.infos import model_info
from embodyrl.config.rules import checkpoint_notes
from embodyrl.config.swap import swap
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.models import build_policy, load_policy
from embodyrl.models.saved import other_options, unread_note
from embodyrl.registry import SupportedModel
from embodyrl.version import __version__

SLOW_S = 5.0
"""Limit of processor time per case [s]."""
HANG_S = 30
"""Limit of time per case [s]."""
MEMORY = 10**9
"""Limit of memory per case [bytes]."""
DEEP = 3000

SPEC = SimulatorSpec(
    tasks={"push": "push the cube"},
    actions=(ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * 4, high=(1.0,) * 4),),
    proprio_dim=5,
    max_episode_steps=10,
    control_frequency=20.0,
    cameras=("render",),
    image_size=(64, 64),
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "cnn": ("cnn", {}),
    "act": (
        "act",
        {"backbone_width": 4, "hidden_size": 16, "heads": 2, "feedforward_size": 24, "encoder_layers": 1},
    ),
    "smolvla": ("smolvla", {"image_size": 32, "layers": 1, "vision_layers": 1, "patch_size": 8, "shuffle": 2}),
    "pi0": ("pi0", {"image_size": 32, "layers": 1}),
    "pi05": ("pi05", {"image_size": 32, "layers": 1}),
    "pi05, LeRobot's": ("pi05", {"image_size": 32, "layers": 1}),
    "pi0_fast": ("pi0_fast", {"image_size": 32, "layers": 1}),
    "gr00t": ("gr00t", {"image_size": 32, "patch_size": 16, "layers": 1, "vision_layers": 1, "action_layers": 2}),
    "gr00t_n17": ("gr00t_n17", {"image_size": 32, "layers": 1, "vision_layers": 1, "action_layers": 3}),
    "openvla": ("openvla", {"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48}),
    "openvla_oft": ("openvla_oft", {"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48}),
}
"""Model and shape of the checkpoint of each name."""

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 10**9, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "0", "auto", "é日本🤖", "\u202eabc", "\x1b[31mred"),
    *("\x00", "\ud800", "../../escape", "/dev/null", "hf-hub:nobody/nothing", "x" * 20000, [], {}, [[]], [{}], [None]),
    *({"": None}, {"a": {"b": 1}}, [1, "two", None], [0.0], [1.0] * 4, [1.0] * 5, [float("nan")] * 4, [True] * 4),
    *(["a"] * 4, [[1.0]] * 4, list(range(3000)), "MEAN_STD", "QUANTILES", "IDENTITY", {"STATE": 3}),
    *({"type": "VISUAL"}, {"type": "VISUAL", "shape": [3, 32, 32]}),
]
"""Wrong values."""


@dataclass
class Outcome:
    """Result of one case."""

    number: int
    kind: str
    """`valid`, `refused` or `failure`."""
    cpu_s: float
    """Processor time [s]."""
    what: str = ""
    """What was mutated; of a failure also the traceback."""


# --------------------------------------------------------------------------------------------------------- checkpoints


@cache
def originals() -> dict[str, Path]:
    """The folders of the checkpoints that are mutated."""
    place = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    found = {}
    for number, (name, (model, shape)) in enumerate(FAMILIES.items()):
        folder = place / str(number)
        folder.mkdir()
        options: Any = SupportedModel.entry(model).load_options()
        more: dict[str, Any] = {"scratch": type(options(name=model).scratch)(**shape)} if shape else {}
        config = options(name=model, **more)
        build_policy(config, SPEC, chunk_size=1, seed=1).save(folder, config)
        if name.endswith("LeRobot's"):
            _as_lerobot(folder)
        found[name] = folder
    return found


def _as_lerobot(folder: Path) -> None:
    """Write statistics and processors as LeRobot does."""
    numbers = json.loads((folder / "norm_stats.json").read_text())["norm_stats"]
    (folder / "norm_stats.json").unlink()
    (folder / "policy.json").unlink()
    stats = {"observation.state": numbers["state"], "action": numbers["actions"]}
    (folder / "stats.json").write_text(json.dumps(stats))
    ways = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"normalization_mapping": ways}))
    for file, step in (("pre", "normalizer_processor"), ("post", "unnormalizer_processor")):
        steps = [{"registry_name": step, "config": {"eps": 1e-8, "features": {}, "norm_map": ways}}]
        content = {"name": f"policy_{file}processor", "steps": steps}
        (folder / f"policy_{file}processor.json").write_text(json.dumps(content))


@cache
def base_config(model: str) -> Any:
    """A config of a model, whose checkpoint is replaced."""
    words = [f"model={model}", "env=gym/pendulum" if model == "mlp" else "env=gym/pendulum_rgb"]
    return load_config("gym_cartpole", words, use=ConfigUse.show).config


def mutate(draw: random.Random, folder: Path) -> str:
    """Change a file of a checkpoint; returns what was changed."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors", ".pt"))
    if not files:
        return "nothing is left"
    weights = [1 if path.suffix != ".json" else 12 if path.name == "config.json" else 6 for path in files]
    path = draw.choices(files, weights)[0]
    name = path.relative_to(folder).as_posix()
    content = path.read_bytes()
    path.unlink()  # the original is a link to the same bytes
    if path.suffix != ".json" or draw.random() < 0.12:
        changed, how = _broken_bytes(draw, content)
    else:
        changed, how = _broken_json(draw, content)
    if how != "removed":
        path.write_bytes(changed)
    return f"{name}: {how}"


def _broken_bytes(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at = draw.randrange(len(content) + 1)
    near = min(at, draw.randrange(400))
    kinds: dict[str, Callable[[], bytes]] = {
        "removed": lambda: b"",
        "empty": lambda: b"",
        f"cut at {at}": lambda: content[:at],
        f"a byte at {near}": lambda: content[:near] + bytes([draw.randrange(256)]) + content[near + 1 :],
        "no UTF-8": lambda: b"\xff\xfe" + content,
        "deep": lambda: b"[" * DEEP + b"]" * DEEP,
        "deep objects": lambda: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "a list": lambda: b"[1, 2]",
        "a page": lambda: b"<!DOCTYPE html><html>Sign in</html>",
        "a pickle": lambda: b"\x80\x04N.",
        "a huge header": lambda: b"\xff" * 8 + content[8:],
    }
    how = draw.choice(list(kinds))
    return kinds[how](), how


def _broken_json(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # mutated before
        return content, "as it was"
    places = list(_places(tree))
    if not places:
        return b"{}", "emptied"
    holder, key, where = draw.choice(
        places if draw.random() < 0.5 else [each for each in places if each[2].count("/") < 4]
    )
    kind = draw.choice(["value", "value", "value", "number", "number", "remove", "rename", "nest", "swap", "long"])
    old = holder[key]
    match kind:
        case "value":
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        case "number":
            number = old if isinstance(old, int | float) and not isinstance(old, bool) else 3
            holder[key] = draw.choice(
                [-number, number + 1, number * 1000, 0, number / 3, str(number), [number], number * 10**7]
            )
        case "remove":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[draw.choice([f"{key}x", key.upper(), "", key[::-1], "camera.name"])] = holder.pop(key)
        case "nest":
            holder[key] = draw.choice([[old], {"a": old}, [old, old]])
        case "swap":
            holder[key] = copy.deepcopy(draw.choice(places)[0])
        case _:
            holder[key] = old * 50 if isinstance(old, list) else [old] * 50
    return json.dumps(tree).encode(errors="replace"), f"{kind} of {where}"


def _places(tree: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield every entry as container, key and path; of long lists the first entries."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key, f"{where}/{key}"
        yield from _places(value, f"{where}/{key}")


def attempt_checkpoint(seed: int, number: int) -> Outcome:
    """Mutate the checkpoint of that number, check it and load it."""
    draw = random.Random(f"{seed}:{number}")
    name = list(FAMILIES)[number % len(FAMILIES)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        shutil.copytree(originals()[name], folder, copy_function=os.link)
        changes = "; ".join(mutate(draw, folder) for _ in range(draw.choice([1, 1, 1, 2, 3])))
        return _outcome(number, f"{name}: {changes}", lambda: _use(FAMILIES[name][0], folder))


def _use(model: str, folder: Path) -> None:
    """Check a checkpoint as `embodyrl validate` does, and load it."""
    config = copy.deepcopy(base_config(model))
    object.__setattr__(config.model, "checkpoint", str(folder))
    faults = list(model_info(model).check(config))
    if any(not str(fault.message) for fault in faults):
        raise AssertionError("a fault without a message")
    if not faults:
        checkpoint_notes(config)
        other_options(config.model)
        unread_note(folder)
    load_policy(model, checkpoint=folder, simulator=SPEC, chunk_size=1)


# ----------------------------------------------------------------------------------------------------------------- swap


CHOICES = ({"algorithm": "grpo"}, {"model": "mlp"}, {"env": "gym/pendulum"}, {"model": "cnn", "algorithm": "ppo"})


TEXTS = (
    "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\nrun: {iterations: 3}\nenv: {num_envs: 4}\n",
    """\
defaults:
  - env: gym/pendulum
  - model: mlp
  - algorithm: ppo
  - _self_

env:
  num_envs: 8
  workers: 2
model:
  hidden_sizes: [32, 32]
algorithm:
  minibatches: 2
  loss: {clip_high: 0.3}
rollout:
  num_chunks: 16
run: {iterations: 5, dir: out}
""",
    "seed: 3\nenv: {name: gymnasium, tasks: [Pendulum-v1]}\nmodel: {name: mlp}\nalgorithm: {name: ppo}\n",
)
"""Configs that are mutated."""
ENCODINGS: tuple[Callable[[str], bytes], ...] = (
    *[lambda text: text.encode(errors="surrogatepass")] * 8,
    lambda text: text.encode("utf-16", errors="surrogatepass"),
    lambda text: text.encode(errors="replace").replace(b"\n", b"\r\n"),
    lambda text: b"\xff" + text.encode(errors="replace"),
)
"""Ways in which such a file may be written."""


def attempt_swap(seed: int, number: int) -> Outcome:
    """Give the config of that number to `embodyrl swap`."""
    draw, choices = random.Random(f"{seed}:{number}"), CHOICES[number % len(CHOICES)]
    text = draw.choice(TEXTS)
    for _ in range(draw.choice([1, 1, 2, 3])):
        text = broken_text(draw, text)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "main.yaml")
        path.write_bytes(draw.choice(ENCODINGS)(text))
        return _outcome(number, f"{choices} in {text!r}", lambda: swap(str(path), choices).diff())


# -------------------------------------------------------------------------------------------------------------- running


def _outcome(number: int, what: str, use: Callable[[], object]) -> Outcome:
    """Run a case within its limits."""
    began, kind = time.process_time(), "valid"
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            use()
    except UserError as error:
        kind = "refused" if str(error) else "failure"
        what += f"\n{error}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # what this is looking for; some packages raise what is no Exception
        kind, what = "failure", f"{what}\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)
    cpu_s = time.process_time() - began
    return Outcome(number, "failure" if cpu_s > SLOW_S else kind, cpu_s, what)


def _hang(*_: object) -> None:
    raise TimeoutError(f"no answer within {HANG_S} s")


def share(kind: str, seed: int, numbers: Sequence[int]) -> list[Outcome]:
    """Run cases in this process."""
    attempt = attempt_checkpoint if kind == "checkpoints" else attempt_swap
    return [attempt(seed, number) for number in numbers]


def limited_share(kind: str, seed: int, numbers: Sequence[int], place: str) -> None:
    """Run cases with limited memory, and write each result at once, so that the end of this process tells its cause."""
    attempt_checkpoint(seed, numbers[0])  # everything is imported
    attempt_swap(seed, numbers[0])
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_memory() + MEMORY,) * 2)
    with Path(place).open("w") as file:
        for number in numbers:
            print(json.dumps({"begun": number}), file=file, flush=True)
            print(json.dumps(asdict(share(kind, seed, [number])[0])), file=file, flush=True)
    shutil.rmtree(next(iter(originals().values())).parent)


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run(kind: str, seed: int, numbers: Sequence[int]) -> list[Outcome]:
    """Run cases in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "results")
        process = multiprocessing.get_context("spawn").Process(
            target=limited_share, args=(kind, seed, numbers, str(place))
        )
        process.start()
        process.join()
        lines = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    found = [Outcome(**line) for line in lines if "begun" not in line]
    if process.exitcode:
        last = lines[-1].get("begun", lines[-1].get("number")) if lines else numbers[0]
        found.append(Outcome(last, "failure", 0.0, f"the process ended with {process.exitcode}"))
        rest = [number for number in numbers if number > last]
        found += run(kind, seed, rest) if rest and lines else []
    return found


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Count results."""
    times = sorted(outcome.cpu_s for outcome in outcomes)
    return {
        "cases": len(outcomes),
        **{kind: Counter(outcome.kind for outcome in outcomes)[kind] for kind in ("valid", "refused", "failure")},
        "cpu_s": {"median": round(times[len(times) // 2], 4), "max": round(times[-1], 3)} if times else {},
        "failures": [asdict(each) for each in outcomes if each.kind == "failure"][:200],
    }


def main() -> None:
    """Mutate, use, count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="checkpoints")
    parser.add_argument("--swaps", type=int, default=500, help="configs for `embodyrl swap`")
    parser.add_argument("--first", type=int, default=0, help="number of the first of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="show the checkpoint of that number and what comes of it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint_mutations.json"))
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(asdict(attempt_checkpoint(args.seed, args.only)), indent=2).replace("\\n", "\n"))
        return
    found: dict[str, Any] = {"version": __version__, "python": platform.python_version(), "seed": args.seed}
    for kind, count in (("checkpoints", args.count), ("swap", args.swaps)):
        outcomes = run(kind, args.seed, range(args.first, args.first + count)) if count else []
        found[kind] = summary(outcomes)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({kind: {**found[kind], "failures": "see the file"} for kind in ("checkpoints", "swap")}, indent=2))
    if any(found[kind]["failure"] for kind in ("checkpoints", "swap")):
        sys.exit(1)


if __name__ == "__main__":
    main()
