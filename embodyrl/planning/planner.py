"""Plan a run: parameters, batches, and memory by phase. Nothing is started, and no weights are read.

The policy's own code runs once on fake tensors (`dry_run`); the rest is arithmetic (`memory`). For a run that does not
fit, settings are sought with which it would, by planning with each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.config import ConfigError
from embodyrl.config.build import with_values
from embodyrl.config.issues import KeyPath, dotted
from embodyrl.config.needs import Learns
from embodyrl.config.rules import action_dim, is_supervised, state_dim, task_descriptions
from embodyrl.config.schema import AUTO, Config, Observe, Offload, Precision, RolloutMode, Schedule
from embodyrl.engine.large import LARGE_ROW, LEARNED_FROM
from embodyrl.envs.types import ActionField, Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.models.flow.config import FlowSizes
from embodyrl.models.saved import LARGE, weight_type
from embodyrl.models.vla.config import WeightType
from embodyrl.placement.ranks import blocks_of, shards_of
from embodyrl.planning.choices import Choice, Fit, candidates, choose_memory, is_large
from embodyrl.planning.memory import (
    Learning,
    Need,
    acting_need,
    copied_to_save,
    kept_away,
    rollout_need,
    train_need,
    waiting_need,
)
from embodyrl.registry import nothing_collected
from embodyrl.rollout.needs import images_are_read
from embodyrl.rollout.replay_fields import row_bytes

if TYPE_CHECKING:  # importing torch takes seconds, and not every plan needs it
    from embodyrl.planning.dry_run import Traced

DTYPE: KeyPath = ("model", "dtype")
GIB, MIB, FLOAT = 2**30, 2**20, 4
ACTION_DIM, PROPRIO_DIM, WORDS = 7, 32, 16
"""Assumed sizes of actions, states and task descriptions (words) until a simulator is started."""
CUDA_CONTEXT = 0.6 * GIB
"""GPU memory of CUDA itself, and fragmentation of its allocator [bytes]."""
PROCESS = 0.6 * GIB
"""Main memory of the main process after importing torch [bytes]."""
SMALL_COLUMNS = 8 * 6 + 2 * FLOAT + 3
"""Bytes of a chunk in scalar columns: origin, values, flags."""
MOST_SETTINGS, MOST_ADVICE = 3, 3
"""Settings that are tried together, and sets of them that are proposed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory of the machine."""

    cuda: bool
    """Whether the policy runs on a GPU."""
    gpu: float | None
    """Memory of that GPU [bytes]; None: no GPU, or unknown."""
    host: float | None
    """Main memory [bytes]; None: unknown."""
    cores: int = 1
    """CPUs that can be busy at once."""
    ranks_here: int | None = None
    """Ranks on each machine of the run; None: all ranks are on one."""


@dataclass(frozen=True, kw_only=True)
class Simulators:
    """Spec and memory that were measured by starting one simulator process."""

    spec: SimulatorSpec
    bytes_per_worker: int
    """Memory that only this process uses."""
    bytes_shared: int
    """Memory that all such processes share, once: packages that the process imported from which they are forked."""

    def bytes_of(self, workers: int) -> int:
        """Return the memory of a number of processes."""
        return self.bytes_shared + workers * self.bytes_per_worker


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Numbers of chunks of an iteration, and of the batches that they are trained in."""

    decisions_per_iteration: int
    """Maximum number of chunks; samples in supervised learning."""
    optimizer_steps_per_iteration: int
    minibatch: int
    ranks: int
    """Ranks that share minibatches, and envs if there are no rollout workers."""
    rollout_workers: int
    """Processes that roll out and do not learn; 0: the ranks roll out."""
    micro_batch: int
    """Per rank."""
    slots_decided_at_once: int
    """Maximum envs that the policy acts for at once, per process; the critic reads as many observations after the
    rollout."""


def batches_of(config: Config) -> Batches:
    """Return the batch sizes that follow from the settings."""
    rollout, slots, ranks = config.rollout, config.env.num_envs, ranks_of(config)
    size, critic = config.algorithm.batches(config), config.algorithm.needs(config).critic
    block = math.ceil(slots / blocks_of(config, ranks))
    halved = rollout.schedule is Schedule.pipeline and not critic
    return Batches(
        decisions_per_iteration=size.decisions,
        optimizer_steps_per_iteration=size.steps,
        minibatch=size.minibatch,
        ranks=ranks,
        rollout_workers=config.placement.rollout.workers,
        micro_batch=min(config.engine.micro_batch_size or size.minibatch, math.ceil(size.minibatch / ranks)),
        slots_decided_at_once=math.ceil(block / 2) if halved else block,
    )


def ahead(config: Config) -> int:
    """Return the rollouts that are collected ahead of learning."""
    return config.rollout.max_staleness if config.rollout.mode is RolloutMode.async_ else 0


def ranks_of(config: Config) -> int:
    """Return the number of ranks of the run; 1 if only torchrun knows it."""
    ranks = config.engine.parallel.world_size
    return ranks if isinstance(ranks, int) else 1


@dataclass(frozen=True, kw_only=True)
class Look:
    """Sizes of a policy, from a dry run."""

    origin: str
    """Origin of its shape, for display."""
    tokens: int
    """Sequence length for one chunk."""
    cache: int
    """KV cache of one env [bytes]."""
    traced: Traced
    recordable: bool
    """Whether a decision can be a CUDA graph."""
    action_dim: int
    """Numbers of an action that is executed."""
    beside: Mapping[str, int]
    """What learns beside the policy, by name [bytes]."""
    flow: FlowSizes | None
    """Sizes of a policy that is steered through its noise."""


class Planner:
    """Plans configs for one machine.

    Args:
        limits: memory of the machine.
        workers: number of simulator processes.
        simulators: measurement of one of them, or None.
    """

    def __init__(self, limits: Limits, workers: int, simulators: Simulators | None) -> None:
        self.limits = {"gpu": limits.gpu, "host": limits.host}
        self._machine = limits
        self._cuda = limits.cuda
        self._workers = workers
        self._simulators = simulators
        self._looks: dict[str, Look] = {}

    def plan(self, config: Config) -> dict[str, Any]:
        """Return the plan as plain data; sizes in MiB.

        Raises:
            UserError: the model cannot be built: it does not fit the simulator, or lacks a package.
        """
        config, choices = self.chosen(config)
        look, needs = self._look(config), self._needs(config)
        weights, known = look.traced.weights, self._simulators
        return {
            "choices": [asdict(choice) for choice in (*choices, *self._consequences(config, look))],
            "model": {
                "name": config.model.name,
                "origin": look.origin,
                "assumed": assumption(config) if known is None else None,
                "parameters": weights.parameters,
                "trainable": weights.trainable,
                "tokens_per_observation": look.tokens,
            },
            "learning": asdict(batches_of(config)),
            "traffic": self._traffic(config, look.traced),
            "rollout_traffic": self._rollout_traffic(config, look.traced),
            "simulator_traffic": self._simulator_traffic(config),
            "lag": ahead(config) if config.rollout.mode is RolloutMode.async_ else None,
            "needs": {place: {phase: _in_mib(need) for phase, need in at.items()} for place, at in needs.items()},
            "limits": {place: None if limit is None else _mib(limit) for place, limit in self.limits.items()},
            "simulators_per_worker": None if known is None else _mib(known.bytes_per_worker),
            "simulators_shared": None if known is None else _mib(known.bytes_shared),
        }

    def chosen(self, config: Config) -> tuple[Config, list[Choice]]:
        """Return the config with the values that `auto` has on this machine, and the reasons for them."""
        config, choices = self._with_weight_type(config)
        values, found = self.choose(config)
        return with_values(config, values), [*choices, *found]

    def choose(self, config: Config) -> tuple[Mapping[KeyPath, Any], list[Choice]]:
        """Return values for the settings that share out memory (`choices.candidates`), and the reasons for them."""
        options = list(candidates(config, ranks_of(config), self._ranks_here(config)))
        return choose_memory(self._with_weight_type(config)[0], options, self._fit)

    def _with_weight_type(self, config: Config) -> tuple[Config, list[Choice]]:
        """Return the config with the type that weights are held in, and the reason for it."""
        if getattr(config.model, "dtype", None) is not WeightType.auto:
            return config, []
        held = weight_type(config.model, precision=config.engine.precision, gpu=self._cuda)
        if config.engine.precision is Precision.float32:
            why = "as engine.precision"
        elif config.model.checkpoint is None:
            why = "random weights"
        elif self._cuda:
            why = "on a GPU"
        else:
            why = "as in the checkpoint" if is_large(config.model) else "a small model on the CPU"
        return with_values(config, {DTYPE: held}), [Choice(setting=dotted(DTYPE), value=held, why=why)]

    def _fit(self, config: Config) -> Fit:
        """Return how full the fullest place would be; one whose size is not known counts as full. CUDA graphs do not
        count, since a run can do without them."""
        needs = self._needs_of(config, self._look(config), learning_of(config, self._ranks_here(config)))
        fits = [
            Fit(need=max(need.total for need in at.values()), limit=self.limits[place]) for place, at in needs.items()
        ]
        return max(fits, key=lambda fit: 1.0 if fit.limit is None else fit.need / fit.limit)

    def _ranks_here(self, config: Config) -> int:
        return self._machine.ranks_here or ranks_of(config)

    def _consequences(self, config: Config, look: Look) -> Iterator[Choice]:
        """Yield the choices that the engine makes from its policy and device."""
        from embodyrl.engine.compute import threads_for

        engine = config.engine
        if engine.precision is Precision.auto:
            kind = str(look.traced.precision).removeprefix("torch.")
            why = "fewer bits are not faster here"
            if kind == Precision.bfloat16:
                why = "as the weights" if getattr(config.model, "dtype", None) == kind else "a model of layers on a GPU"
            yield Choice(setting="engine.precision", value=kind, why=why)
        if engine.threads == AUTO:
            here, cores, weights = self._ranks_here(config), self._machine.cores, look.traced.weights.parameters
            why = f"{cores} cores" + (f", {here} ranks" if here > 1 else "") if weights >= LARGE else "a small model"
            yield Choice(setting="engine.threads", value=threads_for(weights, cores, here), why=why)
        if self._cuda and engine.cuda_graphs:
            settings = learning_of(config, self._ranks_here(config))
            why = "decisions need nothing from the host" if look.recordable else "decisions wait for the host"
            value, why = look.recordable and not settings.sharded, "weights are sharded" if settings.sharded else why
            if value and self._with_graphs(config, look, settings) is None:
                value, why = False, f"there is no room for {len(graphs_of(config))} of them"
            yield Choice(setting="engine.cuda_graphs", value=value, why=why)

    def needs(self, config: Config) -> dict[str, dict[str, Need]]:
        """Return the memory of each place (gpu, host) in each phase."""
        return self._needs(self.chosen(config)[0])

    def _needs(self, config: Config) -> dict[str, dict[str, Need]]:
        look, settings = self._look(config), learning_of(config, self._ranks_here(config))
        return self._with_graphs(config, look, settings) or self._needs_of(config, look, settings)

    def _with_graphs(self, config: Config, look: Look, settings: Learning) -> dict[str, dict[str, Need]] | None:
        """Return the memory with CUDA graphs of decisions. None if there are none: a run that has no room for them goes
        on without."""
        if not (self._cuda and config.engine.cuda_graphs and look.recordable) or settings.sharded:
            return None
        needs = self._needs_of(config, look, replace(settings, graphs=graphs_of(config)))
        limit, without = self.limits["gpu"], self._needs_of(config, look, settings)
        grown = [need.total for phase, need in needs["gpu"].items() if need.total > without["gpu"][phase].total]
        return None if limit is not None and any(total > limit for total in grown) else needs

    def _needs_of(self, config: Config, look: Look, settings: Learning) -> dict[str, dict[str, Need]]:
        """Return the memory of each place in each phase, for settings of the engine and the algorithm."""
        weights, lines = look.traced.weights, look.traced.lines
        buffer, on_device = self._buffer(config, look.traced)
        simulators = 0 if self._simulators is None else self._simulators.bytes_of(self._workers)
        copied = copied_to_save(weights, settings) if config.run.save_async else 0
        host = {"main process": int(PROCESS), "rollout buffer": buffer}
        if is_supervised(config):
            host["demonstrations"] = config.data.memory_mib * MIB
        host |= self._replay(config)
        apart_of_buffer = self._cuda or config.algorithm.needs(config).replay is not None
        train = train_need(weights, lines, settings, batch=on_device if apart_of_buffer else 0)
        workers = config.placement.rollout.workers
        # What a rank, and what a rollout worker needs in each phase.
        phases = {"rollout": rollout_need(weights, lines, look.cache, settings), "train": train}
        apart = {"rollout": Need(), "train": Need()}
        if workers:
            phases["rollout"] = waiting_need(weights, settings)
            acting = acting_need(weights, lines, look.cache, settings)
            held = Need(parts={"weights": weights.weight_bytes})
            apart = {"rollout": acting, "train": acting if config.rollout.mode is RolloutMode.async_ else held}
            host["rollout buffer"] = 0  # a rank learns from those of the workers

        def on_host(parts: Mapping[str, int], of_worker: Mapping[str, int]) -> Need:
            """Return the main memory of a machine's ranks and of all rollout workers."""
            own = {name: self._ranks_here(config) * size for name, size in parts.items()}
            theirs = {"processes": int(PROCESS), **of_worker} if workers else {}
            own |= {f"rollout workers' {name}": workers * size for name, size in theirs.items()}
            at_once = 1 + ahead(config)
            each = {"batch": self._batch_bytes(config, look.traced), "weights": weights.gradient_bytes}
            shared = {f"{name} in shared memory": at_once * size for name, size in each.items() if workers}
            return Need(parts=own | shared | {"simulators": simulators, "copy to be saved": copied})

        if not self._cuda:
            return {"host": {name: on_host({**need.parts, **host}, apart[name].parts) for name, need in phases.items()}}
        both = on_host(host | {"offloaded": kept_away(weights, settings)}, {})
        return {"gpu": self._on_gpu(config, phases, apart), "host": {"both": both}}

    def _replay(self, config: Config) -> dict[str, int]:
        """Return the main memory of a rank's share of the replay, and of what learns from it beside the policy; empty
        for algorithms without one."""
        settings, look = config.algorithm.needs(config).replay, self._look(config)
        if settings is None:
            return dict(look.beside)
        sizes = {"proprio_dim": self._spec(config).proprio_dim, "action_dim": look.action_dim}
        # Of a larger replay as much is in memory, or is being read from the disk.
        size = settings.capacity * row_bytes(config.algorithm.fields(config, **sizes, flow=look.flow))
        held = math.ceil(min(size, settings.memory_mib * MIB) / ranks_of(config))
        return {"replay": held, **look.beside}

    def _on_gpu(self, config: Config, phases: Mapping[str, Need], apart: Mapping[str, Need]) -> dict[str, Need]:
        """Return the memory of the GPU that is filled the most in each phase."""
        rollout, context = config.placement.rollout, {"CUDA": int(CUDA_CONTEXT)}
        if rollout.workers and rollout.share_gpus:
            together = math.ceil(rollout.workers / ranks_of(config))  # on the GPU of a rank
            context = {"CUDA": (1 + together) * int(CUDA_CONTEXT)}
            theirs = {
                name: {f"rollout workers' {part}": together * size for part, size in need.parts.items()}
                for name, need in apart.items()
            }
            return {name: Need(parts={**need.parts, **theirs[name], **context}) for name, need in phases.items()}
        fullest = {
            name: max(need, apart[name], key=lambda each: each.total) if rollout.workers else need
            for name, need in phases.items()
        }
        return {name: Need(parts={**need.parts, **context}) for name, need in fullest.items()}

    def excesses(self, config: Config) -> dict[str, tuple[int, float]]:
        """Return the places where a config does not fit, with the needed and the available memory [bytes]."""
        worst = {place: max(need.total for need in at.values()) for place, at in self.needs(config).items()}
        limits = {place: limit for place, limit in self.limits.items() if limit is not None}
        return {place: (need, limits[place]) for place, need in worst.items() if need > limits.get(place, math.inf)}

    def _columns(self, config: Config, traced: Traced) -> tuple[int, dict[str, int]]:
        """Return the bytes of a chunk: in columns that are small, and by name in those that may be large."""
        spec, chunk = self._spec(config), config.rollout.chunk_size
        looks = chunk if config.rollout.observe is Observe.every_step else 0
        images, proprio = spec.num_images * math.prod(spec.image_size) * 3, FLOAT * spec.proprio_dim
        acted = FLOAT * (chunk * spec.action_dim + traced.entries)
        small = proprio + acted + (FLOAT + 1) * chunk + SMALL_COLUMNS
        kept = not traced.trace_holds_images or images_are_read(config)
        return small, {
            "images": images * kept,
            "step_images": looks * images,
            "step_proprio": looks * proprio,
            "trace": traced.trace_bytes,
        }

    def _buffer(self, config: Config, traced: Traced) -> tuple[int, int]:
        """Return the bytes of a rank's rollout buffer, and of what is learned from on its device."""
        if is_supervised(config):
            return 0, 0
        batches, (small, others) = batches_of(config), self._columns(config, traced)
        chunks = batches.decisions_per_iteration
        needs = config.algorithm.needs(config)
        if needs.replay is not None:
            # Learned from are minibatches of the replay, with what followed; images once more when they are shifted.
            observed = others["images"] * (1 + needs.shifts_images) + FLOAT * self._spec(config).proprio_dim
            share = math.ceil(batches.minibatch / batches.ranks)
            host = (small + sum(others.values())) * math.ceil(chunks / batches.ranks)
            return host, (small + 2 * observed) * share
        host = device = small * chunks
        for name, size in others.items():
            learned, here, at_once = name in LEARNED_FROM, chunks, chunks
            if batches.ranks > 1 and size > LARGE_ROW:
                # A rank has the rows that it collected, and those that it learns from at once.
                at_once = math.ceil(batches.minibatch / batches.ranks)
                here = chunks // batches.ranks + learned * at_once
            host += size * here
            if learned and name not in traced.on_host:
                device += size * at_once
        return host, device

    def _batch_bytes(self, config: Config, traced: Traced) -> int:
        """Return the bytes of the batch of an iteration; 0 if it consists of demonstrations."""
        if is_supervised(config):
            return 0
        small, others = self._columns(config, traced)
        return (small + sum(others.values())) * batches_of(config).decisions_per_iteration

    def _rollout_traffic(self, config: Config, traced: Traced) -> dict[str, float]:
        """Return the MiB that rollout workers exchange with ranks in an iteration; empty if there are none."""
        workers = config.placement.rollout.workers
        if not workers:
            return {}
        learned = workers * traced.weights.gradient_bytes  # in the types that weights are held in
        return {"batch": _mib(self._batch_bytes(config, traced)), "weights": _mib(learned)}

    def _simulator_traffic(self, config: Config) -> float | None:
        """Return the MiB of observations that come from simulators on other machines in an iteration; None: there are
        no such simulators."""
        if config.placement.simulators.nodes is None:
            return None
        spec = self._spec(config)
        height, width = spec.image_size
        observation = spec.num_images * height * width * 3 + FLOAT * spec.proprio_dim
        each = 1 + config.rollout.chunk_size * (config.rollout.observe is Observe.every_step)
        return _mib(observation * each * batches_of(config).decisions_per_iteration)

    def _traffic(self, config: Config, traced: Traced) -> dict[str, float]:
        """Return the MiB that a rank gets from others in an iteration, without shards of weights and gradients; empty
        if there are no others."""
        batches, weights = batches_of(config), traced.weights
        if batches.ranks == 1:
            return {}
        share = (batches.ranks - 1) / batches.ranks  # of what does not come from the rank itself
        gradients = 2 * share * FLOAT * weights.trainable * batches.optimizer_steps_per_iteration
        sharded = learning_of(config, self._ranks_here(config)).sharded
        summed = {} if sharded else {"gradients": _mib(int(gradients))}
        if is_supervised(config):
            return summed
        passes, (small, others) = config.algorithm.batches(config).passes, self._columns(config, traced)
        large = {name: size for name, size in others.items() if size > LARGE_ROW}
        small += sum(others.values()) - sum(large.values())
        fetched = sum(size for name, size in large.items() if name in LEARNED_FROM) / batches.ranks
        chunks = batches.decisions_per_iteration
        return {
            "columns": _mib(int(share * small * chunks)),
            "images and traces": _mib(int(share * fetched * passes * chunks)),
            **summed,
        }

    def _spec(self, config: Config) -> SimulatorSpec:
        return assumed_spec(config) if self._simulators is None else self._simulators.spec

    def _look(self, config: Config) -> Look:
        """Return the sizes of a policy, cached by the settings that affect them."""
        engine, chunk = config.engine, config.rollout.chunk_size
        changes = engine.precision, engine.lora, engine.gradient_checkpointing
        kind = repr((config.model, chunk, changes, config.algorithm))
        if kind not in self._looks:
            self._looks[kind] = self._looked(config)
        return self._looks[kind]

    def _looked(self, config: Config) -> Look:
        with nothing_collected():  # they import torch
            from embodyrl.methods.learner import learner_class
            from embodyrl.planning.dry_run import trace
            from embodyrl.planning.weightless import build_weightless, steered_weightless

        spec, chunk = self._spec(config), config.rollout.chunk_size
        task_description = max(spec.tasks.values(), key=len)
        policy, origin = build_weightless(config.model, spec, chunk_size=chunk)
        flow, needs = None, config.algorithm.needs(config)
        if needs.steering is not None:
            policy = steered_weightless(policy, needs.steering)
            flow = policy.base.sizes
        states = policy.spec.proprio_dim

        few = 2
        observation = Observation(
            images=np.zeros((few, spec.num_images, *spec.image_size, 3), np.uint8) if spec.cameras else None,
            proprio=np.zeros((few, states), np.float32) if states else None,
            task_descriptions=[task_description] * few,
        )
        kind, imitation = (
            None if needs.alone else learner_class(config.algorithm),
            (Learns.imitation, Learns.weighted_imitation),
        )
        traced = trace(
            policy,
            observation,
            config.engine,
            cuda=self._cuda,
            supervised=needs.alone or needs.learns in imitation,
            learner=kind,
            algorithm=config.algorithm,
        )
        # Asked for only now: some policies learn from the first observation how many images there are.
        return Look(
            origin=origin,
            tokens=policy.tokens_per_observation(task_description),
            cache=policy.cache_bytes(task_description),
            traced=traced,
            recordable=policy.acts_on_device,
            action_dim=policy.spec.action_dim,
            beside={} if kind is None else kind.memory(policy, config.algorithm, spec, config.seed),
            flow=flow,
        )


def assumption(config: Config) -> str:
    """Return a text about the sizes that `assumed_spec` assumes."""
    guessed = [
        f"{what} of {size} numbers"
        for what, size, known in (
            ("states", PROPRIO_DIM, state_dim(config)),
            ("actions", ACTION_DIM, action_dim(config)),
        )
        if not known
    ]
    if len(task_descriptions(config)) < len(config.env.tasks):
        guessed.append(f"task descriptions of {WORDS} words")
    return ", ".join(guessed)


def assumed_spec(config: Config) -> SimulatorSpec:
    """Return an assumed spec for a simulator that was not started; cameras and times are the config's."""
    env, size = config.env, action_dim(config) or ACTION_DIM
    entries = ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * size, high=(1.0,) * size)
    return SimulatorSpec(
        tasks=dict.fromkeys(env.tasks, " ".join(["word"] * WORDS)) | task_descriptions(config),
        actions=(entries,),
        proprio_dim=state_dim(config) or PROPRIO_DIM,
        max_episode_steps=env.known_time_limit or 1,
        control_frequency=1.0,
        cameras=tuple(env.cameras),
        image_size=(env.image_size[0], env.image_size[1]) if env.cameras else (0, 0),
        frames=env.frames,
    )


def learning_of(config: Config, ranks_here: int) -> Learning:
    """Return the settings that determine memory, with `ranks_here` ranks on each machine."""
    batches, engine = batches_of(config), config.engine
    return Learning(
        deciding_samples=batches.slots_decided_at_once,
        minibatch=batches.minibatch,
        micro_batch=batches.micro_batch,
        # With adapters, the base model with its initial heads is the reference.
        reference=config.algorithm.needs(config).reference and not engine.lora.rank,
        initial_heads=config.algorithm.needs(config).reference and engine.lora.rank > 0,
        master_weights=engine.optimizer.master_weights,
        offload_optimizer=engine.offload is not Offload.none,
        offload_reference=engine.offload is Offload.all,
        ranks=batches.ranks,
        shards=shards_of(engine.parallel.backend, batches.ranks, ranks_here),
    )


def graphs_of(config: Config) -> list[int]:
    """Return the envs that each CUDA graph decides for, of the most that are held at a time: in a rollout one for each
    group of envs, and where envs drop out, as at the end of every evaluation, one for each number of them."""
    from embodyrl.engine.graphs import MOST

    batches = batches_of(config)
    size, processes = batches.slots_decided_at_once, batches.rollout_workers or batches.ranks
    groups = math.ceil(math.ceil(config.env.num_envs / processes) / size)
    return [*([size] * groups), *range(size - 1, 0, -1)][:MOST]


def _mib(size: float) -> float:
    return round(size / MIB, 2)


def _in_mib(need: Need) -> dict[str, float]:
    """Return the parts that are not 0, and their sum, in MiB."""
    return {name: _mib(size) for name, size in need.parts.items() if size} | {"total": _mib(need.total)}


def remedies(config: Config) -> Iterator[list[str]]:
    """Yield settings that save memory, the least costly first. Each may have several values, the mildest first."""
    micro, slots = batches_of(config).micro_batch, config.env.num_envs
    yield [f"engine.micro_batch_size={2**power}" for power in range(micro.bit_length() - 1, -1, -1) if 2**power < micro]
    yield ["engine.gradient_checkpointing=true"]
    yield ["engine.offload=optimizer", "engine.offload=all"]
    yield ["model.dtype=bfloat16"]
    yield ["engine.lora.rank=32"]
    yield ["engine.optimizer.name=adamw_8bit"]
    yield ["engine.optimizer.master_weights=false"]
    yield ["rollout.schedule=pipeline"]
    yield [f"env.num_envs={slots // parts}" for parts in (2, 4, 8) if slots % parts == 0]


class Adviser:
    """Plans a config with other settings."""

    def __init__(self, planner: Planner, load: Callable[[Sequence[str]], Config]) -> None:
        self._planner, self._load = planner, load
        self._known: dict[tuple[str, ...], bool] = {}

    def advise(self, config: Config) -> list[list[str]]:
        """Return the smallest sets of settings with which a config would fit; empty if none helps."""
        known = [values for values in remedies(config) if values and self._changes(config, values[-1])]
        for count in range(1, MOST_SETTINGS + 1):
            found = []
            for chosen in combinations(known, count):
                if self._fits([values[-1] for values in chosen]):
                    found.append(self._mildest(chosen))
                if len(found) == MOST_ADVICE:
                    break
            if found:
                return found
        return []

    def _mildest(self, chosen: Sequence[list[str]]) -> list[str]:
        """Return each setting with the mildest value that is enough."""
        settings = [values[-1] for values in chosen]
        for number, values in enumerate(chosen):
            for value in values:
                trial = [*settings[:number], value, *settings[number + 1 :]]
                if self._fits(trial):
                    settings = trial
                    break
        return settings

    def _changes(self, config: Config, setting: str) -> bool:
        """Return whether a setting is valid and changes the config."""
        try:
            return self._load([setting]) != config
        except ConfigError:
            return False

    def _fits(self, settings: Sequence[str]) -> bool:
        key = tuple(settings)
        if key not in self._known:
            try:
                changed = self._load(settings)
                self._known[key] = not self._planner.excesses(changed)
            except UserError:  # these settings do not go together, or not with this model
                self._known[key] = False
        return self._known[key]
