"""Write the table of docs/gpu.md: which public experiment fits which GPUs, and with which settings.

    python benchmarks/gpu_fit.py            # prints the table; some minutes
    python benchmarks/gpu_fit.py --write    # also puts it into docs/gpu.md

Everything is computed by what `embodyrl plan` uses; nothing has been measured on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embodyrl.config import ConfigUse, load_config
from embodyrl.config.schema import Config, ParallelBackend
from embodyrl.errors import UserError
from embodyrl.planning.planner import Limits, Planner

GB = 10**9
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- table of benchmarks/gpu_fit.py -->", "<!-- end of the table -->"
SIZES = (24, 48, 80, 141)
"""Memory of GPUs [GB]."""
COUNTS = (1, 8)
EXPERIMENTS = (
    "maniskill_ppo_openvla",
    "maniskill_ppo_openvla_oft",
    "libero_spatial_grpo_openvla_oft",
    "libero_spatial_ppo_pi0",
    "libero_10_ppo_pi05",
    "libero_spatial_ppo_gr00t",
    "libero_spatial_ppo_gr00t_n17",
)
SMALLER = ["engine.micro_batch_size=8"]
LORA = [*SMALLER, "engine.lora.rank=32"]
LADDER: dict[str, list[str]] = {
    "a": [],
    "b": SMALLER,
    "c": [*SMALLER, "engine.optimizer.name=adamw_8bit"],
    "d": LORA,
    "e": [*LORA, "engine.micro_batch_size=1", "env.num_envs=16"],
}
"""Settings, the least costly first; of those that are given twice the last counts."""


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into docs/gpu.md")
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS, help="rows")
    options = parser.parse_args()
    text = table(options.experiments)
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def table(experiments: Sequence[str]) -> str:
    """Return the table in Markdown."""
    titles = [f"{count} x {size} GB" for count in COUNTS for size in SIZES]
    lines = [f"| experiment | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name in experiments:
        planner = Planner(Limits(cuda=True, gpu=None, host=None), 1, None)  # it remembers the model's dry runs
        found = [cell(planner, name, count, size) for count in COUNTS for size in SIZES]
        lines.append(f"| `{name}` | {' | '.join(found)} |")
    return "\n".join(lines)


def cell(planner: Planner, name: str, count: int, size: int) -> str:
    """Return the first step that fits `count` GPUs of `size` [GB], with what was chosen and its memory; `-` if none."""
    planner.limits["gpu"] = size * GB
    for step, settings in LADDER.items():
        try:
            config, _ = planner.chosen(load(name, [*settings, f"engine.parallel.world_size={count}"]))
            need = max(need.total for need in planner.needs(config)["gpu"].values())
        except UserError:  # these settings do not go together, or not with this model
            continue
        if need <= size * GB:
            return f"{step}{marks(config)} ({need / GB:.0f})"
    return "-"


def marks(config: Config) -> str:
    """Return signs for the choices that cost time."""
    sharded = config.engine.parallel.backend is ParallelBackend.fsdp
    return "*" * (config.engine.gradient_checkpointing is True) + "+" * sharded


def load(name: str, overrides: Sequence[str]) -> Config:
    """Load an experiment whose checkpoint need not be here."""
    last = {override.partition("=")[0]: override for override in overrides}
    return load_config(f"experiment/{name}", list(last.values()), use=ConfigUse.elsewhere).config


if __name__ == "__main__":
    main()
