"""Measure on one GPU what a run consists of: decisions, updates, simulation, rendering, moves of memory, and learning.

    python benchmarks/gpu.py --all                               # GR00T N1.5 at real size; at most 9 minutes
    python benchmarks/gpu.py --rows decide learn --model pi0     # some rows, another model
    python benchmarks/gpu.py --all --scale tiny --device cpu     # the same code on a CPU, to try it out

Nothing here has been run on a GPU yet; only the tiny scale has, on a CPU and on the tests' stand-in for a GPU.

Models have the published size and random weights made on the device, so that nothing is downloaded. Every group of rows
is measured by a process of its own. A row that cannot be measured says why, and leaves the others alone. Each row is
in the JSON file as soon as it is measured, and a second call continues with groups that lack some. Each row says its
bound: how
fast it could be if one resource were used perfectly. `share` is the bound's time over the measured one (1 is perfect).

- decide: `HybridEngine.act`. Bound: its arithmetic at the device's matrix peak, or reading all weights once at its
  memory's bandwidth, whichever is slower; both as measured by `peak`, whose own bound is the data sheet's.
- learn: an update of LoRA adapters, and of all weights. Bound: two and three times the arithmetic of scoring at the
  matrix peak, so `share` is the model FLOPs utilisation. Planned memory (`embodyrl plan`'s) is beside the measured one.
- offload, sync: bandwidth. Bound: a plain copy of the same bytes.
- simulate: ManiSkill's GPU simulation. No bound is known; it is PhysX's own speed.
- render: LIBERO and MetaWorld with a camera, in all cores' processes. Bound: the same tasks without images.
- run: PPO on PushCube in the GPU simulation, from states and with a tiny GR00T from images: success over iterations.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# So that a checkout can be measured without being installed, also in the processes of simulators.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

import mode_switch
import numpy as np
import torch
import weight_sync
from vla_real_size import MODELS, PPO, TASK_DESCRIPTION, Setup, count_flops, matrix_peak, measure_learning

import embodyrl
from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.files import write_whole
from embodyrl.methods.on_policy.learner import OnPolicyLearner
from embodyrl.planning.dry_run import trace
from embodyrl.planning.memory import Learning, train_need
from embodyrl.planning.weightless import build_weightless

Row = dict[str, Any]
SHEETS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12), "L40S": (362e12, 0.864e12)}
"""Dense bfloat16 FLOP/s and bytes/s of memory from NVIDIA's data sheets (H100 and A100: SXM, A100 with 80 GB)."""
POLL_S = 0.2
LEAST_S = 20.0
"""A group is not begun with less time left [s]."""


def setup_of(options: Namespace) -> Setup:
    """The model to measure, on the device."""
    tiny = options.scale == "tiny"
    return Setup(options.model, tiny, torch.device(options.device), 1 if tiny else 5)


def weightless(setup: Setup) -> Any:
    """The model without numbers."""
    return build_weightless(setup.config(), setup.simulator, chunk_size=setup.kind.chunk)[0]


def memory_bandwidth(setup: Setup) -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.ones(2**22 if setup.tiny else 2**29, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / setup.seconds(lambda: target.copy_(source))


def sheet(setup: Setup) -> tuple[float, float] | None:
    """What the data sheet says of this GPU."""
    name = torch.cuda.get_device_name() if setup.device.type == "cuda" else ""
    return next((values for key, values in SHEETS.items() if key in name), None)


def attempted(what: str, measure: Callable[[], Row]) -> Row:
    """A row, or why it cannot be measured; the log has the traceback."""
    gc.collect()  # what the row before has left
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return {"what": what} | measure()
    except Exception as error:
        traceback.print_exc()
        return {"what": what, "failed": reason_of(error)}


def reason_of(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def measure_peak(options: Namespace) -> Iterator[Row]:
    """The device's matrix product and memory."""
    setup = setup_of(options)
    limits = sheet(setup) or (None, None)
    measured = (("matrix product", matrix_peak, "FLOP/s"), ("memory copy", memory_bandwidth, "byte/s"))
    for (what, measure, unit), limit in zip(measured, limits, strict=True):

        def row(measure: Callable[[Setup], float] = measure, unit: str = unit, limit: float | None = limit) -> Row:
            value = measure(setup)
            return {unit: value, "bound": limit, "bound_is": "data sheet", "share": limit and value / limit}

        yield attempted(what, row)


def measure_decisions(options: Namespace) -> Iterator[Row]:
    """Decisions per second by batch, with and without CUDA graphs."""
    setup = setup_of(options)
    blank = weightless(setup)
    flops, _ = count_flops(blank, setup.observe)
    held = sum(each.numel() * each.element_size() for each in blank.parameters())
    peak, bandwidth = matrix_peak(setup), memory_bandwidth(setup)
    names = [each.name for each in dataclasses.fields(EngineConfig) if each.name.startswith("cuda_graph")]
    variants: list[dict[str, Any]] = [
        {name: value for name in names} for value in ((False, True) if names else (False,))
    ]
    for settings in variants:
        yield from decisions_of(setup, settings, arithmetic=flops / peak, reading=held / bandwidth)


def decisions_of(setup: Setup, settings: dict[str, Any], *, arithmetic: float, reading: float) -> Iterator[Row]:
    """Decisions of one engine, which has ended with them, so that the next one finds the memory free.

    Args:
        setup: the model.
        settings: of the engine.
        arithmetic: least time of a decision by its arithmetic [s].
        reading: least time of any number of them, in which all weights are read once [s].
    """
    title = "CUDA graphs" if any(settings.values()) else ""
    made: list[HybridEngine] = []

    def make() -> Row:
        made.append(setup.engine(**settings))
        return {}

    ready = attempted(title or "without CUDA graphs", make)
    if "failed" in ready:
        yield ready
        return
    [engine] = made

    def row(batch: int) -> Row:
        setup.peak_memory()
        decide = partial(engine.act, setup.observe(batch), "train")
        with engine.rollout_mode():
            for _ in range(2):  # the second is recorded as a graph
                decide()
            seconds = setup.seconds(decide)
        bound = max(batch * arithmetic, reading)
        is_arithmetic = batch * arithmetic > reading
        return {
            "decisions/s": batch / seconds,
            "bound": batch / bound,
            "bound_is": "arithmetic at the matrix peak" if is_arithmetic else "reading the weights once",
            "share": bound / seconds,
            "peak_gb": setup.peak_memory(),
            "warning": engine.graphs.warning,
        }

    for batch in [1, 4] if setup.tiny else [1, 4, 16, 64]:
        yield attempted(", ".join(filter(None, (f"batch {batch}", title))), partial(row, batch))


def measure_updates(options: Namespace) -> Iterator[Row]:
    """Updates with LoRA and in full: time, and planned against measured memory."""
    setup = setup_of(options)
    blank = weightless(setup)
    _, flops = count_flops(blank, setup.observe)
    tokens, peak = blank.tokens_per_observation(TASK_DESCRIPTION), matrix_peak(setup)
    samples, micro = (2, 1) if setup.tiny else (32, 8)

    def row(what: str) -> Row:
        chosen = Namespace(samples=samples, micro_batch=micro, keep_activations=False)
        row = measure_learning(setup, what, chosen, flops, tokens, peak)
        planned = planned_bytes(setup, what, samples, micro)
        row |= {"planned_gb": planned / 1e9}
        if "failed" not in row:
            arithmetic = (2 if what == "lora" else 3) * flops * samples / peak
            row |= {
                "samples/s": samples / row["seconds"],
                "bound": samples / arithmetic,
                "bound_is": f"{2 if what == 'lora' else 3} x scoring's arithmetic at the matrix peak",
                "share": arithmetic / row["seconds"],
                "planned_over_measured": row["peak_gb"] and planned / 1e9 / row["peak_gb"],
            }
        return row

    for what in ("lora", "full"):
        yield attempted(what, partial(row, what))


def planned_bytes(setup: Setup, what: str, samples: int, micro: int) -> int:
    """Memory that the planner expects of an update, without CUDA's own, which torch does not count."""
    settings: dict[str, Any] = {"device": setup.device.type, "gradient_checkpointing": True}
    config = build_section(EngineConfig, settings | ({"lora": {"rank": 32}} if what == "lora" else {}))
    traced = trace(
        weightless(setup),
        setup.observe(2),
        config,
        cuda=setup.device.type == "cuda",
        learner=OnPolicyLearner,
        algorithm=PPO,
    )
    learning = Learning(
        deciding_samples=samples,
        minibatch=samples,
        micro_batch=micro,
        reference=False,
        master_weights=config.optimizer.master_weights,
    )
    images = samples * setup.kind.images * setup.side**2 * 3
    return train_need(traced.weights, traced.lines, learning, batch=images + samples * traced.trace_bytes).total


def measure_offload(options: Namespace) -> Iterator[Row]:
    """Moving an optimiser's state off the device and back."""
    setup = setup_of(options)
    folder = Path(options.work)
    found = mode_switch.compare(setup.device, 16 if setup.tiny else 8192, 64, setup.rounds, folder)
    for name, copy in (("offload", "copy, device to host"), ("onload", "copy, host to device")):
        yield bandwidth_row(name, found[name], found[copy])


def measure_sync(options: Namespace) -> Iterator[Row]:
    """Weights for policies in other processes, through shared memory."""
    setup = setup_of(options)
    size = 16 if setup.tiny else 2048
    taken = weight_sync.shared_memory(size, 64, setup.rounds)
    speeds = {name: size * 2**20 / float(np.median(seconds)) / 1e9 for name, seconds in taken.items()}
    copy = speeds.pop(weight_sync.COPY)
    for name, speed in speeds.items():
        yield bandwidth_row(name, speed, copy)


def bandwidth_row(what: str, speed: float, copy: float) -> Row:
    """Of a move of memory, beside a plain copy [GB/s]."""
    return {"what": what, "GB/s": speed, "bound": copy, "bound_is": "plain copy", "share": speed / copy}


def steps_per_second(source: str, num_envs: int, overrides: list[str], chunks: int) -> float:
    """Control steps per second of simulators under random actions."""
    chunk = 8
    with embodyrl.make_envs(source, num_envs, overrides=overrides, chunk_size=chunk) as envs:
        envs.reset()
        size = sum(len(field.low) for field in envs.spec.actions)
        actions = np.random.default_rng(0).uniform(-1, 1, (num_envs, chunk, size)).astype(np.float32)
        envs.step(actions)
        start = time.perf_counter()
        for _ in range(chunks):
            envs.step(actions)
        return chunks * chunk * num_envs / (time.perf_counter() - start)


def measure_simulation(options: Namespace) -> Iterator[Row]:
    """ManiSkill's simulation on the GPU, by envs; on a CPU the one there."""
    tiny, gpu = options.scale == "tiny", options.device == "cuda"

    def row(num_envs: int) -> Row:
        sim = ["env.sim=gpu"] if gpu else []
        speed = steps_per_second("maniskill/push_cube", num_envs, sim, 2 if tiny else 20)
        return {"steps/s": speed, "bound": None, "bound_is": "none is known"}

    for num_envs in [2] if tiny else [64, 512, 2048]:
        yield attempted(f"PushCube, {num_envs} envs", partial(row, num_envs))


def measure_rendering(options: Namespace) -> Iterator[Row]:
    """Simulation with rendered images, and without."""
    tiny = options.scale == "tiny"
    slots, chunks = (2, 1) if tiny else (16, 6)

    def row(source: str, camera: str) -> Row:
        plain, seen = (steps_per_second(source, slots, [f"env.cameras=[{each}]"], chunks) for each in ("", camera))
        return {"steps/s": seen, "bound": plain, "bound_is": "the same without images", "share": seen / plain}

    for source, camera in (("metaworld/reach_rgb", "corner2"), ("libero/spatial", "agentview")):
        yield attempted(f"{source}, {slots} envs, one image per 8 steps", partial(row, source, camera))


def measure_run(options: Namespace) -> Iterator[Row]:
    """PushCube learned: success of the evaluations and the wall time."""
    tiny, gpu = options.scale == "tiny", options.device == "cuda"
    common = [f"engine.device={options.device}", "run.save_every=0", *(["env.sim=gpu"] if gpu else [])]
    states = ["env.num_envs=512", "run.iterations=40", "run.eval_every=10", "rollout.num_chunks=16"]
    images = ["model=gr00t", "env.cameras=[base_camera]", "env.num_envs=128", "rollout.chunk_size=4"]
    images += ["run.iterations=15", "run.eval_every=5", "rollout.num_chunks=12", "algorithm.epochs=2"]
    small = ["run.iterations=1", "env.num_envs=2", "rollout.num_chunks=4", "eval.episodes=2", "algorithm.minibatches=1"]

    def row(name: str, settings: list[str]) -> Row:
        folder = Path(options.work) / name.replace(", ", "-").replace(" ", "-").lower()
        chosen = [*common, *settings, *(small if tiny else []), f"run.dir={folder}-{time.time_ns()}"]
        run = embodyrl.train("experiment/maniskill_push_cube", overrides=chosen, progress=False)
        curve = {key: each["eval/success_once"] for key, each in run.summary["evaluations"].items()}
        return {
            "success_by_iteration": curve,
            "wall_s": run.summary["wall_s"],
            "steps/s": run.summary["env_steps_per_s"],
            "bound": 1.0,
            "bound_is": "every episode succeeds",
            "share": max(curve.values(), default=0.0),
        }

    for name, settings in (("states, MLP", states), ("images, tiny GR00T", images)):
        yield attempted(f"PushCube from {name}", partial(row, name, settings))


GROUPS: dict[str, tuple[Callable[[Namespace], Iterator[Row]], float]] = {
    "peak": (measure_peak, 40.0),
    "decide": (measure_decisions, 90.0),
    "learn": (measure_updates, 110.0),
    "simulate": (measure_simulation, 60.0),
    "render": (measure_rendering, 70.0),
    "offload": (measure_offload, 40.0),
    "sync": (measure_sync, 40.0),
    "run": (measure_run, 180.0),
}
"""Measurements, each with the most time it may take [s]."""


def run_group(name: str, options: Namespace) -> None:
    """Measure in this process; writes each row as a line of JSON to the file `options.rows_to`."""
    measure, _ = GROUPS[name]
    with open(options.rows_to, "w") as file:
        try:
            for row in measure(options):
                print(json.dumps(row), file=file, flush=True)
        except Exception as error:  # the table says so, and continues
            traceback.print_exc()
            print(json.dumps({"what": "not measured", "failed": reason_of(error)}), file=file)


def in_own_process(name: str, options: Namespace, seconds: float) -> Iterator[Row]:
    """Rows of a group that is measured in a process of its own, which is killed after so many seconds."""
    rows_to = Path(options.work) / f"{name}.jsonl"
    rows_to.write_text("")
    words = [sys.executable, __file__, "--group", name, "--rows-to", str(rows_to), "--model", options.model]
    words += ["--scale", options.scale, "--device", options.device, "--work", str(options.work)]
    deadline, count = time.monotonic() + seconds, 0
    with (Path(options.work) / f"{name}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        while True:
            has_ended = process.poll() is not None  # before the file is read, so that its last row is not missed
            is_late = time.monotonic() > deadline
            if is_late:
                process.kill()
                process.wait()
            rows = rows_to.read_text().split("\n")[:-1]  # what follows the last end of line is not complete
            for row in rows[count:]:
                yield json.loads(row)
            count = len(rows)
            if has_ended or is_late:
                break
            time.sleep(POLL_S)
    if process.returncode:
        why = f"not done within {seconds:.0f} s" if is_late else f"ended with code {process.returncode}: see {log.name}"
        yield {"what": "the rest", "failed": why}


def text_of(row: Row) -> str:
    """A line of the table."""
    if "failed" in row:
        return f"  {row['what']:<40} {row['failed']}"
    rates = [f"{value:.4g} {unit}" for unit, value in row.items() if "/s" in unit]
    bound = "" if row["bound"] is None else f"{row['bound']:.4g}"
    share = f", {100 * row['share']:.0f} % of it" if row.get("share") is not None else ""
    memory = [f"{key} {row[key]:.1f}" for key in ("planned_gb", "peak_gb") if row.get(key) is not None]
    warning = f"  WARNING: {row['warning']}" if row.get("warning") else ""
    head = f"  {row['what']:<40} {', '.join(rates):<24} bound {bound} ({row['bound_is']}){share}"
    return f"{head}  {'  '.join(memory)}{warning}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="measure everything")
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=[], help="measure these")
    parser.add_argument("--model", choices=MODELS, default="gr00t")
    parser.add_argument("--scale", choices=["real", "tiny"], default="real")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that does not fit in this time")
    parser.add_argument("--work", type=Path, default=Path("gpu-benchmark"), help="folder for logs and runs")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="rows; kept from an earlier call")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--rows-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu" and options.scale == "real":
        parser.error("--device cpu is for trying it out: add --scale tiny")
    if options.group is not None:
        run_group(options.group, options)
        return
    chosen = list(GROUPS) if options.all else options.rows
    if not chosen:
        parser.error("say --all, or which --rows")
    options.work.mkdir(parents=True, exist_ok=True)
    measure_all(chosen, options)


def measure_all(chosen: list[str], options: Namespace) -> None:
    """Measure the groups that the file lacks, and write it after each."""
    setting = {"model": options.model, "scale": options.scale, "device": device_name(options.device)}
    known = json.loads(options.json.read_text()) if options.json.is_file() else {}
    groups: dict[str, list[Row]] = known["groups"] if known.get("setting") == setting else {}
    deadline = time.monotonic() + 60 * options.minutes
    for name in chosen:
        done = groups.get(name)
        if done is None or any("failed" in row for row in done):
            left = deadline - time.monotonic()
            if left < LEAST_S:
                print(f"{name}: no time left; the same command continues from here")
                continue
            print(name)
            groups[name] = [unfinished := {"what": "the rest", "failed": "stopped"}]  # until all rows are there
            for row in in_own_process(name, options, min(left, GROUPS[name][1])):
                print(text_of(row), flush=True)
                groups[name].insert(-1, row)
                write_whole(options.json, json.dumps({"setting": setting, "groups": groups}, indent=2) + "\n")
            groups[name].remove(unfinished)
            write_whole(options.json, json.dumps({"setting": setting, "groups": groups}, indent=2) + "\n")
        else:
            print(name, *map(text_of, done), sep="\n")


def device_name(device: str) -> str:
    """The name of the device that is measured."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
