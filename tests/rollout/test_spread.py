"""Large columns of a batch stay with the rank that collected them, and are there for whoever needs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import programs
import pytest
import torch
from slow import rest_slow
from spread_program import held_bytes

from embodyrl.engine.exchange import Exchange
from embodyrl.engine.parallel import SINGLE_PROCESS

PROGRAM = Path(__file__).with_name("spread_program.py")


@pytest.mark.parametrize("ranks", rest_slow([2, 3]))
def test_ranks_get_what_one_would_have(ranks: int, tmp_path: Path) -> None:
    path = os.pathsep.join([str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    words = [[str(PROGRAM), str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    processes = [programs.Program(each, env=environment, stderr=subprocess.PIPE, text=True) for each in words]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)


def test_one_rank_finds_its_rows_again() -> None:
    exchange = Exchange(SINGLE_PROCESS)
    first = exchange.put({"images": torch.arange(8, dtype=torch.uint8).view(4, 2)})
    second = exchange.put({"images": torch.arange(8, 12, dtype=torch.uint8).view(2, 2)})
    wanted = torch.cat([second[1:], first[[2, 0, 2]]])
    assert exchange.fetch([wanted])["images"].tolist() == [[10, 11], [4, 5], [0, 1], [4, 5]]
    assert held_bytes(exchange) == 12 and exchange.received == 0
    exchange.keep(wanted)
    assert held_bytes(exchange) == 6
    assert exchange.fetch([wanted])["images"].tolist() == [[10, 11], [4, 5], [0, 1], [4, 5]]
    with pytest.raises(KeyError, match="1 rows of a batch are not held any more"):
        exchange.fetch([first[:2]])
