"""Rules between the settings of the learning algorithm, of the engine, and others; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.config.issues import LEAVE_OUT, ConfigIssue
from embodyrl.config.rules import fact, of_newest_rollout, rule
from embodyrl.config.schema import (
    Bootstrap,
    Config,
    Episodes,
    LearningRate,
    Level,
    Offload,
    OldLogprobs,
    Precision,
    RewardLevel,
    RolloutConfig,
    RolloutMode,
)
from embodyrl.registry import ADVANTAGES, ALGORITHMS, FILTERS, LOSSES, REWARDS, Requirement, SupportedModel, load_target


def _comparing(config: Config) -> str | None:
    """Return the component that compares the episodes of a group, as text; None if there is none or it is unknown."""
    settings = config.algorithm
    if fact(FILTERS, settings.filter.name, "group"):
        return f"filter {settings.filter.name!r}"
    compares = fact(ADVANTAGES, settings.advantage.name, "group")
    if load_target(compares)(settings.advantage) if isinstance(compares, str) else compares:
        return f"advantage {settings.advantage.name!r}"
    return None


@of_newest_rollout
def groups_are_compared(config: Config) -> Iterator[ConfigIssue]:
    """Check that there are groups if a component compares their episodes, and only then."""
    name, size, comparing = config.algorithm.advantage.name, config.rollout.group_size, _comparing(config)
    if comparing is not None and size == 1:
        paths = ("rollout.group_size", "algorithm.filter.name" if "filter" in comparing else "algorithm.advantage.name")
        message = f"{comparing} compares the episodes of a group, but rollout.group_size is 1"
        remedy = f"set rollout.group_size to a divisor of env.num_envs: {_group_sizes(config)}"
        yield ConfigIssue(paths, message, remedy, fix={"rollout.group_size": _usual_group_size(config)})
    if comparing is None and size > 1 and fact(ADVANTAGES, name, "group") is not None:
        so_set = " with these options" if fact(ADVANTAGES, name, "group") else ""
        yield ConfigIssue(
            ("rollout.group_size", "algorithm.advantage.name"),
            f"rollout.group_size = {size} has no use: advantage {name!r}{so_set} does not compare the episodes of a "
            f"group, and no filter does",
            "set rollout.group_size to 1, or choose an advantage that does, as 'grpo'",
            fix={"rollout.group_size": LEAVE_OUT},
        )


def _usual_group_size(config: Config) -> int:
    """Return the largest size up to 8 of which there are two groups or more; 2 if no size fits."""
    envs = config.env.num_envs
    return max((size for size in range(2, 9) if envs % size == 0 and envs > size), default=2)


def _group_sizes(config: Config) -> str:
    envs = config.env.num_envs
    return ", ".join(str(size) for size in range(2, envs + 1) if envs % size == 0) or f"none fits {envs}; raise it"


@of_newest_rollout
def whole_episodes_are_collected(config: Config) -> Iterator[ConfigIssue]:
    """Check that components that need whole episodes get them."""
    if config.rollout.episodes is Episodes.whole:
        return
    settings = config.algorithm
    wanting = {
        "advantage": (settings.advantage.name, fact(ADVANTAGES, settings.advantage.name, "whole")),
        "reward": (settings.reward.name, fact(REWARDS, settings.reward.name, "whole")),
        "loss": (settings.loss.name, fact(LOSSES, settings.loss.name, "whole")),
        "filter": (settings.filter.name, fact(FILTERS, settings.filter.name, "group")),
    }
    named = {key: name for key, (name, wants) in wanting.items() if wants}
    if named:
        yield ConfigIssue(
            ("rollout.episodes", *(f"algorithm.{key}.name" for key in named)),
            f"{' and '.join(f'{key} {name!r}' for key, name in named.items())} {'need' if len(named) > 1 else 'needs'} "
            f"whole episodes, but rollout.episodes is {config.rollout.episodes.value!r}",
            "set rollout.episodes to whole",
            fix={"rollout.episodes": "whole"},
        )


@of_newest_rollout
def collections_wait_for_a_filter(config: Config) -> Iterator[ConfigIssue]:
    """Check that repeated rollouts come with a filter that drops groups."""
    most, name = config.algorithm.max_collections, config.algorithm.filter.name
    if most > 1 and fact(FILTERS, name, "group") is False:
        yield ConfigIssue(
            ("algorithm.max_collections", "algorithm.filter.name"),
            f"algorithm.max_collections = {most} has no use: filter {name!r} drops no group",
            "set algorithm.max_collections to 1, or choose a filter",
            fix={"algorithm.max_collections": LEAVE_OUT},
        )


@rule
def components_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the chosen loss, advantage, reward and filter."""
    settings = config.algorithm
    for registry, name in (
        (LOSSES, settings.loss.name),
        (ADVANTAGES, settings.advantage.name),
        (REWARDS, settings.reward.name),
        (FILTERS, settings.filter.name),
    ):
        check = fact(registry, name, "check")
        if check is not None:
            yield from load_target(check)(config)


@of_newest_rollout
def behaviour_policy_is_known(config: Config) -> Iterator[ConfigIssue]:
    """Check that a loss that weights by the behaviour policy gets its log-probs."""
    settings = config.algorithm
    if settings.loss.name == "decoupled_ppo" and settings.old_logprobs is OldLogprobs.recompute:
        yield ConfigIssue(
            ("algorithm.old_logprobs", "algorithm.loss.name"),
            "algorithm.old_logprobs = 'recompute' replaces the log-probs of the behaviour policy, by which loss "
            "'decoupled_ppo' weights",
            "set algorithm.old_logprobs to rollout; with algorithm.proximal = recompute ratios start at 1 as well",
            fix={"algorithm.old_logprobs": LEAVE_OUT},
        )


@of_newest_rollout
def async_rollouts_can_be(config: Config) -> Iterator[ConfigIssue]:
    """Check that asynchronous rollouts have workers, a loss that corrects for older policies, and nothing offloaded."""
    if config.rollout.mode is not RolloutMode.async_:
        return
    if not config.placement.rollout.workers:
        yield ConfigIssue(
            ("rollout.mode", "placement.rollout.workers"),
            "rollout.mode is async, which needs rollout workers, and there are none: the ranks roll out themselves",
            "set placement.rollout.workers to 1 or more, or rollout.mode to sync",
        )
    loss = config.algorithm.loss.name
    if config.rollout.max_staleness and fact(LOSSES, loss, "corrects_staleness") is False:
        able = [entry.name for entry in LOSSES.entries() if entry.corrects_staleness]
        yield ConfigIssue(
            ("rollout.mode", "algorithm.loss.name"),
            f"rollout.mode is async, but loss {loss!r} does not weight by the policy that acted, which is an older one",
            f"set algorithm.loss to {' or '.join(able)}, or rollout.max_staleness to 0 (a loss of your own: register "
            "it with corrects_staleness=True if it does)",
        )
    offloads = {"env.offload": config.env.offload, "engine.offload": config.engine.offload is not Offload.none}
    for name in (name for name, used in offloads.items() if used):
        yield ConfigIssue(
            ("rollout.mode", name),
            f"rollout.mode is async, but {name} makes room for learning while nothing is rolled out, which is never",
            f"leave {name} out, or set rollout.mode to sync",
            fix={name: LEAVE_OUT},
        )


@rule
def only_async_rollouts_are_stale(config: Config) -> Iterator[ConfigIssue]:
    """Check that the age of policies is limited only where rollouts are asynchronous."""
    staleness = config.rollout.max_staleness
    if config.rollout.mode is RolloutMode.sync and staleness != RolloutConfig().max_staleness:
        yield ConfigIssue(
            ("rollout.max_staleness", "rollout.mode"),
            f"rollout.max_staleness = {staleness} has no use: rollout.mode is sync, so that the newest policy acts",
            "leave it out"
            + ("" if fact(ALGORITHMS, config.algorithm.name, "off_policy") else ", or set rollout.mode to async"),
            fix={"rollout.max_staleness": LEAVE_OUT},
        )


def staleness_notes(config: Config) -> list[str]:
    """Return a note if chunks of much older policies are learned from more than once, or if nothing is ahead of
    learning and the numbers are still not those of `sync`."""
    rollout, epochs = config.rollout, config.algorithm.epochs
    workers, ranks = config.placement.rollout.workers, config.engine.parallel.world_size
    ranks = ranks if isinstance(ranks, int) else 1
    numbers_differ = rollout.blocks == "auto" and workers != ranks
    if rollout.mode is RolloutMode.async_ and not rollout.max_staleness and numbers_differ:
        return [
            f"rollout.max_staleness = 0 gives the numbers of rollout.mode=sync only with as many blocks of envs, and "
            f"rollout.blocks is auto: {workers} here, one for each rollout worker, and {ranks} without workers, one "
            f"for each rank. To compare the two, set rollout.blocks={workers} in both"
        ]
    if rollout.mode is not RolloutMode.async_ or rollout.max_staleness < 2 or epochs < 2:
        return []
    return [
        f"algorithm.epochs = {epochs} passes over rollouts that are rollout.max_staleness = {rollout.max_staleness} "
        "iterations old lead far away from the policy that acted: prefer 1 of either"
    ]


def algorithm_notes(config: Config) -> list[str]:
    """Return the algorithm's notes that are no faults, such as the size of what it keeps."""
    notes = fact(ALGORITHMS, config.algorithm.name, "notes")
    return [] if notes is None else list(load_target(notes)(config))


@of_newest_rollout
def rewards_of_actions_are_used(config: Config) -> Iterator[ConfigIssue]:
    """Check that advantages of actions have an estimator that supports them, and log-probs of actions."""
    settings = config.algorithm
    if settings.reward_level is not RewardLevel.action:
        return
    if fact(ADVANTAGES, settings.advantage.name, "actions") is False:
        able = [entry.name for entry in ADVANTAGES.entries() if entry.actions]
        yield ConfigIssue(
            ("algorithm.reward_level", "algorithm.advantage.name"),
            f"algorithm.reward_level is 'action', but advantage {settings.advantage.name!r} works on chunks",
            f"set algorithm.reward_level to chunk, or algorithm.advantage to {' or '.join(able)}",
            fix={"algorithm.reward_level": LEAVE_OUT},
        )
    if settings.logprob_level is Level.chunk:
        yield ConfigIssue(
            ("algorithm.logprob_level", "algorithm.reward_level"),
            "algorithm.reward_level is 'action', but algorithm.logprob_level is 'chunk': one log-prob per chunk cannot "
            "have the advantages of its actions",
            "set algorithm.logprob_level to action or token",
        )


@of_newest_rollout
def stages_fit_advantage(config: Config) -> Iterator[ConfigIssue]:
    """Check that the algorithm's stages provide a critic's values if, and only if, the estimator uses them."""
    algorithm = fact(ALGORITHMS, config.algorithm.name, "critic")
    advantage = config.algorithm.advantage.name
    estimator = fact(ADVANTAGES, advantage, "critic")
    if algorithm is not None and estimator is not None and algorithm is not estimator:
        fitting = [entry.name for entry in ALGORITHMS.entries() if entry.critic is estimator]
        yield ConfigIssue(
            ("algorithm.advantage.name", "algorithm.name"),
            f"advantage {advantage!r} {'uses a' if estimator else 'has no'} critic, and algorithm "
            f"{config.algorithm.name!r} is made for one {'without' if estimator else 'with'}",
            f"choose algorithm.name among: {', '.join(fitting) or 'none so far'}",
        )


@of_newest_rollout
def bootstrap_has_critic(config: Config) -> Iterator[ConfigIssue]:
    """Check that bootstrapping comes with an advantage that has a critic."""
    name, bootstrap = config.algorithm.advantage.name, config.algorithm.bootstrap
    if fact(ADVANTAGES, name, "critic") is False and bootstrap is not Bootstrap.none:
        yield ConfigIssue(
            ("algorithm.bootstrap", "algorithm.advantage.name"),
            f"algorithm.bootstrap = {bootstrap.value!r} needs a critic, and advantage {name!r} has none",
            "set algorithm.bootstrap to none",
            fix={"algorithm.bootstrap": "none"},
        )


@of_newest_rollout
def value_loss_has_critic(config: Config) -> Iterator[ConfigIssue]:
    """Check that the value loss has no weight without a critic."""
    name, weight = config.algorithm.advantage.name, config.algorithm.value_coef
    if fact(ADVANTAGES, name, "critic") is False and weight > 0:
        yield ConfigIssue(
            ("algorithm.value_coef", "algorithm.advantage.name"),
            f"algorithm.value_coef = {weight:g} weights the loss of a critic, and advantage {name!r} has none",
            "set algorithm.value_coef to 0",
            fix={"algorithm.value_coef": 0.0},
        )


@of_newest_rollout
def model_has_critic(config: Config) -> Iterator[ConfigIssue]:
    """Check that an advantage that needs values has a model that predicts them."""
    name, model = config.algorithm.advantage.name, config.model.name
    if fact(ADVANTAGES, name, "critic") and fact(SupportedModel, model, "critic") is False:
        without = [entry.name for entry in ADVANTAGES.entries() if not entry.critic]
        yield ConfigIssue(
            ("algorithm.advantage.name", "model.name"),
            f"advantage {name!r} needs values, and model {model!r} predicts none",
            f"choose another model, or an advantage without a critic ({', '.join(without)})",
        )


@rule
def srpo_rewards_progress(config: Config) -> Iterator[ConfigIssue]:
    """Check that SRPO has its reward, the only difference from GRPO."""
    settings = config.algorithm
    if settings.name == "srpo" and settings.reward.name != "srpo":
        yield ConfigIssue(
            ("algorithm.reward.name", "algorithm.name"),
            f"algorithm.name is 'srpo', but algorithm.reward is {settings.reward.name!r}, which makes it GRPO",
            "set algorithm.reward to srpo, or algorithm.name to grpo",
            fix={"algorithm.reward": "srpo"},
        )


@rule
def demonstrations_are_learned_from(config: Config) -> Iterator[ConfigIssue]:
    """Check that demonstrations are named if the algorithm learns from them, and only then."""
    name, path = config.algorithm.name, config.data.path
    if name not in ALGORITHMS:
        return  # which has been reported
    learns = fact(ALGORITHMS, name, "demonstrations")
    if learns and path is None:
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"algorithm {name!r} learns from demonstrations, but data.path is null",
            "name the folder of a LeRobotDataset v3; `embodyrl collect CONFIG --out DIR --episodes N` records one",
        )
    if (
        path is not None
        and learns is False
        and ALGORITHMS.entry(name).source == "built-in"
        and not config.pipeline.insert
    ):
        entry = ALGORITHMS.entry(name)
        beside = [each.name for each in ALGORITHMS.entries() if each.off_policy and each.demonstrations]
        others = [] if entry.steers else beside if entry.off_policy else ["sft"]
        yield ConfigIssue(
            ("data.path", "algorithm.name"),
            f"data.path has no use: algorithm {name!r} learns from rollouts",
            "set data.path to null" + (f", or algorithm to {' or '.join(others)}" if others else ""),
            fix={"data.path": LEAVE_OUT},
        )


@rule
def algorithm_can_run_so(config: Config) -> Iterator[ConfigIssue]:
    """Run the checks of the chosen algorithm."""
    check = fact(ALGORITHMS, config.algorithm.name, "check")
    if check is None:
        return
    yield from load_target(check)(config)


PEFT = Requirement(module="peft", install="pip install 'embodyrl[vla]'")


@rule
def weights_can_be_computed_with(config: Config) -> Iterator[ConfigIssue]:
    """Check that weights held in bfloat16 are not to be computed with in float32."""
    held = getattr(config.model, "dtype", None)
    if held == Precision.bfloat16 and config.engine.precision is Precision.float32:
        yield ConfigIssue(
            ("engine.precision", "model.dtype"),
            "engine.precision = float32, but weights held in model.dtype = bfloat16 are computed with in bfloat16",
            "set engine.precision to auto, or model.dtype to float32",
        )


@rule
def only_rates_that_fall_have_a_floor(config: Config) -> Iterator[ConfigIssue]:
    """Check that a floor comes with a learning rate that falls."""
    settings = config.engine.optimizer
    if settings.lr_floor > 0.0 and settings.schedule is LearningRate.constant:
        yield ConfigIssue(
            ("engine.optimizer.lr_floor", "engine.optimizer.schedule"),
            f"engine.optimizer.lr_floor = {settings.lr_floor} has no use: engine.optimizer.schedule is constant",
            "set engine.optimizer.lr_floor to 0, or engine.optimizer.schedule to linear or cosine",
            fix={"engine.optimizer.lr_floor": LEAVE_OUT},
        )


@rule
def warm_up_comes_to_an_end(config: Config) -> Iterator[ConfigIssue]:
    """Check that warm-up ends within the run."""
    warmup, iterations = config.engine.optimizer.warmup, config.run.iterations
    if warmup and warmup >= iterations:
        yield ConfigIssue(
            ("engine.optimizer.warmup", "run.iterations"),
            f"engine.optimizer.warmup = {warmup} iterations, but run.iterations = {iterations}: the learning rate "
            "never reaches engine.optimizer.lr",
            f"set engine.optimizer.warmup below {iterations}",
        )


@of_newest_rollout
def micro_batches_hold_whole_episodes(config: Config) -> Iterator[ConfigIssue]:
    """Check that a whole episode fits into a micro-batch if the loss needs whole episodes."""
    size, loss, chunks = config.engine.micro_batch_size, config.algorithm.loss.name, config.rollout.num_chunks
    if size is not None and fact(LOSSES, loss, "whole") and size < chunks:
        yield ConfigIssue(
            ("engine.micro_batch_size", "rollout.num_chunks", "algorithm.loss.name"),
            f"engine.micro_batch_size = {size}, but loss {loss!r} needs the up to rollout.num_chunks = {chunks} chunks "
            "of an episode at once",
            f"set engine.micro_batch_size to {chunks} or more, or algorithm.loss to one that does not compare episodes",
            fix={"engine.micro_batch_size": chunks},
        )


@rule
def model_consists_of_blocks(config: Config) -> Iterator[ConfigIssue]:
    """Check that adapters and checkpointing come with a model that consists of layers."""
    engine, name = config.engine, config.model.name
    if engine.lora.rank and not PEFT.is_met():
        yield ConfigIssue(
            ("engine.lora.rank",),
            f"engine.lora.rank = {engine.lora.rank} needs package {PEFT.module!r}, which is not installed",
            f"run: {PEFT.install}",
        )
    if fact(SupportedModel, name, "blocks") is not False:
        return
    if engine.lora.rank:
        yield ConfigIssue(
            ("engine.lora.rank", "model.name"),
            f"engine.lora.rank = {engine.lora.rank}, but model {name!r} is small and has no layers for adapters",
            "set engine.lora.rank to 0",
            fix={"engine.lora.rank": LEAVE_OUT},
        )
    if engine.gradient_checkpointing is True:
        yield ConfigIssue(
            ("engine.gradient_checkpointing", "model.name"),
            f"engine.gradient_checkpointing is set, but model {name!r} is small and has no activations worth dropping",
            "set engine.gradient_checkpointing to false",
            fix={"engine.gradient_checkpointing": LEAVE_OUT},
        )
