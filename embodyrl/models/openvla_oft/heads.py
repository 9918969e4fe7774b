"""What OpenVLA-OFT adds to OpenVLA: a head that says numbers, and a token for the robot's state.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `C` actions in a chunk, `D` action dims, `E`
width of the language model, `S` proprio dims.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

_BLOCKS = 2


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = features + self.ffn(features)
        return result


class _ResidualNetwork(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, features: Tensor) -> Tensor:
        features = functional.relu(self.fc1(self.layer_norm1(features)))
        for block in self.mlp_resnet_blocks:
            features = block(features)
        result: Tensor = self.fc2(self.layer_norm2(features))
        return result


class L1Head(nn.Module):
    """Numbers straight from hidden states; trained on the mean absolute error, hence its name."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualNetwork(action_dim * width, width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Numbers `[B, C*D]` of hidden states `[B, C*D, E]`."""
        per_action = hidden.unflatten(1, (-1, self.action_dim)).flatten(2)
        numbers: Tensor = self.model(per_action).flatten(1)
        return numbers


class ProprioProjector(nn.Module):
    """One token for the robot's state."""

    def __init__(self, proprio_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        """Embeddings `[B, 1, E]` of states `[B, S]`."""
        token: Tensor = self.fc2(functional.gelu(self.fc1(proprio)))
        return token.unsqueeze(1)
