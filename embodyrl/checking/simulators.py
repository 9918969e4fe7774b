"""What every simulator promises. The EnvManager, checkpoints and comparisons of runs rely on all of it.

Promises are tried on a simulator with two slots and short episodes. None depends on what was played before.

Shapes: `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.checking.promises import Bench, Broken, DoesNotApply, Promise, needed, promise
from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import EnvConfig
from embodyrl.envs.base import EpisodeOverError, RenderError, SimulatorError
from embodyrl.envs.types import EpisodeSpec, Observation, Simulator
from embodyrl.registry import SIMULATORS

LIMIT = 12
"""Time limit of the episodes that are played [control steps]."""
LONG = 60
"""Actions after which an episode that has not ended is one that does not end itself."""
TRIES = 20
"""Episodes among which one is looked for that lasts to the time limit."""

PROMISES: list[Promise[SimulatorBench]] = []
_promise = functools.partial(promise, PROMISES)


@dataclass(eq=False)
class Trajectory:
    """What came out of a slot: images `[steps + 1, V, H, W, 3]` and proprio `[steps + 1, S]` (empty where it has
    none), rewards and success `[steps]`, ends `[steps, 2]`."""

    images: NDArray[np.uint8]
    proprio: NDArray[np.float32]
    rewards: NDArray[np.float32]
    success: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, Trajectory) and all(
            a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(self.arrays(), other.arrays(), strict=True)
        )

    def arrays(self) -> list[NDArray[Any]]:
        """Return all of it."""
        return [self.images, self.proprio, self.rewards, self.success, self.ends]

    def after(self, done: int) -> Trajectory:
        """Return what follows its first `done` actions."""
        return Trajectory(*[array[done:] for array in self.arrays()])

    def shows(self, step: int, observation: Observation, row: int = 0) -> bool:
        """Return whether `row` of `observation` is the one after `step` actions, bit for bit."""
        images, proprio = arrays_of(observation)
        return np.array_equal(self.images[step], images[row]) and np.array_equal(self.proprio[step], proprio[row])

    def difference(self, other: Trajectory) -> tuple[str, str]:
        """Return the first difference from another one for people, and the method that made it."""
        for step in range(min(len(self.proprio), len(other.proprio))):
            pairs: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
                "proprio": (self.proprio[step], other.proprio[step]),
                "images": (self.images[step], other.images[step]),
            }
            for name, (one, two) in pairs.items():
                if not np.array_equal(one, two):
                    at = tuple(int(each) for each in np.argwhere(one != two)[0])
                    where = f"{name}{list(at)} {f'after step {step}' if step else 'of the first observation'}"
                    return f"{where} was {one[at]:g}, then {two[at]:g}", "step" if step else "reset"
            if step < min(len(self.rewards), len(other.rewards)) and self.rewards[step] != other.rewards[step]:
                rewards = f"{self.rewards[step]:g}, then {other.rewards[step]:g}"
                return f"the reward of step {step + 1} was {rewards}", "step"
        return f"it ended after {len(self.rewards)} steps, then after {len(other.rewards)}", "step"


def arrays_of(observation: Observation) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return images `[B, V, H, W, 3]` and proprio `[B, S]` of an observation; `[B, 0]` where it has none."""
    nothing = len(observation.task_descriptions), 0
    images = np.empty(nothing, np.uint8) if observation.images is None else observation.images
    return images, np.empty(nothing, np.float32) if observation.proprio is None else observation.proprio


def same(one: Observation, other: Observation) -> bool:
    """Return whether two observations are equal, bit for bit."""
    (images, proprio), (others, other_proprio) = arrays_of(one), arrays_of(other)
    alike = np.array_equal(images, others) and np.array_equal(proprio, other_proprio)
    return one.task_descriptions == other.task_descriptions and alike


class SimulatorBench(Bench):
    """A simulator with two slots, and episodes to play in it."""

    def __init__(self, config: EnvConfig, modules: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self.config = config

    def build(self, num_slots: int, max_episode_steps: int = LIMIT) -> Simulator:
        """Build the simulator with a time limit [control steps]."""
        config = dataclasses.replace(self.config, max_episode_steps=max_episode_steps)
        simulator: Simulator = SIMULATORS.load(config.name)(config, num_slots)
        return simulator

    @needed
    def simulator(self) -> Simulator:
        """The simulator."""
        return self.build(num_slots=2)

    def owners(self) -> list[type]:
        """Return the classes whose methods promises name."""
        seats = getattr(self.built.get("simulator"), "_seats", [])
        slots = [type(seat.slot) for seat in seats if seat.slot is not None]
        target = SIMULATORS.entry(self.config.name).target
        known = [*([target] if isinstance(target, type) else []), *dict.fromkeys(slots)]
        found = super().owners()
        return [*known, *sorted(found, key=lambda each: not hasattr(each, "step"))]

    def episode(self, number: int) -> EpisodeSpec:
        """Return episode `number`; with several tasks they alternate."""
        task = self.config.tasks[number % len(self.config.tasks)]
        return EpisodeSpec(task=task, start_state=100 + number, seed=7 * number, group=number)

    def actions(self, number: int, steps: int = LIMIT) -> NDArray[np.float32]:
        """Return the actions of episode `number`, `[steps, D]`: random around a random direction, so that something
        happens."""
        generator = np.random.default_rng(number)
        low, high = self.simulator.spec.action_low, self.simulator.spec.action_high
        middle, half = (high + low) / 2, (high - low) / 2
        noise = 0.6 * generator.uniform(-1, 1, (steps, len(low))) + generator.uniform(-1, 1, len(low))
        return (middle + half * np.clip(noise, -1, 1)).astype(np.float32)

    def start(self, *numbers: int) -> Observation:
        """Start these episodes in slots 0, 1, ...; returns their first observation."""
        return self.simulator.reset(range(len(numbers)), [self.episode(number) for number in numbers])

    def play(self, number: int, slot: int = 0) -> Trajectory:
        """Play episode `number` from its start to its end."""
        self.simulator.reset([slot], [self.episode(number)])
        return self.go_on(self.actions(number), slot)

    def go_on(self, plan: NDArray[np.float32], slot: int = 0) -> Trajectory:
        """Execute `plan [steps, D]` one action at a time, up to the end of the episode; starts with `observe`."""
        simulator = self.simulator
        observations = [simulator.observe([slot])]
        rewards, success, ends = [], [], []
        for action in plan:
            result = simulator.step_chunk([slot], action[None, None])
            observations.append(result.observation)
            rewards.append(result.rewards[0, 0])
            success.append(result.success[0, 0])
            ends.append([result.terminated[0], result.truncated[0]])
            if result.terminated[0] or result.truncated[0]:
                break
        images, proprio = zip(*[arrays_of(observation) for observation in observations], strict=True)
        return Trajectory(
            images=np.concatenate(images),
            proprio=np.concatenate(proprio),
            rewards=np.array(rewards, np.float32),
            success=np.array(success, np.bool_),
            ends=np.array(ends, np.bool_),
        )

    def half_played(self, number: int) -> tuple[Trajectory, int, bytes]:
        """Play episode `number`, and again its first half; returns it, the actions of that half, and the state then."""
        whole = self.play(number)
        done = len(whole.rewards) // 2
        self.start(number)
        if done:
            self.simulator.step_chunk([0], self.actions(number)[None, :done])
        (state,) = self.simulator.get_state([0])
        return whole, done, state

    def goes_on_alike(self, number: int, whole: Trajectory, done: int, state: bytes) -> None:
        """Check that this process, which has not played it, plays episode `number` as another one did, and continues
        from its state.

        Raises:
            Broken: it does not.
        """
        _compare(whole, self.play(number), "in another process ", DETERMINED)
        self.simulator.set_state([0], [state])
        rest = self.go_on(self.actions(number)[done:])
        _compare(whole.after(done), rest, f"in another process, restored after {done} actions, ", RESTORED)


DETERMINED = "draw all random numbers from generators that reset seeds by episode.start_state and episode.seed"
RESTORED = "let the state hold, or reset and the actions decide, everything that the rest of the episode depends on"


def _compare(wanted: Trajectory, found: Trajectory, when: str, remedy: str) -> None:
    if found != wanted:
        text, method = wanted.difference(found)
        raise Broken(f"{when}{text}", remedy, method=method)


def _require(holds: object, found: str, remedy: str = "", *, method: str = "") -> None:
    if not holds:
        raise Broken(found, remedy, method=method)


@_promise("the simulator is built for these options", "__init__")
def is_built(bench: SimulatorBench) -> None:
    """Check that it starts at all."""
    assert bench.simulator


@_promise("its spec says what is offered", "__init__")
def spec_says_what_is_offered(bench: SimulatorBench) -> None:
    """Check `SimulatorSpec`."""
    spec, config = bench.simulator.spec, bench.config
    _require(
        list(spec.tasks) == list(config.tasks),
        f"SimulatorSpec.tasks are {list(spec.tasks)}, env.tasks {config.tasks}",
        "declare the tasks of config.tasks, in that order",
    )
    nameless = [task for task, text in spec.tasks.items() if not isinstance(text, str) or len(text.split()) < 2]
    _require(not nameless, f"tasks {nameless} have no task description", "describe each in words: {task: 'push ...'}")
    _require(
        spec.max_episode_steps == LIMIT,
        f"SimulatorSpec.max_episode_steps is {spec.max_episode_steps}, the config says {LIMIT}",
        "pass config.time_limit",
    )
    _require(spec.control_frequency > 0, f"control_frequency is {spec.control_frequency}", "give it in Hz, above 0")
    _require(spec.action_dim > 0, "SimulatorSpec.actions has no numbers", "declare an ActionField")
    for field in spec.actions:
        _require(field.name and field.unit, f"{field} lacks a name or a unit", "the unit of plain numbers is '1'")
        opens = field.meaning != "gripper" or field.opens != field.closes
        _require(opens, f"gripper {field.name!r} opens and closes at {field.opens}", "give opens= and closes=")
        wide = all(low < high for low, high in zip(field.low, field.high, strict=True))
        _require(
            wide, f"{field.name!r} has the bounds {field.low} and {field.high}: no choice", "let low be below high"
        )
    size = tuple(config.image_size) if config.cameras else (0, 0)
    _require(
        list(spec.cameras) == list(config.cameras) and tuple(spec.image_size) == size,
        f"SimulatorSpec has cameras {list(spec.cameras)} of {spec.image_size}, the config {config.cameras} of {size}",
        "pass tuple(config.cameras), and tuple(config.image_size) if there are cameras, else (0, 0)",
    )
    _require(spec.cameras or spec.proprio_dim, "it shows neither images nor a state", "declare proprio_dim")


@_promise("what the registration says of it before it starts is true", "__init__")
def what_is_said_before_it_starts_is_true(bench: SimulatorBench) -> None:
    """Check the facts of the registry entry that are computed without the simulator."""
    info, spec = simulator_info(bench.config.name), bench.simulator.spec
    facts = {"state_dim": spec.proprio_dim, "action_dim": spec.action_dim, "control_frequency": spec.control_frequency}
    if not any(info.says(name) for name in facts):
        raise DoesNotApply("its info says neither state_dim, action_dim nor control_frequency")
    for name, fact in facts.items():
        said, where = getattr(info, name)(bench.config), f"{type(info).__module__}:{type(info).__qualname__}.{name}"
        _require(said in (None, fact), f"{name} says {said}, the simulator has {fact}", f"see {where}")


@_promise("observations and results have the declared shapes and types", "observe")
def shapes_and_types(bench: SimulatorBench) -> None:
    """Check a first observation and a chunk of three actions."""
    spec = bench.simulator.spec
    first = bench.start(0, 1)
    result = bench.simulator.step_chunk([0, 1], np.stack([bench.actions(0), bench.actions(1)])[:, :3])
    for observation in (first, result.observation):
        _require((observation.images is not None) == bool(spec.cameras), "images and cameras do not agree")
        _require((observation.proprio is not None) == (spec.proprio_dim > 0), "proprio and proprio_dim do not agree")
        images, proprio = arrays_of(observation)
        wanted = (2, len(spec.cameras), *spec.image_size, 3) if spec.cameras else (2, 0)
        _is_array(images, wanted, np.uint8, "images")
        _is_array(proprio, (2, spec.proprio_dim), np.float32, "proprio")
        _require(np.isfinite(proprio).all(), "proprio has NaN or infinity", "return finite numbers")
        described = [spec.tasks[bench.episode(number).task] for number in (0, 1)]
        _require(observation.task_descriptions == described, "task_descriptions are not those of the episodes' tasks")
    _is_array(result.rewards, (2, 3), np.float32, "rewards", method="step")
    _is_array(result.success, (2, 3), np.bool_, "success", method="step")
    _is_array(result.terminated, (2,), np.bool_, "terminated", method="step")
    _is_array(result.truncated, (2,), np.bool_, "truncated", method="step")
    _is_array(result.steps, (2,), np.int32, "steps", method="step")


def _is_array(found: NDArray[Any], shape: tuple[int, ...], kind: type, name: str, *, method: str = "") -> None:
    wanted = f"{np.dtype(kind)} {shape}"
    _require(
        found.shape == shape and found.dtype == kind,
        f"{name} are {found.dtype} {found.shape}, want {wanted}",
        method=method,
    )


@_promise("observations come in the order of the slots that were asked for", "reset")
def order_of_slots_is_the_callers(bench: SimulatorBench) -> None:
    """Check slots 1, 0 against slots 0, 1."""
    simulator, episodes = bench.simulator, [bench.episode(0), bench.episode(1)]
    forth = simulator.reset([0, 1], episodes)
    back = simulator.reset([1, 0], episodes)
    _require(same(forth, back), "reset([1, 0], ...) shows other observations than reset([0, 1], ...)", DETERMINED)
    _require(same(simulator.observe([1, 0]), back), "observe([1, 0]) differs from what reset([1, 0]) returned")


@_promise("reset with the same seed gives the same observation", "reset")
def same_seed_same_observation(bench: SimulatorBench) -> None:
    """Check one episode, after another one was played."""
    first = arrays_of(bench.start(0))
    bench.play(1)
    again = arrays_of(bench.start(0))
    for index, name in enumerate(("images", "proprio")):
        alike = np.array_equal(first[index], again[index])
        _require(alike, f"{name} differ between two resets with one EpisodeSpec", DETERMINED)


@_promise("the same episode gives the same trajectory, whatever was played before", "step")
def same_episode_same_trajectory_in_any_slot(bench: SimulatorBench) -> None:
    """Check three episodes in either slot, in other orders."""
    first = {number: bench.play(number) for number in (0, 1, 2)}
    for slot, order in ((0, (2, 0, 1)), (1, (1, 2, 0))):
        for number in order:
            _compare(first[number], bench.play(number, slot), f"played again in slot {slot}, ", DETERMINED)


@_promise("random numbers come from the episode's seed, not from global generators", "reset")
def global_random_numbers_decide_nothing(bench: SimulatorBench) -> None:
    """Check an episode under other global seeds."""
    trajectories = []
    for seed in (1, 2):
        with global_seed(seed):
            trajectories.append(bench.play(0))
    _compare(trajectories[0], trajectories[1], "with another global seed ", DETERMINED)


class global_seed:  # noqa: N801 - used as a function
    """Seed the global generators of Python, numpy and torch during a block, and restore them at its end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = random.getstate(), np.random.get_state(), _torch(lambda torch: torch.get_rng_state())
        random.seed(self._seed)
        np.random.seed(self._seed)
        _torch(lambda torch: torch.manual_seed(self._seed))

    def __exit__(self, *_: object) -> None:
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])
        _torch(lambda torch: torch.set_rng_state(self._before[2]))


def _torch(use: Callable[[Any], Any]) -> Any:
    """Call a function of torch, if it has been imported: no simulator need wait for that."""
    return use(sys.modules["torch"]) if "torch" in sys.modules else None


@_promise("what one slot plays does not disturb another", "step")
def interleaved_slots_do_not_disturb_each_other(bench: SimulatorBench) -> None:
    """Check two episodes that are stepped in turn."""
    alone = [bench.play(0), bench.play(1)]
    bench.start(0, 1)
    plans = [bench.actions(0), bench.actions(1)]
    shared = "keep what changes in the slot, not in its class or module"
    for index in range(min(len(trajectory.rewards) for trajectory in alone)):
        result = bench.simulator.step_chunk([0, 1], np.stack([plan[index : index + 1] for plan in plans]))
        for row, trajectory in enumerate(alone):
            fits = result.rewards[row, 0] == trajectory.rewards[index]
            fits = fits and trajectory.shows(index + 1, result.observation, row)
            _require(fits, f"after step {index + 1} slot {row} differs from when it played alone", shared)


@_promise("chunks of actions give the trajectory of single ones", "step")
def chunks_do_not_change_the_trajectory(bench: SimulatorBench) -> None:
    """Check chunks of four."""
    single = bench.play(0)
    bench.start(0)
    rewards: list[float] = []
    plan = bench.actions(0)
    while True:
        result = bench.simulator.step_chunk([0], plan[None, len(rewards) : len(rewards) + 4])
        rewards += result.rewards[0, : result.steps[0]].tolist()
        shown = single.shows(len(rewards), result.observation)
        _require(shown, f"after {len(rewards)} actions in chunks of 4 the observation differs", DETERMINED)
        if result.terminated[0] or result.truncated[0]:
            break
    _require(rewards == single.rewards.tolist(), "rewards of chunks of 4 differ from those of single actions")


@_promise("start states differ", "reset")
def start_states_differ(bench: SimulatorBench) -> None:
    """Check four of one task."""
    same_task = range(0, 4 * len(bench.config.tasks), len(bench.config.tasks))
    starts = [arrays_of(bench.start(number)) for number in same_task]
    remedy = "draw the layout from np.random.default_rng(episode.start_state) in reset, and let observations show it"
    count = len({images.tobytes() + proprio.tobytes() for images, proprio in starts})
    _require(count == 4, f"4 start states look like {count}: held-out episodes are those of training", remedy)
    if bench.simulator.spec.cameras:
        count = len({images.tobytes() for images, _ in starts})
        _require(count == 4, f"images of 4 start states look like {count}", remedy, method="observe")


@_promise("the start state decides the start, and the seed does not", "reset")
def start_state_decides_the_start_and_the_seed_does_not(bench: SimulatorBench) -> None:
    """Check another seed and group."""
    one = bench.episode(0)
    other = dataclasses.replace(one, seed=one.seed + 12345, group=9)
    first = bench.simulator.reset([0], [one])
    remedy = "draw the layout by episode.start_state alone: members of a group share it"
    _require(same(first, bench.simulator.reset([0], [other])), "another seed gives another first observation", remedy)


@_promise("an episode ends at the time limit, or before it by terminating", "step")
def truncated_exactly_at_the_time_limit(bench: SimulatorBench) -> None:
    """Check where an episode ends."""
    trajectory = bench.play(0)
    terminated, truncated = trajectory.ends.T
    _require(terminated[-1] or truncated[-1], f"it has not ended after {LIMIT} steps, its time limit")
    _require(terminated[-1] != truncated[-1], "it terminated and was cut off at once", "one excludes the other")
    _require(not terminated[:-1].any() and not truncated[:-1].any(), "it continued after its end")


@_promise("a slot stops at its own end inside a chunk", "step")
def a_slot_stops_at_its_own_end_inside_a_chunk(bench: SimulatorBench) -> None:
    """Check a chunk that goes beyond the time limit in one slot."""
    lasting = next((number for number in range(TRIES) if len(bench.play(number).rewards) == LIMIT), None)
    if lasting is None:
        raise DoesNotApply(f"no episode lasts {LIMIT} steps")
    other = next((number for number in range(1, TRIES) if len(bench.play(number).rewards) >= 5), None)
    if other is None:
        raise DoesNotApply("no episode lasts 5 steps")
    bench.start(lasting, other)
    bench.simulator.step_chunk([0], bench.actions(lasting)[None, : LIMIT - 2])
    ends = np.zeros((5, bench.simulator.spec.action_dim), np.float32)
    ends[:2] = bench.actions(lasting)[LIMIT - 2 :]
    result = bench.simulator.step_chunk([0, 1], np.stack([ends, bench.actions(other)[:5]]))
    found = f"of 5 actions, 2 before the limit, slots executed {result.steps.tolist()}, want [2, 5]"
    _require(result.steps[0] == 2, found)
    _require(result.truncated.tolist()[0] and not result.terminated[0], "the time limit is not reported as truncated")
    left_over = result.rewards[0, 2:].any() or result.success[0, 2:].any()
    _require(not left_over, "actions after the end have rewards or success")


@_promise("an episode that is over is not stepped", "step")
def an_ended_episode_is_not_stepped(bench: SimulatorBench) -> None:
    """Check that it is refused."""
    bench.play(0)
    _is_refused(bench, 0, EpisodeOverError)


def _is_refused(bench: SimulatorBench, slot: int, error: type[Exception]) -> None:
    try:
        bench.simulator.step_chunk([slot], bench.actions(0)[None, :1])
    except error:
        return
    raise Broken("step_chunk after the end of an episode raised no EpisodeOverError")


@_promise("an episode that terminates is not cut off", "step")
def termination_is_not_truncation(bench: SimulatorBench) -> None:
    """Check an episode with the largest actions, far from its time limit."""
    simulator = bench.build(num_slots=1, max_episode_steps=LONG)
    simulator.reset([0], [bench.episode(0)])
    result = simulator.step_chunk([0], np.tile(simulator.spec.action_high, (1, LONG, 1)))
    simulator.close()
    steps = int(result.steps[0])
    if not result.terminated[0]:
        raise DoesNotApply(f"its episodes do not terminate within {LONG} steps")
    _require(not result.truncated[0], "it terminated, and is reported as truncated too", "one excludes the other")
    _require(0 < steps <= LONG and not result.rewards[0, steps:].any(), "actions after the end have rewards")


@_promise("actions change what is observed", "observe")
def actions_change_what_is_observed(bench: SimulatorBench) -> None:
    """Check that an episode does not look the same all along."""
    for number in range(3):
        trajectory = bench.play(number)
        if any((array[0] != array[-1]).any() for array in (trajectory.images, trajectory.proprio)):
            return
    raise Broken("observations of 3 episodes stay as they were at the start", "return the state after the last step")


@_promise("observe gives the last observation again", "observe")
def observe_gives_the_last_observation(bench: SimulatorBench) -> None:
    """Check it after two actions."""
    bench.start(0)
    later = bench.simulator.step_chunk([0], bench.actions(0)[None, :2]).observation
    _require(same(bench.simulator.observe([0]), later), "observe differs from what step_chunk returned")


@_promise("a saved state continues in the same slot and in another", "step")
def state_goes_on_in_the_same_and_in_another_slot(bench: SimulatorBench) -> None:
    """Check a state of the middle of an episode."""
    whole, done, state = bench.half_played(3)
    _require(isinstance(state, bytes), f"get_state returned {type(state).__name__}, want bytes for each slot")
    plan, rest = bench.actions(3)[done:], whole.after(done)
    _compare(rest, bench.go_on(plan), "after get_state ", "let saving change nothing")
    for slot in (0, 1):
        bench.play(4, slot)
        lost = bench.simulator.set_state([slot], [state])
        _require(not lost, f"set_state says that slot {slot} is not restored exactly", RESTORED)
        again = bench.simulator.get_state([slot]) == [state]
        _require(again, "the state that was restored is saved as another one", RESTORED)
        _compare(rest, bench.go_on(plan, slot), f"restored after {done} actions in slot {slot}, ", RESTORED)


@_promise("states of a fresh and of an ended episode are restored", "reset")
def state_of_a_fresh_and_of_an_ended_episode(bench: SimulatorBench) -> None:
    """Check both ends of an episode."""
    bench.start(0)
    fresh = bench.simulator.get_state([0])
    whole = bench.go_on(bench.actions(0))
    ended = bench.simulator.get_state([0])
    bench.simulator.set_state([1], ended)
    _require(whole.shows(-1, bench.simulator.observe([1])), "a restored ended episode shows something else", RESTORED)
    _is_refused(bench, 1, EpisodeOverError)
    bench.simulator.set_state([1], fresh)
    _compare(whole, bench.go_on(bench.actions(0), 1), "restored at its start, ", RESTORED)


@_promise("images for people are rendered, or refused in words", "render")
def images_are_for_people_or_refused_in_words(bench: SimulatorBench) -> None:
    """Check `render`."""
    bench.start(0, 1)
    try:
        images = bench.simulator.render([0, 1])
    except RenderError as error:
        _require(len(str(error).split()) > 3, f"render raised RenderError({str(error)!r})", "say what is missing")
        return
    fits = images.ndim == 4 and images.shape[0] == 2 and images.shape[3] == 3 and images.dtype == np.uint8
    _require(fits, f"render returned {images.dtype} {images.shape[1:]}, want uint8 (height, width, 3)")


@_promise("every camera sees the scene change", "observe")
def every_camera_sees_the_scene_change(bench: SimulatorBench) -> None:
    """Check that images are neither blank nor frozen nor twice the same."""
    cameras = bench.simulator.spec.cameras
    if not cameras:
        raise DoesNotApply("it has no cameras")
    images = bench.play(0).images
    _require((images.std(axis=(2, 3, 4)) > 1).all(), "an image has one colour alone", "draw the scene")
    for view, camera in enumerate(cameras):
        changes = (images[0, view] != images[-1, view]).any()
        _require(changes, f"camera {camera!r} shows the same at the start and at the end", "draw the current state")
    for one, other in itertools.combinations(range(images.shape[1]), 2):
        differ = (images[0, one] != images[0, other]).any()
        _require(differ, f"cameras {cameras[one]!r} and {cameras[other]!r} show the same")


@_promise("closing twice is harmless, and a closed simulator says so", "close")
def closing_twice_is_harmless_and_a_closed_simulator_says_so(bench: SimulatorBench) -> None:
    """Check `close`."""
    assert bench.simulator  # one that cannot be built is reported once
    simulator = bench.build(num_slots=1)
    simulator.reset([0], [bench.episode(0)])
    simulator.close()
    simulator.close()
    try:
        simulator.reset([0], [bench.episode(0)])
    except SimulatorError as error:
        _require("closed" in str(error), f"reset of a closed simulator raised {error}", "say that it is closed")
        return
    raise Broken("reset of a closed simulator raised no SimulatorError")
