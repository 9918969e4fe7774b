"""Networks of the reference cases of ACT, beside the numbers of LeRobot, and ways to get them slightly wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.models import load_policy
from embodyrl.models.act import network as networks
from embodyrl.models.act.network import ACT, Decoder, DecoderLayer, EncoderLayer, FrozenBatchNorm, Style

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "act"
KEYS = REFERENCE.parent / "act-expected-keys.json"


class Case:
    """A folder of reference cases.

    Args:
        name: beginning of the names of its arrays.
    """

    def __init__(self, name: str) -> None:
        arrays = np.load(REFERENCE / "reference.npz")
        self.arrays = {
            key.removeprefix(name): torch.from_numpy(arrays[key]) for key in arrays.files if key.startswith(name)
        }
        self.folder = REFERENCE / ("checkpoint-prenorm" if name else "checkpoint")

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.arrays[key]

    def policy(self, **options: Any) -> Any:
        """The checkpoint as a policy that executes all that it predicts."""
        return load_policy(
            "act", **{"checkpoint": self.folder, "chunk_size": self["raw/actions"].shape[1], "dropout": 0.0} | options
        )

    def changed(self, folder: Path, **settings: Any) -> Path:
        """A copy of the checkpoint with other entries in config.json."""
        shutil.copytree(self.folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    def network(self) -> ACT:
        """The network in double precision, whose numbers are the same on every processor."""
        network: ACT = self.policy().network.double()
        return network

    def given(self, key: str) -> torch.Tensor:
        """An array as an input of `network`."""
        return self["in/" + key].double()

    def actions(self, network: ACT) -> torch.Tensor:
        """Chunks with a latent variable of zero."""
        return network(self.given("images"), self.given("state"))[0]

    def learned(self, network: ACT) -> tuple[torch.Tensor, Style | None]:
        """Chunks with the latent variable of the demonstrations, and its distribution."""
        images, state, style = self.given("images"), self.given("state"), None
        if network.sizes.style_layers:
            style = network.infer_style(self.given("actions"), state, self["in/action_is_pad"])
        drawn = None if style is None else style.sample(self.given("eps"))
        return network(images, state, drawn)[0], style


def excess(found: torch.Tensor, wanted: torch.Tensor, *, largest: float | None = None) -> float:
    """Return the largest share of the tolerance: atol 1.5e-5 + rtol 2e-6, or a share of the largest entry."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    tolerance = 1.5e-5 + 2e-6 * wanted.abs() if largest is None else largest * wanted.abs().max()
    return float(((found - wanted).abs() / tolerance).max().detach())


# ------------------------------------------------------------------------------------------------------------ mutations


def of(kind: type[torch.nn.Module], attribute: str, value: float) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        for module in network.modules():
            if isinstance(module, kind):
                setattr(module, attribute, value)

    return change


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)


def position_in_values() -> Any:
    def forward(self: Any, x: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        located = self.before(self.norm1, x) + places
        x = self.behind(self.norm1, x, networks.attend(self.self_attn, located, located, located, hidden))
        return self.behind(self.norm2, x, self.feed_forward(self.before(self.norm2, x)))

    return replaced(EncoderLayer, "forward", forward)


def positions_from_zero() -> Any:
    before = networks._waves

    def waves(places: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
        return before(places - places[0], size, dtype)

    return replaced(networks, "_waves", waves)


def columns_before_rows() -> Any:
    before = networks.places_in_image

    def places(height: int, width: int, size: int, device: torch.device) -> torch.Tensor:
        return torch.roll(before(height, width, size, device), size // 2, dims=1)

    return replaced(networks, "places_in_image", places)


def no_places_in_memory() -> Any:
    before = DecoderLayer.forward

    def forward(self: Any, x: Any, steps: Any, memory: Any, places: Any) -> torch.Tensor:
        return before(self, x, steps, memory, places * 0)

    return replaced(DecoderLayer, "forward", forward)


def no_norm_of_the_decoder() -> Any:
    before = Decoder.forward

    def forward(self: Any, steps: Any, memory: Any, places: Any) -> torch.Tensor:
        norm, self.norm = self.norm, torch.nn.Identity()
        try:
            return before(self, steps, memory, places)
        finally:
            self.norm = norm

    return replaced(Decoder, "forward", forward)


def whole_sigma() -> Any:
    def sample(self: Style, noise: torch.Tensor) -> torch.Tensor:
        return self.mean + self.log_variance.exp() * noise

    return replaced(Style, "sample", sample)


def one_weight(network: Any) -> None:
    network.encoder.layers[0].linear2.weight.data[0, 0] += 1e-3


NETWORKS: dict[str, Callable[[Any], None]] = {
    "batch-norm-epsilon": of(FrozenBatchNorm, "epsilon", 0.0),
    "layer-norm-epsilon": of(torch.nn.LayerNorm, "eps", 1e-6),
    "one-weight": one_weight,
}
"""Changes of a network."""
CODE: dict[str, Callable[[], Any]] = {
    "position-in-values": position_in_values,
    "positions-from-zero": positions_from_zero,
    "columns-before-rows": columns_before_rows,
    "no-places-in-memory": no_places_in_memory,
    "no-norm-of-the-decoder": no_norm_of_the_decoder,
    "whole-sigma": whole_sigma,
}
"""Changes of the code, as contexts."""
