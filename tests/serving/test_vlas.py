"""Vision-language-action models that are served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")
pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from websockets.sync.client import ClientConnection, connect

import embodyrl
from embodyrl.messages import pack, unpack
from embodyrl.rollout.plans import Plans
from tests.serving.vlas import TINY, message, observation, tiny


def ask(client: ClientConnection, number: int, **more: int) -> Any:
    client.send(pack(message(number) | more, bytes_keys=True))
    answer = client.recv(timeout=60)
    assert isinstance(answer, bytes), answer
    return unpack(answer)["actions"]


@pytest.mark.parametrize("model", TINY)
def test_a_client_gets_what_the_policy_does_bit_for_bit(model: str) -> None:
    """Takes a second for each: these networks are the smallest that there are."""
    policy = tiny(model)
    with embodyrl.serve(policy, port=0) as there, connect(there.url, compression=None) as client:
        told = unpack(client.recv(timeout=60))
        assert (told["model"], told["chunk_size"], told["cameras"]) == (model, 4, ["front"])
        for number in range(3):
            found = ask(client, number)
            assert np.array_equal(found, policy.act(observation(number))[0])


def test_a_chunk_goes_on_from_the_one_before_of_the_same_client() -> None:
    policy = tiny("pi0", "model.rtc=5")
    plans, slot = Plans.of(policy.policy, 1), np.zeros(1, np.int64)
    assert plans is not None
    with embodyrl.serve(policy, port=0, wait_ms=50.0) as there, connect(there.url, compression=None) as client:
        assert unpack(client.recv(timeout=60))["rtc"] is True
        with connect(there.url, compression=None) as other:
            other.recv(timeout=60)
            ask(other, 7)  # another client plans something else
            first = ask(client, 0)
            decision = policy.decide(observation(0))
            assert np.array_equal(first, decision.actions[0])
            plans.keep(slot, decision.plan)
            further = plans.inputs(slot, 2, 1)
            wanted = policy.decide(observation(1), further=further).actions[0].numpy()
            # Both clients are answered together: one goes on, the other begins an episode.
            other.send(pack(message(8) | {"episode": 1, "executed": 2}, bytes_keys=True))
            found = ask(client, 1, executed=2, delay=1)
            np.testing.assert_allclose(found, wanted, atol=1e-5)
            assert np.abs(found - policy.act(observation(1))[0]).max() > 1e-2
            answer = other.recv(timeout=60)
            assert isinstance(answer, bytes)
            np.testing.assert_allclose(unpack(answer)["actions"], policy.act(observation(8))[0], atol=1e-5)
    assert not any(torch.is_tensor(each) and each.requires_grad for each in vars(plans).values())
