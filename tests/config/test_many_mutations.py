"""Some of the configs of `benchmarks/config_mutations.py`."""

from __future__ import annotations

import errno
import os
import re

import drivers
import pytest
from slow import rest_slow

from embodyrl.config import ConfigError, load_config

HEAD = "defaults: [env: gym/pendulum, model: mlp, algorithm: ppo, _self_]\n"
DEEP = "[" * 900 + "]" * 900
FOUND = {
    "a key that is no text": (HEAD, ["run.iterations={null: 1}", "run.name=${oc.env:HOME}"], "run.iterations"),
    "a key that is no text, deep": (HEAD, ["env.kwargs.g=[{a: {null: 3}}]"], "has the key null, which is no text"),
    "a mark for what is missing": (HEAD, ["env.name=???"], "stands for a value that is missing"),
    "deep in the file": (HEAD + "env: {kwargs: " + "{a: " * 300 + "1" + "}" * 300 + "}\n", [], "nested more than 50"),
    "deep on the command line": (HEAD, [f"env.kwargs.a={DEEP * 3}"], "cannot be read"),
    "deeper than a file may be": (HEAD, [f"env.kwargs.a={'[' * 60 + ']' * 60}"], "nested more than 50"),
    "a long option": (HEAD.replace("mlp", "x" * 400), [], "has no option"),
    "a long key": (HEAD, [f"{'x' * 400}=1"], "unknown key"),
    "a group outside": (HEAD.replace("model: mlp", "../..: x"), [], "no config group '../..'"),
}
"""Configs that once ended in a traceback, or in a walk through the whole disk, and what is said of them now."""


@pytest.fixture(scope="module")
def driver():
    return drivers.load("config_mutations")


def test_a_config_is_drawn_from_its_number_alone(driver):
    assert driver.mutant(1, 5) == driver.mutant(1, 5) != driver.mutant(2, 5)
    assert len({str(driver.mutant(1, number)) for number in range(50)}) == 50


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_stays_mended(driver, tmp_path, case):
    text, overrides, said = FOUND[case]
    driver.write(driver.Mutant({"main.yaml": text}, overrides), tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(tmp_path / "main.yaml", overrides)


@pytest.mark.parametrize("numbers", rest_slow([range(50), range(50, 200)]), ids=str)
def test_every_config_is_accepted_or_has_faults_and_soon(driver, numbers):
    counted = driver.summary(driver.share(2, numbers))
    assert counted["failures"] == [] and counted["configs"] == len(numbers)
    assert counted["faults"] > len(numbers) / 2  # about one in a hundred is still a config


@pytest.mark.parametrize("setting", ["model.checkpoint", "model.tokenizer", "data.path"])
def test_a_path_that_may_not_be_looked_at_is_a_fault(setting, monkeypatch):
    """Permissions do not stop an administrator, who may run the tests."""
    whole = os.stat

    def stat(path, *args, **kwargs):
        if str(path).startswith("/theirs"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    # Newer versions of Python take such a path for one that is not there.
    with pytest.raises(ConfigError, match=r"/theirs/x\S* (cannot be looked at \(Permission denied\)|do|does) "):
        load_config("tiny_pi0_sft", [f"{setting}=/theirs/x"])


def test_the_driver_knows_a_config(driver):
    assert driver.load(0, driver.Mutant({"main.yaml": HEAD}, [])).kind == "valid"


def test_the_driver_sees_a_traceback_and_a_slow_config(driver, monkeypatch):
    def fails(*_, **__):
        raise RecursionError("deep")

    made = driver.mutant(1, 1)
    monkeypatch.setattr(driver, "load_config", fails)
    outcome = driver.load(1, made)
    assert outcome.kind == "traceback" and "RecursionError: deep" in outcome.what
    counted = driver.summary([outcome, driver.Outcome(2, "valid", 5.1)])
    assert (counted["traceback"], counted["slow"], len(counted["failures"])) == (1, 1, 2)


def test_the_program_answers_like_the_function(driver):
    text, words, _ = FOUND["a key that is no text"]
    outcome = driver.validate(0, driver.Mutant({"main.yaml": text}, words))
    assert outcome.kind == "faults", outcome
