from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from engines import make_batch, make_engine, weights

from embodyrl.engine.compute import set_up_torch
from embodyrl.errors import UserError
from embodyrl.placement.cuda import PRODUCTS
from embodyrl.runner.build import settings_of_torch_kept


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def learned() -> torch.Tensor:
    engine = make_engine(engine={"deterministic": True})
    for _ in range(3):
        engine.learner.update(make_batch(engine), ["push"])
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


def test_float32_is_float32_on_a_gpu_also_in_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRODUCTS:
        monkeypatch.delenv(name, raising=False)
    with settings_of_torch_kept():
        torch.backends.cudnn.allow_tf32 = True
        with settings_of_torch_kept():
            set_up_torch(torch.device("cpu"), deterministic=False)
            assert torch.backends.cudnn.allow_tf32 and not any(name in os.environ for name in PRODUCTS)
            set_up_torch(torch.device("cuda"), deterministic=False)
            assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
            assert all(os.environ[name] == value for name, value in PRODUCTS.items())
        assert torch.backends.cudnn.allow_tf32, "as it was"


def test_a_process_that_has_computed_before_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Product:
        def __init__(self, error: str) -> None:
            self.error = error

        def __matmul__(self, other: object) -> None:
            raise RuntimeError(self.error)

    for said, error, message in (
        (
            "you must set an environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8",
            UserError,
            "before the program starts",
        ),
        ("CUDA error: unspecified launch failure", RuntimeError, "launch failure"),
    ):
        with settings_of_torch_kept(), monkeypatch.context() as patch, pytest.raises(error, match=message):
            patch.setattr(torch, "ones", lambda *_, said=said, **__: Product(said))
            set_up_torch(torch.device("cuda"), deterministic=True)
