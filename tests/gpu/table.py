"""Every kind of model on a stand-in for a CUDA device, against the CPU.

    python tests/gpu/table.py [-v] [--json FILE] [FAMILY | FAMILY/SETTING ..]

prints for each case whether it runs, its largest difference from the CPU, and how often the CPU waits for the GPU and
copies to or from it (syncs + copies): in `Policy.act`, in a decision of the engine, in an optimiser step. -v adds
the lines, `--json` writes it all to a file. Needs g++ and a CPU build of torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from standin import build

COLUMNS = ("Policy.act train", "Policy.act eval", "decision", "optimiser step")
HEAD = f"{'':30} {'largest':>10}  {'Policy.act':>16}{'deci-':>8}{'opti-':>8}\n"
HEAD += f"{'model/setting':30} {'difference':>10}  {'train':>8}{'eval':>8}{'sion':>8}{'step':>8}"


def compute(family: str, setting: str, folder: Path) -> dict[str, Any]:
    """Play a case on both devices; returns what there is to say about it."""
    import cases
    from standin.device import gpu

    chosen = cases.FAMILIES[family], cases.SETTINGS[setting]
    try:
        with gpu():
            on_gpu = cases.play(*chosen, "cuda", folder / "cuda")
        worst, where = cases.difference(on_gpu, cases.play(*chosen, "cpu", folder / "cpu"))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    counts = {name: dataclasses.asdict(each) for name, each in on_gpu.counts.items()}
    return {"difference": worst, "where": where, "tolerance": chosen[1].tolerance, "counts": counts}


def row(name: str, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "error" in found:
        return f"{name:24} FAILS {found['error']}"
    mark = "ok" if found["difference"] <= found["tolerance"] else "WRONG"
    counts = [found["counts"].get(column) for column in COLUMNS]
    text = [f"{each['syncs']} + {each['copies']}" if each else "-" for each in counts]
    return f"{name:24} {mark:5} {found['difference']:10.1e}  " + "".join(f"{each:>8}" for each in text)


def main() -> int:
    """Print the table; returns 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="FAMILY[/SETTING]")
    parser.add_argument("-v", action="store_true", dest="verbose")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if (reason := build.missing()) is not None:
        print(reason)
        return 1
    import cases
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    every = [(family, setting) for family, kind in cases.FAMILIES.items() for setting in cases.names(kind)]
    chosen = [pair for pair in every if not asked.cases or pair[0] in asked.cases or "/".join(pair) in asked.cases]
    cases.load_families(sorted({family for family, _ in chosen}))
    results = {}
    print(HEAD, flush=True)
    for family, setting in chosen:
        name = f"{family}/{setting}"
        with tempfile.TemporaryDirectory() as folder:
            found = results[name] = compute(family, setting, Path(folder))
        print(row(name, found), flush=True)
        if asked.verbose:
            print(found.get("traceback", f"    largest difference: {found.get('where')}"))
            for part, counted in found.get("counts", {}).items():
                print("".join(f"    {part}: {line}\n" for line in counted["lines"]), end="")
    if asked.json is not None:
        asked.json.write_text(json.dumps(results))
    good = [name for name, found in results.items() if found.get("difference", 1e9) <= found.get("tolerance", 0.0)]
    return 0 if results and len(good) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
