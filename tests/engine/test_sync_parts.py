"""Checksums and layouts of weight sync, each alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from embodyrl.engine.sync import Entry, LayoutError, held_by
from embodyrl.engine.sync.checksum import checksum, checksum_of
from embodyrl.engine.sync.layout import check_fit, from_json, pack, to_json, total_bytes, travelling, unpack, weights_of

WORDS = st.integers(min_value=1, max_value=1500)


def draw(words: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (8 * words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(words=WORDS, seed=st.integers(0, 99), byte=st.integers(0), bit=st.integers(0, 7))
def test_a_checksum_sees_every_bit(words: int, seed: int, byte: int, bit: int) -> None:
    data = draw(words, seed)
    before = checksum(data)
    assert before == checksum(data.clone()) and -(2**63) <= before < 2**63
    data[byte % len(data)] ^= 1 << bit
    assert checksum(data) != before


def test_a_checksum_sees_what_is_stale_swapped_shifted_or_cut() -> None:
    old, new = draw(4096, 1), draw(4096, 2)
    found = {checksum(data) for data in (old, new)}
    for row in (0, 3, 7):
        torn = new.clone()
        torn[: 4096 * row] = old[: 4096 * row]
        found.add(checksum(torn))
    swapped = new.view(8, 4096)[[0, 1, 5, 3, 4, 2, 6, 7]].reshape(-1)
    found |= {checksum(swapped), checksum(new.roll(8)), checksum(new[:-8]), checksum(new[:4096]), checksum(new[:-4096])}
    assert len(found) == 9 + 1 - 1, "row 0 torn is the new data itself"
    assert checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(128, dtype=torch.uint8))


def test_a_checksum_of_a_tensor_is_one_of_its_bytes() -> None:
    words = torch.arange(24, dtype=torch.bfloat16)
    assert checksum_of(words) == checksum(words.view(torch.uint8)) != checksum_of(words.neg())
    part = words[3:10].view(7, 1).expand(7, 2).t()  # neither contiguous nor aligned, and no whole words
    assert checksum_of(part) == checksum_of(part.clone()) != checksum_of(part + 1)
    for small in (torch.tensor(True), torch.zeros(0, 4), torch.tensor(3)):
        assert checksum_of(small) == checksum_of(small.clone())


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 3, extra: str | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(2, width, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(width, 1, dtype=dtype)
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 4))
        if extra is not None:
            self.register_parameter(extra, nn.Parameter(torch.zeros(2)))


def test_what_learns_travels_last_and_in_the_receivers_type() -> None:
    entries = travelling(held_by(Model()), held_by(Model(torch.bfloat16)))
    assert {each.name for each in entries[:2]} == {"body.weight", "body.bias"}
    assert [each.changes for each in entries] == [False] * 2 + [True] * 4
    assert {each.name: each.dtype for each in entries}["seen"] == "int64"
    assert all(each.dtype == "bfloat16" for each in entries if each.name.startswith(("body", "head")))
    assert from_json(to_json(entries)) == entries


def test_bytes_are_what_is_copied_with_conversion() -> None:
    sender, receiver = Model(), Model(torch.bfloat16)
    entries = travelling(held_by(sender), held_by(receiver))
    data = torch.zeros(total_bytes(entries), dtype=torch.uint8)
    pack(entries, weights_of(sender), data)
    unpack(entries, data, weights_of(receiver))
    for name, tensor in receiver.state_dict().items():
        assert torch.equal(tensor, sender.state_dict()[name].to(tensor.dtype)), name


@pytest.mark.parametrize(
    ("receiver", "text"),
    [
        (Model(extra="adapter"), "the sender lacks adapter"),
        (
            Model(width=4),
            r"body\.bias has shape \(3,\) at the sender and \(4,\) at the receiver; body\.weight has shape",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(receiver: nn.Module, text: str) -> None:
    with pytest.raises(LayoutError, match=f"weights of sender and receiver do not fit: {text}"):
        travelling(held_by(Model()), held_by(receiver))
    with pytest.raises(LayoutError, match="the receiver lacks adapter"):
        check_fit(held_by(Model(extra="adapter")), held_by(Model()))


def test_types_that_cannot_be_converted_are_named() -> None:
    whole = [Entry(name="count", shape=(1,), dtype="int64")]
    with pytest.raises(LayoutError, match="count is int64 at the sender and float32 at the receiver"):
        travelling(whole, [Entry(name="count", shape=(1,), dtype="float32")])
    with pytest.raises(LayoutError, match="w is sent as float32 and is bfloat16 at the receiver"):
        check_fit([Entry(name="w", shape=(1,), dtype="float32")], [Entry(name="w", shape=(1,), dtype="bfloat16")])
    with pytest.raises(LayoutError, match="'count' has the type 'save', which torch does not know"):
        from_json(b'[{"name": "count", "shape": [1], "dtype": "save", "changes": true}]')[0].torch_dtype  # noqa: B018
