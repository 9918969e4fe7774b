"""Seconds of one iteration on 1 to 1,000 machines of 8 GPUs, computed from measured costs.

    python benchmarks/scale_model.py            # prints the tables; seconds
    python benchmarks/scale_model.py --write    # also puts them into docs/scaling.md

Modes: collocated (ranks roll out themselves), separate (rollout workers, in turns with learning), async (the same, one
rollout ahead); hybrid (collocated, with all simulators on CPU machines), async hybrid (both). Work grows with the
machines: each GPU brings `slots` envs. Assumptions are the fields of `Machines` and `Case`, each with its source:
*measured* (a committed result of this project), *published*, *counted* (by `embodyrl plan` or torch, no clock) or
*assumed*. Nothing here ran on a GPU or on a real network; `scale_check.py` compares the model with real runs whose
parts sleep.

What a run does:
- rollout: in lockstep, the policy chooses a chunk for all envs of a process, then its simulator processes execute it,
  each for its envs in turn. An env that has played its episode (whole episodes) drops out.
- weights: each rollout worker on another machine pulls what learning has changed from the first rank's machine, before
  its rollout. That is a star: one network card sends it once for each worker.
- batch: every rank gets the small columns of everybody: gathered, mapped from workers of the same machine, or read
  over lines from each worker of another one. Over the same lines it reads its share of the images and traces. In each
  epoch a rank gets the rows that it is dealt from other ranks.
- learning: rows, and per optimiser step an all-reduce of gradients.
- slow machines: some are slower for good, and everybody waits for them. Times are expected ones: `n` machines have a
  slow one among them with probability 1 - (1 - slow_share)^n.

Left out: evaluation, checkpoints, start-up, rewards and advantages (every rank computes them for the whole batch), the
first rank's requests to workers, `rollout.schedule: pipeline`, cores that the simulators take from the policy.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- tables of benchmarks/scale_model.py -->", "<!-- end of the tables -->"
COUNTS = (1, 2, 4, 16, 64, 256, 1000)
"""Machines with GPUs."""
MODES = ("collocated", "separate", "async", "hybrid", "async hybrid")
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What machines and the lines between them can do."""

    gpus: int = 8
    """Of a machine."""
    card_gb_s: float = 12.5
    """A machine's network card, all traffic together [GB/s]. Assumed: 100 Gbit/s."""
    line_gb_s: float = 2.6
    """One connection between processes. Measured: 256 MiB to two workers in 0.104 s, results/lent_weights.json."""
    nvlink_gb_s: float = 450.0
    """Between GPUs of a machine, each direction. Published: H100 and H200."""
    hop_s: float = 50e-6
    """One step of gloo's ring, of which a gathering has as many as ranks. Assumed."""
    ask_s: float = 100e-6
    """A request to another machine and the beginning of its answer. Assumed."""
    columns: int = 16
    """Small columns, each gathered or asked for by itself. Counted: OpenVLA-OFT's batch."""
    memory_gb_s: float = 10.5
    """Weights into shared memory. Measured: results/weight_sync.json."""
    touch_s_per_gb: float = 0.86
    """What collecting in fresh shared memory takes more. Measured: (write_shared_s - write_s) / bytes of
    results/hand_over.json."""
    map_s_per_gb: float = 0.06
    """Mapping and joining a batch of the same machine. Measured: way_1_s - read_s of results/hand_over.json."""
    exchange_gb_s: float = 0.38
    """What a rank receives from others while it learns, reading included. Measured: 2 ranks of
    results/spread_batch.json, 63 MiB in 0.17 s."""
    observe_s: float = 2.3e-3
    """A step of simulators on another machine beyond its bytes: none of our results yet. Assumed: all of what 32 images
    of 224x224 took over a raw loopback connection."""
    host_cores: int = 128
    """Of the CPU machine that hybrid adds to each machine with GPUs. Assumed."""
    slow_share: float = 0.02
    """Share of machines that are slower for good. Assumed."""
    slow_by: float = 0.15
    """How much longer these take, as a share. Assumed."""

    def slowest(self, count: int) -> float:
        """Return how much longer the slowest of some machines takes, as an expected factor."""
        return 1.0 + self.slow_by * (1.0 - (1.0 - self.slow_share) ** count)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, per GPU."""

    name: str
    about: str
    cores: int
    """For simulators, per GPU."""
    step_s: float
    """A control step of one env on one core. Assumed; measured for some simulators in docs/performance.md."""
    step_sigma: float = 0.3
    """Standard deviation of its logarithm. Assumed."""
    slots: int = 64
    """Envs per GPU."""
    chunks: int = 64
    actions: int = 8
    """In a chunk."""
    length: float | None = None
    """Median length of an episode in chunks, lognormal and cut off at `chunks`; None: envs never stop."""
    length_sigma: float = 0.6
    """Standard deviation of its logarithm. Assumed."""
    decide_least_s: float = 1913 * 5e-6
    """A decision, however few envs. Counted: kernels of OpenVLA-OFT 7.5 B; assumed: 5 us to launch one."""
    decide_s: float = 4.91 / (989 * 0.4)
    """A decision, per env. Counted: TFLOP; published: an H200's 989 TFLOP/s; assumed: 40 % of it."""
    learn_s: float = 9.95 / (989 * 0.4)
    """Learning from a chunk, LoRA. Counted and assumed as above."""
    micro_batch: int = 8
    minibatches: int = 4
    """Optimiser steps per iteration, in one epoch."""
    row_gb: float = 151.6e3 / GB
    """Images and traces of a chunk. Counted: `embodyrl plan`, one camera of 224x224."""
    small_gb: float = 1024 / GB
    """All other columns of a chunk. Counted: `embodyrl plan`."""
    weights_gb: float = 0.44
    """What learning changes and a worker pulls. Counted: LoRA of rank 32 and heads, float32."""
    gradients_gb: float = 0.44
    """What is all-reduced per optimiser step; with `sharded` by a machine, else by a rank."""
    sharded_gb: float = 0.0
    """Weights that the ranks of a machine gather from each other twice per micro-batch (hsdp)."""


CASES = (
    Case(name="A", about="simulators are cheap: 16 cores per GPU, 30 ms per step", cores=16, step_s=0.030),
    Case(name="B", about="simulators bind: 6 cores per GPU, 50 ms per step", cores=6, step_s=0.050),
    Case(
        name="C",
        about="whole episodes with a long tail: as A, half of the episodes end within 20 of 64 chunks",
        cores=16,
        step_s=0.030,
        length=20.0,
    ),
    Case(
        name="D",
        about="as A, and all weights learn (hsdp)",
        cores=16,
        step_s=0.030,
        learn_s=3 * 4.91 / (989 * 0.4),  # counted: forward, and backward with twice the products
        weights_gb=15.1,  # bfloat16
        gradients_gb=30.2,  # summed in float32
        sharded_gb=15.1,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who does what."""

    ranks: int
    workers: int = 0
    """0: the ranks roll out."""
    rank_machines: int = 1
    worker_machines: int = 0
    """With rollout workers."""
    cores: int
    """For the simulators of one process that rolls out."""
    hosts: int = 0
    """CPU machines for simulators."""

    @property
    def players(self) -> int:
        """Processes that roll out."""
        return self.workers or self.ranks

    @property
    def one_machine(self) -> bool:
        """Everything is on one machine."""
        return self.rank_machines == 1 and self.worker_machines <= 1 and self.ranks + self.workers <= Machines.gpus


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Costs of an iteration [s]. Arrays are by iteration and process that rolls out."""

    simulate: NDArray[np.float64]
    decide: NDArray[np.float64]
    weights: float
    batch: float
    learn: float
    gradients: float
    """And shards of weights, between ranks."""
    slow_players: float
    """Factor of the slowest process that rolls out."""
    slow_ranks: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """A cell of a table."""

    layout: Layout
    seconds: float
    """Of an iteration."""
    busy: float
    """Share of the time in which a GPU computes."""
    parts: dict[str, float]
    """Seconds on the critical path, by what they are spent on."""

    @property
    def bottleneck(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


ITERATIONS, WARM_UP, DRAWS = 12, 2, 200
"""Iterations that are followed (more with few processes), those of them that are not counted, and rollouts that are
drawn for all of them."""


def predict(case: Case, layout: Layout, *, ahead: int = 0, machines: Machines | None = None) -> Result:
    """Return what an iteration takes; `ahead` is how many rollouts are ahead of learning."""
    costs = costs_of(case, layout, machines or Machines())
    seconds = follow(costs, ahead)
    computing = float(costs.decide.mean()) * layout.players + costs.learn * layout.ranks
    return Result(
        layout=layout,
        seconds=seconds,
        busy=computing / (seconds * (layout.ranks + layout.workers)),
        parts=critical_parts(costs, ahead),
    )


def follow(costs: Iteration, ahead: int) -> float:
    """Follow some iterations; returns the mean seconds of one.

    Rollout `n` is asked for when iteration `n - ahead` begins. A worker begins it when it has ended its last one.
    """
    rollouts = (costs.simulate + costs.decide) * costs.slow_players + costs.weights
    learning = costs.batch + costs.learn * costs.slow_ranks + costs.gradients
    free, begins = np.zeros(rollouts.shape[1]), [0.0]
    for number, rollout in enumerate(rollouts):
        free = np.maximum(free, begins[max(0, number - ahead)]) + rollout
        begins.append(max(float(free.max()), begins[-1]) + learning)
    return (begins[-1] - begins[WARM_UP]) / (len(rollouts) - WARM_UP)


def critical_parts(costs: Iteration, ahead: int) -> dict[str, float]:
    """Return the seconds of an iteration by what they are spent on; if rollout and learning overlap, of the longer."""
    rollout = costs.simulate + costs.decide
    longest = rollout.max(axis=1).mean()
    playing = {
        "simulators": float(costs.simulate.mean()),
        "policy compute": float(costs.decide.mean()),
        "unequal episodes": float(longest - rollout.mean()),
        "slow machines": float(longest) * (costs.slow_players - 1.0),
        "weights": costs.weights,
    }
    learning = {
        "batch movement": costs.batch,
        "learning": costs.learn,
        "gradients": costs.gradients,
        "slow machines": costs.learn * (costs.slow_ranks - 1.0),
    }
    if ahead:
        return max(playing, learning, key=lambda parts: sum(parts.values()))
    return playing | learning | {"slow machines": playing["slow machines"] + learning["slow machines"]}


def costs_of(case: Case, layout: Layout, machines: Machines) -> Iteration:
    """Return the costs of iterations."""
    total = case.slots * (layout.ranks + layout.workers)
    slots = ceil(total / layout.players)
    observe = observe_s(case, slots, layout, machines)
    simulate, decide, chosen = rollouts(case, slots, layout.cores, observe)
    # Which of the drawn rollouts each process has in each iteration.
    iterations = max(ITERATIONS, 2 * DRAWS // layout.players)
    which = np.random.default_rng(0).integers(len(simulate), size=(iterations, layout.players))
    rows = chosen * total / slots
    if layout.workers and layout.one_machine:
        simulate = simulate + machines.touch_s_per_gb * case.row_gb * rows / layout.players
    return Iteration(
        simulate=simulate[which],
        decide=decide[which],
        weights=weights_s(case, layout, machines),
        batch=batch_s(case, layout, rows, machines),
        learn=rows / layout.ranks * case.learn_s,
        gradients=gradients_s(case, layout, rows, machines),
        slow_players=machines.slowest(layout.worker_machines or layout.rank_machines),
        slow_ranks=machines.slowest(layout.rank_machines),
    )


@functools.cache
def rollouts(
    case: Case, slots: int, cores: int, observe: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Draw rollouts of a process with `slots` envs.

    Returns:
        Seconds of simulation and of decisions `[DRAWS]`, and the mean number of chunks in a rollout.
    """
    dice = np.random.default_rng(1)
    processes = min(slots, cores)
    each = ceil(slots / processes)
    # In lockstep a chunk takes as long as the slowest process.
    steps = dice.lognormal(-(case.step_sigma**2) / 2, case.step_sigma, (200, processes, each * case.actions))
    barrier = float(steps.mean(axis=2).max(axis=1).mean())
    chunk_s = case.actions * case.step_s * barrier
    if case.length is None:
        simulate = np.full(DRAWS, case.chunks * (each * chunk_s + observe))
        return simulate, np.full(DRAWS, case.chunks * decide_s(case, np.array(slots))), float(slots * case.chunks)
    lengths = np.ceil(case.length * dice.lognormal(0.0, case.length_sigma, (DRAWS, slots))).clip(1, case.chunks)
    simulate, decide = np.zeros(DRAWS), np.zeros(DRAWS)
    padded = np.zeros((DRAWS, processes * each))
    padded[:, :slots] = lengths
    for chunk in range(case.chunks):
        alive = (padded > chunk).reshape(DRAWS, processes, each).sum(axis=2)
        count = alive.sum(axis=1)
        simulate += alive.max(axis=1) * chunk_s + observe * (count > 0)
        decide += np.where(count > 0, decide_s(case, count), 0.0)
    return simulate, decide, float(lengths.sum(axis=1).mean())


def decide_s(case: Case, slots: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the seconds of a decision for so many envs."""
    seconds: NDArray[np.float64] = np.maximum(case.decide_least_s, slots * case.decide_s)
    return seconds


def observe_s(case: Case, slots: int, layout: Layout, machines: Machines) -> float:
    """Return the seconds that observations of a chunk take from simulators on other machines."""
    if not layout.hosts:
        return 0.0
    ends = min(layout.hosts, layout.worker_machines or layout.rank_machines)
    rate = min(machines.line_gb_s, machines.card_gb_s * ends / layout.players)
    return machines.observe_s + slots * case.row_gb / rate


def weights_s(case: Case, layout: Layout, machines: Machines) -> float:
    """Return the seconds until every worker has its weights: one card sends all of them."""
    if not layout.workers:
        return 0.0
    shared = 2 * case.weights_gb / machines.memory_gb_s  # in, and out of it
    remote = 0 if layout.one_machine else layout.workers - max(0, machines.gpus - layout.ranks)
    return max(shared, remote and case.weights_gb / machines.line_gb_s, remote * case.weights_gb / machines.card_gb_s)


def batch_s(case: Case, layout: Layout, rows: float, machines: Machines) -> float:
    """Return the seconds in which a batch of so many chunks gets to where it is learned from."""
    on_a_machine = min(layout.ranks, machines.gpus)
    others = rows / layout.ranks * case.row_gb * (layout.ranks - 1) / layout.ranks
    exchanged = others / min(machines.exchange_gb_s, machines.card_gb_s / on_a_machine)
    if layout.workers and layout.one_machine:
        return rows * case.row_gb * machines.map_s_per_gb + exchanged
    small = rows * case.small_gb / min(machines.line_gb_s, machines.card_gb_s / on_a_machine)
    if not layout.workers:
        ring = machines.columns * machines.hop_s * (layout.ranks - 1)
        return (small + ring) * (layout.ranks > 1) + exchanged
    sent = rows * case.small_gb * layout.ranks / layout.worker_machines / machines.card_gb_s
    asked = layout.workers * machines.columns * machines.ask_s  # one after the other
    ends = [(layout.rank_machines, layout.ranks), (layout.worker_machines, layout.workers)]
    rate = min(min(card * machines.card_gb_s, count * machines.line_gb_s) for card, count in ends)
    return max(small, sent) + asked + rows * case.row_gb / rate + exchanged


def gradients_s(case: Case, layout: Layout, rows: float, machines: Machines) -> float:
    """Return the seconds in which ranks exchange gradients and shards of weights."""
    gathered = 2 * case.sharded_gb / machines.nvlink_gb_s * ceil(rows / layout.ranks / case.micro_batch)
    if layout.rank_machines == 1:
        return gathered + case.minibatches * 2 * case.gradients_gb / machines.nvlink_gb_s * (layout.ranks > 1)
    # A ring goes through each machine once, and sends everything twice.
    share = (layout.rank_machines - 1) / layout.rank_machines
    return gathered + case.minibatches * 2 * case.gradients_gb * share / machines.card_gb_s


def layouts(case: Case, mode: str, count: int, machines: Machines) -> list[Layout]:
    """Return the layouts of a mode on so many machines with GPUs: with rollout workers, splits of the GPUs."""
    gpus, hosts = count * machines.gpus, count if "hybrid" in mode else 0
    if mode in ("collocated", "hybrid"):
        cores = machines.host_cores // machines.gpus if hosts else case.cores
        return [Layout(ranks=gpus, rank_machines=count, cores=cores, hosts=hosts)]
    unit = 1 if count <= 4 else machines.gpus  # large clusters give whole machines
    splits = {max(1, round(gpus / unit * part / 32)) * unit for part in range(2, 31)}
    return [
        Layout(
            ranks=gpus - workers,
            workers=workers,
            rank_machines=ceil((gpus - workers) / machines.gpus),
            worker_machines=ceil(workers / machines.gpus),
            # Those of a machine with as many workers as possible; the cores of machines of ranks are idle.
            cores=machines.host_cores * hosts // workers or case.cores * machines.gpus // min(workers, machines.gpus),
            hosts=hosts,
        )
        for workers in sorted(splits)
        if workers < gpus
    ]


@functools.cache
def best(case: Case, mode: str, count: int, machines: Machines | None = None) -> Result:
    """Return the prediction for the best split of the GPUs."""
    machines = machines or Machines()
    ahead = 1 if "async" in mode else 0
    every = [predict(case, each, ahead=ahead, machines=machines) for each in layouts(case, mode, count, machines)]
    return min(every, key=lambda result: result.seconds)


def table(case: Case, counts: Sequence[int] = COUNTS) -> str:
    """Return the table of a case in Markdown."""
    lines = [f"| machines | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
    alone = {mode: best(case, mode, 1) for mode in MODES}
    for count in counts:
        cells = [cell(best(case, mode, count), alone[mode]) for mode in MODES]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(result: Result, alone: Result) -> str:
    """Return seconds, GPU utilisation and bottleneck, and what has grown most since one machine."""
    split = f", {result.layout.workers} of {result.layout.ranks + result.layout.workers}" * bool(result.layout.workers)
    text = f"{result.seconds:.0f} s ({result.busy:.0%}{split}) {result.bottleneck}"
    if result.parts.keys() != alone.parts.keys():  # of async the other side is the longer one now
        return text.replace("%", " %")
    grown = {part: spent - alone.parts[part] for part, spent in result.parts.items()}
    most = max(grown, key=lambda part: grown[part])
    if result.seconds > 1.03 * alone.seconds and most != result.bottleneck:
        text += f"; {most} +{grown[most]:.0f} s"
    return text.replace("%", " %")


CARDS = (1.25, 3.125, 12.5)
"""Network cards: 10, 25 and 100 Gbit/s."""


def star_table() -> str:
    """Return in Markdown how many workers may pull weights from one machine: with async, as many as take a tenth of an
    iteration, and as many as take longer than any other part of it."""
    lines = [
        f"| what learns | {' | '.join(f'{card * 8:.0f} Gbit/s' for card in CARDS)} |",
        "|---" * (1 + len(CARDS)) + "|",
    ]
    for name, case in (("LoRA 32 (A)", CASES[0]), ("all weights (D)", CASES[3])):
        result = best(case, "async", 4)
        limits = [result.seconds / 10, max(result.parts.values())]
        tenth, most = ([f"{int(limit * card / case.weights_gb):,}" for card in CARDS] for limit in limits)
        cells = [f"{few}, {many}" for few, many in zip(tenth, most, strict=True)]
        lines.append(f"| {name}, {case.weights_gb:.2f} GB | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    """Return all tables in Markdown."""
    parts = [f"**{case.name}**: {case.about}\n\n{table(case)}" for case in CASES]
    head = (
        "**Weights**: workers that pull them through the first rank's network card in a tenth of an iteration, and as\n"
        "many with which that takes longer than anything else"
    )
    return "\n\n".join([*parts, f"{head}\n\n{star_table()}"])


def main() -> None:
    """Print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into docs/scaling.md")
    options = parser.parse_args()
    text = tables()
    print(text)
    if options.write:
        put(text, BEGIN, END)


def put(text: str, begin: str, end: str) -> None:
    """Put a text between two marks of the page."""
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
