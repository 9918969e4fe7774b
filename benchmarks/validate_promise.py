"""Run what `embodyrl validate` accepts: no config that it passes may fail in the first iteration for a reason it shows.

Small configs (`BASES`: shipped experiments and groups that run in a second or two) get one to three other values each:
every setting of every section at its limits and beside them, null, other choices, other components and groups, odd
and large sizes. What a config is depends only on `--seed` and its number. `validate`'s own check reads it; what is
accepted runs for one iteration, in a process forked from one that has imported torch. Every run that ends otherwise
than with exit code 0 is a finding, counted by its cause, and the exit code is then 1.

Some configs that rules between settings refuse are run as well, past these rules: `refused, but run` counts how they
end, by rule. Most have a setting without use; the others would be false faults.

    nice python benchmarks/validate_promise.py [--count 300] [--refused 50] [--seed 1] [--start 0] [--only N ...]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pkgutil
import platform
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from embodyrl.config import ConfigError, ConfigUse, load_config, to_commented_yaml
from embodyrl.config.fields import Setting, all_paths, find_setting, registry_of
from embodyrl.config.schema import Config
from embodyrl.config.values import choices_in
from embodyrl.runner.start_rules import start_rules
from embodyrl.version import __version__

DEADLINE_S = 40.0
"""Longest run [s]."""
MEMORY = 12 << 30
"""Address space of a run and of each of its processes [bytes]."""

SMALL = [
    *("run.iterations=1", "eval.episodes=2", "tracking.sinks=[jsonl]", "engine.threads=1"),
    *("env.num_envs=4", "env.workers=1", "env.max_episode_steps=8", "rollout.num_chunks=8"),
]
WHOLE = ["rollout.episodes=whole", "rollout.group_size=2", "algorithm.epochs=1", "algorithm.minibatches=2"]
ONE = ["algorithm.epochs=1", "algorithm.minibatches=2"]
SQUASHED = ["model.head=squashed", "model.log_std_init=-1.0"]
REPLAY = [
    *("algorithm.off_policy.replay.start_after=8", "algorithm.off_policy.replay.capacity=100"),
    *("algorithm.off_policy.batch_size=8", "algorithm.off_policy.critics.hidden_sizes=[8]"),
]
PIXELS = ["env=gym/pendulum_rgb", "env.num_envs=2", "env.image_size=[32,32]", "eval.episodes=1"]
PI = ["model.scratch={layers:1,image_size:32}", "rollout.chunk_size=2"]
STATES, IMAGES = "states", "images"
"""Demonstrations, recorded when the program starts: of MetaWorld's expert, and of a policy that sees images."""


@dataclass(frozen=True)
class Base:
    """A config that runs quickly."""

    source: str
    overrides: list[str]


def _gym(*more: str) -> Base:
    return Base("experiment/gym_pendulum", [*SMALL, "model.hidden_sizes=[8]", *more])


def _pixels(model: str, *more: str) -> Base:
    return Base("experiment/gym_pendulum", [*PIXELS[:1], f"model={model}", *SMALL, *PIXELS[1:], *more])


def _reach(*more: str) -> Base:
    return Base("experiment/metaworld_reach", [*more[:1], *SMALL, "model.hidden_sizes=[8]", *more[1:]])


def _push(name: str, *more: str) -> Base:
    """Return an experiment with a replay and demonstrations, on a task that starts quickly."""
    small = [*SMALL, "model.hidden_sizes=[8]", *REPLAY, f"data.path={STATES}"]
    return Base(f"experiment/push_{name}", ["env=metaworld/reach", *small, *more])


BASES = {
    "ppo": _gym(*ONE),
    "cartpole": Base("experiment/gym_cartpole", [*SMALL, *ONE, "model.hidden_sizes=[8]"]),
    "grpo": _gym("algorithm=grpo", *WHOLE),
    "rloo": _gym("algorithm=rloo", *WHOLE),
    "dapo": _gym("algorithm=dapo", *WHOLE, "algorithm.filter.metric=total_reward", "algorithm.reward=dense"),
    "gspo": _gym("algorithm=gspo", *WHOLE),
    "cpgd": _gym("algorithm=cpgd", *WHOLE),
    "reinforce_pp": _gym("algorithm=reinforce_pp", "rollout.episodes=whole", *ONE),
    "srpo": _gym("algorithm=srpo", *WHOLE),
    "ranks": _gym(*ONE, "env.workers=2", "engine.parallel.world_size=2"),
    "workers": _gym(*ONE, "placement.rollout.workers=1"),
    "async": _gym(
        *ONE, "placement.rollout.workers=1", "rollout.mode=async", "algorithm.loss=decoupled_ppo", "run.iterations=2"
    ),
    "sac": Base("experiment/gym_pendulum_sac", [*SMALL, "model.hidden_sizes=[8]", *REPLAY]),
    "reach": _reach("algorithm=ppo", *ONE),
    "sft": _reach("algorithm=sft", f"data.path={STATES}", "data.steps=2", "data.batch_size=8"),
    "iql": _push("iql", "algorithm.off_policy.offline_iterations=1", "data.steps=2"),
    "rlpd": _push("rlpd", "data.batch_size=8", "algorithm.off_policy.imitation.first_steps=2"),
    "dagger": Base(
        "experiment/push_dagger",
        [
            "env=metaworld/reach",
            *SMALL,
            "model.hidden_sizes=[8]",
            *REPLAY[1:3],
            f"data.path={STATES}",
            "algorithm.off_policy.imitation.first_steps=2",
        ],
    ),
    "cnn": _pixels("cnn", *ONE),
    "cnn_sac": Base(
        "experiment/metaworld_reach_pixels_sac",
        [*PIXELS[:1], *SMALL, *PIXELS[1:], *REPLAY, "model.hidden_sizes=[8]", "model.channels=[4,4,4]"],
    ),
    "act": _pixels(
        "act",
        *ONE,
        "rollout.chunk_size=2",
        "model.scratch={backbone_width:4,hidden_size:16,heads:2,feedforward_size:24,style_layers:1}",
    ),
    "pi0": _pixels("pi0", "algorithm=grpo", *WHOLE, *PI, "model.noise_method=flow_sde"),
    "pi0_ppo": _pixels("pi0", *ONE, *PI),
    "pi0_sft": _pixels("pi0", "algorithm=sft", *PI, f"data.path={IMAGES}", "data.steps=2", "data.batch_size=8"),
    "smolvla": _pixels(
        "smolvla",
        "algorithm=grpo",
        *WHOLE,
        "rollout.chunk_size=2",
        "model.scratch={layers:2,vision_layers:1}",
        "model.noise_method=flow_sde",
        "model.frozen=nothing",
    ),
    "openvla_oft": _pixels(
        "openvla_oft",
        "algorithm=grpo",
        *WHOLE,
        "rollout.chunk_size=2",
        "model.scratch={image_size:32,hidden_size:32,layers:1,mlp_size:48}",
    ),
    "gr00t": _pixels(
        "gr00t",
        "algorithm=grpo",
        *WHOLE,
        "rollout.chunk_size=2",
        "model.scratch={layers:1,action_layers:2,action_horizon:4}",
        "model.noise_method=flow_cps",
    ),
    "gr00t_n17": _pixels(
        "gr00t_n17",
        "algorithm=grpo",
        *WHOLE,
        "rollout.chunk_size=2",
        "model.scratch={layers:1,action_layers:3,action_horizon:4}",
        "model.noise_method=flow_cps",
    ),
}

GROUPS = {
    "env": [
        *("gym/pendulum", "gym/cartpole", "gym/pendulum_rgb", "metaworld/reach", "metaworld/mt10"),
        *("mujoco/inverted_pendulum", "mujoco/hopper", "robotics/fetch_reach", "pusht/state"),
    ],
    "model": [
        *("mlp", "cnn", "act", "pi0", "pi05", "pi0_fast", "smolvla"),
        *("openvla", "openvla_oft", "gr00t", "gr00t_n17"),
    ],
    "algorithm": [
        *("ppo", "grpo", "rloo", "dapo", "gspo", "cpgd", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"),
        *("srpo", "sac", "rlpd", "iql", "dagger", "dsrl", "sft", "reward_classifier"),
    ],
}
SPECIAL: dict[str, list[str]] = {
    "run.dir": ["null", "/proc/nowhere", "''"],
    "run.name": ["x", "'ä b'", "''", "'..'"],
    "env.tasks": ["[Pendulum-v1]", "[CartPole-v1]", "[Acrobot-v1]", "[reach-v3]", "[reach-v3,push-v3]", "[]"],
    "env.cameras": ["[]", "[render]", "[corner4]", "[corner4,gripperPOV]", "[render,render]"],
    "env.image_size": ["[16,16]", "[16,48]", "[2048,16]", "[17,23]", "[84,84]", "[32]"],
    "env.task_descriptions": ["{Pendulum-v1: swing it up}", "{Pendulum-v1: ''}", "{reach-v3: '\u00e4'}"],
    "env.arguments": ["{}", "{g: 9.0}", "{render_mode: human}", "{nobody: 1}", "{g: text}"],
    "env.num_envs": ["1", "2", "3", "6", "16", "64"],
    "env.workers": ["auto", "1", "2", "4", "64"],
    "env.startup_timeout_s": ["0.001", "4.0", "1.0e9"],
    "env.step_timeout_s": ["0.001", "1.0", "1.0e9"],
    "engine.parallel.world_size": ["auto", "1", "2"],
    "engine.parallel.timeout_s": ["0.001", "1.0", "1.0e9"],
    "engine.threads": ["auto", "1", "2", "7", "1024", "100000"],
    "seed": ["0", "7", f"{2**32}", f"{2**63 - 1}"],
    "eval.first_start_state": ["0", "10000", f"{2**31}", f"{2**32}", f"{10**15}", f"{2**63 - 1}"],
    "env.start_states": ["1", "2", "10000", "10001", f"{2**33}"],
    "env.max_episode_steps": ["1", "2", "3", "8", "9", "100", f"{10**7}", f"{10**10}"],
    "rollout.num_chunks": ["1", "2", "3", "7", "8", "9", "33", f"{10**9}", f"{10**15}"],
    "eval.episodes": ["1", "2", "3", "5", f"{10**9}"],
    "placement.rollout.workers": ["0", "1", "2"],
    "placement.rollout.timeout_s": ["0.001", "9.0", "1.0e9"],
    "placement.address": ["null", "127.0.0.1:9"],
    "engine.lora.targets": ["[]", "[q_proj]", "[nowhere]", "[q_proj,v_proj]", "[q_proj,q_proj]"],
    "data.path": [STATES, IMAGES, "nowhere", "null", "/dev/null"],
    "pipeline.drop": ["[]", "[reward]", "[update]", "[rollout]", "[nowhere]"],
    "pipeline.replace": ["{reward: rollout}", "{update: update}", "{nowhere: update}"],
    "pipeline.insert": ["[]", "[{name: again, stage: reward}]", "[{name: more, stage: update, after: [update]}]"],
    "pipeline.function": ["null", "nowhere:f", "json:dumps"],
    "plugins": ["[]", "[json]", "[nowhere]"],
    "tracking.sinks": ["[]", "[console]", "[tensorboard]", "[jsonl,console,tensorboard]"],
    "model.checkpoint": ["null", "nowhere", "/tmp"],
    "model.hidden_sizes": ["[]", "[1]", "[3,5]", "[2048]", "[8,8,8,8,8,8]"],
}
"""Values of settings whose types say little, or for which larger ones take too long."""
SIZES = [0, 1, 2, 3, 5, 7, 8, 16, 33, 100]
"""Whole numbers without upper limit."""
NUMBERS = [-1.0, 0.0, 1.0e-8, 0.1, 0.5, 1.0, 2.0, 50.0, 1.0e6]


@dataclass(frozen=True)
class Case:
    """One config."""

    base: str
    changes: list[str]

    @property
    def overrides(self) -> list[str]:
        """Return them with groups in place of those of the base."""
        groups = [change for change in self.changes if change.split("=")[0] in GROUPS]
        others = [change for change in self.changes if change not in groups]
        own = [
            each for each in BASES[self.base].overrides if each.split("=")[0] not in {g.split("=")[0] for g in groups}
        ]
        return [*own, *groups, *others]


@dataclass
class Outcome:
    """Result of one config."""

    number: int
    case: Case
    kind: str
    """`refused`, `ran`, `failed`, `slow`, or `traceback` of the check itself."""
    cause: str = ""
    rules: bool = False
    """Refused by rules between settings alone."""
    wall_s: float = 0.0
    text: str = field(default="", repr=False)


@cache
def paths(base: str) -> dict[str, Setting]:
    """Return every setting of a base's config by its path."""
    loaded = load_config(BASES[base].source, BASES[base].overrides, use=ConfigUse.show)
    data = asdict(loaded.config)
    found = {}
    for path in all_paths(Config, data):
        setting, _ = find_setting(Config, data, path)
        if setting is not None and (setting.section is None or registry_of(setting.section) is not None):
            found[".".join(map(str, path))] = setting
    return found


def values(path: str, setting: Setting) -> list[str]:
    """Return values that a setting may be given."""
    if path in SPECIAL:
        return SPECIAL[path]
    found = ["null"] if setting.nullable else []
    registry = registry_of(setting.section) if setting.section is not None else setting.registry
    limits: Any = setting.field.metadata
    kinds = setting.kinds
    if path in GROUPS:
        return GROUPS[path]
    if registry is not None:
        return found + registry.names()
    found += limits.get("words") or ()
    if typing.get_origin(kinds[0]) is list:
        [kind] = typing.get_args(kinds[0])
        entries = list(_single(kind, limits))
        return [
            *found,
            "[]",
            *(f"[{entry}]" for entry in entries),
            *(f"[{one},{two}]" for one, two in itertools.pairwise(entries)),
        ]
    if setting.is_free_form:
        return [*found, "{}", "{nobody: 1}"]
    return [*found, *itertools.chain.from_iterable(_single(kind, limits) for kind in kinds)]


def _single(kind: Any, limits: Any) -> Iterator[str]:
    low, high, above, below = (limits.get(each) for each in ("low", "high", "above", "below"))
    if kind is bool:
        yield from ("true", "false")
    elif choices_in(kind):
        yield from map(str, choices_in(kind))
    elif kind in (int, float):
        near: list[Any] = NUMBERS if kind is float else SIZES
        edge = 1 if kind is int else 1.0e-3
        limit = [each + sign * edge for each in (low, high) if each is not None for sign in (-1, 0, 1)]
        limit += [each + sign * edge for each in (above, below) if each is not None for sign in (-1, 0, 1)]
        inside = [each for each in near if (low is None or each >= low) and (high is None or each <= high)]
        inside += [each for each in limit if abs(each) <= 2048]
        yield from (str(kind(each)) for each in dict.fromkeys(inside))
    else:
        yield from ("nowhere", "''", "/dev/null")


def case(seed: int, number: int) -> Case:
    """Return the case of that number."""
    draw = random.Random(f"{seed}:{number}")
    base = draw.choice(list(BASES))
    changes = {}
    for _ in range(draw.choice([1, 1, 2, 2, 3])):
        path = draw.choice(list(GROUPS)) if draw.random() < 0.1 else draw.choice(list(paths(base)))
        choices = GROUPS[path] if path in GROUPS else values(path, paths(base)[path])
        if choices:
            changes[path] = draw.choice(choices)
    return Case(base, [f"{path}={value}" for path, value in changes.items()])


def validated(number: int, made: Case) -> Outcome:
    """Check a config as `embodyrl validate` does."""
    try:
        load_config(BASES[made.base].source, made.overrides, use=ConfigUse.check, also=[start_rules])
    except ConfigError as error:
        first = error.faults[0].message
        return Outcome(number, made, "refused", shape(first), rules=_only_rules(made), text=str(error))
    except Exception:
        text = traceback.format_exc()
        return Outcome(number, made, "traceback", shape(text.strip().splitlines()[-1]), text=text)
    return Outcome(number, made, "accepted")


def _only_rules(made: Case) -> bool:
    """Return whether a refused config is well-formed as such."""
    try:
        load_config(BASES[made.base].source, made.overrides, use=ConfigUse.show)
    except Exception:
        return False
    return True


def shape(text: str) -> str:
    """Return a message without its numbers and paths, so that like ones are counted together."""
    text = re.sub(r"/[\w./+-]+", "PATH", text)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)[:200]


# ------------------------------------------------------------------------------------------- in a process of its own


def program(arguments: list[str], folder: str, past_rules: bool) -> None:
    """Be `embodyrl run`, with these arguments."""
    import resource

    os.setsid()
    out = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if past_rules:
        for name in ("check_rules", "inherited_values"):
            setattr(importlib.import_module("embodyrl.config.load"), name, lambda *_: [])
    from embodyrl.cli.main import main

    # The report at the end takes longer than all the rest, and does not depend on the config.
    setattr(importlib.import_module("embodyrl.runner.ending"), "write_report", lambda *_: None)  # noqa: B010
    sys.argv = ["embodyrl", "run", *arguments]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        Path(folder, "code").write_text(str(code))


def preload() -> list[str]:
    """Return the modules that every run needs."""
    import embodyrl

    rooms = ("algorithms", "engine", "pipelines", "rollout", "runner", "tracking", "cli", "models", "envs", "data")
    folder = Path(embodyrl.__file__).parent
    modules = [f"embodyrl.{room}.{each.name}" for room in rooms for each in pkgutil.iter_modules([str(folder / room)])]
    modules += ["embodyrl.envs.gymnasium.tasks"]
    others = ["torch.utils.tensorboard", "tensordict", "av", "gymnasium", "embodyrl.models.libraries", "psutil"]
    return ["validate_promise", *others, *modules]


if __name__ == "validate_promise":  # in the process that runs are forked from: what it remembers, all of them know
    importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)
    importlib.metadata.packages_distributions()
    to_commented_yaml(load_config("experiment/gym_pendulum").config)


def execute(arguments: list[str], *, past_rules: bool = False) -> tuple[int | None, str]:
    """Run `embodyrl run` in a process; returns its exit code, None after the deadline, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=program, args=(arguments, folder, past_rules))
        process.start()
        process.join(DEADLINE_S)
        if (is_slow := process.is_alive()) and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        output, code = Path(folder, "output"), Path(folder, "code")
        text = output.read_text(errors="replace") if output.exists() else ""
        if is_slow:
            return None, text
        return int(code.read_text()) if code.exists() else -abs(process.exitcode or 99), text


def run(outcome: Outcome, *, past_rules: bool = False) -> Outcome:
    """Run a config for one iteration."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        own = [] if any(each.startswith("run.dir=") for each in outcome.case.changes) else [f"run.dir={folder}/run"]
        code, text = execute([BASES[outcome.case.base].source, *outcome.case.overrides, *own], past_rules=past_rules)
    kind = {0: "ran", None: "slow"}.get(code, "failed")
    said = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"error|embodyrl:|[\w.]*(Error|Exception|Interrupted)\b", line)]
    cause = "" if kind == "ran" else f"exit {code}: {shape((errors or said or ['nothing'])[-1])}"
    return Outcome(outcome.number, outcome.case, kind, cause, wall_s=time.perf_counter() - began, text=text)


# ------------------------------------------------------------------------------------------------- in the program


def record(folder: Path) -> None:
    """Record demonstrations."""
    import subprocess

    def embodyrl(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "embodyrl", *words], check=True, stdout=subprocess.DEVNULL)

    if not (folder / STATES).exists():
        small = ["env.num_envs=2", "env.workers=1"]
        embodyrl("collect", "experiment/metaworld_reach", *small, "--episodes", "3", "--out", STATES, "--keep", "all")
        images = BASES["cnn"]
        embodyrl("run", images.source, *images.overrides, "run.dir=seeing")
        embodyrl(
            *("collect", images.source, *images.overrides, "--policy", "seeing"),
            *("--episodes", "3", "--keep", "all", "--out", IMAGES),
        )


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Count results."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    failures = Counter(each.cause for each in outcomes if each.kind in ("failed", "traceback"))
    return {"configs": len(outcomes), **dict(sorted(kinds.items())), "findings": dict(failures.most_common())}


def tried(number: int, seed: int, *, past_rules: bool) -> tuple[Outcome, Outcome | None]:
    """Check the config of that number, and run it if it is accepted; the second outcome is that of a run past the
    rules that refuse it."""
    outcome, beyond = validated(number, case(seed, number)), None
    if outcome.kind == "accepted":
        outcome = run(outcome)
    elif outcome.kind == "refused" and outcome.rules and past_rules:
        beyond = run(outcome, past_rules=True)
        beyond.cause = f"refused for: {outcome.cause}"
    return outcome, beyond


def show(outcome: Outcome) -> None:
    """Print an outcome, and append what its program said to the file `log`."""
    said = f"{outcome.kind} after {outcome.wall_s:.1f} s {outcome.cause}"
    print(f"{outcome.number} {outcome.case.base} {outcome.case.changes} {said}", flush=True)
    with Path("log").open("a") as log:
        log.write(f"\n==== {outcome.number} {outcome.case} {outcome.kind}\n{outcome.text}\n")


def main() -> None:
    """Draw, check, run, count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--refused", type=int, default=0, help="of those that rules refuse, so many are run past them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first config")
    parser.add_argument("--only", type=int, nargs="+", help="show the configs of these numbers and what comes of them")
    parser.add_argument("--work", type=Path, default=Path("validate_promise"), help="folder for demonstrations, a log")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/validate_promise.json"))
    args = parser.parse_args()
    out = args.out.resolve()
    args.work.mkdir(exist_ok=True)
    os.chdir(args.work)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    record(Path())
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload())
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    past: list[Outcome] = []
    for number in args.only or range(args.start, args.start + args.count):
        outcome, beyond = tried(number, args.seed, past_rules=len(past) < args.refused)
        outcomes.append(outcome)
        past += [] if beyond is None else [beyond]
        for each in (outcome, beyond):
            if each is not None and (args.only or each is beyond or each.kind not in ("ran", "refused")):
                show(each)
    found = {"version": __version__, "python": platform.python_version(), "seed": args.seed, **summary(outcomes)}
    found |= {"refused, but run": Counter(f"{each.kind}, {each.cause}" for each in past)}
    found["wall_s"] = round(time.perf_counter() - began)
    if not args.only:
        out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    sys.exit(any(outcome.kind in ("failed", "traceback") for outcome in outcomes))


if __name__ == "__main__":
    main()
