"""The network of ACT: a ResNet per image, a transformer that reads images and state, one that predicts a chunk of
actions, and, for learning from demonstrations, one that compresses the demonstrated chunk to a latent variable.

Zhao et al. (2023), "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", arXiv:2304.13705; details as
in LeRobot 0.6.1. Shapes: `B` samples, `V` images, `N` tokens of the encoder (latent variable, the robot's state, the
environment's, then the images' cells row by row), `H` actions, `D` numbers of an action, `S` of the robot's state, `U`
of the environment's, `Z` of the latent variable, `E` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.act.config import BLOCKS, Architecture

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}

# ------------------------------------------------------------------------------------------------------------ backbone


class FrozenBatchNorm(nn.Module):
    """Batch normalisation by statistics that never change: a scale and a shift of each channel.

    All four are parameters without gradient, so that they are read, written and sent to other processes as weights are.
    """

    epsilon = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.running_var = (nn.Parameter(torch.ones(channels), requires_grad=False) for _ in range(2))
        self.bias, self.running_mean = (nn.Parameter(torch.zeros(channels), requires_grad=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, channels, h, w]` to the same shape."""
        scale = self.weight * (self.running_var + self.epsilon).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Block(nn.Module):
    """Two convolutions beside a shortcut, He et al. (2016), arXiv:1512.03385."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = FrozenBatchNorm(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = FrozenBatchNorm(out)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), FrozenBatchNorm(out))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, channels, h, w]` to `[M, out, h / stride, w / stride]`, rounded up."""
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + shortcut)


class ResNet(nn.Module):
    """The convolutions of a ResNet, whose first stage has `width` channels."""

    STRIDE = 32

    def __init__(self, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm(width)
        self.stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        channels = width
        for number, (name, count) in enumerate(zip(self.stages, blocks, strict=True)):
            out = width * 2**number
            steps = [Block(channels, out, 2 if number else 1), *(Block(out, out, 1) for _ in range(count - 1))]
            self.add_module(name, nn.Sequential(*steps))
            channels = out
        self.channels = channels

    def forward(self, images: Tensor) -> Tensor:
        """Map `images [M, 3, h, w]` to `[M, channels, h / 32, w / 32]`, rounded up."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x


# --------------------------------------------------------------------------------------------------------- transformers


def attend(
    layer: nn.MultiheadAttention, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """Return what queries `[L, B, E]` find among keys and values `[N, B, E]`, of which `hidden [B, N]` are not seen."""
    # Without `need_weights` another kernel is chosen, whose last digits add up to more than the reference cases allow.
    found: Tensor = layer(queries, keys, values, key_padding_mask=hidden, need_weights=True)[0]
    return found


class FeedForward(nn.Module):
    """What encoder and decoder layers have in common."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.linear1 = nn.Linear(sizes.width, sizes.feedforward)
        self.linear2 = nn.Linear(sizes.feedforward, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.activation = ACTIVATIONS[sizes.activation]
        self.norm_first = sizes.norm_first

    def feed_forward(self, x: Tensor) -> Tensor:
        """Map `[N, B, E]` to the same shape."""
        out: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return out

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what a part of the layer reads of its input."""
        return norm(x) if self.norm_first else x

    def behind(self, norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
        """Return a part's input together with its change of it."""
        changed: Tensor = x + self.dropout(change)
        return changed if self.norm_first else norm(changed)


class EncoderLayer(FeedForward):
    """Attention among all tokens, and a feed-forward layer."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__(sizes)
        self.self_attn = nn.MultiheadAttention(sizes.width, sizes.heads, sizes.dropout)
        self.norm1, self.norm2 = (nn.LayerNorm(sizes.width) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Map tokens `[N, B, E]` at `places [N, 1, E]` to the same shape; the `hidden [B, N]` ones are not seen."""
        read = self.before(self.norm1, x)
        located = read + places
        x = self.behind(self.norm1, x, attend(self.self_attn, located, located, read, hidden))
        return self.behind(self.norm2, x, self.feed_forward(self.before(self.norm2, x)))


class DecoderLayer(FeedForward):
    """Attention among actions, attention to the encoder's output, and a feed-forward layer."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__(sizes)
        self.self_attn, self.multihead_attn = (
            nn.MultiheadAttention(sizes.width, sizes.heads, sizes.dropout) for _ in range(2)
        )
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(sizes.width) for _ in range(3))

    def forward(self, x: Tensor, steps: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        """Map actions `[H, B, E]` at `steps [H, 1, E]` to the same shape, given the encoder's output and its
        `places`."""
        read = self.before(self.norm1, x)
        located = read + steps
        x = self.behind(self.norm1, x, attend(self.self_attn, located, located, read))
        found = attend(self.multihead_attn, self.before(self.norm2, x) + steps, memory + places, memory)
        x = self.behind(self.norm2, x, found)
        return self.behind(self.norm3, x, self.feed_forward(self.before(self.norm3, x)))


class Encoder(nn.Module):
    """Encoder layers that follow each other, with a norm at the end if they do not end in one."""

    def __init__(self, sizes: Architecture, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(sizes) for _ in range(layers)])
        self.norm = nn.LayerNorm(sizes.width) if sizes.norm_first else nn.Identity()

    def forward(self, x: Tensor, places: Tensor, hidden: Tensor | None = None) -> Tensor:
        """See `EncoderLayer`."""
        for layer in self.layers:
            x = layer(x, places, hidden)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """Decoder layers that follow each other, and a norm."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(sizes) for _ in range(sizes.decoder_layers)])
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, steps: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        """Return actions `[H, B, E]`; see `DecoderLayer`."""
        x = steps.new_zeros(len(steps), memory.shape[1], memory.shape[2])
        for layer in self.layers:
            x = layer(x, steps, memory, places)
        out: Tensor = self.norm(x)
        return out


# ------------------------------------------------------------------------------------------------------------ positions


def steps_of_sequence(length: int, width: int) -> Tensor:
    """Return sinusoids `[length, width]` of places in a sequence, Vaswani et al. (2017), arXiv:1706.03762."""
    return _waves(torch.arange(length, dtype=torch.float64), width, torch.float64).float()


def places_in_image(height: int, width: int, size: int, device: torch.device) -> Tensor:
    """Return sinusoids `[height * width, size]` of an image's cells: half of the numbers for the row, half for the
    column, which are counted from 1 and scaled to 2 pi at the last one."""
    rows, columns = (
        _waves(torch.arange(1.0, count + 1, device=device) / (count + 1e-6) * (2 * math.pi), size // 2, torch.float32)
        for count in (height, width)
    )
    both = [rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)]
    return torch.cat(both, dim=-1).flatten(0, 1)


def _waves(places: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines `[n, size]`, in turn, of `places [n]` over periods from 2 pi to 10000 * 2 pi."""
    periods = 10000 ** (2 * (torch.arange(size, dtype=dtype, device=places.device) // 2) / size)
    angles = places[:, None] / periods
    return torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=-1).flatten(1)


# -------------------------------------------------------------------------------------------------------------- network


@dataclass(frozen=True)
class Style:
    """Distribution of the latent variable of demonstrations."""

    mean: Tensor
    """`[B, Z]`"""
    log_variance: Tensor
    """`[B, Z]`"""

    def sample(self, noise: Tensor) -> Tensor:
        """Return latent variables `[B, Z]` for standard normal noise of this shape."""
        return self.mean + (self.log_variance / 2).exp() * noise

    def divergence(self) -> Tensor:
        """Return the KL divergence from a standard normal distribution `[B]` [nats], Kingma & Welling (2014),
        arXiv:1312.6114, appendix B."""
        terms = 1 + self.log_variance - self.mean.square() - self.log_variance.exp()
        return -0.5 * terms.sum(-1)


class ACT(nn.Module):
    """See the module. Names of weights are LeRobot's."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        width, state, action = sizes.width, sizes.state_dim, sizes.action_dim
        if sizes.style_layers:
            self.vae_encoder = Encoder(sizes, sizes.style_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, width)
            self.vae_encoder_action_input_proj = nn.Linear(action, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * sizes.style_size)
            length = sizes.horizon + (2 if state else 1)
            self.vae_encoder_pos_enc = nn.Parameter(steps_of_sequence(length, width)[None], requires_grad=False)
        if sizes.images:
            self.backbone = ResNet(BLOCKS[sizes.backbone], sizes.backbone_width)
        self.encoder = Encoder(sizes, sizes.encoder_layers)
        self.decoder = Decoder(sizes)
        if state:
            self.encoder_robot_state_input_proj = nn.Linear(state, width)
        if sizes.environment_dim:
            self.encoder_env_state_input_proj = nn.Linear(sizes.environment_dim, width)
        self.encoder_latent_input_proj = nn.Linear(sizes.style_size, width)
        if sizes.images:
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.channels, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + (state > 0) + (sizes.environment_dim > 0), width)
        self.decoder_pos_embed = nn.Embedding(sizes.horizon, width)
        self.action_head = nn.Linear(width, action)

    def infer_style(self, actions: Tensor, state: Tensor | None, hidden: Tensor) -> Style:
        """Return the distribution of the latent variable of demonstrated chunks.

        Args:
            actions: `[B, H, D]`, normalised.
            state: `[B, S]`, likewise; None if the model reads none.
            hidden: `[B, H]`, True for actions that are not seen.
        """
        batch = len(actions)
        tokens = [self.vae_encoder_cls_embed.weight[:, None].expand(-1, batch, -1)]
        if state is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state)[None])
        tokens.append(self.vae_encoder_action_input_proj(actions).transpose(0, 1))
        ahead = hidden.new_zeros(batch, len(tokens) - 1)
        places = self.vae_encoder_pos_enc.transpose(0, 1)
        seen = self.vae_encoder(torch.cat(tokens), places, torch.cat([ahead, hidden], dim=1))
        mean, log_variance = self.vae_encoder_latent_output_proj(seen[0]).chunk(2, dim=-1)
        return Style(mean, log_variance)

    def embed(
        self, images: Tensor | None, state: Tensor | None, style: Tensor, environment: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the encoder's tokens `[N, B, E]` and their places `[N, 1, E]`.

        Args:
            images: `[B, V, 3, h, w]`, normalised; None if the model reads none.
            state: `[B, S]`, likewise.
            style: `[B, Z]`, the latent variable.
            environment: `[B, U]`, normalised; None if the model reads none.
        """
        tokens = [self.encoder_latent_input_proj(style)[None]]
        if state is not None:
            tokens.append(self.encoder_robot_state_input_proj(state)[None])
        if environment is not None:
            tokens.append(self.encoder_env_state_input_proj(environment)[None])
        places = [self.encoder_1d_feature_pos_embed.weight]
        if images is not None:
            cells = self.encoder_img_feat_input_proj(self.backbone(images.flatten(0, 1)))
            height, width = cells.shape[2:]
            seen = torch.unflatten(cells, 0, images.shape[:2]).permute(1, 3, 4, 0, 2).flatten(0, 2)  # [V*h*w, B, E]
            tokens.append(seen)
            places.append(places_in_image(height, width, self.sizes.width, cells.device).repeat(images.shape[1], 1))
        return torch.cat(tokens), torch.cat(places)[:, None]

    def forward(
        self,
        images: Tensor | None,
        state: Tensor | None,
        style: Tensor | None = None,
        environment: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict chunks.

        Args:
            images, state, environment: see `embed`; not all of them None.
            style: latent variable `[B, Z]`; None: zero.

        Returns:
            Normalised actions `[B, H, D]`, and the encoder's output `[B, N, E]`.
        """
        if style is None:
            given = next(each for each in (images, environment, state) if each is not None)
            style = given.new_zeros(len(given), self.sizes.style_size)
        tokens, places = self.embed(images, state, style, environment)
        memory = self.encoder(tokens, places)
        decoded = self.decoder(self.decoder_pos_embed.weight[:, None], memory, places)
        actions: Tensor = self.action_head(decoded.transpose(0, 1))
        return actions, memory.transpose(0, 1)


def initialize(network: ACT) -> None:
    """Set random weights: convolutions after He et al. (2015), arXiv:1502.01852, matrices of the transformers after
    Glorot & Bengio (2010), as LeRobot does.

    The second normalisation of each block halves what it adds to the shortcut: with statistics that are not those of
    any data, sums would grow from block to block.
    """
    for part in (network.encoder, network.decoder):
        for parameter in part.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    for module in network.backbone.modules() if network.sizes.images else ():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, Block):
            nn.init.constant_(module.bn2.weight, 0.5)
