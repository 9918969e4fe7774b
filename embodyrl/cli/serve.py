"""`embodyrl serve`."""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence

from embodyrl.api import load_policy
from embodyrl.cli.arguments import CommandLineError
from embodyrl.errors import UserError
from embodyrl.screen import counted, say, terminal_width
from embodyrl.servers import PROMPT, STATE, is_url
from embodyrl.serving.options import ServeOptions
from embodyrl.serving.server import LOOPBACK, PolicyServer, check_free

SHOWN_EVERY_S, PLAIN_EVERY_S = 1.0, 30.0
"""Seconds between two looks at the figures on a terminal, and between two lines elsewhere [s]."""


def keys_of(words: Sequence[str]) -> dict[str, str]:
    """Return the keys of `--map NAME=KEY`.

    Raises:
        CommandLineError: a word is no such pair, or a name comes twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, key = word.partition("=")
        if not equals or not name or not key:
            raise CommandLineError(f"--map {word}: want NAME=KEY, for instance agentview=observation/image")
        if name in found:
            raise CommandLineError(f"--map {word}: {name} is there already, as {found[name]}")
        found[name] = key
    return found


def serve(path: str, overrides: Sequence[str], options: ServeOptions, *, trust: bool) -> int:
    """Serve until a signal comes; returns the exit code."""
    options.check()
    if is_url(path):
        raise UserError(f"{path} is the policy of a server already: serve a run, a checkpoint or an exported policy")
    check_free(options.host, options.port)
    say(f"loading   {path} ...")
    server = PolicyServer(load_policy(path, overrides, trust=trust), options)

    def begun() -> None:
        say(_first_lines(server))

    async def both() -> None:
        showing = asyncio.create_task(_show(server))
        try:
            await server.serve(begun, (signal.SIGINT, signal.SIGTERM))
        finally:
            showing.cancel()
            if sys.stdout.isatty():  # the line of figures stands there
                print("\r\033[K", end="", flush=True)

    begun_at = time.monotonic()
    asyncio.run(both())
    figures = server.figures
    refused = f", {counted(figures.refused, 'message')} refused" if figures.refused else ""
    say(f"served {counted(figures.requests, 'request')} in {time.monotonic() - begun_at:.0f} s{refused}")
    return 0


def _first_lines(server: PolicyServer) -> str:
    told, options = server.metadata, server.options
    high, wide = told["image_size"]
    what = dict.fromkeys(told["cameras"], f"{high} x {wide}")
    what |= {STATE: counted(told["state_dim"], "number"), PROMPT: "task description"}
    longest = max(map(len, ("serving", *told["keys"])))
    chunks = f"chunks of {counted(told['chunk_size'], 'action')} of {told['action_dim']}"
    lines = [f"serving   {server.url} ({options.protocol})   {chunks}"]
    lines += [f"  {name:<{longest}}  {what[name]}: {' | '.join(ways)}" for name, ways in told["keys"].items()]
    lines += [f"chunks    {text}" for text in (server.executed,) if text]
    if server.seed is not None:
        lines.append(f"sampling  as eval.sample or --sample says, seed {server.seed}; clients are answered one by one")
    if options.host not in LOOPBACK:
        who = "whoever knows the token" if options.token else "WHOEVER REACHES IT, for there is no --token,"
        lines.append(f"open      to other machines: {who} can let this policy act")
    return "\n".join([*lines, "Ctrl-C ends it, after the requests under way"])


async def _show(server: PolicyServer) -> None:
    """Show what is being answered, a line a second at most."""
    live, before, shown_at = sys.stdout.isatty(), 0, time.monotonic()
    while True:
        await asyncio.sleep(SHOWN_EVERY_S if live else PLAIN_EVERY_S)
        figures, now = server.figures, time.monotonic()
        if figures.requests == before and not live:
            continue
        rate, before, shown_at = (figures.requests - before) / (now - shown_at), figures.requests, now
        line = f"{counted(server.clients, 'client')}   {rate:.1f} requests/s"
        if figures.latencies:
            latencies = sorted(figures.latencies)
            middle, late = statistics.median(latencies), latencies[math.ceil(0.95 * (len(latencies) - 1))]
            batch = figures.requests / max(figures.batches, 1)
            line += f"   batch {batch:.1f}   latency {1000 * middle:.1f} ms (95 %: {1000 * late:.1f})"
        if figures.refused:
            line += f"   {figures.refused:,} refused"
        if live:
            print(f"\r\033[K{line[: (terminal_width() or 80) - 1]}", end="", flush=True)
        else:
            say(line)
