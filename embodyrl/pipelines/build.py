"""Building an iteration from a config: an algorithm's stages, or those of a function of the user's, with the changes of
the section `pipeline`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config, InsertedStage
from embodyrl.errors import did_you_mean, listed
from embodyrl.pipelines.checks import RESOURCES, check_names, check_stages
from embodyrl.pipelines.pipeline import Pipeline, PipelineError, Stage
from embodyrl.registry import ALGORITHMS, STAGES


def build_pipeline(config: Config) -> Pipeline:
    """Build the iteration that a config asks for: the algorithm's stages, or those of `pipeline.function`, with the
    changes of the section `pipeline`. Imports no stage.

    Raises:
        PipelineError: the stages do not fit together, or the config changes stages that are not there.
        UnknownNameError: there is no such algorithm.
    """
    changes = config.pipeline
    stages = _of_function(config) if changes.function else list(ALGORITHMS.load(config.algorithm.name)(config))
    unknown = list(_unknown_names(config, stages))
    # In this order: what was dropped cannot be replaced, and a new stage finds its place among those that are left.
    stages = [stage for stage in stages if stage.name not in changes.drop]
    stages = [Stage(each.name, changes.replace[each.name]) if each.name in changes.replace else each for each in stages]
    misplaced = [issue for number in range(len(changes.insert)) for issue in _insert(stages, number, changes.insert)]

    def where(name: str) -> tuple[str, ...]:
        return tuple(_settings(name, config))

    # With an unknown name stages are in the wrong place, so issues of their columns would only mislead.
    check = check_names if unknown else check_stages
    if issues := [*unknown, *misplaced, *check(stages, where)]:
        raise PipelineError(issues)
    return Pipeline(stages)


def _of_function(config: Config) -> list[Stage]:
    """Call the user's own function for the stages; its module was imported when the config was loaded."""

    def wrong(message: str, hint: str) -> PipelineError:
        return PipelineError([ConfigIssue(("pipeline.function",), message, hint)])

    name = str(config.pipeline.function)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise wrong(f"pipeline.function = {name!r} names no function", "write module:function")
    if module not in sys.modules:
        raise wrong(f"the module of {name} was not imported", "load the config with load_config")
    known = vars(sys.modules[module])
    if attribute not in known:
        functions = sorted(each for each, value in known.items() if callable(value) and not each.startswith("_"))
        hint = did_you_mean(attribute, functions, otherwise=f"one of {', '.join(functions) or 'none'}")
        raise wrong(f"module {module!r} has no {attribute!r}", hint)
    try:
        stages = known[attribute](config)
    except Exception as error:  # whatever a stranger's function raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name} failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        raise wrong(what, "fix the function") from error
    if not isinstance(stages, list) or not all(isinstance(stage, Stage) for stage in stages):
        raise wrong(f"{name} returned a {type(stages).__name__}", "return a list of embodyrl.pipelines.Stage")
    return stages


def _unknown_names(config: Config, stages: Sequence[Stage]) -> Iterator[ConfigIssue]:
    """Find names in the section `pipeline` that no stage has."""
    changes, known = config.pipeline, [stage.name for stage in stages]
    left = [*(name for name in known if name not in changes.drop), *(each.name for each in changes.insert)]
    named = [(f"pipeline.drop.{place}", name, known) for place, name in enumerate(changes.drop)]
    named += [(f"pipeline.replace.{name}", name, known) for name in changes.replace]
    for number, inserted in enumerate(changes.insert):
        for key, names in (("after", inserted.after), ("before", inserted.before)):
            named += [(f"pipeline.insert.{number}.{key}.{place}", name, left) for place, name in enumerate(names)]
    for setting, name, there in named:
        if name not in there:
            hint = did_you_mean(name, there, otherwise=f"one of {', '.join(there) or 'none'}")
            yield ConfigIssue((setting,), f"the iteration has no stage {name!r}", hint)


def _insert(stages: list[Stage], number: int, insertions: Sequence[InsertedStage]) -> Iterator[ConfigIssue]:
    """Insert a stage where its `after` and `before`, and those of earlier insertions, allow; within these limits right
    after the last stage that writes or changes a column it names. Yields an issue if there is no such place."""
    inserted, earlier = insertions[number], insertions[:number]
    followed = {*inserted.after, *(each.name for each in earlier if inserted.name in each.before)}
    preceded = {*inserted.before, *(each.name for each in earlier if inserted.name in each.after)}
    low = max((place + 1 for place, stage in enumerate(stages) if stage.name in followed), default=0)
    high = min((place for place, stage in enumerate(stages) if stage.name in preceded), default=len(stages))
    if low > high:
        one, other = listed(sorted(followed)), listed(sorted(preceded))
        message = f"stage {inserted.name!r} cannot come after {one} and before {other}"
        names = ", ".join(stage.name for stage in stages)
        yield ConfigIssue((f"pipeline.insert.{number}",), message, f"the others run in the order {names}")
    columns = set(_declared(Stage(inserted.name, inserted.stage)).inputs) - set(RESOURCES)
    # Columns of the batch tell the place better than resources, which nearly every stage uses.
    behind = [place + 1 for place, stage in enumerate(stages) if columns & set(_declared(stage).outputs)]
    wanted = max(behind, default=low or high)
    stages.insert(max(low, min(wanted, high)), Stage(inserted.name, inserted.stage))


def _declared(stage: Stage) -> Stage:
    """Return the stage with the columns that its function declares, if that is registered."""
    return stage.declared() if stage.function in STAGES else stage


def _settings(name: str, config: Config) -> Iterator[str]:
    """Yield the settings that may have to be changed for a stage: those that added it, the section, the algorithm."""
    changes = config.pipeline
    yield from (f"pipeline.insert.{number}" for number, each in enumerate(changes.insert) if each.name == name)
    if name in changes.replace:
        yield f"pipeline.replace.{name}"
    if changes.drop:
        yield "pipeline.drop"
    if changes.function is not None:
        yield "pipeline.function"
    yield from ("pipeline", "algorithm.name")
