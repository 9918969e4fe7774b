"""embodyrl from Python: the same runs as from the command line, in a script, a notebook or a thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import psutil
import pytest

import embodyrl
from embodyrl.runner.callbacks import CallbackError
from embodyrl.runner.checkpoint import CheckpointError, Manifest

TINY = [
    "env.num_envs=4",
    "env.workers=2",
    "env.max_episode_steps=10",
    "rollout.num_chunks=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[8]",
    "eval.episodes=3",
    "run.eval_every=2",
    "run.save_every=0",
    "run.iterations=4",
    "tracking.sinks=[jsonl,console]",
    "tracking.report=false",
    "engine.optimizer.schedule=constant",
]


OTHERS: set[int] = set()


def pendulum(path: Path, *overrides: str, **options: Any) -> embodyrl.Run:
    return embodyrl.train("gym_pendulum", [*TINY, f"run.dir={path}", *overrides], **options)


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run, without times."""
    rows = embodyrl.Run(run_dir).metrics
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def weights(run_dir: Path) -> dict[str, Any]:
    files = Manifest.read(run_dir / "checkpoints" / "last").files
    return {name: facts for name, facts in files.items() if name.startswith("policy/")}


@pytest.fixture(autouse=True)
def others() -> Iterator[set[int]]:
    """Processes that other tests keep, by id."""
    OTHERS.update(each.pid for each in programs.children_of(psutil.Process(), recursive=True))
    yield OTHERS
    OTHERS.clear()


def assert_nothing_is_left() -> None:
    children = [each for each in programs.children_of(psutil.Process(), recursive=True) if each.pid not in OTHERS]
    assert not psutil.wait_procs(children, timeout=60)[1], "processes are left"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> embodyrl.Run:
    return pendulum(tmp_path_factory.mktemp("trained") / "run")


def test_a_run_says_what_it_measured_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = pendulum(tmp_path / "run")
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [row["iteration"] for row in run.metrics] == [0, 1, 2, 3, 4]
    assert run.metrics[-1]["env/total_steps"] == 4 * 4 * 8 and run.stopped_by is None
    assert run.evaluation is not None and run.evaluation.episodes == 3
    assert run.evaluation.success_once == run.metrics[-1]["eval/success_once"]
    assert repr(embodyrl.Run(run.path).metrics) == repr(run.metrics)
    assert_nothing_is_left()
    run = embodyrl.resume(run.path, ["run.iterations=6"], progress=True)
    assert [row["iteration"] for row in run.metrics] == [0, 1, 2, 3, 4, 5, 6]
    shown = capfd.readouterr().out
    assert "simulator  gymnasium Pendulum-v1" in shown and "done in" in shown and "next: embodyrl eval" in shown


SCRIPT = """
print("once")
import sys
import embodyrl

class Watch(embodyrl.Callback):
    seen = []

    def on_iteration(self, metrics):
        self.seen.append(metrics["iteration"])

    def on_evaluation(self, result):
        self.seen.append(result.episodes)

assert not {"torch", "numpy", "hydra"} & set(sys.modules)
run = embodyrl.train("gym_pendulum", OVERRIDES, callbacks=[Watch()])
assert Watch.seen == [3, 1, 3, 2, 3, 3, 4] or print(Watch.seen)
policy = embodyrl.load_policy("run/last")
with embodyrl.make_envs("gym/pendulum", num_envs=3) as envs:
    observation = envs.reset()
    for _ in range(5):
        result = envs.step(policy.act(observation))
        observation = result.observation
assert result.rewards.shape == (3, 1) and observation.proprio.shape == (3, 3)
assert embodyrl.evaluate("run", episodes=2).episodes == 2
print("twice")
"""


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("OVERRIDES", repr([*TINY, "run.dir=run"])))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("once\ntwice\n", "", 0)


def test_two_runs_in_a_process_equal_two_from_the_command_line(tmp_path: Path) -> None:
    """The first as a cell of a notebook in a thread that is not the main one, the second as a dict."""
    cell = f"import embodyrl\nrun = embodyrl.train('gym_pendulum', {[*TINY, f'run.dir={tmp_path}/cell']!r})"
    space: dict[str, Any] = {"__name__": "__main__"}
    thread = threading.Thread(target=exec, args=(compile(cell, "<cell>", "exec"), space))
    thread.start()
    thread.join()
    assert space["run"].path == tmp_path / "cell"
    loaded = embodyrl.load_config("gym_pendulum", [*TINY, "seed=2", f"run.dir={tmp_path}/dict"])
    embodyrl.train(loaded.config)
    for seed, name in ((1, "cell"), (2, "dict")):
        words = ["run", "gym_pendulum", *TINY, f"seed={seed}", f"run.dir={tmp_path}/cli-{name}"]
        programs.run(["-m", "embodyrl", *words], check=True)
        assert numbers(tmp_path / name) == numbers(tmp_path / f"cli-{name}")
        assert weights(tmp_path / name) == weights(tmp_path / f"cli-{name}")


def test_a_config_that_is_wrong_says_so_however_it_is_given(tmp_path: Path) -> None:
    own = {"defaults": [{"env": "gym/pendulum"}, {"model": "mlp"}, {"algorithm": "ppo"}, "_self_"]}
    with pytest.raises(embodyrl.ConfigError, match=r"did you mean 'algorithm\.gamma'\?"):
        embodyrl.train("gym_pendulum", ["algorithm.gama=0.5"])
    with pytest.raises(embodyrl.ConfigError, match=r"^config: unknown key 'sede' - did you mean 'seed'\?\n1 fault"):
        embodyrl.train({**own, "sede": 3})
    with pytest.raises(embodyrl.ConfigError, match="no such file - did you mean 'experiment/gym_pendulum'"):
        embodyrl.train("gym_pendulm")
    with pytest.raises(embodyrl.UserError, match="overrides = 'seed=3': give a list"):
        embodyrl.train("gym_pendulum", "seed=3")
    with pytest.raises(embodyrl.UserError, match="the config is a int"):
        embodyrl.train(3)  # type: ignore[arg-type]
    for load in (embodyrl.load_config, embodyrl.make_envs):
        with pytest.raises(embodyrl.UserError, match="the config is a list: give a path, a shipped experiment's name"):
            load([own])  # type: ignore[arg-type]
    assert embodyrl.load_config({**own, "seed": 3}, ["run.iterations=7"]).config.run.iterations == 7
    with pytest.raises(embodyrl.UserError, match=r"the config holds .*: use numbers"):
        embodyrl.train({**own, "seed": object()})
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        embodyrl.evaluate(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="last does not exist"):
        embodyrl.load_policy(tmp_path / "last")
    with pytest.raises(embodyrl.UserError, match="no environment 'metaworld/rech' - did you mean 'metaworld/reach'"):
        embodyrl.make_envs("metaworld/rech")
    assert not list(tmp_path.iterdir())


def test_an_error_shows_the_callers_own_line_and_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal comes through many frames, of which its text needs none."""

    def refused() -> tuple[list[str], bool]:
        with pytest.raises(embodyrl.UserError, match="nonsense") as caught:
            pendulum(tmp_path / "run", "env.kwargs={nonsense: 1}")
        frames = traceback.extract_tb(caught.value.__traceback__)
        return [Path(frame.filename).name for frame in frames], caught.value.__suppress_context__

    names, alone = refused()
    assert set(names) == {"test_api.py", "api.py"} and names.count("api.py") == 1 and alone
    monkeypatch.setenv("EMBODYRL_DEBUG", "1")
    assert "load.py" in refused()[0]


class Misspelt(embodyrl.Callback):
    def on_iterations(self, metrics: Any) -> None: ...


class Deaf(embodyrl.Callback):
    def iteration(self, metrics: Any) -> None: ...


class Short:
    def on_iteration(self) -> None: ...


class Long:
    def on_iteration(self, metrics: Any) -> None: ...

    def on_evaluation(self, iteration: int, result: Any) -> None: ...


class Number:
    on_evaluation = 3


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (print, "callbacks is a builtin_function_or_method: give a list"),
        (
            [print],
            r"callbacks\[0\] \(builtin_function_or_method\) has no method on_iteration or on_evaluation: give an",
        ),
        ([embodyrl.Callback], r"is the class Callback: give an object, Callback\(\)"),
        ([Misspelt()], "has a method 'on_iterations', which is never called - did you mean 'on_iteration'"),
        ([Deaf()], "has no method on_iteration or on_evaluation - did you mean 'on_iteration'"),
        (
            [Short()],
            r"\(Short\)\.on_iteration takes \(\).*, but .* one argument: define it as on_iteration\(self, metrics\)",
        ),
        ([Long()], r"\(Long\)\.on_evaluation takes \(iteration.*define it as on_evaluation\(self, result\)"),
        ([Number()], r"\(Number\)\.on_evaluation is a int: make it a method that takes 'result'"),
    ],
)
def test_a_callback_that_is_none_is_refused_before_anything_starts(callbacks, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=message):
        pendulum(tmp_path / "run", callbacks=callbacks)
    assert not list(tmp_path.iterdir())


class At(embodyrl.Callback):
    """Does something in the second iteration."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_iteration(self, metrics: Any) -> Any:
        return self.what() if metrics["iteration"] == 2 else None


def fail() -> None:
    raise ArithmeticError("out of ideas")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("what", "raised", "by"),
    [
        (lambda: False, None, "callback"),
        (fail, ArithmeticError, "callback"),
        (lambda: "stop", CallbackError, "callback"),
        (press_ctrl_c, KeyboardInterrupt, "SIGINT"),
    ],
)
def test_a_run_that_is_stopped_is_saved_and_goes_on_as_if_it_had_not_been(
    what: Any, raised: type[BaseException] | None, by: str, tmp_path: Path, trained: embodyrl.Run
) -> None:
    path, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)
    if raised is None:
        run = pendulum(path, callbacks=[At(what)])
        assert run.stopped_by == by
    else:
        with pytest.raises(raised):
            pendulum(path, callbacks=[At(what)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert_nothing_is_left()
    stopped = embodyrl.Run(path)
    assert stopped.stopped_by == by and stopped.metrics[-1]["iteration"] == 2
    assert embodyrl.resume(path).stopped_by is None
    assert numbers(path) == numbers(trained.path) and weights(path) == weights(trained.path)


def test_an_evaluation_may_stop_a_run_before_it_begins(tmp_path: Path) -> None:
    class Never:
        def on_evaluation(self, result: embodyrl.Evaluation) -> bool:
            return result.episodes > 3

    run = pendulum(tmp_path / "run", callbacks=[Never()])
    assert run.stopped_by == "callback" and [row["iteration"] for row in run.metrics] == [0]
    assert (tmp_path / "run" / "checkpoints" / "000000").is_dir()


def test_a_simulator_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(embodyrl.RunError):
        pendulum(path, callbacks=[At(kill_a_child)])
    assert_nothing_is_left()
    assert "failed: " in (path / "run.log").read_text()


def kill_a_child() -> None:
    for child in programs.children_of(psutil.Process(), recursive=True):
        if child.pid not in OTHERS:
            child.kill()


def test_policies_act_as_in_their_evaluation(trained: embodyrl.Run, tmp_path: Path) -> None:
    expected = embodyrl.evaluate(trained.path, episodes=4)
    assert trained.evaluation is not None and expected.episodes == 4
    for name in ("last", "checkpoints/last"):
        assert embodyrl.evaluate(trained.path / name, ["eval.episodes=4"]).mean_return == expected.mean_return
    assert embodyrl.evaluate(trained.path.parent / "last", episodes=4).mean_return == expected.mean_return
    folder = trained.path / "checkpoints" / "last" / "policy"
    public = embodyrl.evaluate(folder, [*TINY, "eval.episodes=4"], config="gym_pendulum")
    assert public.mean_return == expected.mean_return

    policy = trained.policy
    assert (policy.chunk_size, policy.action_dim, policy.config.seed) == (1, 1, 1)
    with embodyrl.make_envs(trained.path, num_envs=2, seed=5) as envs:
        observation = envs.reset()
        again = embodyrl.load_policy(trained.path, envs=envs)
        assert np.array_equal(policy.act(observation), again.act(observation))
        assert policy.act(observation, sample=True).shape == (2, 1, 1)
        ends = 0
        for _ in range(12):
            result = envs.step(policy.act(observation)[:, 0])
            observation, ends = result.observation, ends + result.ended
        assert ends.tolist() == [1, 1], "episodes of 10 steps, and the next ones begin at once"
        with pytest.raises(embodyrl.UserError, match=r"want \[num_envs, chunk_size, action dims\] = \(2, 1, 1\)"):
            envs.step(np.zeros((2, 3, 1)))
        with pytest.raises(embodyrl.UserError, match=r"actions\[1, 0, 0\] is nan: want finite numbers"):
            envs.step([[0.0], [np.nan]])
    assert_nothing_is_left()


def test_an_exported_policy_acts_in_envs_of_its_own(trained: embodyrl.Run, tmp_path: Path) -> None:
    programs.run(["-m", "embodyrl", "export", str(trained.path), "--out", str(tmp_path / "policy")], check=True)
    with embodyrl.make_envs(tmp_path / "policy", 2, api="gymnasium", seed=5) as envs:
        policy = embodyrl.load_policy(tmp_path / "policy", envs=envs.envs)
        ends = 0
        envs.reset()
        for _ in range(10):
            actions = policy.act(envs.observation)
            assert np.array_equal(actions, trained.policy.act(envs.observation))
            ends = ends + envs.step(actions)[3]
    assert ends.tolist() == [1, 1], "episodes of 10 steps, as in the config of its run"


def test_a_folder_that_is_no_run_or_sweep_is_refused_and_one_nearby_named(
    trained: embodyrl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no runs/ is
    path, nowhere = trained.path, trained.path.with_name("runn")
    last = path / "checkpoints" / "last"
    for kind, wrong, expected in (
        (embodyrl.Run, "nope", "nope does not exist: give the folder that `embodyrl run` made"),
        (embodyrl.Run, nowhere, f"{nowhere} does not exist: did you mean {str(path)!r}?"),
        (embodyrl.Run, path.parent, f"(no config.yaml): give the folder of one, for instance {path}"),
        (embodyrl.Run, last, f"is a checkpoint: open its run with embodyrl.Run({str(path)!r})"),
        (embodyrl.Sweep, "nope", "nope is no sweep (no sweep.json): give the folder that a sweep made"),
        (embodyrl.Sweep, path, f"no sweep but a single run: open it with embodyrl.Run({str(path)!r})"),
    ):
        with pytest.raises(embodyrl.UserError) as caught:
            kind(wrong)
        assert str(caught.value).endswith(expected)


def test_envs_show_images_that_stay_as_they_are() -> None:
    overrides = ["env.cameras=[render]", "env.image_size=[16,24]"]
    with embodyrl.make_envs("gym/pendulum", 2, overrides=overrides, chunk_size=3) as envs:
        first = envs.reset().images
        assert first is not None and first.dtype == np.uint8 and first.shape == (2, 1, 16, 24, 3)
        before = first.copy()
        for _ in range(3):
            result = envs.step(np.ones((2, 3, 1)))
        assert result.rewards.shape == (2, 3) and result.steps.tolist() == [3, 3]
        assert np.array_equal(first, before) and not np.array_equal(result.observation.images, before)


def test_everything_that_is_promised_is_there() -> None:
    assert set(embodyrl.__all__) <= set(dir(embodyrl))
    assert all(getattr(embodyrl, name) is not None for name in embodyrl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        embodyrl.trian  # noqa: B018
