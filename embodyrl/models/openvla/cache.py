"""Keys and values of past tokens, in memory that is reserved once."""

from __future__ import annotations

from torch import Tensor


class KeyValueCache:
    """A cache for a number of positions that is known before, as a language model of transformers takes it.

    transformers' dynamic cache uploads empty tensors and copies all keys for each token; its static cache attends to
    positions that are not written yet.

    Args:
        positions: the most positions that are written.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._layers: dict[int, _Layer] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, h, L, d]` of a layer, and return all that it has."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = _Layer(key_states, value_states, self._positions)
        return self._layers[layer_idx].append(key_states, value_states)


class _Layer:
    """Keys and values `[B, h, positions, d]`, of which the first are written."""

    def __init__(self, keys: Tensor, values: Tensor, positions: int) -> None:
        self._memory = [each.new_empty(*each.shape[:2], positions, each.shape[3]) for each in (keys, values)]
        self._written = 0

    def append(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        begin, self._written = self._written, self._written + given[0].shape[2]
        for memory, part in zip(self._memory, given, strict=True):
            memory[:, :, begin : self._written] = part
        keys, values = (memory[:, :, : self._written] for memory in self._memory)
        return keys, values
