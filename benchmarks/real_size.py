"""Benchmark the commands on a CPU with models of the published size: seconds and peak memory, beside what is planned.

    python benchmarks/real_size.py gr00t pi0 --work DIR --assets LIBERO/assets
    python benchmarks/real_size.py gr00t --scale tiny --work DIR --assets LIBERO/assets --json tiny.json

For each model, random weights in bfloat16 are written in the public layout (shards with an index, statistics, a
tokenizer), every tensor from its own name, so that any of them can be written again and compared. Then the program
itself does what a user does, in processes of its own, with the public experiment and a few changes (`CHANGES`): `plan`,
`run`, which a SIGTERM stops in its first iteration, `export`, `resume` and `eval`. The weights that the
public loader reads from the checkpoint and from the exported folder are compared with those written: bytes are equal
but for the layers that learned.

Every step is a row of the JSON; a step that has its row is not done again. --scale tiny does all of it with a model of
a few thousand weights. Needs about three times the weights' size on the disk, and LIBERO with its assets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodyrl.config import load_config
from embodyrl.config.schema import Config
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import build_policy
from embodyrl.models.gr00t.network import NAMING as GR00T_NAMES
from embodyrl.models.gr00t_n17.config import N17
from embodyrl.models.gr00t_n17.network import Names
from embodyrl.models.pi.checkpoint import Layout
from embodyrl.models.pi0_fast.checkpoint import FastLayout
from embodyrl.models.prismatic.network import NAMING as PRISMATIC_NAMES
from embodyrl.models.saved import ADAPTER_FOLDER, HEADS_FILE, INDEX_FILE, PUBLISHED, shard_files
from embodyrl.models.weights import Naming
from embodyrl.registry import SupportedModel
from embodyrl.runs import GRAPH_FILE

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "as_float32.py"
RESULTS, TABLE = ROOT / "benchmarks" / "results" / "real_size.json", ROOT / "docs" / "results" / "real_size.md"

WITHOUT_COPIES = ["engine.optimizer.master_weights=false"]
"""GR00T's action head learns in full: 1.1 billion weights, with float32 copies and moments 13 GB."""
ONE_CAMERA = ["env.cameras=[agentview]", "model.cameras=[agentview,absent,absent]"]
"""Of pi's three images."""
EXPLORING = [
    "algorithm.filter.name=accuracy",
    "algorithm.filter.accuracy_low=0",
    "algorithm.filter.accuracy_high=1",
    "algorithm.entropy_coef=0.01",
]
"""All episodes fail: their groups stay, and the entropy teaches, since the advantages are 0."""
EXPERIMENTS = {
    "gr00t": ["libero_spatial_ppo_gr00t", "model.freeze_language=false", *WITHOUT_COPIES],
    "gr00t_n17": ["libero_spatial_ppo_gr00t_n17", "model.freeze_language=false", *WITHOUT_COPIES],
    "pi0": ["libero_spatial_ppo_pi0", "model.frozen=nothing", *ONE_CAMERA],
    "pi05": ["libero_10_ppo_pi05", "model.frozen=nothing", *ONE_CAMERA],
    "pi0_fast": [
        "libero_spatial_grpo_pi0_fast",
        "rollout.group_size=2",
        "model.answer_length=8",
        *ONE_CAMERA,
        *EXPLORING,
    ],
    "openvla_oft": ["libero_spatial_grpo_openvla_oft", "rollout.group_size=2", *EXPLORING],
    "openvla": ["maniskill_ppo_openvla", "env=libero/spatial", "env.cameras=[agentview]"],
}
"""The public experiment of each model, and what must change so that adapters learn and a CPU suffices."""
TINY = {
    "gr00t": ["model.embodiment_tag=null", "model.prompt_length=null"],
    "gr00t_n17": ["model.embodiment_tag=null"],
}
"""Of a model in few weights, which has statistics and a tokenizer of its own."""
CHUNK_SIZES = {"gr00t": 5, "gr00t_n17": 8, "pi0": 5, "pi05": 10, "pi0_fast": 10, "openvla_oft": 8, "openvla": 1}
"""Actions of a chunk in these experiments."""
CHANGES = [
    "env.num_envs=2",
    "rollout.episodes_per_slot=1",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "engine.device=cpu",
    "engine.threads=2",
    "engine.lora.rank=32",
    "engine.micro_batch_size=1",
    "run.iterations=1",
    "run.eval_every=0",
    "run.save_every=0",
    "eval.episodes=1",
    "tracking.sinks=[jsonl]",
]
SHARD_BYTES = {"full": 2 * 10**9, "tiny": 10**5}
STARTED_S = {"full": 15.0, "tiny": 1.0}
"""After a run has written its graph, it is in its first iteration [s]; one at full size takes minutes."""
PI: dict[str, type[Layout]] = {"pi0": Layout, "pi05": Layout, "pi0_fast": FastLayout}
NAMES = {"gr00t": GR00T_NAMES, "gr00t_n17": Names(N17.vlm.from_config(N17.published)).naming}
"""Names of weights that do not depend on the files."""
BLOCK = 1_000_003
"""Random numbers of a tensor before they repeat."""
SAMPLED = 40
"""Tensors whose numbers are compared, spread over all."""
GB = 1e9

# -------------------------------------------------------------------------------------------------------------- weights


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random weights of a tensor, from its name alone."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    block = torch.randn(min(count, BLOCK), generator=generator).mul_(0.02).bfloat16()
    return block.repeat(-(-count // BLOCK))[:count].reshape(shape)


def naming(policy: Any) -> Naming:
    """Names of a policy's weights in the public layout."""
    return names_of(policy.name, policy.files.layout if policy.name in PI else None)


def names_of(model: str, layout: Layout | None) -> Naming:
    """Names of a model's weights in the public layout; those of pi0 depend on the files."""
    if layout is not None:
        return Naming(public=layout.public, own=layout.own)
    return NAMES.get(model, PRISMATIC_NAMES)


def empty_policy(config: Config, scale: str) -> Any:
    """The policy whose files and shapes are written: without numbers at the published size."""
    policy_type: Callable[..., Any] = SupportedModel.entry(config.model.name).load()
    if scale == "full":
        policy = policy_type(dataclasses.replace(config.model, checkpoint=PUBLISHED), None, config.rollout.chunk_size)
    else:
        arm = ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * 7, high=(1.0,) * 7)
        simulator = SimulatorSpec(
            tasks={task: task for task in config.env.tasks},
            actions=(arm,),
            proprio_dim=8,
            max_episode_steps=config.env.time_limit,
            control_frequency=20.0,
            cameras=tuple(config.env.cameras),
            image_size=(64, 64),
        )
        policy = policy_type(dataclasses.replace(config.model, checkpoint=None), simulator, config.rollout.chunk_size)
    policy.name = config.model.name
    return policy


def write_checkpoint(config: Config, scale: str, folder: Path) -> dict[str, Any]:
    """Write a checkpoint with random weights, one shard in memory at a time."""
    policy = empty_policy(config, scale)
    public = naming(policy).public
    shapes = {public(name): tuple(each.shape) for name, each in policy.network.named_parameters()}
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES[scale]
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES[scale]
        shards[-1].append(name)
        room -= size
    folder.mkdir(parents=True)
    policy.files.write(folder)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        save_file({name: numbers(name, shapes[name]) for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return {"gb": total / GB, "tensors": len(shapes), "shards": len(shards)}


def sampled(names: list[str]) -> list[str]:
    """Some names, evenly spread."""
    return sorted(names)[:: max(1, len(names) // SAMPLED)]


def compare_loaded(config: Config) -> dict[str, Any]:
    """Compare what the public loader reads with what was written."""
    policy: Any = build_policy(config.model, None, chunk_size=config.rollout.chunk_size, seed=0)
    public, own = naming(policy).public, dict(policy.network.named_parameters())
    names = sampled(list(own))
    equal = [name for name in names if same(own[name].detach(), numbers(public(name), tuple(own[name].shape)))]
    return {"compared": len(names), "equal": len(equal)}


def compare_exported(model: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Compare an exported folder with what was written, tensor by tensor: those without an adapter have the same bytes.

    Args:
        model: name of the model.
        checkpoint: the exported checkpoint's `policy` folder, which names the layers and heads that learned.
        folder: the exported policy.
    """
    adapted = json.loads((checkpoint / ADAPTER_FOLDER / "adapter_config.json").read_text())["target_modules"]
    learned = {f"{name}.weight" for name in adapted}
    with safe_open(checkpoint / HEADS_FILE, "pt") as heads:
        learned |= {name.removeprefix("network.") for name in heads.keys()}  # noqa: SIM118 - not a mapping
    own = names_of(model, PI[model].read(folder) if model in PI else None).own
    counts = {"compared": 0, "equal": 0, "learned": 0, "wrong": 0}
    for path in shard_files(folder):
        with safe_open(path, "pt") as shard:
            for name in sampled(list(shard.keys())):
                found = shard.get_tensor(name)
                kind = "equal" if same(found, numbers(name, tuple(found.shape))) else "wrong"
                if kind == "wrong" and own(name) in learned:
                    kind = "learned"
                counts["compared"] += 1
                counts[kind] += 1
    return counts


def same(found: Tensor, written: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return found.dtype == written.dtype and torch.equal(found.view(torch.int16), written.view(torch.int16))


# ------------------------------------------------------------------------------------------------------------- commands


@dataclass
class Peak:
    """Most memory of a command [GB]."""

    main: float = 0.0
    """The process itself, pages of mapped files included."""
    own: float = 0.0
    """The process itself without those pages, which the system takes back when memory runs short."""
    others: float = 0.0
    """Its children: simulators and what they are forked from, shared pages counted once."""


def watch(process: subprocess.Popen[str], peak: Peak) -> None:
    """Note the most memory of a process and its children until it ends."""
    main = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            found = main.memory_info()
            peak.main = max(peak.main, found.rss / GB)
            peak.own = max(peak.own, (found.rss - found.shared) / GB)
            others = [each.memory_full_info().pss for each in main.children(recursive=True)]
            peak.others = max(peak.others, sum(others) / GB)
        time.sleep(0.1)


def command(words: list[str], expected: int = 0, stop: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Run the program; returns seconds, peak memory and output.

    Args:
        words: its arguments.
        expected: its exit code.
        stop: a SIGTERM is sent as soon as this is true.

    Raises:
        SystemExit: it ended with another exit code.
    """
    begin, peak = time.monotonic(), Peak()
    process = subprocess.Popen([sys.executable, PROGRAM, *words], stdout=subprocess.PIPE, text=True)
    watcher = threading.Thread(target=watch, args=(process, peak))
    watcher.start()
    row: dict[str, Any] = {}
    if stop is not None:
        while process.poll() is None and not stop():
            time.sleep(0.1)
        row["signal_s"] = round(time.monotonic() - begin, 1)
        process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    watcher.join()
    if process.returncode != expected:
        raise SystemExit(f"embodyrl {' '.join(words)} ended with {process.returncode}, expected {expected}")
    row |= {"seconds": round(time.monotonic() - begin, 1)}
    sizes = {"main_gb": peak.main, "own_gb": peak.own, "others_gb": peak.others}
    return row | {name: round(size, 3) for name, size in sizes.items()} | {"output": output}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics that a run has logged."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def phases(run: Path) -> dict[str, float]:
    """Seconds of the phases of a run's last iteration."""
    iterations = [row for row in rows_of(run) if "time/iteration" in row]
    last: dict[str, Any] = iterations[-1] if iterations else {}
    return {name: round(value, 1) for name, value in last.items() if name.startswith("time/") and value >= 0.05}


@dataclass(frozen=True)
class Case:
    """One model at one size."""

    model: str
    scale: str
    work: Path
    changes: list[str]
    """Further overrides of the experiment."""
    chunks: int = 3
    """Decisions of an episode."""
    updates: bool = True
    """Whether there is time for an update; else the run is stopped in the evaluation before it."""

    @property
    def checkpoint(self) -> Path:
        """The weights that are written."""
        return self.work / "checkpoint"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.work / "run"

    @property
    def exported(self) -> Path:
        """The exported policy."""
        return self.work / "exported"

    @property
    def words(self) -> list[str]:
        """The experiment and its overrides."""
        base, *more = EXPERIMENTS[self.model]
        checkpoint = self.checkpoint if self.checkpoint.is_dir() else "<weights>"
        tiny = TINY.get(self.model, []) if self.scale == "tiny" else []
        length = [f"rollout.num_chunks={self.chunks}", f"env.max_episode_steps={self.chunks * CHUNK_SIZES[self.model]}"]
        before = [] if self.updates else ["run.eval_every=1"]
        changes = [*CHANGES, *length, *before, *self.changes, f"model.checkpoint={checkpoint}"]
        return [f"experiment/{base}", *more, *tiny, *changes]

    def config(self) -> Config:
        """The config that is run; the weights are left open until they are written."""
        name, *overrides = self.words
        return load_config(name, overrides).config

    def steps(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """What is done, in order, by the name of its row."""
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "write": lambda: write_checkpoint(self.config(), self.scale, self.checkpoint),
            "load": lambda: compare_loaded(self.config()),
            "plan": self.plan,
            "run": self.stopped,
            "export": lambda: self.say(["export", str(self.run), "--out", str(self.exported)]),
            "compare": self.compare,
        }
        return (
            steps
            if not self.updates
            else steps
            | {
                "resume": lambda: self.say(["resume", str(self.run)]) | {"phases": phases(self.run)},
                "eval": lambda: self.say(["eval", str(self.run)]),
            }
        )

    def say(self, words: list[str], **options: Any) -> dict[str, Any]:
        """Run the program; a row without its output."""
        row = command(words, **options)
        del row["output"]
        return row

    def plan(self) -> dict[str, Any]:
        """Plan the run, with a simulator that is started to measure it."""
        row = command(["plan", *self.words, "--start", "--json"])
        plan = json.loads(row.pop("output"))
        needs = {
            phase: {name: round(mib * 2**20 / GB, 3) for name, mib in parts.items()}
            for phase, parts in plan["needs"]["host"].items()
        }
        return row | {"parameters": plan["model"]["parameters"], "learn": plan["model"]["trainable"], "needs": needs}

    def stopped(self) -> dict[str, Any]:
        """Run until it is stopped in its first iteration or the evaluation before it, which it finishes and saves."""
        words = ["run", *self.words, f"run.dir={self.run}"]
        row = self.say(words, expected=128 + signal.SIGTERM, stop=self.begun)
        if not (self.run / "checkpoints" / "last").is_dir():
            raise SystemExit(f"{self.run} was stopped before it started: raise STARTED_S")
        return row | {"phases": phases(self.run)}

    def begun(self) -> bool:
        """Whether the run has started: it has written what precedes its first iteration, some time ago."""
        graph = self.run / GRAPH_FILE
        return graph.is_file() and time.time() > graph.stat().st_mtime + STARTED_S[self.scale]

    def compare(self) -> dict[str, Any]:
        """Compare the exported weights with those that were written."""
        last = self.run / "checkpoints" / "last"
        row = compare_exported(self.model, last / "policy", self.exported)
        return row | {
            "checkpoint_gb": round(sum(each.stat().st_size for each in last.rglob("*") if each.is_file()) / GB, 3)
        }


# -------------------------------------------------------------------------------------------------------------- results


def measure(case: Case, results: dict[str, Any], save: Callable[[], None]) -> None:
    """Do the steps that have no row yet."""
    rows = results.setdefault(
        case.model, {"scale": case.scale, "chunks": case.chunks, "updates": case.updates, "rows": {}}
    )["rows"]
    for name, step in case.steps().items():
        if name in rows:
            continue
        begin = time.monotonic()
        row = step()
        rows[name] = {"seconds": round(time.monotonic() - begin, 1), **row}
        print(case.model, name, rows[name], flush=True)
        save()


STEPS = ("write", "load", "plan", "run", "export", "compare", "resume", "eval")
PAGE = """\
# Models of the published size on a CPU

`python benchmarks/real_size.py` writes random weights of the published size in the public layout and does what a user
does with them (its docstring says how): public experiments with two LIBERO envs, adapters of rank 32, one sample at
once. Measured on two cores with 24 GB and no GPU, which others used at the same time: seconds are an upper bound. The
processor has no instructions for bfloat16; matrix products are computed in float32 (`benchmarks/as_float32.py`).

Memory is the peak in GB. *Own* leaves out pages of mapped files, which the system takes back when memory runs short:
weights are mapped, and a page is in memory once it was read. *Planned* is what `embodyrl plan --start` says for the
command's phase: training for `run` (of its first update, where the optimiser's moments come into being when
activations have gone), the rollout for `resume` (which evaluates), the rollout without optimiser for
`eval` and for a `run` that was stopped in the evaluation before its first update.

Where less is used than planned, the likely causes are: pages of weights that no input needs (most of a vocabulary) are
never read, and the system takes read pages back while other programs fill the memory. Simulators were planned by one
that has played the first task in each of its envs. Of two that evaluate one episode only one is reset; those of runs
play as many tasks as there are resets (OpenVLA resets after each of its one-action episodes). Since then `plan --start`
measures a process that has played all tasks of which it keeps an environment. `export` merges the adapters, so that
adapted layers are the process's own. pi0-FAST's answers were cut to 8 tokens of at most 71 (`model.answer_length`),
each of which reads all weights.
"""


def table(results: dict[str, Any]) -> Iterator[str]:
    """Lines of the page about the results."""
    yield PAGE
    for model, found in results.items():
        yield f"## {model}"
        yield ""
        yield from model_lines(found["rows"], updates=found["updates"])
        yield ""


def model_lines(rows: dict[str, Any], *, updates: bool) -> Iterator[str]:
    """Lines about one model."""
    written, plan = rows["write"], rows.get("plan")
    if plan is not None:
        yield (
            f"{plan['parameters'] / 1e9:.2f} billion parameters, {written['gb']:.2f} GB in {written['shards']} files; "
            f"{plan['learn'] / 1e6:.1f} million learn."
        )
        yield ""
    yield "| step | seconds | main process | own | planned | difference | simulators | planned | difference |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in [name for name in STEPS if name in rows]:
        row = rows[name]
        main, simulators = planned_gb(name, plan, updates=updates)
        cells = [f"{row[key]:.2f}" if key in row else "" for key in ("main_gb", "own_gb")]
        cells += against(row.get("main_gb"), main)
        cells += [f"{row['others_gb']:.2f}" if row.get("others_gb") else "", *against(row.get("others_gb"), simulators)]
        yield f"| {name} | {row['seconds']:.0f} | {' | '.join(cells)} |"
    yield ""
    if "load" in rows:
        yield f"Loaded: {rows['load']['equal']} of {rows['load']['compared']} compared tensors have the bytes written."
    if "compare" in rows:
        row = rows["compare"]
        yield (
            f"Exported and read again: of {row['compared']} compared tensors {row['equal']} have the bytes written, "
            f"{row['learned']} learned, {row['wrong']} are wrong. A checkpoint takes {row['checkpoint_gb']:.2f} GB."
        )
    if "run" not in rows:
        yield "The other commands were not measured."
    elif not updates:
        yield "The run was stopped before its first update, for which the machine was too slow."


def against(found: float | None, planned: float | None) -> list[str]:
    """Cells: what was planned, and by how much what was found differs."""
    if not found or not planned:
        return ["", ""]
    return [f"{planned:.2f}", f"{100 * (found / planned - 1):+.0f} %"]


def planned_gb(name: str, plan: dict[str, Any] | None, *, updates: bool) -> tuple[float | None, float | None]:
    """What is planned for a command's main process and for its simulators [GB]; None: nothing is."""
    if plan is None or name not in ("run", "resume", "eval"):
        return None, None
    rollout, train = plan["needs"]["rollout"], plan["needs"]["train"]
    simulators = rollout["simulators"]
    if name == "run" and updates:
        # In the first update the optimiser's state comes when activations have gone.
        return train["total"] - simulators - min(train.get("activations", 0.0), train["optimiser"]), simulators
    return rollout["total"] - simulators - (0.0 if name == "resume" else rollout["optimiser"]), simulators


def main() -> None:
    """Measure what has not been measured, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *EXPERIMENTS], help="none: only write the page again")
    parser.add_argument("--scale", choices=SHARD_BYTES, default="full")
    parser.add_argument("--chunks", type=int, default=3, help="decisions of an episode")
    parser.add_argument("--no-update", action="store_true", help="stop before the first update: for slow machines")
    parser.add_argument("--work", type=Path, help="folder for weights and runs")
    parser.add_argument("--assets", type=Path, help="folder of LIBERO's assets; none: where LIBERO keeps them")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.models and options.work is None:
        parser.error("give a folder for weights and runs with --work")
    results = json.loads(options.json.read_text()) if options.json.is_file() else {}

    def save() -> None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")

    changes = [] if options.assets is None else [f"env.assets={options.assets}"]
    for model in options.models:
        case = Case(model, options.scale, options.work / model, changes, options.chunks, not options.no_update)
        measure(case, results, save)
    if options.scale == "full":
        TABLE.write_text("\n".join(table(results)).rstrip() + "\n")


if __name__ == "__main__":
    main()
