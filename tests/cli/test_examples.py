"""The examples as a stranger uses them, copied to a folder of their own; and what the docs show of them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import yaml
from torch import Tensor

from embodyrl.config.build import build_section
from embodyrl.config.check import check_settings
from embodyrl.config.compose import Settings
from embodyrl.config.issues import Location
from embodyrl.config.schema import ModelConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import Policy, PolicyError, PolicyObservation
from embodyrl.registry import SupportedModel, all_registries

REPOSITORY = Path(__file__).parents[2]
EXAMPLES, DOCS = REPOSITORY / "examples", REPOSITORY / "docs"
SCRIPTS = {"async_client", "from_python", "sb3_envs"}
"""Those that are run by Python itself; all others have a config."""
NAMES = sorted({path.stem for path in EXAMPLES.iterdir() if path.is_file()} - SCRIPTS)

POINT_MASS = ["env.num_envs=4", "env.max_episode_steps=16", "rollout.num_chunks=16"]
SMALL = {
    "adapter_skeleton": POINT_MASS,
    "custom_image_model": POINT_MASS,
    "custom_loss": [*POINT_MASS, "rollout.group_size=2"],
    "custom_model": POINT_MASS,
    "custom_reward": POINT_MASS,
    "custom_simulator": POINT_MASS,
    "custom_sink": [*POINT_MASS, "env.workers=2"],
    "custom_text_model": POINT_MASS,
    "custom_stage": ["env.num_envs=2", "env.max_episode_steps=16", "rollout.num_chunks=16", "algorithm.minibatches=2"],
}
"""What makes each example small; a new one needs a line here, and one in `SHOWS`."""

SHOWS: dict[str, Callable[[dict[str, float], str], bool]] = {
    "adapter_skeleton": lambda row, screen: row["env/steps"] == 64.0 and "gymnasium adapter/Push-v0" in screen,
    "custom_image_model": lambda row, screen: row["train/ratio_max"] >= 1.0 and "model      conv" in screen,
    "custom_loss": lambda row, screen: row["train/beyond_width"] >= 0.0 and "grpo (pairwise, spo)" in screen,
    "custom_model": lambda row, screen: row["train/ratio_max"] >= 1.0 and "model      linear" in screen,
    "custom_reward": lambda row, screen: row["rollout/shaped_reward_per_step"] < row["rollout/reward_per_step"],
    "custom_simulator": lambda row, screen: row["env/steps"] == 64.0 and "simulator  point_mass" in screen,
    "custom_sink": lambda row, screen: row["env/steps"] == 64.0 and "custom_sink" in screen,
    "custom_text_model": lambda row, screen: row["env/steps"] > 128.0 and "reach, oppose" in screen,
    "custom_stage": lambda row, screen: row["mine/effort"] > 0.0 and row["time/stage/effort"] > 0.0,
}
"""How each one is seen in the first row of metrics, or on the screen."""


def embodyrl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], timeout=240, cwd=cwd)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the examples, below the working directory of a stranger."""
    folder = tmp_path / "my own"
    folder.mkdir()
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_from_the_outside(name: str, copied: Path, tmp_path: Path) -> None:
    assert name in SMALL and name in SHOWS, f"examples/{name} is not tested: add it to SMALL and SHOWS"
    config = f"my own/{name}.yaml"
    checked = embodyrl("validate", config, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert ": OK" in checked.stdout and "runs Python code of its own" in checked.stdout
    few = ["run.iterations=1", "run.eval_every=0", "run.save_every=0", "eval.episodes=2", "run.dir=out"]
    few.append("tracking.report=false")
    done = embodyrl("run", config, *few, *SMALL[name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"plug-in {name}: {copied / name}.py\n" in done.stderr
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert SHOWS[name](row, done.stdout), (row, done.stdout)


WATCH_PREPROCESS = """

_preprocess = ConvPolicy.preprocess


def _watched(self, observation):
    images, proprio, tasks = observation.images, observation.proprio, observation.task_descriptions
    seen = [type(observation).__name__, type(images).__name__, images.dtype, list(images.shape[1:])]
    seen += [type(proprio).__name__, proprio.dtype, list(proprio.shape[1:]), len(images) == len(proprio) == len(tasks)]
    with open("seen.txt", "a") as file:
        print(len(images), *seen, file=file)
    return _preprocess(self, observation)


ConvPolicy.preprocess = _watched
"""


def test_preprocess_gets_tensors_in_rollouts_and_in_learning(copied: Path, tmp_path: Path) -> None:
    """`ConvPolicy` with 4 envs, and minibatches of 16 samples."""
    with (copied / "custom_image_model.py").open("a") as file:
        file.write(WATCH_PREPROCESS)
    few = ["run.iterations=1", "run.eval_every=0", "run.save_every=0", "eval.episodes=2", "run.dir=out"]
    few += ["algorithm.minibatches=4", "rollout.ready_slots=4", "tracking.report=false"]
    done = embodyrl("run", "my own/custom_image_model.yaml", *few, *POINT_MASS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in (tmp_path / "seen.txt").read_text().splitlines()]
    expected = "PolicyObservation Tensor torch.uint8 [1, 32, 32, 3] Tensor torch.float32 [4] True"
    assert {what for _, what in lines} == {expected}
    assert {"4", "16"} <= {samples for samples, _ in lines}, "of a rollout's step, and of a minibatch"


def test_the_script_trains_evaluates_and_steps(copied: Path, tmp_path: Path) -> None:
    few = ["run.iterations=5", "run.eval_every=0", "env.max_episode_steps=8", "rollout.num_chunks=16"]
    few += ["algorithm.minibatches=1", "algorithm.epochs=1", "eval.episodes=2", "run.dir=out"]
    done = programs.run(["my own/from_python.py", *few], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    begin = ["evaluation", "iteration", str(5 * 8 * 16), "success", "stepped:"]
    assert all(line.startswith(word) for line, word in zip(lines, begin, strict=True)), lines
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "words", "sentences"),
    [
        (
            "custom_loss",
            ["algorithm.loss.widht=0.1", "algorithm.advantage.margin=-1"],
            ["did you mean 'algorithm.loss.width'?", "algorithm.advantage.margin = -1 is too small"],
        ),
        ("custom_loss", ["rollout.group_size=1"], ["advantage 'pairwise' compares the episodes of a group"]),
        ("custom_reward", ["algorithm.reward.cost=-0.1"], ["algorithm.reward.cost = -0.1 is too small"]),
        ("custom_model", ["rollout.chunk_size=2"], ["rollout.chunk_size"]),
        ("custom_simulator", ["env.goal_radius=0"], ["env.goal_radius = 0 is too small"]),
        (
            "custom_simulator",
            ["env.tasks=[reech]", "env.cameras=[tip]"],
            ["point_mass has no task 'reech'", "did you mean 'reach'?", "has no camera 'tip'"],
        ),
    ],
)
def test_options_of_the_examples_are_checked(
    name: str, words: list[str], sentences: list[str], copied: Path, tmp_path: Path
) -> None:
    done = embodyrl("validate", f"my own/{name}.yaml", *words, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for sentence in sentences:
        assert sentence in done.stderr


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Runs a module's text; what it registers is forgotten after the test."""
    for registry in all_registries():
        registry.names()  # fill it
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def run(name: str, text: str) -> dict[str, Any]:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
        exec(compile(text, name, "exec"), module.__dict__)
        return module.__dict__

    yield run


@pytest.fixture
def example(imported: Callable[[str, str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What a module of `examples/` defines."""
    return lambda name: imported(name, (EXAMPLES / f"{name}.py").read_text())


def test_the_loss_is_least_where_the_ratio_is_a_width_away(example) -> None:
    spo = example("custom_loss")["spo"]
    ratio = torch.linspace(0.5, 1.5, 101)
    for advantage, best in ((2.0, 1.2), (-0.5, 0.8)):
        output = spo(
            logprobs=ratio.log(),
            old_logprobs=torch.zeros(101),
            advantages=torch.full((101,), advantage),
            width=0.2,
        )
        assert ratio[output.losses.argmin()] == pytest.approx(best)
        assert output.metrics["beyond_width"].mean() == pytest.approx(60 / 101, abs=0.03)


def test_the_advantage_counts_who_is_beaten(example) -> None:
    pairwise = example("custom_loss")["pairwise"]
    # Returns of two groups of three in two steps: 4, 1, 1.005 and, with its second episode lost, 5, -, 3.
    rewards = torch.tensor([[4.0, 1.0, 1.0, 2.0, 9.0, 3.0], [0.0, 0.0, 0.005, 3.0, 9.0, 7.0]], dtype=torch.float64)
    valid = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    advantages, returns = pairwise(rewards=rewards, valid=valid, group_size=3, margin=0.01)
    assert advantages.tolist() == [[1.0, -0.5, -0.5, 1.0, 0.0, -1.0], [1.0, -0.5, -0.5, 1.0, 0.0, 0.0]]
    assert returns.tolist() == [[4.0, 1.0, 1.005, 5.0, 0.0, 3.0], [4.0, 1.0, 1.005, 5.0, 0.0, 0.0]]
    advantages, _ = pairwise(rewards=rewards, valid=valid, group_size=3, margin=0.0)
    assert advantages[0].tolist() == [1.0, -1.0, 0.0, 1.0, 0.0, -1.0]


SIMULATOR = SimulatorSpec(
    tasks={"reach": "reach"},
    actions=(ActionField(name="push", meaning="force", unit="N", low=(-1.0, -2.0), high=(1.0, 2.0)),),
    proprio_dim=6,
    max_episode_steps=10,
    control_frequency=1.0,
)


def linear(module: dict[str, Any], simulator: SimulatorSpec = SIMULATOR) -> Policy:
    torch.manual_seed(0)
    assert "linear" in SupportedModel
    policy: Policy = module["LinearPolicy"](module["LinearConfig"](name="linear"), simulator, 1)
    return policy


CAMERA = dataclasses.replace(SIMULATOR, cameras=("top",), image_size=(30, 33))
"""Sides that are no multiples of the strides."""


def conv(module: dict[str, Any], simulator: SimulatorSpec = CAMERA) -> Policy:
    torch.manual_seed(0)
    assert "conv" in SupportedModel
    policy: Policy = module["ConvPolicy"](module["ConvConfig"](name="conv"), simulator, 1)
    return policy


def text(module: dict[str, Any], simulator: SimulatorSpec = SIMULATOR) -> Policy:
    torch.manual_seed(0)
    assert "text" in SupportedModel
    policy: Policy = module["TextPolicy"](module["TextConfig"](name="text"), simulator, 3)
    return policy


def tensors(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.ones(shape, device=device) for shape in shapes]


def observation(samples: int, device: str = "cpu") -> PolicyObservation:
    """Of `CAMERA`."""
    return PolicyObservation(
        images=torch.randint(256, (samples, 1, 30, 33, 3), dtype=torch.uint8, device=device),
        proprio=torch.randn(samples, 6, device=device),
        task_descriptions=["reach"] * samples,
    )


MODELS = [("custom_model", linear), ("custom_image_model", conv), ("custom_text_model", text)]


@pytest.mark.parametrize(("name", "build"), MODELS)
def test_the_models_decide_and_score_alike_in_either_precision(name, build, example) -> None:
    policy = build(example(name))
    inputs = policy.preprocess(observation(5))
    for halved in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halved):
            generator = torch.Generator().manual_seed(3)
            output = policy.act(inputs, "train", generator)
            scored = policy.evaluate(inputs, output.trace)
            state = generator.get_state()
            likely = policy.act(inputs, "eval", generator)
        found = [output.actions, output.logprobs, output.values, scored.logprobs, scored.entropy, scored.values]
        found += [likely.actions, likely.logprobs]
        assert {tensor.dtype for tensor in found} == {torch.float32}, "what leaves the network is float32"
        torch.testing.assert_close(scored.logprobs, output.logprobs)
        torch.testing.assert_close(scored.values, output.values)
        assert torch.equal(state, generator.get_state()), "evaluation draws nothing"


def test_the_model_refuses_what_it_cannot_steer(example) -> None:
    module = example("custom_model")
    push = ActionField(name="push", meaning="discrete", unit="1", low=(0.0,), high=(4.0,))
    for changes in ({"proprio_dim": 0}, {"actions": (push,)}):
        spec = {name: getattr(SIMULATOR, name) for name in ("tasks", "actions", "proprio_dim", "control_frequency")}
        with pytest.raises(PolicyError, match="needs a state observation and continuous actions"):
            linear(module, SimulatorSpec(**(spec | {"max_episode_steps": 10} | changes)))


def test_the_image_model_refuses_a_simulator_without_images(example) -> None:
    module = example("custom_image_model")
    number = ActionField(name="push", meaning="discrete", unit="1", low=(0.0,), high=(4.0,))
    for changes in ({"cameras": ()}, {"actions": (number,)}):
        with pytest.raises(PolicyError, match=r"needs images and continuous actions: set env\.cameras"):
            conv(module, dataclasses.replace(CAMERA, **changes))


def test_the_image_model_does_without_a_state_observation(example) -> None:
    policy = conv(example("custom_image_model"), dataclasses.replace(CAMERA, proprio_dim=0))
    seen = dataclasses.replace(observation(5), proprio=None)
    assert policy.act(policy.preprocess(seen), "eval").actions.shape == (5, 1, 2)


def test_the_text_model_reads_the_task_description(example) -> None:
    policy = text(example("custom_text_model"))
    seen = dataclasses.replace(observation(3), proprio=torch.ones(3, 6), task_descriptions=["go left", "go right", ""])
    output = policy.act(policy.preprocess(seen), "eval")
    assert output.actions.shape == (3, 3, 2) and output.logprobs.shape == (3, 6)
    assert len(output.actions.unique(dim=0)) == 3
    long = dataclasses.replace(seen, task_descriptions=["go left " * 100] * 3)
    assert policy.preprocess(long)["words"].shape == (3, 32)


def test_what_is_computed_is_computed_where_its_inputs_are(example) -> None:
    """On torch's `meta` device, which refuses tensors of the CPU beside its own, and to read numbers, as a GPU does."""
    for policy in [build(example(name)).to("meta") for name, build in MODELS]:
        for source in ("cpu", "meta"):  # observations of rollouts are on the CPU
            inputs = policy.preprocess(observation(5, source))
            assert {each.device.type for each in inputs.values()} == {"meta"}
        for mode in ("train", "eval"):
            output = policy.act(inputs, mode)
            scored = policy.evaluate(inputs, output.trace)
            assert {each.device.type for each in (output.actions, scored.logprobs, scored.values)} == {"meta"}

    loss = example("custom_loss")
    logprobs, old, advantages = tensors("meta", (5, 2), (5, 2), (5, 2))
    output = loss["spo"](logprobs=logprobs, old_logprobs=old, advantages=advantages, width=0.2)
    assert output.losses.device.type == "meta" and output.metrics["beyond_width"].device.type == "meta"
    found = loss["pairwise"](rewards=old.double().T, valid=old.T > 0, group_size=5, margin=0.0)
    assert {each.device.type for each in found} == {"meta"}
    rewards, actions = tensors("meta", (3, 4, 2), (3, 4, 2, 6))
    assert example("custom_reward")["gentle"](rewards=rewards, actions=actions, cost=0.1).device.type == "meta"


def test_the_stage_subtracts_its_price(example) -> None:
    batch = {"actions": torch.full((3, 4, 2, 6), 0.5), "shaped_rewards": torch.ones(3, 4, 2)}
    iteration = types.SimpleNamespace(batch=batch, metrics={})
    example("custom_stage")["pay_for_effort"](iteration)
    assert iteration.metrics["mine/effort"] == pytest.approx(1.5)
    assert torch.allclose(batch["shaped_rewards"], torch.full((3, 4, 2), 1.0 - 0.05 * 1.5))


SECTIONS = [
    ("algorithms.md", "A reward, filter, advantage, loss or encoder of your own"),
    ("configuration.md", "For developers"),
    ("models.md", "Adding a model"),
    ("tracking.md", "A sink in one file"),
    ("rollout.md", "Step an EnvManager"),
    ("simulators.md", "Writing one"),
    ("pipelines.md", "Changing the stages in YAML"),
    ("pipelines.md", "A stage of one's own"),
    ("pipelines.md", "Stages listed by a function of one's own"),
]
"""What a page says to whoever writes a plug-in."""


def blocks(page: str, title: str) -> list[tuple[str, str, str]]:
    """The code of a section: its language, the file that its first line names, and the rest."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.M | re.S)
    found = []
    for language, code in re.findall(r"^```(python|yaml)\n(.*?)^```", section, re.M | re.S):
        first, _, rest = code.partition("\n")
        assert first.startswith("# "), f"{page}: a block does not say which file it is of: {first!r}"
        found.append((language, first.removeprefix("# "), rest))
    return found


def is_part_of(shown: Any, whole: Any) -> bool:
    """Whether a piece of YAML is that file, less what it leaves out."""
    if not isinstance(shown, dict) or not isinstance(whole, dict):
        return shown == whole
    return all(key in whole and is_part_of(value, whole[key]) for key, value in shown.items())


WRONG: dict[str, list[Any]] = {
    "bias": [0, 1, "true", None],
    "layers": [3.0, "3", 0, True, None],
    "dropout": ["0.1", 1.0, float("nan"), None],
    "backbone": [3, True, None],
    "seed": ["3", 1.5],
    "patch": ["small", 1.5, 0, None],
    "warmup": ["never", "0.1", 0, None],
    "pooling": ["sum", 1, None],
    "activation": ["Tanh", "gelu", 1, None],
    "sizes": [64, [64, 1.5], [0], None],
    "weights": [[1.0], {"a": "1"}, {3: 1.0}, None],
    "extra": [1, {3: 1}, None],
    "head": [3, {"width": 0}, {"widht": 3}, None],
}
"""Values that the docs' table of types refuses."""
RIGHT: dict[str, list[Any]] = {
    "bias": [False],
    "layers": [3],
    "dropout": [0.1, 0, 1e-3],
    "backbone": ["small", "3"],
    "seed": [None, 3],
    "patch": ["auto", 8],
    "warmup": ["none", 0.1, 3],
    "pooling": ["max"],
    "activation": ["relu"],
    "sizes": [[], [8, 8]],
    "weights": [{}, {"a": 1, "b": 0.5}],
    "extra": [{"a": {"b": [1, "c"]}}],
    "head": [{}, {"width": 8}],
}


@pytest.mark.parametrize("name", WRONG)
def test_types_of_settings_are_as_the_docs_list_them(name, imported) -> None:
    (code,) = (code for _, file, code in blocks("configuration.md", "For developers") if file == "my_types.py")
    module = imported("my_types", code)
    SupportedModel.register("net", target=object, options=module["NetConfig"], critic=False, summary="for the types")

    def faults(value: Any) -> list[str]:
        settings = Settings({"name": "net", name: value})
        return [str(fault) for fault in check_settings(settings, ModelConfig, Location("here"), ())]

    assert all(faults(value) for value in WRONG[name])
    assert not any(faults(value) for value in RIGHT[name])
    built = [getattr(build_section(ModelConfig, {"name": "net", name: value}), name) for value in RIGHT[name]]
    assert name != "activation" or built == [module["Activation"].relu]
    assert name != "head" or built == [module["HeadConfig"](), module["HeadConfig"](width=8)]


def test_every_type_in_the_docs_is_tried(imported) -> None:
    (code,) = (code for _, file, code in blocks("configuration.md", "For developers") if file == "my_types.py")
    own = {field.name for field in dataclasses.fields(imported("my_types", code)["NetConfig"])}
    assert set(WRONG) == set(RIGHT) == own - {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize(("page", "title"), SECTIONS)
def test_what_the_docs_show_runs_as_it_stands(page, title, imported, tmp_path) -> None:
    shown = blocks(page, title)
    assert shown
    for language, name, code in shown:
        if language == "python":
            imported(Path(name).stem, code)
        if name.startswith("examples/"):
            file = (REPOSITORY / name).read_text()
            if language == "python":
                missing = [part for part in re.split(r"\n\n+", code.strip("\n")) if part not in file]
                assert not missing, f"{page} shows what {name} does not say"
            else:
                assert is_part_of(yaml.safe_load(code), yaml.safe_load(file)), f"{page} shows another {name}"
        else:
            (tmp_path / name).write_text(code)
    few = ["run.iterations=1", "run.eval_every=0", "eval.episodes=1", "algorithm.minibatches=1"]
    few += ["env.num_envs=2", "env.max_episode_steps=8", "rollout.num_chunks=8", "tracking.report=false"]
    for file in tmp_path.glob("*.yaml"):
        done = embodyrl("run", file.name, *few, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
