"""What `embodyrl plan` says about the model and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

MIB_PER_GB = 1e9 / 2**20
LARGE_MIB = 4000
"""From here on, sizes are shown in GB."""
PLACES = {"gpu": "GPU", "host": "main memory"}


def model_rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines about the policy and its batches."""
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
        f"{learning['decisions_per_iteration']} decisions per iteration, {learning['optimizer_steps_per_iteration']} "
        f"optimiser steps of {learning['minibatch']}, {learning['micro_batch']} at once; decides for up to "
        f"{learning['slots_decided_at_once']} slots at once{_on_ranks(learning['ranks'])}",
    )
    each = plan["simulators_per_worker"]
    said = f"{each:.0f} MiB each" if each is not None else "unknown until one is started (--start)"
    yield "simulators", f"memory of a process: {said}"
    if model["assumed"]:
        yield "assumed", f"{model['assumed']} (--start looks)"


def _on_ranks(ranks: int) -> str:
    return "" if ranks == 1 else f", on each of {ranks} ranks"


def memory_table(needs: dict[str, dict[str, dict[str, float]]]) -> Table:
    """A row for each part, a column for each place and phase."""
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
    """Whether it fits, and what would."""
    several = plan["learning"]["ranks"] > 1
    for place, phases in plan["needs"].items():
        limit = plan["limits"][place]
        need = max(parts["total"] for parts in phases.values())
        title = f"each {PLACES[place]}" if several and place == "gpu" else PLACES[place]
        if limit is None:
            yield f"{title}: needs {_gb(need)}; say what there is with --{'gpu-' * (place == 'gpu')}memory"
        elif need <= limit:
            yield f"{title}: fits, needs {_gb(need)} of {_gb(limit)}"
        else:
            yield f"{title}: does not fit: needs {_gb(need)} of {_gb(limit)}"
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
