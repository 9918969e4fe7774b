"""What `test_ranks.py` has two processes do: python rank_program.py RANK FOLDER CASES. Each case compares an engine of
two ranks with an engine that is alone, in every one of them; the result is FOLDER/RANK.json."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import make_batch, make_engine, make_policy
from learning import PPO

from embodyrl.algorithms.aggregation import token_weights
from embodyrl.config.schema import Aggregation, Offload, OldLogprobs, ParallelBackend, ParallelConfig, Precision
from embodyrl.data.layout import Batch
from embodyrl.engine.distribution import full_state_dict, parallelize
from embodyrl.engine.exchange import Exchange
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.parallel import Ranks, connected
from embodyrl.engine.sharding import Shards
from embodyrl.envs import Observation
from embodyrl.errors import UserError
from embodyrl.models.vla.config import WeightType
from embodyrl.placement.ranks import RankInfo, shards_of

CASES: dict[str, Callable[[Ranks], None]] = {}
SIZE = 22
TERMS: dict[str, Any] = {"entropy_coef": 0.1, "kl_coef": 0.3, "value_clip": 0.2, "minibatches": 3}


def case(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        CASES[name] = function
        return function

    return add


def spread_over(backend: str, **more: Any) -> dict[str, Any]:
    return {"parallel": ParallelConfig(backend=ParallelBackend(backend)), **more}


def batch_for(engine: HybridEngine) -> Any:
    """Unequal episodes, in no order, some entries of which do not count; from `engine`, which is alone."""
    batch = make_batch(engine, SIZE)
    draw = torch.Generator().manual_seed(3)
    batch["sequence"] = torch.tensor([0] * 2 + [4] * 7 + [9] * 5 + [1] * 8)[torch.randperm(SIZE, generator=draw)]
    batch["valid"] = torch.rand(SIZE, generator=draw) < 0.8
    batch["old_logprobs"] += 0.1 * torch.randn(SIZE, generator=draw)
    batch["weights"] = token_weights(batch["valid"], batch["sequence"], Aggregation.seq_mean_token_mean, longest=8)
    return batch


def same(ranks: Ranks, shared: HybridEngine, alone: HybridEngine, tolerance: float = 2e-6) -> None:
    """The weights and statistics of two engines agree, on all ranks."""
    wanted = alone.policy.state_dict()
    found = full_state_dict(shared.policy.state_dict(), keep=True)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, wanted[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert all(torch.equal(tensor, other) for other in ranks.gather(tensor)), f"{name} differs between ranks"


def close(found: dict[str, float], wanted: dict[str, float], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert abs(value - wanted[name]) <= tolerance * max(1.0, abs(wanted[name])), (name, value, wanted[name])


def learn_alike(ranks: Ranks, loss: str, backend: str, size: int | None = None, **terms: Any) -> None:
    alone = make_engine(loss=loss, **TERMS | terms)
    shared = make_engine(loss=loss, engine=spread_over(backend, micro_batch_size=size), ranks=ranks, **TERMS | terms)
    assert isinstance(shared.weights, Shards) == (backend != "none")
    for _ in range(2):
        batch = batch_for(alone)
        with shared.rollout_mode():  # ranks decide as often as they like
            for _ in range(1 + 2 * ranks.rank):
                shared.act(Observation(proprio=batch["proprio"].numpy(), task_descriptions=["push"] * SIZE), "eval")
        found, wanted = shared.learner.update(batch, ["push"]), alone.learner.update(batch, ["push"])
        close(found, wanted)
        assert len({json.dumps(each) for each in ranks.gather_values(found)}) == 1, "ranks log different numbers"
    same(ranks, shared, alone)


for backend in ("fsdp", "none"):
    case(f"ppo {backend}")(lambda ranks, backend=backend: learn_alike(ranks, "ppo", backend))
case("micro-batches")(lambda ranks: learn_alike(ranks, "ppo", "fsdp", size=3))
case("an odd number of micro-batches")(lambda ranks: learn_alike(ranks, "ppo", "fsdp", size=5, minibatches=1))
case("whole episodes")(lambda ranks: learn_alike(ranks, "gspo", "fsdp", size=4, minibatches=2))
case("fewer episodes than ranks")(lambda ranks: learn_alike(ranks, "gspo", "fsdp", minibatches=4))
case("proximal policy")(lambda ranks: learn_alike(ranks, "decoupled_ppo", "fsdp"))
case("early stop")(lambda ranks: learn_alike(ranks, "ppo", "fsdp", target_kl=1e-4))


@case("log-probs computed again")
def start_at_one(ranks: Ranks) -> None:
    for backend, size in (("fsdp", None), ("fsdp", 3), ("none", 5)):
        settings = spread_over(backend, micro_batch_size=size, precision=Precision.bfloat16)
        shared = make_engine(engine=settings, old_logprobs=OldLogprobs.recompute, ranks=ranks)
        batch = batch_for(make_engine())
        batch["old_logprobs"] += 0.3
        assert shared.learner.update(batch, ["push"])["train/ratio_error_first_minibatch"] == 0.0, backend


@case("imitation")
def imitate_alike(ranks: Ranks) -> None:
    draw = np.random.default_rng(0)
    batches = []
    for size in (7, 8, 1):
        seen = Observation(proprio=draw.normal(size=(size, 3)).astype(np.float32), task_descriptions=["push"] * size)
        batches.append(Batch(observation=seen, actions=draw.uniform(-1, 1, (size, 1, 1)).astype(np.float32)))
    for backend, size in (("fsdp", None), ("fsdp", 2), ("none", None)):
        alone = make_engine()
        shared = make_engine(engine=spread_over(backend, micro_batch_size=size), ranks=ranks)
        for _ in range(2):
            close(shared.learner.imitation.learn(batches), alone.learner.imitation.learn(batches))
        same(ranks, shared, alone)


@case("going on with as many ranks, fewer and more")
def go_on(ranks: Ranks, backend: str = "fsdp") -> None:
    settings: dict[str, Any] = {"engine": spread_over(backend, offload=Offload.all), **TERMS}
    shared, alone = make_engine(ranks=ranks, **settings), make_engine(**TERMS)
    first = batch_for(alone)
    shared.learner.update(first, ["push"])
    alone.learner.update(first, ["push"])
    state, policy = shared.state_dict(), shared.full_policy()
    assert (policy is None) == (not ranks.is_first)
    weights = full_state_dict(shared.policy.state_dict(), keep=True)
    if policy is not None:
        assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())
        assert [each.requires_grad for each in policy.parameters()] == [True] * len(list(policy.parameters()))
    for key in ("optimizer", "reference"):  # the others get theirs from the disk
        state[key] = torch.load(hand_over(ranks, state[key]), weights_only=True)
    second = batch_for(alone)

    def resumed(state: dict[str, Any], weights: dict[str, Any], **kind: Any) -> HybridEngine:
        policy = make_policy()
        policy.load_state_dict(weights)
        engine = make_engine(policy=policy, **{**TERMS, **kind})
        engine.load_state_dict(copy.deepcopy(state))
        engine.learner.update(second, ["push"])
        return engine

    same_again = resumed(state, weights, ranks=ranks, engine=settings["engine"])
    fewer, more = resumed(state, weights), resumed(alone.state_dict(), alone.policy.state_dict(), ranks=ranks)
    shared.learner.update(second, ["push"])
    alone.learner.update(second, ["push"])
    for name, value in full_state_dict(shared.policy.state_dict(), keep=True).items():
        assert torch.equal(value, full_state_dict(same_again.policy.state_dict(), keep=True)[name]), name
    same(ranks, shared, fewer)
    same(ranks, more, alone)


def hand_over(ranks: Ranks, value: Any) -> Path:
    path = FOLDER / f"handed_{len(list(FOLDER.iterdir())) if ranks.is_first else 0}.pt"
    path = Path(ranks.broadcast_from_rank0(str(path)))
    if ranks.is_first:
        torch.save(value, path)
    ranks.barrier()
    return path


@case("ranks gather, broadcast, sum and scatter")
def exchange(ranks: Ranks) -> None:
    rank = ranks.rank
    assert [each.tolist() for each in ranks.gather(torch.tensor([rank == 0, True]))] == [[True, True], [False, True]]
    assert ranks.gather_lists([b"a", b""] if rank == 0 else [b"bcd"]) == [b"a", b"", b"bcd"]
    assert ranks.gather_lists([]) == []
    assert ranks.broadcast_from_rank0({"rank": rank}) == {"rank": 0}
    assert ranks.sum(torch.tensor([1.0, rank])).tolist() == [2.0, 1.0]
    assert list(ranks.scatter("abc")) == ([("a", True), ("c", True)] if rank == 0 else [("b", True), ("a", False)])


def vla_cases(sharded: str = "fsdp") -> None:
    try:
        import vla
    except BaseException:  # a package is missing: `pytest.skip`
        return
    from embodyrl.config.schema import Device, EngineConfig, LoraConfig
    from embodyrl.models import build_policy
    from embodyrl.models.prismatic.config import ScratchConfig
    from embodyrl.planning.dry_run import trace
    from embodyrl.planning.memory import Learning, rollout_need, train_need
    from embodyrl.planning.weightless import build_weightless

    def learn(ranks: Ranks, backend: str = sharded, **engine: Any) -> None:
        alone = vla.make_engine(kl_coef=0.1, **engine)
        shared = vla.make_engine(kl_coef=0.1, ranks=ranks, **spread_over(backend), **engine)
        if backend != "none":
            assert len(shared.weights._parts) > 4, "blocks are units of their own"
        for _ in range(2):
            batch = vla.make_batch(alone, 5)
            found, wanted = (
                shared.learner.update(batch, vla.TASK_DESCRIPTIONS),
                alone.learner.update(batch, vla.TASK_DESCRIPTIONS),
            )
            close(found, wanted, 1e-4)
        same(ranks, shared, alone, 1e-4)
        weights, policy = full_state_dict(shared.policy.state_dict(), keep=True), shared.full_policy()
        if policy is not None:
            assert all(torch.equal(value, weights[name]) for name, value in policy.state_dict().items())

    @case("memory is what the plan says")
    def need(ranks: Ranks) -> None:
        import test_dry_run
        from measured import least_peak_bytes

        size = {"scratch": ScratchConfig(image_size=32, hidden_size=192, layers=6, mlp_size=768)}
        config, spec = test_dry_run.make_config("openvla_oft", size), test_dry_run.IMAGES
        weightless, _ = build_weightless(config, spec, chunk_size=4)
        observe, task_descriptions = test_dry_run.make_observation, list(spec.tasks.values())
        of_engine = EngineConfig(device=Device.cpu)
        traced = trace(weightless, observe(spec, 2), of_engine, cuda=False, **PPO)
        for backend in (sharded, "none"):
            planned = Learning(
                deciding_samples=2,
                minibatch=4,
                micro_batch=2,
                reference=False,
                master_weights=True,
                ranks=ranks.size,
                shards=shards_of(ParallelBackend(backend), ranks.size, ranks.local_size),
            )
            policy = build_policy(config, spec, chunk_size=4, seed=1)
            engine = make_engine(policy=policy, ranks=ranks, engine=spread_over(backend), minibatches=1, epochs=1)
            batch = test_dry_run.make_batch(engine, spec, 4)
            engine.learner.update(batch, task_descriptions)  # the optimiser makes its state

            def decide(engine: HybridEngine = engine) -> None:
                with engine.rollout_mode():
                    engine.act(observe(spec, 2), "eval")

            rollout = least_peak_bytes(decide, engine.device)
            train = least_peak_bytes(functools.partial(engine.learner.update, batch, task_descriptions), engine.device)
            there = ("weights", "optimiser")
            for parts, measured in (
                (rollout_need(traced.weights, traced.lines, 0, planned).parts, rollout),
                (train_need(traced.weights, traced.lines, planned, batch=0).parts, train),
            ):
                expected = sum(size for name, size in parts.items() if name not in there)
                # Of all ranks: if one failed alone, the others would wait for it in what comes next.
                for of_rank in ranks.gather_values(measured):
                    assert abs(expected - of_rank) < 0.25 * of_rank, (backend, expected, of_rank)

    case("a VLA model")(learn)
    if sharded != "fsdp":
        return
    case("a VLA model with adapters, computed again")(
        lambda ranks: learn(ranks, lora=LoraConfig(rank=2), gradient_checkpointing=True, micro_batch_size=2)
    )
    case("a VLA model with adapters on whole weights")(lambda ranks: learn(ranks, "none", lora=LoraConfig(rank=2)))


def held_bytes(exchange: Exchange) -> int:
    """Bytes that this rank holds for others."""
    return sum(column.nbytes for held in exchange._held for column in held.columns.values())


def large_cases() -> None:
    """Learning from images and traces that lie with the ranks that collected them."""
    try:
        import vla
    except BaseException:  # a package is missing: `pytest.skip`
        return

    def where_it_was_collected(ranks: Ranks, batch: Any, exchange: Exchange) -> Any:
        """The batch without the large columns, of which this rank holds every other row."""
        own = torch.arange(len(batch["task_index"])) % ranks.size == ranks.rank
        address = torch.zeros(len(batch["task_index"]), dtype=torch.int64)
        names = {"images": batch["images"]} | {f"trace/{name}": column for name, column in batch["trace"].items()}
        address[own] = exchange.put({name: column[own] for name, column in names.items()})
        others = {name: column for name, column in batch.items() if name not in ("images", "trace")}
        return others | {"address": ranks.sum(address)}

    def fetch_what_is_learned_from(
        ranks: Ranks, size: int | None, loss: str = "ppo", backend: str = "none", **algorithm: Any
    ) -> None:
        settings = {"loss": loss, "algorithm": algorithm, **spread_over(backend, micro_batch_size=size)}
        everywhere, apart = (vla.make_engine(ranks=ranks, **settings) for _ in range(2))
        alone, samples = vla.make_engine(), 13
        for _ in range(2):
            batch = vla.make_batch(alone, samples)
            batch["sequence"] = torch.arange(samples) // 3
            spread = where_it_was_collected(ranks, batch, apart.exchange)
            wanted = everywhere.learner.update(batch, vla.TASK_DESCRIPTIONS)
            assert apart.learner.update(spread, vla.TASK_DESCRIPTIONS) == wanted
            apart.exchange.keep(torch.zeros(0, dtype=torch.int64))
        found = full_state_dict(apart.policy.state_dict(), keep=True)
        for name, tensor in full_state_dict(everywhere.policy.state_dict(), keep=True).items():
            assert torch.equal(tensor, found[name]), name
        assert held_bytes(apart.exchange) == everywhere.exchange.received == 0

    for number, options in enumerate(
        (
            {"size": None, "minibatches": 3, "epochs": 2},
            {"size": 2, "minibatches": 2, "kl_coef": 0.1, "old_logprobs": OldLogprobs.recompute},
            {"size": 4, "loss": "gspo", "minibatches": 2},
            {"size": 3, "backend": "fsdp"},
        )
    ):
        case(f"large columns come when they are learned from ({number})")(
            lambda ranks, options=options: fetch_what_is_learned_from(ranks, **options)
        )

    @case("an epoch moves no more than a rank's share")
    def traffic(ranks: Ranks) -> None:
        engine = vla.make_engine(ranks=ranks, algorithm={"minibatches": 4, "epochs": 3})
        batch = vla.make_batch(vla.make_engine(), 64)
        engine.learner.update(where_it_was_collected(ranks, batch, engine.exchange), vla.TASK_DESCRIPTIONS)
        large = batch["images"].nbytes + sum(column.nbytes for column in batch["trace"].values())
        assert 0 < engine.exchange.received <= 3 * 1.1 * large / ranks.size
        assert held_bytes(engine.exchange) == large / ranks.size


def model_cases() -> None:
    """Every family of models, sharded: gradients, and deciding in between."""
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    import test_policies

    def gradients(ranks: Ranks, name: str, **options: Any) -> None:
        one = test_policies.CASES[name]
        one = dataclasses.replace(one, options=one.options | options)
        alone, shared = one.policy(), one.policy()
        inputs = alone.preprocess(one.observation(4))
        with torch.no_grad():
            trace = alone.act(inputs, "train", torch.Generator().manual_seed(0)).trace
        weights = parallelize(shared, ranks, ParallelBackend.fsdp, torch.device("cpu"))
        with weights.unsharded(), torch.inference_mode():
            for _ in range(1 + ranks.rank):
                shared.act(inputs, "eval")

        def learn(policy: Any, part: slice, factor: float) -> None:
            found = policy.evaluate(*({key: value[part] for key, value in of.items()} for of in (inputs, trace)))
            (factor * (found.logprobs.sum() + found.values.sum())).backward()

        learn(alone, slice(4), 1.0)
        learn(shared, slice(2 * ranks.rank, 2 * ranks.rank + 2), weights.factor)
        error, size = 0.0, 0.0
        for (key, wanted), found in zip(alone.named_parameters(), shared.parameters(), strict=True):
            assert (wanted.grad is None) == (found.grad is None), key
            if wanted.grad is not None:
                error += float(
                    (full_state_dict([found.grad], keep=True)[0].float() - wanted.grad.float()).square().sum()
                )
                size += float(wanted.grad.float().square().sum())
        # Sums of 16-bit numbers round differently when they are cut in two; where terms cancel, only that is left.
        assert error**0.5 <= (0.03 if options else 1e-5) * size**0.5, (error, size)

    def imitate(ranks: Ranks, name: str) -> None:
        one = test_policies.CASES[name]
        seen = one.simulated(5)
        wanted = np.random.default_rng(0).uniform(-0.3, 0.3, (5, one.chunk, one.policy().spec.action_dim))
        alone = make_engine(policy=one.policy())
        shared = make_engine(policy=one.policy(), engine=spread_over("fsdp", micro_batch_size=2), ranks=ranks)
        found, expected = (
            engine.learner.imitation.learn([Batch(observation=seen, actions=wanted.astype(np.float32))] * 2)
            for engine in (shared, alone)
        )
        close(found, expected, 1e-4)

    families = ("pi0", "pi05", "pi0_fast", "gr00t", "gr00t_n17", "smolvla")
    for name in ("openvla", "openvla_oft", *families, "act", "cnn"):
        if not test_policies.SupportedModel.entry(test_policies.CASES[name].model).missing():
            case(f"{name}, sharded")(lambda ranks, name=name: gradients(ranks, name))
            if name in test_policies.DRAWS | {"pi0_fast"}:
                case(f"{name} imitates, sharded")(lambda ranks, name=name: imitate(ranks, name))
            half = {"dtype": WeightType.bfloat16}
            if hasattr(test_policies.CASES[name].config, "dtype"):
                case(f"{name} in 16 bits, sharded")(lambda ranks, name=name, half=half: gradients(ranks, name, **half))


def machine_cases() -> None:
    """Two machines of two ranks: each holds a copy, sharded over its ranks."""
    case("hsdp")(lambda ranks: learn_alike(ranks, "ppo", "hsdp"))
    case("hsdp, micro-batches")(lambda ranks: learn_alike(ranks, "gspo", "hsdp", size=4, minibatches=2))
    case("hsdp, going on with as many ranks, fewer and more")(lambda ranks: go_on(ranks, "hsdp"))

    @case("hsdp, a shard of a machine's")
    def hold_half(ranks: Ranks) -> None:
        engine = make_engine(engine=spread_over("hsdp"), ranks=ranks)
        weight: Any = max(engine.policy.parameters(), key=lambda each: each.numel())
        assert weight.to_local().numel() * 2 == weight.numel()

    @case("machines of different numbers of ranks")
    def refuse(ranks: Ranks) -> None:
        ranks = copy.copy(ranks)
        ranks.local_size = 3
        try:
            make_engine(engine=spread_over("hsdp"), ranks=ranks)
        except UserError as error:
            assert "4 ranks are not 3 on each machine" in str(error)
        else:
            raise AssertionError("not refused")

    vla_cases("hsdp")


def main() -> None:
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    size = 4 if sys.argv[3] == "machines" else 2
    place = RankInfo(rank=rank, size=size, local_rank=rank % 2, local_size=2, meeting=str(FOLDER / "meeting"))
    if sys.argv[3] != "small":  # the others are done without them
        CASES.clear()
    if sys.argv[3] == "models":
        vla_cases()
        large_cases()
        model_cases()
    if sys.argv[3] == "machines":
        machine_cases()
    results = {}
    with connected(place, torch.device("cpu"), 60.0, lambda ranks: None) as ranks:
        for name, function in CASES.items():
            error = ""
            try:
                function(ranks)
            except Exception:
                error = traceback.format_exc()
                print(name, error, file=sys.stderr, flush=True)  # the others may wait for this rank in vain
            errors = ranks.gather_values(error)
            results[name] = "\n".join(each for each in errors if each)
    (FOLDER / f"{rank}.json").write_text(json.dumps(results))


FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
if __name__ == "__main__":
    main()
