"""Where a `kvarto.Cache` waits for its device, and what it finds out then."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvarto
from kvarto.errors import NotFinite, UsageError


class Operations(TorchDispatchMode):
    """Notes which operations torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def mask(kv: kvarto.Cache, attention_mask: torch.Tensor | None) -> torch.Tensor:
    return kv.padding_mask(1, attention_mask, sequences=2, window_tokens=None, device=torch.device("cpu"))


def test_without_padding_no_mask_is_looked_at() -> None:
    model = tiny.shared("llama")
    kv, inputs = kvarto.Cache(model, "int4"), tiny.prompt(100, 100)
    tiny.feed(model, kv, inputs, [100])
    with Operations() as seen:
        made = mask(kv, None)
    assert made.shape == (2, 1, 1, 101)
    assert set(seen.names) == {"ones", "unsqueeze"}
    padded = kvarto.Cache(model, "int4")
    tiny.feed(model, padded, tiny.prompt(100, 40), [100])
    with pytest.raises(UsageError, match="the padding that the 100 cached columns were stored with"):
        mask(padded, None)


def test_what_a_gpu_noted_is_raised_by_the_next_forward_pass() -> None:
    model = tiny.shared("llama")
    kv, inputs = kvarto.Cache(model, "int4"), tiny.prompt(100, 90)
    for layer in kv.kv.layers:
        layer.finite.deferred = True  # As on a GPU.
    expected = tiny.feed(model, kv, inputs, [80, 20])
    kv.kv.layers[1].finite.see(torch.ones(3), torch.tensor([1.0, torch.inf]))
    longer = tiny.one_more_token(inputs)
    with pytest.raises(NotFinite, match="layer 1, values"):
        tiny.feed(model, kv, longer, [1])
    with pytest.raises(NotFinite, match="layer 1, values"):
        kv.crop(-1)
    kv.reset()
    assert torch.equal(tiny.feed(model, kv, inputs, [80, 20]), expected)
