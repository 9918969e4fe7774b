"""The Ray cluster of a run: joining it, looking at its machines, reserving room on them.

Nothing here waits without a deadline, and no cluster but the one that is named is ever joined, started or stopped.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil

from embodyrl.errors import UserError
from embodyrl.files import Closing
from embodyrl.placement.plan import WorkerSpec, inventory
from embodyrl.placement.ray_actor import Look, RayActor, look
from embodyrl.placement.run_plan import Machine, Plan
from embodyrl.placement.signals import STOPPING
from embodyrl.version import __version__

LABEL = "embodyrl"
"""Ray node label that says what a machine is for: `ray start --labels=embodyrl=train`."""
REACH_S = 3.0
"""Longest time to open a connection to a process of Ray that lives [s]."""
_ROLES = ("rank", "rollout", "simulators")
_FORWARDED = ("OMP_NUM_THREADS", "MUJOCO_GL", "PYOPENGL_PLATFORM", "HF_HUB_OFFLINE", "HF_HOME")
"""Variables of this process that those elsewhere get as well, if they are set."""


class ClusterError(UserError):
    """Raised when a cluster cannot be joined, or has not what a run needs."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True)
class _Place:
    """Part of the placement group for a process."""

    bundle: int
    gpus: float
    """Share of its GPU."""


class RayCluster(Closing):
    """The cluster that a config names, for the length of a block. Leaving it ends nothing but this run's processes.

    Args:
        address: `host:port` of its head.
        timeout_s: longest time for the cluster to answer [s].

    Raises:
        ClusterError: Ray is not installed, nobody answers, or this machine is not part of the cluster.
    """

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self.ray = _import_ray()
        """The package."""
        self._group: Any = None
        self._places: dict[tuple[str, int], _Place] = {}
        self._holder: Any = None
        self.gpu_here: str | None = None
        """GPU that Ray has assigned to the first rank, for CUDA_VISIBLE_DEVICES; None: none."""
        self._joined = self._join()
        try:
            self.here: str = self.ray.util.get_node_ip_address()
            """Name of this machine."""
            self._nodes = self._find_nodes()
        except BaseException:
            self.close()
            raise

    def _join(self) -> bool:
        """Join; returns whether it is for us to leave."""
        ray, (host, _, port) = self.ray, self.address.rpartition(":")
        if ray.is_initialized():
            if ray.get_runtime_context().gcs_address != self.address:
                raise ClusterError(
                    f"this program has joined the Ray cluster at {ray.get_runtime_context().gcs_address}, and "
                    f"placement.address is {self.address}: leave that one (ray.shutdown()), or name it"
                )
            return False
        if not _answers(host.strip("[]"), int(port)):
            raise ClusterError(
                f"no Ray cluster answers at {self.address}: on the machine that is to lead it, run `ray start --head "
                f"--node-ip-address={host} --port={port}`, on each other one `ray start --address={self.address}`"
            )
        own = {one.address for each in psutil.net_if_addrs().values() for one in each}
        # On the head's machine its address says which raylet is ours; elsewhere Ray finds the only one there is.
        leads = host in own or host.startswith("127.")
        try:
            with _signals_kept():
                ray.init(
                    address=self.address,
                    namespace=f"embodyrl-{os.getpid()}-{time.time_ns()}",
                    log_to_driver=False,
                    configure_logging=False,
                    **({"_node_ip_address": host} if leads else {}),
                )
        except Exception as error:  # Ray has no common class for what can go wrong here
            raise ClusterError(
                f"this machine cannot join the Ray cluster at {self.address} ({first_line(error)}): run `ray start "
                f"--address={self.address}` here, with the same versions of Python and Ray as there; a cluster that "
                "asks for a token needs RAY_AUTH_MODE=token in this environment, too"
            ) from error
        return True

    def _find_nodes(self) -> dict[str, Any]:
        """Return what Ray knows of each machine, by its address. Those that do not answer are left out: Ray takes a
        quarter of a minute to count a machine as lost, which may have come back meanwhile.

        Raises:
            ClusterError: this machine is not among them.
        """
        found = {}
        for node in self.ray.nodes():
            if node["Alive"] and _answers(node["NodeManagerAddress"], node["NodeManagerPort"]):
                found[node["NodeManagerAddress"]] = node
        if self.here not in found:
            raise ClusterError(
                f"this machine, {self.here}, is not among those of the Ray cluster at {self.address} that answer "
                f"({', '.join(sorted(found, key=_in_order)) or 'none'}): run `ray start --address={self.address}` here"
            )
        return found

    def machines(self) -> list[Machine]:
        """Return the machines that are up, this one first, the others by address.

        Raises:
            ClusterError: embodyrl is missing on one of them, or is another version, or Ray there fails.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._nodes = self._find_nodes()
        names = sorted(self._nodes, key=lambda name: (name != self.here, _in_order(name)))
        task = self.ray.remote(num_cpus=0, max_retries=0)(look)
        looks = {
            name: task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._nodes[name]["NodeID"], soft=False)
            ).remote()
            for name in names
            if name != self.here
        }
        found = {self.here: Look(__version__, inventory())}
        for name, pending in looks.items():
            try:
                found[name] = self.ray.get(pending, timeout=self._timeout_s)
            except self.ray.exceptions.GetTimeoutError:
                raise ClusterError(
                    f"machine {name} of the cluster did not answer within placement.start_timeout_s = "
                    f"{self._timeout_s:g} s"
                ) from None
            except self.ray.exceptions.RayError as error:
                if not self.is_up(name):
                    continue  # it has gone meanwhile
                raise ClusterError(
                    f"machine {name} of the cluster cannot run embodyrl ({_last_line(error)}): install embodyrl "
                    f"{__version__} with `embodyrl[ray]` in the Python that runs Ray there; if it is, see Ray's logs"
                ) from None
            if found[name].version != __version__:
                raise ClusterError(
                    f"machine {name} has embodyrl {found[name].version}, and this is {__version__}: install the same"
                )
        return [
            Machine(name=name, inventory=found[name].inventory, labels=self._labels(name), address=name)
            for name in names
            if name in found
        ]

    def _labels(self, name: str) -> tuple[str, ...]:
        label = (self._nodes[name].get("Labels") or {}).get(LABEL)
        return () if label is None else (label,)

    def reserve(self, plan: Plan, *, timeout_s: float) -> None:
        """Reserve room for all processes of a plan, in one placement group.

        Raises:
            ClusterError: there is not; says what is missing.
        """
        bundles, shares = self._bundles(plan)
        self._refuse_impossible(bundles)
        self._group = self.ray.util.placement_group(bundles, strategy="PACK")
        done, _ = self.ray.wait([self._group.ready()], timeout=timeout_s)
        if not done:
            raise ClusterError(
                f"the cluster at {self.address} had no room for this run within placement.start_timeout_s = "
                f"{timeout_s:g} s ({self._missing(bundles)}): wait for other jobs to end, or ask for fewer processes"
            )
        users = Counter(shares.values())
        self._places = {
            key: _Place(bundle, 1.0 / users[bundle] if "GPU" in bundles[bundle] else 0.0)
            for key, bundle in shares.items()
        }
        if self._places[("rank", 0)].gpus:
            self._holder = self.actor("rank", 0)
            self.gpu_here = self.ray.get(self._holder.gpus.remote(), timeout=timeout_s)

    def _missing(self, bundles: Sequence[dict[str, float]]) -> str:
        """Return what there is not enough of, by machine."""
        from ray._private.state import available_resources_per_node

        free, short = available_resources_per_node(), []
        for machine, node in self._nodes.items():
            wanted = _total([bundle for bundle in bundles if f"node:{machine}" in bundle])
            here = free.get(node["NodeID"])
            if here is None:
                short.append(f"machine {machine} is gone")
                continue
            short += [
                f"{name} of machine {machine}: {here.get(name, 0.0):g} free, {wanted[name]:g} wanted"
                for name in ("GPU", "CPU")
                if wanted[name] > here.get(name, 0.0)
            ]
        return "; ".join(short) or "the machines have room, but Ray did not give it"

    def _bundles(self, plan: Plan) -> tuple[list[dict[str, float]], dict[tuple[str, int], int]]:
        """Return bundles of resources, and the bundle of each process; those that share a GPU share one."""
        bundles: list[dict[str, float]] = []
        shares: dict[tuple[str, int], int] = {}
        by_gpu: dict[Any, int] = {}
        for spec in [spec for role in _ROLES for spec in plan.role(role)]:
            resources = self._nodes[spec.machine]["Resources"]
            key = (spec.machine, spec.gpus) if spec.gpus and resources.get("GPU") else None
            if key in by_gpu:
                shares[spec.role, spec.rank] = by_gpu[key]
                continue
            bundle = {f"node:{spec.machine}": 0.001}
            if resources.get("CPU"):
                bundle["CPU"] = self._cpus(plan, spec, resources["CPU"])
            if key is not None:
                bundle["GPU"] = 1.0
                by_gpu[key] = len(bundles)
            shares[spec.role, spec.rank] = len(bundles)
            bundles.append(bundle)
        return bundles, shares

    @staticmethod
    def _cpus(plan: Plan, spec: WorkerSpec, offered: float) -> float:
        """Return the CPUs to reserve for a process and its simulators: less than that where there are not so many."""

        def processes(one: WorkerSpec) -> int:
            simulators = plan.simulators_of(one) if one.slots else []
            return 1 + sum(each.machine == one.machine for each in simulators)

        here = [one for role in _ROLES for one in plan.role(role) if one.machine == spec.machine]
        wanted = processes(spec) * min(1.0, offered / sum(map(processes, here)))
        return float(int(wanted)) if wanted >= 1.0 else int(wanted * 1000) / 1000

    def _refuse_impossible(self, bundles: Sequence[dict[str, float]]) -> None:
        """Refuse at once what no waiting can bring."""
        for name, node in self._nodes.items():
            wanted = sum(bundle.get("GPU", 0.0) for bundle in bundles if f"node:{name}" in bundle)
            offered = node["Resources"].get("GPU", 0.0)
            if wanted > offered:
                raise ClusterError(
                    f"machine {name} offers Ray {offered:g} GPUs, and {wanted:g} are wanted there: start fewer "
                    "processes, or Ray there with a larger --num-gpus"
                )

    def actor(self, role: str, rank: int, machine: str | None = None) -> Any:
        """Start an actor where a process belongs.

        Args:
            role, rank: of the process.
            machine: its machine, where nothing was reserved for it.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        place = self._places.get((role, rank))
        strategy: Any
        if place is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
        else:
            strategy = NodeAffinitySchedulingStrategy(self._nodes[machine or self.here]["NodeID"], soft=False)
        kind = self.ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"beside": 3})(_actor_class(self.ray))
        variables = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
        gpus = 0.0 if place is None else place.gpus
        return kind.options(num_gpus=gpus, scheduling_strategy=strategy).remote(variables)

    def is_up(self, machine: str) -> bool:
        """Return whether Ray's process on a machine answers; Ray itself takes longer to count one as lost."""
        node = self._nodes[machine]
        return _answers(node["NodeManagerAddress"], node["NodeManagerPort"])

    def give_back(self) -> None:
        """Give back what was reserved. May be called again."""
        if self._holder is not None:
            self.ray.kill(self._holder)
            self._holder = None
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)
            self._group = None
        self._places = {}

    def close(self) -> None:
        """Give back what was reserved, and leave."""
        self.give_back()
        if self._joined:
            self._joined = False
            self.ray.shutdown()


def _actor_class(ray: Any) -> type:
    """Return the class of actors, with calls that Ray runs beside the others."""

    class WatchedRayActor(RayActor):
        watch = ray.method(concurrency_group="beside")(RayActor.watch)
        stacks = ray.method(concurrency_group="beside")(RayActor.stacks)

    return WatchedRayActor


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore at the end of a block what signals to this program do: Ray would end it by SIGTERM, and print a trace."""
    if threading.current_thread() is not threading.main_thread():  # where nobody can change it
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def signals_through() -> Iterator[None]:
    """Let what the handler of a signal raises in a block through; Ray makes a SystemError of it while it waits."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None


def _import_ray() -> Any:
    # Explicitly, because Ray otherwise goes by whether a token lies about on this machine.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray prints hundreds of lines of a raylet that was killed into the output of every program of the cluster.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            f"placement.backend is ray, but Ray cannot be imported ({error}): pip install 'embodyrl[ray]'"
        ) from error
    return ray


def _answers(host: str, port: int) -> bool:
    """Return whether something listens at an address."""
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def _total(bundles: Sequence[dict[str, float]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return total


def _in_order(address: str) -> tuple[Any, ...]:
    """Return a key by which addresses are sorted as numbers."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in address.split("."))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]
