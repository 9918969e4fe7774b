"""Drawing from categorical distributions."""

from __future__ import annotations

import pytest
import torch

from embodyrl.models.sampling import draw


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(1, 2), (7, 256), (5, 1000)])
def test_draws_what_multinomial_draws(shape: tuple[int, int], seed: int) -> None:
    """And leaves the generator in the same state, so that runs stay equal to earlier ones."""
    probabilities = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)
    probabilities[probabilities < 1e-3] = 0.0
    ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    expected = torch.multinomial(probabilities, 1, generator=theirs).squeeze(-1)
    assert torch.equal(draw(probabilities, ours), expected)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.0, 0.1, 0.2, 0.7])
    drawn = draw(probabilities.expand(100_000, -1), torch.Generator().manual_seed(0))
    frequencies = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(frequencies, probabilities, atol=0.006, rtol=0)
    assert frequencies[0] == 0
