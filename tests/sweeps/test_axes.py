import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.sweeps.axes import Axis, load_all, points_of, read_seeds, several_values, split_words, with_seeds

PENDULUM = "experiment/gym_pendulum"


def load(words):
    return load_config(PENDULUM, words)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=1,2", ("1", "2")),
        ("algorithm=ppo,grpo", ("ppo", "grpo")),
        ("env=gym/pendulum,gym/cartpole", ("gym/pendulum", "gym/cartpole")),
        ("a=range(1,4)", ("1", "2", "3")),
        ("a=choice(x,y)", ("x", "y")),
        ("a=[1,2],[3]", ("[1,2]", "[3]")),
        ("a=[1,2]", None),
        ("a={b:1,c:2}", None),
        ("a='x,y'", None),
        ('a="x,y"', None),
        ("a=1", None),
        ("a=1,", None),
        ("a=(", None),
    ],
)
def test_which_arguments_name_several_values(word, values):
    found = several_values(word)
    assert (None if found is None else found.values) == values


def test_every_combination_is_a_run_in_a_folder_of_its_own():
    axes = [Axis("a.b", ("1", "2")), Axis("env", ("gym/pendulum", "gym_pendulum")), Axis("seed", ("3",))]
    points = points_of(axes)
    assert [point.overrides for point in points[:2]] == [
        ["a.b=1", "env=gym/pendulum", "seed=3"],
        ["a.b=1", "env=gym_pendulum", "seed=3"],
    ]
    assert [point.name for point in points[:2]] == [
        "a.b=1,env=gym_pendulum,seed=3",
        "a.b=1,env=gym_pendulum,seed=3~2",
    ]
    assert points[0].setting == "a.b=1,env=gym/pendulum"


def test_names_stay_short_and_different():
    long = "x" * 300
    names = [point.name for point in points_of([Axis("a", (long + "1", long + "2"))])]
    assert len(set(names)) == 2 and all(len(name) < 255 for name in names)


def test_seeds_begin_with_that_of_the_config():
    axes = with_seeds(load, ["seed=7"], [], "3")
    assert axes == [Axis("seed", ("7", "8", "9"))]
    assert with_seeds(load, [], [], "3,9")[0].values == ("3", "9")


@pytest.mark.parametrize("text", ["0", "", "x", "1.5", "-1", "3,", "1..5", "5000"])
def test_illegal_seeds(text):
    with pytest.raises(ConfigError, match="--seeds"):
        read_seeds(text)


@pytest.mark.parametrize(
    ("words", "seeds", "message"),
    [
        (["run.dir=a,b"], None, "run.dir takes one value: each run gets a folder of its own"),
        (["run.name=a,b"], None, """write 'run.name="a,b"'"""),
        (["seed=1,2"], "2", "seed and --seeds both name seeds"),
        (["seed=1", "seed=1,2"], None, "seed is given 2 times"),
        (["algorithm.gamma=0.9,0.9"], None, "names 0.9 more than once"),
        ([], "1,01", "names a seed more than once"),
        (["run.iterations=range(1,1200)"], None, "1199 runs"),
    ],
)
def test_what_cannot_be_swept(words, seeds, message):
    plain, axes = split_words(words)
    with pytest.raises(ConfigError) as caught:
        with_seeds(load, plain, axes, seeds)
    assert message in str(caught.value)
    assert str(caught.value).endswith("nothing was started.")


def test_all_faults_of_all_runs_are_named_at_once():
    plain, axes = split_words(["algorithm.gamma=0.9,2", "run.iteratons=3", "engine.device=cpu,gpu"])
    points = points_of(with_seeds(load, plain, axes, "2"))
    with pytest.raises(ConfigError) as caught:
        load_all(load, plain, points)
    text = str(caught.value)
    assert "unknown key 'run.iteratons'" in text
    assert "with algorithm.gamma=2: algorithm.gamma = 2" in text
    assert "with engine.device=gpu: engine.device must be one of" in text
    assert text.count("\n") == 3 and text.endswith("3 faults; nothing was started.")
