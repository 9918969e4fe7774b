"""Columns of a batch: how a component's function gets those that it names, and conversions between their levels.

| level | shape | one number for |
|---|---|---|
| token | [..., C, D] | every log-prob entry (`N = C*D`; D is 1 for a model that gives one entry per action) |
| action | [..., C] | every action of a chunk |
| chunk | [...] | every chunk |

`...` is `[K, B]` in a batch and `[M]` in a minibatch. No function here and no loss broadcasts: `[M, 1]` against `[M]`
would silently become `[M, M]`, so a shape that does not fit is an error that names both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embodyrl.algorithms.options import option_names
from embodyrl.config.schema import Level
from embodyrl.errors import UserError, did_you_mean

R = TypeVar("R")


class SignatureError(UserError):
    """Raised when a registered function names an argument that is not available."""


class Bound(Generic[R]):
    """A component's function with its options; it is called with columns and takes those that the function names.

    A loss, advantage estimator, reward or filter lists what it needs as keyword-only arguments, and nothing else, so
    that its signature is its documentation. The signature is read here, once: that takes as long as several operations
    on a small minibatch.

    Args:
        function: of the component.
        section: of the config with its options (`config.algorithm.loss`).
    """

    def __init__(self, function: Callable[..., R], section: Any) -> None:
        options, parameters = option_names(section), inspect.signature(function).parameters
        self.function = function
        self._options = {name: getattr(section, name) for name in parameters if name in options}
        self._required = {
            name: parameter.default is inspect.Parameter.empty
            for name, parameter in parameters.items()
            if name not in options
        }

    def takes(self, column: str) -> bool:
        """Return whether the function names this column, so that an expensive one is computed only where it is used."""
        return column in self._required

    def __call__(self, columns: Mapping[str, Any]) -> R:
        """Call the function with those of the columns that it names; see `given`."""
        return self.function(**self._options, **self.given(columns))

    def given(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the columns that the function names.

        Raises:
            SignatureError: one without default is not there; lists those that are.
        """
        taken = {}
        for name, required in self._required.items():
            if name in columns:
                taken[name] = columns[name]
            elif required:
                hint = did_you_mean(name, list(columns), lead=" - ")
                raise SignatureError(
                    f"{self.function.__module__}.{self.function.__qualname__} asks for {name!r}, which is not "
                    f"available{hint} (available: {', '.join(sorted({*columns, *self._options}))})"
                )
        return taken


class OutputError(UserError):
    """Raised when a registered function does not return what its registry asks for (docs/algorithms.md)."""


def function_name(function: Callable[..., Any]) -> str:
    """Return the full name of a function, for people."""
    return f"{function.__module__}.{function.__qualname__}" if inspect.isfunction(function) else repr(function)


def require_output(what: str, found: object, like: Tensor, remedy: str) -> Tensor:
    """Require that a registered function has returned a tensor of real numbers or bools, of the shape and on the device
    of another one.

    Args:
        what: which function returned which part of its result, "reward my.module.mine returned rewards".
        found: that part.
        like: `[...]`, has the shape and the device.
        remedy: how to return this shape.

    Raises:
        OutputError: it has not; says what was found and what is expected.
    """
    if not isinstance(found, Tensor):
        raise OutputError(f"{what} as {type(found).__name__}, expected a torch tensor {tuple(like.shape)}: {remedy}")
    if found.shape != like.shape:
        raise OutputError(f"{what} of shape {tuple(found.shape)}, expected {tuple(like.shape)}: {remedy}")
    if found.device != like.device:
        raise OutputError(f"{what} on {found.device}, expected {like.device}, where its arguments are")
    if found.is_complex():
        raise OutputError(f"{what} of type {found.dtype}, expected real numbers")
    return found


def require_finite(what: str, found: Tensor, counts: Tensor, given: Mapping[str, Any]) -> None:
    """Require that what a registered function has returned is finite, unless what it was given is not.

    Args:
        what, found: see `require_output`.
        counts: bool, of the shape of `found`: which numbers are used.
        given: the function's arguments.

    Raises:
        OutputError: a number is NaN or infinite; says which.
    """
    wrong = ~torch.isfinite(found) & counts
    columns = [column for column in given.values() if isinstance(column, Tensor) and column.is_floating_point()]
    if bool(wrong.any()) and all(bool(torch.isfinite(column).all()) for column in columns):
        place = torch.nonzero(wrong)[0].tolist()
        raise OutputError(f"{what} with {found[tuple(place)].item()} at {place}, expected finite numbers")


class LevelError(ValueError):
    """Raised when a tensor does not have the shape of its level; names the shape found and the one expected."""


def executed_actions(steps: Tensor, valid: Tensor, chunk_size: int) -> Tensor:
    """Return a mask of the actions that were executed, bool `[..., C]`: the first `steps` of each valid chunk. The
    action with which an episode ends is one of them, those left in its chunk are not.

    Args:
        steps: `[...]` number of actions executed. valid: `[...]` bool. chunk_size: `C`.
    """
    require_same_shape(steps=steps, valid=valid)
    return (torch.arange(chunk_size, device=steps.device) < steps.unsqueeze(-1)) & valid.unsqueeze(-1)


def logprobs_at_level(level: Level, entries: Tensor, executed: Tensor) -> Tensor:
    """Return log-probs or entropies `[..., N]` at a level: the sum of the entries that the level joins. Entries of
    actions that were not executed count 0, because no reward depends on them.

    Args:
        level: token -> `[..., C, D]`, action -> `[..., C]`, chunk -> `[...]`.
        entries: `[..., N]`. executed: bool `[..., C]`.

    Raises:
        LevelError: the shapes do not fit.
    """
    chunk_size = executed.shape[-1]
    if entries.dim() < 2 or entries.shape[-1] % chunk_size:
        raise LevelError(
            f"the model's log-probs or entropies have shape {tuple(entries.shape)}, and N = {entries.shape[-1]} is no "
            f"multiple of the chunk size C = {chunk_size}, so they cannot be taken at algorithm.logprob_level: "
            f"{level.value}. Policy.act and Policy.evaluate must return [B, N] with N = C * n, ordered by action: "
            f"entry c * n + d belongs to action c (docs/models.md, Log-probs)"
        )
    by_action = torch.unflatten(entries, -1, (chunk_size, -1))
    if by_action.shape[:-1] != executed.shape:
        raise LevelError(f"entries have shape {tuple(entries.shape)}, executed actions {tuple(executed.shape)}")
    # A sum of log-probs is the log-prob of their product, the joint probability of an action or of a chunk.
    # `where` and not a product with the mask, which would make NaN of 0 * inf.
    counted = torch.where(executed.unsqueeze(-1), by_action, 0.0)
    if level is Level.token:
        return counted
    return counted.sum(-1) if level is Level.action else counted.sum((-1, -2))


def valid_at(level: Level, executed: Tensor, tokens_per_action: int) -> Tensor:
    """Return a mask of what counts at a level, bool: entries of executed actions, executed actions, or chunks with any.

    Args:
        level: as in `logprobs_at_level`.
        executed: bool `[..., C]`.
        tokens_per_action: `D`.
    """
    if level is Level.token:
        return executed.unsqueeze(-1).expand(*executed.shape, tokens_per_action)
    return executed if level is Level.action else executed.any(-1)


def expand_to_level(level: Level, column: Tensor, executed: Tensor, tokens_per_action: int) -> Tensor:
    """Expand advantages to the log-probs' level: that of a chunk `[...]` or of an action `[..., C]` holds for all
    entries below it.

    Args:
        level: as in `logprobs_at_level`.
        column: `[...]` or `[..., C]`.
        executed: bool `[..., C]`.
        tokens_per_action: `D`.

    Raises:
        LevelError: the shapes do not fit, or actions would have to be joined.
    """
    per_action = column.shape == executed.shape
    if not per_action and column.shape != executed.shape[:-1]:
        raise LevelError(
            f"advantages have shape {tuple(column.shape)}, expected {tuple(executed.shape[:-1])} or "
            f"{tuple(executed.shape)}"
        )
    if level is Level.chunk:
        if per_action:
            raise LevelError("advantages of actions do not fit one log-prob per chunk: use log-probs of actions")
        return column
    by_action = column if per_action else column.unsqueeze(-1).expand_as(executed)
    return by_action if level is Level.action else by_action.unsqueeze(-1).expand(*executed.shape, tokens_per_action)


def chunk_rewards(rewards: Tensor, gamma_within: float) -> Tensor:
    """Return the reward of each chunk: `[..., C]` -> `[...]`, the sum over its actions, the i-th times
    `gamma_within ** i` (i = 0, 1, ...)."""
    if gamma_within == 1.0:
        return rewards.sum(-1)
    factors = gamma_within ** torch.arange(rewards.shape[-1], dtype=rewards.dtype, device=rewards.device)
    return (rewards * factors).sum(-1)


def in_time(column: Tensor) -> Tensor:
    """Put actions one after the other in time: `[K, B, C]` -> `[K*C, B]`."""
    if column.dim() != 3:
        raise LevelError(f"a column of actions has shape {tuple(column.shape)}, expected [K, B, C]")
    return column.transpose(1, 2).flatten(0, 1)


def in_chunks(column: Tensor, chunk_size: int) -> Tensor:
    """Cut a column in time into chunks, the inverse of `in_time`: `[K*C, B]` -> `[K, B, C]`."""
    if column.dim() != 2 or column.shape[0] % chunk_size:
        raise LevelError(f"a column in time has shape {tuple(column.shape)}, expected [K*{chunk_size}, B]")
    return torch.unflatten(column, 0, (-1, chunk_size)).transpose(1, 2)


def require_same_shape(**columns: Tensor) -> None:
    """Require that columns have one shape, so that nothing broadcasts.

    Raises:
        LevelError: the columns' shapes differ; names each.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise LevelError(f"these must have one shape, got {found}")
