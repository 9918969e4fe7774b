"""Runs of several ranks: the first starts and supervises the others, which follow it."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.schema import Config
from embodyrl.errors import RunError, UserError, explain
from embodyrl.placement.child import die_with_parent
from embodyrl.placement.cuda import set_up_allocator
from embodyrl.placement.plan import inventory
from embodyrl.placement.ranks import Peers, RankInfo, use_own_gpu
from embodyrl.placement.signals import ignore_from_now_on, leave_to_parent
from embodyrl.runner.build import PROGRAM, Host, open_runner
from embodyrl.runner.fitting import follow_choices
from embodyrl.runner.rundir import SOURCES, WORKER_LOGS, RunDir, read_config

if TYPE_CHECKING:
    from embodyrl.engine.parallel import Ranks

ENDING_S = 30.0
"""Longest time for the other ranks to end after the first [s]."""


@contextmanager
def leading(config: Config, place: RankInfo, run_dir: Path, checkpoint: Path | None) -> Iterator[Ranks | None]:
    """Be the first rank for the length of a block: start the others, send them run directory and checkpoint, and wait
    for their end. Yields None if there are no others."""
    if place.size == 1:
        yield None
        return
    peers = Peers()
    try:
        place = peers.start(place, run_dir, run_dir / WORKER_LOGS)
        use_own_gpu(place, config.engine.device, inventory())

        from embodyrl.engine.compute import choose_device
        from embodyrl.engine.parallel import connected

        device, timeout_s = choose_device(config.engine.device), config.engine.parallel.timeout_s
        with connected(place, device, timeout_s, peers.raise_if_ended) as ranks:
            ranks.broadcast_from_rank0(
                [str(run_dir.absolute()), None if checkpoint is None else str(checkpoint.absolute())]
            )
            yield ranks
        peers.finish(ENDING_S)
    finally:
        peers.close()


def follow(config: Config, place: RankInfo, *, started: float, host: Host = PROGRAM) -> tuple[Path, int]:
    """Take part in a run as a rank other than the first; returns the run directory and the exit code."""
    set_up_allocator()
    use_own_gpu(place, config.engine.device, inventory())

    from embodyrl.engine.compute import choose_device
    from embodyrl.engine.parallel import connected

    device, timeout_s = choose_device(config.engine.device), config.engine.parallel.timeout_s
    with connected(place, device, timeout_s, lambda ranks: None) as ranks:
        run_dir, checkpoint = (
            None if path is None else Path(path) for path in ranks.broadcast_from_rank0([None, None])
        )
        assert run_dir is not None, "the first rank has one"
        loaded = read_config(run_dir, [], SOURCES, trust=True)  # the first rank has checked it, and whose the code is
        with open_runner(
            follow_choices(loaded, ranks.broadcast_from_rank0([])),
            RunDir.shared(run_dir),
            started=started,
            checkpoint=checkpoint,
            place=place,
            ranks=ranks,
            host=host,
        ) as runner:
            return run_dir, runner.run()


def main(parent: str, run_dir: str, place: str) -> None:
    """Entry point of a rank that the first one started; dies with it."""
    die_with_parent(int(parent))
    leave_to_parent()
    faulthandler.enable()
    started = time.monotonic()
    try:
        config = read_config(Path(run_dir), [], SOURCES, trust=True).config  # as the first rank does
        sys.exit(follow(config, RankInfo.from_json(place), started=started)[1])
    except (UserError, RunError) as error:
        sys.exit(explain(error))
    finally:
        ignore_from_now_on()  # the first rank reads this one's exit status
