"""Normalisation of states and actions, group by group, and back.

Shapes: `B` samples, `S` numbers of a state, `C` actions of a chunk, `D` numbers of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t_n17.robots import ActionGroup, Group, Robot, Way


class GroupScale(nn.Module):
    """Normalises the numbers of a group, and back.

    min_max maps the range to -1 .. 1, numbers without a range to 0; mean_std leaves those without a deviation as they
    are. Statistics of steps `[T, D]` belong to the first `T` actions of a chunk; later ones have the last one's.

    Args:
        group: its statistics.
        clip: clip normalised numbers of a range to -1 .. 1.
    """

    first: Tensor
    width: Tensor

    def __init__(self, group: Group, *, clip: bool) -> None:
        super().__init__()
        self.way, self.size = group.way, group.size
        self.limit = clip and group.way is Way.min_max
        first = torch.tensor(group.first, dtype=torch.float32)
        second = torch.tensor(group.second, dtype=torch.float32)
        if group.way is Way.mean_std:
            still = second == 0
            first, second = first.masked_fill(still, 0.0), second.masked_fill(still, 1.0)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("width", second if group.way is Way.mean_std else second - first, persistent=False)

    def normalize(self, numbers: Tensor, *, clip: bool = True) -> Tensor:
        """Normalise numbers `[..., D]`, or `[B, C, D]` where steps differ; sines and cosines are `[..., 2*D]`. `clip`:
        if the checkpoint's processor does."""
        if self.way is Way.sin_cos:
            return torch.cat([numbers.sin(), numbers.cos()], dim=-1)
        first, width = self._of_steps(numbers)
        if self.way is Way.mean_std:
            return (numbers - first) / width
        still = width == 0
        scaled = 2.0 * (numbers - first) / width.masked_fill(still, 1.0) - 1.0
        scaled = scaled.masked_fill(still, 0.0)
        return scaled.clamp(-1.0, 1.0) if self.limit and clip else scaled

    def unnormalize(self, numbers: Tensor, *, clip: bool = True) -> Tensor:
        """Convert normalised numbers to those of the robot; `clip` those of a range to it."""
        first, width = self._of_steps(numbers)
        if self.way is Way.mean_std:
            return numbers * width + first
        limited = numbers.clamp(-1.0, 1.0) if clip else numbers
        return (limited + 1.0) * 0.5 * width + first

    def _of_steps(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        if self.first.dim() == 1:
            return self.first, self.width
        count, known = numbers.shape[-2], len(self.first)
        if count <= known:
            return self.first[:count], self.width[:count]
        rows = (torch.cat([each, each[-1:].expand(count - known, -1)]) for each in (self.first, self.width))
        first, width = rows
        return first, width


class StateScale(nn.Module):
    """Normalises states."""

    def __init__(self, robot: Robot) -> None:
        super().__init__()
        self.groups = nn.ModuleList(GroupScale(group, clip=robot.clip) for group in robot.state)
        self._sizes = [group.size for group in robot.state]

    def __len__(self) -> int:
        return sum(self._sizes)

    def normalize(self, state: Tensor) -> Tensor:
        """Normalise states `[B, S]`; groups of sines and cosines are twice as wide."""
        parts = state.split(self._sizes, dim=-1)
        return torch.cat([scale.normalize(part) for scale, part in zip(self._scales(), parts, strict=True)], dim=-1)

    def _scales(self) -> list[GroupScale]:
        return list(self.groups)  # type: ignore[arg-type]


class ActionScale(nn.Module):
    """Normalises chunks of actions, of which some numbers may be relative to the state of the decision, and back."""

    clipped: Tensor
    """bool `[D]`, numbers that are clipped to -1 .. 1 before they act."""

    def __init__(self, robot: Robot) -> None:
        super().__init__()
        self.groups = nn.ModuleList(GroupScale(group, clip=robot.clip) for group in robot.action)
        self._described: list[ActionGroup] = list(robot.action)
        self._sizes = [group.size for group in robot.action]
        limits = [group.way is Way.min_max for group in robot.action for _ in range(group.size)]
        self.register_buffer("clipped", torch.tensor(limits), persistent=False)

    def __len__(self) -> int:
        return sum(self._sizes)

    def normalize(self, actions: Tensor, state: Tensor, *, clip: bool = True) -> Tensor:
        """Normalise actions `[B, C, D]` that are chosen in states `[B, S]`; `clip` as in `GroupScale`."""
        return self._each(actions, state, to_robot=False, clip=clip)

    def unnormalize(self, numbers: Tensor, state: Tensor, *, clip: bool = True) -> Tensor:
        """Convert the network's numbers `[B, C, D]` to actions, for states `[B, S]` of the decision; `clip` as in
        `GroupScale`."""
        return self._each(numbers, state, to_robot=True, clip=clip)

    def _each(self, numbers: Tensor, state: Tensor, *, to_robot: bool, clip: bool) -> Tensor:
        results: list[Tensor] = []
        parts = numbers.split(self._sizes, dim=-1)
        for scale, group, part in zip(self.groups, self._described, parts, strict=True):
            assert isinstance(scale, GroupScale)
            reference = None if group.reference is None else state[:, None, group.reference]
            if to_robot:
                part = scale.unnormalize(part, clip=clip)
                results.append(part if reference is None else _absolute(part, reference, pose=group.pose))
            else:
                part = part if reference is None else _relative(part, reference, pose=group.pose)
                results.append(scale.normalize(part, clip=clip))
        return torch.cat(results, dim=-1)


# ---------------------------------------------------------------------------------------------------------------- poses


SHORTEST = 1e-9
"""Shortest row that is normalised, so that rows of zeros are no NaN."""


def _absolute(numbers: Tensor, reference: Tensor, *, pose: bool) -> Tensor:
    """Return what numbers `[B, C, D]` relative to a reference `[B, 1, D]` stand for."""
    if not pose:
        return numbers + reference
    base, turned = rotation(reference[..., 3:]), rotation(numbers[..., 3:])
    place = (base @ numbers[..., :3].double().unsqueeze(-1)).squeeze(-1) + reference[..., :3].double()
    rows = (base @ turned)[..., :2, :].flatten(-2)
    return torch.cat([place, rows], dim=-1).to(numbers.dtype)


def _relative(numbers: Tensor, reference: Tensor, *, pose: bool) -> Tensor:
    """Return the inverse of `_absolute`."""
    if not pose:
        return numbers - reference
    back, turned = rotation(reference[..., 3:]).transpose(-1, -2), rotation(numbers[..., 3:])
    place = (back @ (numbers[..., :3].double() - reference[..., :3].double()).unsqueeze(-1)).squeeze(-1)
    rows = (back @ turned)[..., :2, :].flatten(-2)
    return torch.cat([place, rows], dim=-1).to(numbers.dtype)


def rotation(rows: Tensor) -> Tensor:
    """Return the rotation matrices `[..., 3, 3]` in float64 whose first two rows are nearly `rows [..., 6]`: the first
    one normalised, the second one made perpendicular to it (Zhou et al. 2019, arXiv:1812.07035)."""
    first, second = rows.double().unflatten(-1, (2, 3)).unbind(-2)
    first = first / first.norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
    second = second - (first * second).sum(-1, keepdim=True) * first
    second = second / second.norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
    return torch.stack([first, second, torch.linalg.cross(first, second, dim=-1)], dim=-2)
