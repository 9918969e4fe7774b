"""Parts of a run, each built from a loaded config: simulators, engine, demonstrations, replay, sinks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from embodyrl.config import LoadedConfig, to_plain
from embodyrl.config.build import flat
from embodyrl.config.rules import can_learn
from embodyrl.config.schema import Config, EngineConfig, LoraConfig, ModelConfig, Observe, Precision
from embodyrl.data.experts import Demonstrator
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.manager import Simulators, start_env_manager
from embodyrl.envs.manager.remote import RemoteManager
from embodyrl.errors import without_controls
from embodyrl.models.saved import from_own_folder, read_steering, stands_alone, stored_type, weight_type, with_kept
from embodyrl.models.vla.config import WeightType
from embodyrl.placement.cuda import set_up_cuda
from embodyrl.placement.plan import inventory, policy_gpu
from embodyrl.placement.ranks import SINGLE_RANK, RankInfo, blocks_of, own_blocks, own_share
from embodyrl.placement.transport.line import Address
from embodyrl.registry import SINKS, SupportedModel, nothing_collected
from embodyrl.runner.rundir import RunDir
from embodyrl.runner.stopping import end_program
from embodyrl.runs import WORKER_LOGS
from embodyrl.screen import say
from embodyrl.tracking import Sink, SinkContext

if TYPE_CHECKING:
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions
    from embodyrl.engine.compute import Blocks
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.engine.parallel import Ranks
    from embodyrl.methods.learner import Learner
    from embodyrl.models import Policy
    from embodyrl.rollout.replay import Replay
    from embodyrl.rollout.rollouts import Rollouts

CONSOLE = "console"
"""The sink that shows a run on the screen."""


@dataclass(frozen=True, kw_only=True)
class ProgramInfo:
    """Settings of the program that a run is part of."""

    progress: bool = True
    """Show the run on the screen."""
    rows: Sink | None = None
    """Receives the metrics as well."""
    callbacks: Sequence[object] = ()
    """See `callbacks.Callback`."""
    leave: Callable[[int], NoReturn] = end_program
    """Called on a second Ctrl-C; see `stopping.Stopper`."""


PROGRAM = ProgramInfo()
"""The command line, whose process has nothing else to do."""


def simulator_config(loaded: LoadedConfig, expert: Demonstrator | None) -> LoadedConfig:
    """Return the config of the simulators; with an expert that intervenes, they show what it observes, too."""
    return (
        loaded
        if expert is None
        else dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, env=expert.env))
    )


TORCH = "embodyrl.runner.runner"
"""The module with which all of torch that a run needs is imported."""
HEAD_START_S = 0.05
"""Time in which the first process is started before torch is imported [s]."""


@contextmanager
def imported_meanwhile(model: str | None) -> Iterator[None]:
    """Import torch and a policy's class in a second thread during a block that waits for processes, since both take
    seconds. The block must start them, because processes die with the thread that started them.

    Args:
        model: name of the policy; None: none is built.

    Raises:
        MissingPackageError, ImportError: it cannot be imported.
    """
    if TORCH in sys.modules:
        yield
        return
    failed: list[BaseException] = []

    def warm_up() -> None:
        # For 0.2 s the interpreter does nothing but load torch's library: what starts processes would wait.
        time.sleep(HEAD_START_S)
        try:
            importlib.import_module(TORCH)
            if model is not None:
                SupportedModel.entry(model).load()
        except BaseException as error:
            failed.append(error)

    warming = threading.Thread(target=warm_up, daemon=True)
    with nothing_collected():
        warming.start()
        yield
        warming.join()
    if failed:
        raise failed[0]


@contextmanager
def open_simulators(
    loaded: LoadedConfig,
    log_dir: Path | None,
    place: RankInfo = SINGLE_RANK,
    elsewhere: Address | None = None,
    *,
    policy: bool = True,
) -> Iterator[Simulators]:
    """Start the simulators of one of several processes, and import torch and the policy's class meanwhile.

    Args:
        loaded: config of the run.
        log_dir: folder for their output; None: it is kept only while they run.
        place: of the process.
        elsewhere: a host on another machine that has started them.
        policy: whether the config's policy will be built.
    """
    with ExitStack() as stack:
        with imported_meanwhile(loaded.config.model.name if policy else None):
            simulators: Simulators
            if elsewhere is not None:
                simulators = stack.enter_context(RemoteManager(elsewhere))
            else:
                simulators = stack.enter_context(_start_simulators(loaded, log_dir, place))
        yield simulators


def _start_simulators(loaded: LoadedConfig, log_dir: Path | None, place: RankInfo) -> Simulators:
    """Start the simulators of one of several processes on this machine; see `open_simulators`."""
    config, machine = loaded.config, inventory()
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    return start_env_manager(
        own_share(config.env, place, machine),
        chunk_size=config.executed_actions,
        every_step=config.rollout.observe is Observe.every_step,
        plugins=config.plugins,
        plugin_path=str(loaded.plugin_dir),
        log_dir=log_dir,
        near=policy_gpu(config.engine.device, machine),
    )


@contextmanager
def settings_of_torch_kept() -> Iterator[None]:
    """Restore at the end of a block what an engine sets in torch for the whole process: threads, determinism, and the
    precision of convolutions."""
    import torch

    from embodyrl.engine.compute import convolves_in_tf32

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    before = {name: getattr(cudnn, name) for name in ("deterministic", "benchmark")}
    before["allow_tf32"] = convolves_in_tf32()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        # Only where it changes anything: the call imports torch's compiler, which takes a second.
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic)
        for name, value in before.items():
            setattr(cudnn, name, value)


def worker_logs(run_dir: Path, place: RankInfo) -> Path:
    """Return the folder for the logs of a rank's simulator processes."""
    folder = run_dir / WORKER_LOGS
    return folder if place.is_first else folder / f"rank-{place.rank}"


class Offers(Protocol):
    """Simulators that a policy is built for."""

    @property
    def spec(self) -> SimulatorSpec:
        """Their spec."""
        ...


@dataclass(frozen=True)
class SpecOnly:
    """Simulators that run in other processes, or run no more."""

    spec: SimulatorSpec


def build_method(config: Config, manager: Offers, *, weights: Path | None, **options: Any) -> Learner:
    """Build the policy in its engine, and the method that learns with it; for the arguments see `build_engine`."""
    from embodyrl.methods.learner import build_learner

    reference = config.algorithm.needs(config).reference
    policy, given = _policy_and_options(config, manager, weights, reference=reference, **options)
    return build_learner(policy, config.algorithm, simulator=manager.spec, **given)


def build_engine(config: Config, manager: Offers, *, weights: Path | None, **options: Any) -> HybridEngine:
    """Build the policy in an engine, without what learns.

    Args:
        config: of the run.
        manager: its simulators, or any object with their spec.
        weights: folder of a saved policy; None: the weights that the config names. The folder suffices, unless it holds
            adapters for weights elsewhere, or the policy that the run began with is needed, too.
        options: further arguments of `HybridEngine`: `folder`, `ranks`, `blocks`, `processes_here`.
    """
    from embodyrl.engine.hybrid import HybridEngine

    policy, given = _policy_and_options(config, manager, weights, reference=False, **options)
    return HybridEngine(policy, **given)


def _policy_and_options(
    config: Config,
    manager: Offers,
    weights: Path | None,
    *,
    reference: bool,
    ranks: Ranks | None = None,
    blocks: Blocks | None = None,
    **options: Any,
) -> tuple[Policy, dict[str, Any]]:
    """Build the policy; returns it with the other arguments of its engine."""
    from embodyrl.engine.parallel import SINGLE_PROCESS
    from embodyrl.models import build_policy

    set_up_cuda()  # before the policy computes anything
    model = config.model if weights is None else with_kept(config.model, weights)
    model = with_weight_type(model, config.engine, weights)
    if weights is not None and stands_alone(weights) and not reference:
        model, weights = from_own_folder(model, weights), None
    steering = config.algorithm.needs(config).steering if can_learn(config) else None
    policy = build_policy(
        model, manager.spec, chunk_size=config.rollout.chunk_size, seed=config.seed, steering=steering
    )
    return policy, {
        "config": config.engine,
        "iterations": config.run.iterations,
        "seed": config.seed,
        "reference": reference,
        "saved": weights,
        "ranks": ranks or SINGLE_PROCESS,
        "blocks": blocks or blocks_here(config, SINGLE_RANK),
        **options,
    }


def with_weight_type(model: ModelConfig, engine: EngineConfig, weights: Path | None) -> ModelConfig:
    """Return the model's options with the type that its weights are held in, if it has such an option."""
    from embodyrl.engine.compute import choose_device, has_bfloat16

    given = model
    if getattr(model, "dtype", None) is not WeightType.auto:
        return model
    steered = weights is not None and read_steering(weights) is not None
    if weights is not None and stands_alone(weights) and not steered and engine.precision is not Precision.float32:
        held = stored_type(weights)  # a run continues in the type that it was saved in, to which its optimiser belongs
    else:
        # Files of a policy that is steered stay as they were when the run began, and so does what follows from them.
        model = from_own_folder(model, weights) if weights is not None and steered else model
        held = weight_type(model, precision=engine.precision, gpu=has_bfloat16(choose_device(engine.device)))
    changes: dict[str, Any] = {"dtype": held}
    return dataclasses.replace(given, **changes)


def blocks_here(config: Config, place: RankInfo) -> Blocks:
    """Return the blocks of one of several processes that roll out."""
    from embodyrl.engine.compute import Blocks

    return Blocks(here=own_blocks(config, place.rank, place.size), count=blocks_of(config, place.size))


def build_acting(
    config: Config, manager: Offers, weights: Path | None, *, place: RankInfo = SINGLE_RANK
) -> HybridEngine:
    """Build the policy in an engine that only acts: without float32 copies of 16-bit weights, which would triple the
    memory. `place` is that of this process among those that roll out; for the other arguments see `build_engine`."""
    optimizer = dataclasses.replace(config.engine.optimizer, master_weights=False)
    engine = dataclasses.replace(config.engine, optimizer=optimizer)
    if not can_learn(config):  # adapters of another model, whose config this was
        engine = dataclasses.replace(engine, lora=LoraConfig(), gradient_checkpointing=False)
    return build_engine(
        dataclasses.replace(config, engine=engine),
        manager,
        weights=weights,
        blocks=blocks_here(config, place),
        processes_here=place.local_size,
    )


def open_demonstrations(config: Config, manager: Offers, engine: HybridEngine) -> Demonstrations:
    """Open the demonstrations that the config names.

    Raises:
        DatasetError: they are incomplete, or do not fit the simulator or the policy.
    """
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.store import EpisodeStore

    store = EpisodeStore.open(config)
    store.require_fit(manager.spec, engine.policy.spec.proprio_dim)
    return Demonstrations(store)


def open_transitions(config: Config, demonstrations: Demonstrations, manager: Offers) -> Transitions | None:
    """Return the demonstrations as decisions beside those of a replay; None if the algorithm takes none.

    Raises:
        DatasetError: they have no rewards, no usable decision, or are too large.
    """
    from embodyrl.data.transitions import Transitions

    if not config.algorithm.needs(config).transitions:
        return None
    reward, tasks = config.algorithm.parts().get("reward"), list(dict.fromkeys(manager.spec.tasks.values()))
    judge_ends = None if reward is None else reward.judged_ends
    return Transitions(demonstrations.store, tasks, judge_ends=judge_ends)


def open_replay(config: Config, rollouts: Rollouts, engine: HybridEngine, folder: Path) -> Replay | None:
    """Open the empty replay that the algorithm learns from, with this rank's slots; None if it learns from none."""
    needs = config.algorithm.needs(config)
    if needs.replay is None:
        return None
    from embodyrl.models.flow.steering import SteeredPolicy
    from embodyrl.rollout.replay import Replay
    from embodyrl.rollout.replay_fields import MIB

    policy = engine.policy
    settings, spec = needs.replay, rollouts.spec
    return Replay(
        settings.capacity,
        slots=config.env.num_envs,
        own=rollouts.own_slots,
        fields=config.algorithm.fields(
            config,
            proprio_dim=spec.proprio_dim,
            action_dim=spec.action_dim,
            flow=policy.base.sizes if isinstance(policy, SteeredPolicy) else None,
        ),
        start_after=settings.start_after,
        seed=config.seed,
        memory=settings.memory_mib * MIB,
        folder=folder,
        only="labelled" if needs.only_labelled else None,
    )


@contextmanager
def open_sinks(
    loaded: LoadedConfig, directory: RunDir, start_iteration: int, host: ProgramInfo
) -> Iterator[Sequence[Sink]]:
    """Open the sinks that the config names, and close them; the console only if the host shows progress."""
    config = loaded.config

    def warn(text: str) -> None:
        directory.note(without_controls(text))
        if host.progress:
            say(text)

    context = SinkContext(
        run_dir=directory.path,
        iterations=config.run.iterations,
        start_iteration=start_iteration,
        name=loaded.written.run.name,
        settings=flat(to_plain(loaded.written)),
        service=config.tracking.service,
        warn=warn,
    )
    with ExitStack() as stack:
        opened: list[Sink] = [] if host.rows is None else [host.rows]
        for name in config.tracking.sinks:
            if name == CONSOLE and not host.progress:
                continue
            sink: Sink = SINKS.load(name)(context)
            stack.callback(sink.close)
            opened.append(sink)
        yield opened
