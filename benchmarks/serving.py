"""Measure how many requests a second a policy server answers, and how fast.

Contenders, each a process of its own, over the same bytes of the same number of client processes:

- ours: `embodyrl.serving`, by openpi's protocol
- vla-eval: its own model server (vla-eval 0.8.0, in an environment of its own), by its own protocol
- echo: `websockets` alone, which reads a message and returns as many bytes as our answer has

Two policies: `stub` returns zeros at once (chunks of 8 x 7; two images of 224 x 224, a state of 8 numbers, a prompt),
and `pi0` is a tiny pi0 with random weights (the size of `tiny_pi0_sft`, one image of 64 x 64). vla-eval is
measured twice with pi0: with its default of one request at a time, and batching, where the same forward pass answers
all that wait. Rounds are interleaved (forwards, backwards, ...); medians of rounds are shown, and ratios.

    python benchmarks/serving.py --work DIR [--rounds 7] [--seconds 3] [--clients 1 4 16] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

OURS, THEIRS, BATCHING, ECHO = "embodyrl", "vla-eval", "vla-eval, batching", "echo"
CONTENDERS = {"stub": (OURS, THEIRS, ECHO), "pi0": (OURS, THEIRS, BATCHING, ECHO)}
CHUNK, ACTION = 8, 7
START_S = 120.0
MOST_BYTES = 2**24

# With pi0 both sides' servers hold the same torch module, in their own process.
THEIR_SERVER = """
import sys
policy, port, batching = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
sys.path += sys.argv[4:]
import numpy as np
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import serve

if policy == "pi0":
    from serving import observation_of, policy_of
    acting = policy_of("pi0")

class Stub(PredictModelServer):
    def predict_batch(self, seen, contexts):
        if policy == "stub":
            return [{"actions": np.zeros((8, 7), np.float32)} for _ in seen]
        chunks = acting.act(observation_of(seen))
        return [{"actions": chunk} for chunk in chunks]

    def predict(self, seen, context):
        return self.predict_batch([seen], [context])[0]

serve(Stub(max_batch_size=16 if batching else 1), host="127.0.0.1", port=port)
"""


# --------------------------------------------------------------------------------------------------------- the policies


def policy_of(name: str) -> Any:
    """What acts, as `PolicyServer` wants it: `stub` or `pi0`."""
    from embodyrl.envs import ActionField, SimulatorSpec

    if name == "stub":
        arm = ActionField(name="arm", meaning="joint_target", unit="rad", low=(-1.0,) * ACTION, high=(1.0,) * ACTION)
        seen = SimulatorSpec(
            tasks={"lift": "lift the cube"},
            actions=(arm,),
            proprio_dim=8,
            max_episode_steps=100,
            control_frequency=20.0,
            cameras=("front", "wrist"),
            image_size=(224, 224),
        )
        chunk = np.zeros((64, CHUNK, ACTION), np.float32)
        return SimpleNamespace(
            simulator=seen,
            chunk_size=CHUNK,
            action_dim=ACTION,
            config=SimpleNamespace(model=SimpleNamespace(name="stub"), eval=SimpleNamespace(sample=False), seed=0),
            policy=SimpleNamespace(spec=SimpleNamespace(proprio_dim=8), plan_shape=None),
            engine=SimpleNamespace(actions_of=lambda decision: decision.actions),
            decide=lambda seen, **_: SimpleNamespace(actions=chunk[: len(seen.task_descriptions)], plan=None),
        )
    import torch

    from embodyrl.config import ConfigUse, load_config
    from embodyrl.runner.build import SpecOnly, build_acting
    from embodyrl.runner.playing import LoadedPolicy

    torch.set_num_threads(1)
    config = load_config("tiny_pi0_sft", ["model.statistics=null", "eval.sample=false"], use=ConfigUse.show).config
    hand = ActionField(name="hand", meaning="normalized", unit="1", low=(-1.0,) * 4, high=(1.0,) * 4)
    seen = SimulatorSpec(
        tasks={"faucet-open-v3": "open the faucet", "faucet-close-v3": "close the faucet"},
        actions=(hand,),
        proprio_dim=4,
        max_episode_steps=30,
        control_frequency=27.0,
        cameras=("corner4",),
        image_size=(64, 64),
    )
    return LoadedPolicy(config, build_acting(config, SpecOnly(seen), None), seen)


def message_of(name: str, protocol: str) -> bytes:
    """One observation in the bytes of a protocol: `openpi` or `vla-eval`."""
    from embodyrl.messages import pack

    draw = np.random.default_rng(0)
    views, size = (("front", "wrist"), 224) if name == "stub" else (("corner4",), 64)
    images = {view: draw.integers(256, size=(size, size, 3)).astype(np.uint8) for view in views}
    state = draw.normal(size=8 if name == "stub" else 4).astype(np.float32)
    task = "lift the cube" if name == "stub" else "open the faucet"
    if protocol == "openpi":
        return pack({"images": images, "state": state, "prompt": task}, bytes_keys=True)
    payload = {"images": images, "states": state, "task_description": task}
    return pack({"type": "observation", "payload": payload, "seq": 1, "timestamp": 0.0}, bytes_keys=False)


def observation_of(seen: list[dict[str, Any]]) -> Any:
    """The observation of what vla-eval's clients show, a row for each."""
    from embodyrl.envs import Observation

    return Observation(
        images=np.stack([np.stack(list(each["images"].values())) for each in seen]),
        proprio=np.stack([each["states"] for each in seen]),
        task_descriptions=[each["task_description"] for each in seen],
    )


# ------------------------------------------------------------------------------------------------- servers and clients


def be_ours(policy: str, port: int) -> None:
    """Serve, as `embodyrl serve` does."""
    from embodyrl.serving.options import ServeOptions
    from embodyrl.serving.server import PolicyServer

    server = PolicyServer(policy_of(policy), ServeOptions(port=port))
    asyncio.run(server.serve(lambda: None))


def be_echo(policy: str, port: int) -> None:
    """Answer whatever comes with as many bytes as our answer has."""
    from websockets.asyncio.server import ServerConnection, serve

    from embodyrl.messages import pack

    timing = {"infer_ms": 1.0, "prev_total_ms": 1.0}
    shape = (CHUNK, ACTION) if policy == "stub" else (4, 4)
    answer = pack({"actions": np.zeros(shape, np.float32), "server_timing": timing}, bytes_keys=True)

    async def talk(connection: ServerConnection) -> None:
        await connection.send(b"hello")
        async for _ in connection:
            await connection.send(answer)

    async def forever() -> None:
        async with serve(talk, "127.0.0.1", port, compression=None, max_size=MOST_BYTES) as server:
            await server.serve_forever()

    asyncio.run(forever())


def be_client(port: int, message: Path, greeting: str) -> None:
    """Ask for the seconds that each line of the standard input says, and write the latencies of a round."""
    from websockets.sync.client import connect

    data = message.read_bytes()
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=MOST_BYTES, ping_interval=None) as client:
        if greeting == "hears":
            client.recv(timeout=START_S)
        print("ready", flush=True)
        for line in sys.stdin:
            latencies, until = [], time.perf_counter() + float(line)
            while (begun := time.perf_counter()) < until:
                client.send(data)
                answer = client.recv(timeout=60)
                latencies.append(time.perf_counter() - begun)
            if isinstance(answer, str) or b"error" in answer[:40]:
                sys.exit(f"refused: {answer[:500]!r}")
            print(json.dumps(latencies), flush=True)


def command_of(contender: str, policy: str, port: int, theirs: Path) -> list[str]:
    """The command line of a server."""
    if contender in (THEIRS, BATCHING):
        here = Path(__file__).resolve()
        if policy == "stub":
            return [str(theirs), "-c", THEIR_SERVER, policy, str(port), str(contender == BATCHING)]
        packages = (theirs.parents[1] / "lib").glob("python*/site-packages")  # behind those that are here
        added = [str(here.parent), str(here.parents[1]), *map(str, packages)]
        return [sys.executable, "-c", THEIR_SERVER, policy, str(port), str(contender == BATCHING), *added]
    return [sys.executable, __file__, "--be", contender, policy, str(port)]


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process until the end of a `with` block."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def free_port() -> int:
    """A port that nobody listens at."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(server: subprocess.Popen[str], port: int) -> None:
    """Wait until a server lets clients in."""
    import socket

    until = time.monotonic() + START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > until:
                sys.exit(f"a server does not start: {server.args!r:.300}: {error}")
            time.sleep(0.1)


def their_python(work: Path) -> Path:
    """The interpreter of an environment with vla-eval, which is made if it is not there."""
    python = work / "vla-eval" / "bin" / "python"
    if not python.exists():
        venv.create(work / "vla-eval", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "vla-eval==0.8.0"], check=True)
    return python


# ----------------------------------------------------------------------------------------------------------- the report


class Running:
    """A server and its clients, which stay for all rounds and ask in turn."""

    def __init__(self, stack: ExitStack, contender: str, policy: str, clients: int, work: Path) -> None:
        theirs = contender in (THEIRS, BATCHING)
        port = free_port()
        message = work / f"{policy}-{'vla-eval' if theirs else 'openpi'}.msgpack"
        message.write_bytes(message_of(policy, "vla-eval" if theirs else "openpi"))
        log = stack.enter_context((work / f"{policy}-{contender.replace(', ', '-')}.log").open("w"))
        command = command_of(contender, policy, port, their_python(work))
        server = stack.enter_context(started(command, stdout=log, stderr=log))
        wait_for(server, port)
        asking = [sys.executable, __file__, "--client", str(port), str(message), "says" if theirs else "hears"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.clients = [stack.enter_context(started(asking, **pipes)) for _ in range(clients)]
        for each in self.clients:
            assert each.stdout is not None
            if each.stdout.readline() != "ready\n":
                sys.exit(f"a client of {contender} does not start; see {work}")

    def round(self, seconds: float) -> dict[str, float]:
        """Requests per second, and median and 95th percentile of their latencies [ms]."""
        for each in self.clients:
            assert each.stdin is not None
            each.stdin.write(f"{seconds}\n")
            each.stdin.flush()
        latencies: list[float] = []
        for each in self.clients:
            assert each.stdout is not None
            latencies += json.loads(each.stdout.readline() or "[]")
        if not latencies:
            sys.exit("no request was answered")
        middle, late = np.percentile(latencies, [50, 95])
        return {"requests_per_s": len(latencies) / seconds, "p50_ms": 1e3 * middle, "p95_ms": 1e3 * late}


def compare(policy: str, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let all contenders take turns, and sum up."""
    names = CONTENDERS[policy]
    with ExitStack() as stack:
        running = {name: Running(stack, name, policy, clients, options.work) for name in names}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for each in running.values():
            each.round(min(options.seconds, 0.5))  # what is done at the first request does not count
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                rounds[name].append(running[name].round(options.seconds))
    medians = {
        name: {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
        for name, found in rounds.items()
    }
    ours = medians[OURS]
    ratios = {name: round(ours["requests_per_s"] / medians[name]["requests_per_s"], 3) for name in names[1:]}
    return {
        "policy": policy,
        "clients": clients,
        "medians": medians,
        "requests_per_s_over": ratios,
        "median_latency_over_echo": round(ours["p50_ms"] / medians[ECHO]["p50_ms"], 3),
        "rounds": rounds,
    }


def main() -> None:
    """Compare, or be a server or a client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for vla-eval's environment and logs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--policies", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument("--be", nargs=3, metavar=("NAME", "POLICY", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=3, metavar=("PORT", "FILE", "GREETING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        name, policy, port = options.be
        (be_ours if name == OURS else be_echo)(policy, int(port))
        return
    if options.client:
        port, message, greeting = options.client
        be_client(int(port), Path(message), greeting)
        return
    if options.work is None:
        parser.error("--work: name a folder")
    options.work.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    results = []
    print(f"{'policy':8}{'clients':>8}  {'':20}{'requests/s':>12}{'p50 ms':>9}{'p95 ms':>9}{'ours over it':>14}")
    for policy in options.policies:
        for clients in options.clients:
            results.append(found := compare(policy, clients, options))
            for name, median in found["medians"].items():
                ratio = "" if name == OURS else f"{found['requests_per_s_over'][name]:.2f}"
                rate, middle, late = (median[key] for key in ("requests_per_s", "p50_ms", "p95_ms"))
                line = f"{policy:8}{clients:>8}  {name:20}{rate:12.1f}{middle:9.2f}{late:9.2f}{ratio:>14}"
                print(line, flush=True)
    machine = {"cores": len(os.sched_getaffinity(0)), "load_average": load, "python": platform.python_version()}
    if options.out is not None:
        told = {"machine": machine, "rounds": options.rounds, "seconds": options.seconds, "results": results}
        options.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
