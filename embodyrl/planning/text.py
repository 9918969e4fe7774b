"""Format the output of `embodyrl plan`: machine, processes, model and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from embodyrl.planning.choices import Choice
from embodyrl.screen import counted

MIB_PER_GB = 1e9 / 2**20
LARGE_MIB = 4000
"""Size from which on sizes are shown in GB [MiB]."""
PLACES = {"gpu": "GPU", "host": "main memory"}


def rows(source: str, plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Return titles and lines about everything except processes and memory, in display order."""
    machine, memory, threads = plan["machine"], plan["memory"], plan["threads"]
    nodes = [
        f"node {node['id']}: {'CPUs ' + node['cpus'] if node['cpus'] else 'no CPU'}"
        f"{'' if node['memory'] else ', no memory'}"
        for node in machine["numa_nodes"]
    ]
    gpus = [
        f"{gpu['address']}, {'node unknown' if gpu['node'] is None else 'node ' + str(gpu['node'])}"
        for gpu in machine["gpus"]
    ]
    return [
        ("config", f"{source}: OK"),
        ("machine", f"CPUs {machine['cpus']}, of which {machine['cores']} can be busy at once"),
        ("nodes", "; ".join(nodes) or "the kernel shows none"),
        ("GPUs", "; ".join(gpus) or "no NVIDIA GPU"),
        *([("", " - ".join(plan["idle_gpus"]))] if plan["idle_gpus"] else []),
        *([("", f"too few: {plan['too_few_gpus']}")] if plan["too_few_gpus"] else []),
        ("NUMA", plan["numa"]),
        ("start", _start(plan["preload"])),
        ("memory", f"{_size(memory['shared_segment_mib'])} shared segment, plus {memory['not_included'][0]}"),
        *model_rows(plan),
        *(("chosen", str(Choice(**choice))) for choice in plan.get("choices", ())),
        ("threads", f"{threads['per_worker']} per simulator process; main process: {_main_threads(plan)}"),
    ]


def _main_threads(plan: dict[str, Any]) -> Any:
    """Return the number of threads of the main process, as far as it is known."""
    chosen = {choice["setting"]: choice["value"] for choice in plan.get("choices", ())}
    return chosen.get("engine.threads", plan["threads"]["main_process"])


def _start(preload: Sequence[str] | None) -> str:
    if preload is None:
        return "every process is a fresh interpreter"
    return f"processes are forked from one that has imported {', '.join(preload) or 'nothing'}"


def _size(mib: float) -> str:
    return f"{mib:.1f} MiB" if mib >= 0.1 else "less than 0.1 MiB"


def layout_table(layout: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each machine of the run."""
    table = Table(box=None, pad_edge=False)
    for title in ("machine", "roles", "GPUs", "envs", "processes"):
        table.add_column(title, overflow="fold")
    for row in layout:
        table.add_row(row["machine"], row["roles"], row["gpus"] or "-", row["envs"] or "-", str(row["processes"]))
    return table


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each simulator process."""
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "envs", "node", "cpus", "memory from", "its own variables"):
        table.add_column(title, overflow="fold")
    for worker in workers:
        memory = "where it runs" if worker["memory_node"] is None else f"node {worker['memory_node']}"
        node = "any" if worker["numa_node"] is None else str(worker["numa_node"])
        table.add_row(worker["worker"], worker["slots"], node, worker["cpus"], memory, pairs(worker["env_vars"]))
    return table


def pairs(variables: dict[str, str]) -> str:
    """Return variables as `NAME=value`."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def model_rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield titles and lines about the policy and its batches."""
    model = plan["model"]
    if model is None:
        yield "model", f"cannot be planned: {plan['why_not']}"
        return
    tokens = f"; reads {model['tokens_per_observation']} tokens" if model["tokens_per_observation"] else ""
    yield (
        "model",
        f"{model['name']}, {model['origin']}: {_count(model['parameters'])} parameters, "
        f"{_count(model['trainable'])} of them learn{tokens}",
    )
    learning = plan["learning"]
    yield (
        "learning",
        f"{counted(learning['decisions_per_iteration'], 'chunk')} per iteration, "
        f"{counted(learning['optimizer_steps_per_iteration'], 'optimiser step')} of {learning['minibatch']}, "
        f"{learning['micro_batch']} at once; acts for up to {counted(learning['slots_decided_at_once'], 'env')} at once"
        f"{_on_processes(learning)}",
    )
    if plan["traffic"]:
        said = ", ".join(f"{size:.0f} MiB of {what}" for what, size in plan["traffic"].items())
        yield "traffic", f"a rank gets from others, per iteration: {said}"
    if exchanged := plan["rollout_traffic"]:
        batch, weights = (_size(exchanged[what]) for what in ("batch", "weights"))
        title = "" if plan["traffic"] else "traffic"
        yield title, f"rollout workers give ranks a batch of {batch} per iteration, and get {weights} of weights"
    if plan["simulator_traffic"] is not None:  # a few bytes round to 0
        title = "" if plan["traffic"] or plan["rollout_traffic"] else "traffic"
        yield title, f"simulators send observations of {_size(plan['simulator_traffic'])} per iteration"
    if (lag := plan["lag"]) is not None:
        longer = f"{counted(lag, 'iteration')} ahead: an iteration takes the longer of rollout and learning"
        yield "lag", f"async, rollouts are {longer}" if lag else "async, but no rollout is ahead of learning"
    each, shared = plan["simulators_per_worker"], plan["simulators_shared"]
    said = "unknown until one is started (--start)"
    if each is not None:
        said = f"{each:.0f} MiB each, and {shared:.0f} MiB that all share"
    yield "simulators", f"memory of a process: {said}"
    if model["assumed"]:
        yield "assumed", f"{model['assumed']} (--start measures)"


def _on_processes(learning: dict[str, Any]) -> str:
    ranks, workers = learning["ranks"], learning["rollout_workers"]
    if workers:
        each = f", in each of {workers} rollout workers" if workers > 1 else ", in a rollout worker"
        return each + (f"; learns in {ranks} ranks" if ranks > 1 else "")
    return "" if ranks == 1 else f", on each of {ranks} ranks"


def memory_table(needs: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Return a table with a row for each part, and a column for each place and phase."""
    columns = [(place, phase, parts) for place, phases in needs.items() for phase, parts in phases.items()]
    large = max(parts["total"] for *_, parts in columns) > LARGE_MIB
    unit, size = ("GB", MIB_PER_GB) if large else ("MB", MIB_PER_GB / 1000)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"memory [{unit}]")
    for place, phase, _ in columns:
        title = PLACES[place] if phase == "both" else f"{PLACES[place]}, {phase}"
        table.add_column(title, justify="right")
    names = list(dict.fromkeys(name for *_, parts in columns for name in parts if name != "total"))
    for name in [*names, "total"]:
        cells = [f"{parts[name] / size:.1f}" if name in parts else "-" for *_, parts in columns]
        table.add_row(name, *cells, style="bold" if name == "total" else None)
    return table


def verdict(plan: dict[str, Any]) -> Iterator[str]:
    """Yield lines that report whether the run fits, and settings with which it would."""
    several = plan["learning"]["ranks"] + plan["learning"]["rollout_workers"] > 1
    for place, phases in plan["needs"].items():
        limit = plan["limits"][place]
        need = max(parts["total"] for parts in phases.values())
        title = f"each {PLACES[place]}" if several and place == "gpu" else PLACES[place]
        uncounted = place == "host" and plan["simulators_per_worker"] is None
        without = ", simulators not counted (--start)" if uncounted else ""
        if limit is None:
            option = "--gpu-memory" if place == "gpu" else "--memory"
            yield f"{title}: needs {_gb(need)}{without}; give the available memory with {option}"
        elif need <= limit:
            yield f"{title}: fits, needs {_gb(need)} of {_gb(limit)}{without}"
        else:
            yield f"{title}: does not fit: needs {_gb(need)} of {_gb(limit)}{without}"
    for settings in plan["advice"]:
        yield f"  try {' '.join(settings)}"
    if not plan["fits"] and not plan["advice"]:
        yield "  no setting that was tried makes it fit: take a smaller model, more memory, or more GPUs"


def _gb(mib: float) -> str:
    return f"{mib / MIB_PER_GB:.3g} GB"


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)
