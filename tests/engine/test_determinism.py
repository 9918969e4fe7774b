from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines import make_batch, make_engine, weights


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def learned() -> torch.Tensor:
    engine = make_engine(engine={"deterministic": True})
    for _ in range(3):
        engine.update(make_batch(engine), ["push"])
    return weights(engine)


def test_runs_are_equal_bit_for_bit_and_algorithms_that_are_not_are_refused() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(learned(), learned())
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.functional.max_unpool1d(torch.zeros(1, 1, 2), torch.tensor([[[0, 2]]]), 2)


def test_without_the_setting_torch_chooses() -> None:
    make_engine()
    assert not torch.are_deterministic_algorithms_enabled()
