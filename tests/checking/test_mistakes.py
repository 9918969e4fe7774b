"""Deliberate mistakes in plug-ins: small variations of a good simulator and a good model in one file. Each is found by
`validate` or by `check`, in a sentence that names the line of the plug-in."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # where `carts` is

import carts
from carts import GOOD

from embodyrl.checking import policies, simulators
from embodyrl.checking.policies import PolicyBench
from embodyrl.checking.promises import Finding, State
from embodyrl.checking.simulators import SimulatorBench
from embodyrl.config import ConfigError, load_config
from embodyrl.envs import ActionField, SimulatorSpec

SPEC = SimulatorSpec(
    tasks={"drive": "drive to the right"},
    actions=(ActionField(name="push", meaning="force", unit="N", low=(-2.0,), high=(2.0,)),),
    proprio_dim=2,
    max_episode_steps=12,
    control_frequency=10.0,
)


@dataclass(frozen=True)
class Mistake:
    """A change of the good plug-in, and what is said of it."""

    label: str
    old: str
    new: str
    found: str
    """Part of the sentence."""
    line: str
    """Text of the line that it names."""
    promise: str = ""
    """The promise of `check` that is broken."""


OF_VALIDATE = [
    Mistake(
        "a slot without observe",
        "    def observe(self):\n        return None, np.array([self.place, self.speed], np.float32)\n",
        "    def look(self):\n        return None\n",
        "Track lacks observe()",
        "class Track(Slot):",
    ),
    Mistake("a simulator without make_slot", "make_slot", "build_slot", "Cart lacks make_slot()", "class Cart("),
    Mistake("a model without evaluate", "def evaluate", "def score", "Line lacks evaluate()", "class Line("),
    Mistake(
        "a model that is no policy",
        "class Line(Policy)",
        "class Line(nn.Module)",
        "class Line must derive from embodyrl.models.policy.Policy",
        "class Line(",
    ),
    Mistake(
        "limits that are swapped",
        "low=(-2.0,), high=(2.0,)",
        "low=(2.0,), high=(-2.0,)",
        "number 0 goes from 2 to -2",
        "push = ActionField(",
    ),
    Mistake(
        "an unknown meaning",
        'meaning="force"',
        'meaning="forces"',
        "has meaning 'forces' - did you mean 'force'?",
        "push = ActionField(",
    ),
    Mistake(
        "act without a mode",
        "def act(self, inputs, mode, generator):",
        'def act(self, inputs, generator, mode="train"):',
        "Line.act(self, inputs, generator, mode) is called with (inputs, mode, generator), in this order",
        "def act(",
    ),
    Mistake(
        "act without a generator",
        "def act(self, inputs, mode, generator):",
        "def act(self, inputs, mode):\n        generator = None",
        "Line.act(self, inputs, mode) is called with (inputs, mode, generator)",
        "def act(",
    ),
    Mistake(
        "a model built without the size of chunks",
        "def __init__(self, config, simulator, chunk_size):",
        "def __init__(self, config, simulator):\n        chunk_size = 1",
        "Line.__init__(self, config, simulator) is called with (config, simulator, chunk_size)",
        "def __init__(self, config, simulator)",
    ),
    Mistake(
        "a simulator built without slots",
        "def __init__(self, config, num_slots):",
        "def __init__(self, config):\n        num_slots = 1",
        "Cart(config) is called with (config, num_slots)",
        "def __init__(self, config):",
    ),
    Mistake(
        "reset by a seed",
        "def reset(self, episode):",
        "def reset(self, episode, seed):",
        "Track.reset(self, episode, seed) is called with (episode)",
        "def reset(",
    ),
    Mistake(
        "an option whose limits are swapped",
        "setting(0.1, low=0.0, high=1.0)",
        "setting(0.1, low=1.0, high=0.0)",
        "option 'friction' of CartConfig has low=1 above high=0",
        "friction: float",
    ),
    Mistake(
        "an option of a type that no config has",
        "noise: float = setting(0.5, above=0.0)",
        "noise: torch.Tensor = setting(0.5)",
        "option 'noise' of LineConfig has the type torch.Tensor",
        "noise: torch.Tensor",
    ),
]
OF_SIMULATOR = [
    Mistake(
        "no super().__init__",
        "        super().__init__(spec, num_slots)",
        "        self.spec = spec",
        "'Cart' object has no attribute '_closed'",
        "def __init__(self, config, num_slots)",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "a layout from the operating system",
        "np.random.default_rng(episode.start_state)",
        "np.random.default_rng()",
        "proprio differ between two resets with one EpisodeSpec",
        "def reset(",
        "reset with the same seed gives the same observation",
    ),
    Mistake(
        "a layout from numpy's global generator",
        "layout.uniform(-0.5, 0.5)",
        "np.random.uniform(-0.5, 0.5)",
        "with another global seed proprio[0] of the first observation was",
        "def reset(",
        "random numbers come from the episode's seed, not from global generators",
    ),
    Mistake(
        "wind from Python's global generator",
        "self.random.normal(0.0, 0.01)",
        "random.gauss(0.0, 0.01)",
        "with another global seed the reward of step 1 was",
        "def step(",
        "random numbers come from the episode's seed, not from global generators",
    ),
    Mistake(
        "wind that is not seeded by the episode",
        "        self.random = np.random.default_rng(episode.seed)\n",
        "",
        "played again in slot 0, ",
        "def step(",
        "the same episode gives the same trajectory, whatever was played before",
    ),
    Mistake(
        "a layout by the seed",
        "default_rng(episode.start_state)",
        "default_rng(episode.seed)",
        "another seed gives another first observation",
        "def reset(",
        "the start state decides the start, and the seed does not",
    ),
    Mistake(
        "a layout that is always the same",
        "default_rng(episode.start_state)",
        "default_rng(0)",
        "4 start states look like 1",
        "def reset(",
        "start states differ",
    ),
    Mistake(
        "a reset that forgets the speed",
        "        self.speed = 0.0\n\n",
        "\n",
        "proprio differ between two resets",
        "def reset(",
        "reset with the same seed gives the same observation",
    ),
    Mistake(
        "a state that slots share",
        "before, self.place = self.place, self.place + 0.1 * self.speed",
        "Track.drift = getattr(Track, 'drift', 0.0) + 0.01; before, self.place = 0, self.place + Track.drift",
        "differs from when it played alone",
        "def step(",
        "what one slot plays does not disturb another",
    ),
    Mistake(
        "doubles",
        "np.array([self.place, self.speed], np.float32)",
        "np.array([self.place, self.speed])",
        "Track.observe() returned proprio float64 (2,), want float32 (2,)",
        "def observe(",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "a state of another size",
        "np.array([self.place, self.speed], np.float32)",
        "np.array([self.place], np.float32)",
        "Track.observe() returned proprio float32 (1,), want float32 (2,)",
        "def observe(",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "images that were not declared",
        "return None, np.array",
        "return np.zeros((1, 8, 8, 3), np.uint8), np.array",
        "Track.observe() returned images, but SimulatorSpec.cameras is empty",
        "def observe(",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "an observation of the start",
        "np.array([self.place, self.speed], np.float32)",
        "np.array([0.3, self.config.friction], np.float32)",
        "observations of 3 episodes stay as they were",
        "def observe(",
        "actions change what is observed",
    ),
    Mistake(
        "Gymnasium's five values",
        "return Transition(reward=self.place - before, terminated=False, success=self.place > 1.0)",
        "return self.place, 0.0, False, False, {}",
        "Track.step() returned tuple(float, float, bool, bool, dict), want Transition(",
        "def step(",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "a reward that is NaN",
        "reward=self.place - before",
        "reward=float('nan')",
        "reward is nan, want a finite number",
        "def step(",
        "observations and results have the declared shapes and types",
    ),
    Mistake(
        "a time limit of its own",
        "max_episode_steps=config.time_limit",
        "max_episode_steps=200",
        "SimulatorSpec.max_episode_steps is 200, the config says 12",
        "def __init__(self, config, num_slots)",
        "its spec says what is offered",
    ),
    Mistake(
        "tasks that are not described",
        '"drive to the right"',
        '""',
        "tasks ['drive'] have no task description",
        "def __init__(self, config, num_slots)",
        "its spec says what is offered",
    ),
    Mistake(
        "an error in the middle",
        "wind = self.random.normal(0.0, 0.01)",
        "wind = self.wind",
        "AttributeError: 'Track' object has no attribute 'wind'",
        "wind = self.wind",
        "the same episode gives the same trajectory, whatever was played before",
    ),
]
OF_MODEL = [
    Mistake(
        "no super().__init__ before the layers",
        "        super().__init__(config, simulator, chunk_size)\n",
        "",
        "AttributeError: cannot assign module before Module.__init__() call",
        "self.mean = nn.Linear(",
        "the policy is built for this simulator",
    ),
    Mistake(
        "no spec",
        "self.spec = PolicySpec(",
        "spec = PolicySpec(",
        "'Line' object has no attribute 'spec'",
        "def __init__(self, config, simulator, chunk_size)",
        "its spec has the sizes of config and simulator",
    ),
    Mistake(
        "actions without chunks",
        "from_unit_range(sample, self.centre, self.half_width).unsqueeze(1)",
        "from_unit_range(sample, self.centre, self.half_width)",
        "actions is float32 (3, 1), want float32 (3, 1, 1)",
        "def act(",
        "act returns the actions of a chunk for each env",
    ),
    Mistake(
        "actions in doubles",
        ".unsqueeze(1),",
        ".unsqueeze(1).double(),",
        "actions is float64 (3, 1, 1), want float32 (3, 1, 1)",
        "def act(",
        "act returns the actions of a chunk for each env",
    ),
    Mistake(
        "actions beyond the limits",
        "from_unit_range(sample, self.centre, self.half_width)",
        "(9.0 * sample)",
        "the simulator takes -2 .. 2",
        "def act(",
        "actions lie within the limits of the simulator",
    ),
    Mistake(
        "log-probs summed to [B]",
        "logprobs=distribution.log_prob(sample),",
        "logprobs=distribution.log_prob(sample).sum(-1),",
        "logprobs is float32 (3,), want float32 (3, N)",
        "def act(",
        "log-probs are [B, N], and N is a multiple of the chunk",
    ),
    Mistake(
        "sampling in eval mode",
        'if mode == "train":',
        "if True:",
        'act(inputs, "eval") gave two actions for one observation',
        "def act(",
        "eval mode draws nothing: twice the same actions",
    ),
    Mistake(
        "torch's global generator",
        "torch.randn(sample.shape, generator=generator)",
        "torch.randn(sample.shape)",
        "one generator gave two actions: global random numbers are used",
        "def act(",
        "train mode draws from the generator that it is given, and from nothing else",
    ),
    Mistake(
        "no exploration",
        "sample + self.noise * torch.randn(sample.shape, generator=generator)",
        "sample",
        "4 seeds of the generator gave the same actions",
        "def act(",
        "train mode draws from the generator that it is given, and from nothing else",
    ),
    Mistake(
        "no values with a critic",
        "values=values,\n            trace",
        "values=None,\n            trace",
        "values is None, but model 'NAME' is registered with critic=True",
        "def act(",
        "values are [B] where the algorithm has a critic",
    ),
    Mistake(
        "values [B, 1]",
        ".squeeze(-1)",
        "",
        "values is float32 (3, 1), want float32 (3)",
        "def act(",
        "values are [B] where the algorithm has a critic",
    ),
    Mistake(
        "log-probs of another distribution",
        'logprobs, entropy = distribution.log_prob(trace["sample"])',
        'logprobs, entropy = distribution.log_prob(trace["sample"] + 0.1)',
        "log-probs of evaluate and act differ by up to",
        "def evaluate(",
        "evaluate gives the log-probs of act at equal weights",
    ),
    Mistake(
        "an entropy of another shape",
        "distribution.entropy()",
        "distribution.entropy().mean()",
        "entropy is float32 (), want float32 (3, 1)",
        "def evaluate(",
        "evaluate gives the log-probs of act at equal weights",
    ),
    Mistake(
        "scores without a gradient",
        "        distribution, values = self.predict(inputs)\n        logprobs, entropy",
        "        with torch.no_grad():\n            distribution, values = self.predict(inputs)\n"
        "        logprobs, entropy",
        "logprobs of evaluate have no gradient in any weight",
        "def evaluate(",
        "evaluate is differentiable in the weights",
    ),
    Mistake(
        "a mean across envs",
        'mean = self.mean(inputs["proprio"])',
        'mean = self.mean(inputs["proprio"] - inputs["proprio"].mean(0))',
        "an env alone gets another action",
        "def act(",
        "each env is decided for by its own observation",
    ),
    Mistake(
        "weights that are not saved",
        'mean = self.mean(inputs["proprio"])',
        'self.shift = getattr(self, "shift", torch.rand(1)); mean = self.mean(inputs["proprio"]) + self.shift',
        "the loaded policy acts otherwise: some of it is not saved",
        "def save(",
        "saved weights load into a policy with others, which then acts the same",
    ),
    Mistake(
        "a trace without rows",
        'trace={"sample": sample},',
        'trace={"sample": sample, "noise": torch.tensor(self.noise)},',
        "'noise' is float32 (), want a tensor (3, ...) for 3 envs",
        "def act(",
        "the trace holds tensors with a row for each env",
    ),
    Mistake(
        "an error in the middle",
        'distribution.log_prob(trace["sample"])',
        'distribution.log_prob(trace["drawn"])',
        "KeyError: 'drawn'",
        "logprobs, entropy = ",
        "evaluate gives the log-probs of act at equal weights",
    ),
]


def write(folder: Path, mistake: Mistake) -> tuple[Path, Path]:
    """Write the plug-in with a mistake, and its config."""
    assert mistake.old in GOOD, mistake.label
    return carts.write(folder, GOOD.replace(mistake.old, mistake.new, 1))


def broken(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.promise: finding for finding in findings if finding.state is State.broken}


def of_simulator(config: Path) -> list[Finding]:
    loaded = load_config(config)
    bench = SimulatorBench(loaded.config.env, loaded.config.plugins)
    return [bench.try_(each) for each in simulators.PROMISES]


def of_model(config: Path) -> list[Finding]:
    loaded = load_config(config)
    bench = PolicyBench(loaded.config, SPEC, loaded.config.plugins)
    return [bench.try_(each) for each in policies.PROMISES]


def assert_names_line(text: str, module: Path, line: str) -> None:
    found = re.search(rf"[(/]{re.escape(module.name)}:(\d+)\)", text)
    assert found is not None, text
    assert module.read_text().splitlines()[int(found[1]) - 1].strip().startswith(line), text


def labelled(mistakes: Sequence[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=[each.label for each in mistakes])


@labelled(OF_VALIDATE)
def test_validate_finds_what_importing_shows(mistake: Mistake, tmp_path: Path) -> None:
    config, module = write(tmp_path, mistake)
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    (fault,) = caught.value.faults
    assert mistake.found in str(fault) and str(fault).startswith(f"{config}:")
    assert_names_line(str(fault), module, mistake.line)


@labelled(OF_SIMULATOR)
def test_check_finds_what_a_simulator_does_wrong(mistake: Mistake, tmp_path: Path) -> None:
    config, module = write(tmp_path, mistake)
    found = broken(of_simulator(config))
    assert mistake.promise in found, found
    assert mistake.found in found[mistake.promise].found
    assert_names_line(str(found[mistake.promise]), module, mistake.line)


@labelled(OF_MODEL)
def test_check_finds_what_a_model_does_wrong(mistake: Mistake, tmp_path: Path) -> None:
    config, module = write(tmp_path, mistake)
    found = broken(of_model(config))
    assert mistake.promise in found, found
    assert mistake.found.replace("NAME", module.stem) in found[mistake.promise].found
    if mistake.line != "def save(":  # it is the package's own
        assert_names_line(str(found[mistake.promise]), module, mistake.line)


def test_a_good_plugin_keeps_every_promise(tmp_path: Path) -> None:
    config, _ = carts.write(tmp_path)
    assert not broken([*of_simulator(config), *of_model(config)])


def test_lines_of_kept_promises_fit_a_terminal() -> None:
    for each in (*simulators.PROMISES, *policies.PROMISES):
        assert len(str(Finding(promise=each.text, state=State.kept))) <= 80
