"""The reference KV store against a loop."""

from __future__ import annotations

import torch

from tp_runtime.ops.kv_store import store_kv


def test_each_token_goes_to_its_slot_and_slot_minus_one_nowhere() -> None:
    k, v = torch.randn(2, 5, 3, 6)
    caches = torch.full((2, 4, 2, 3, 6), float("nan"))
    slots = [6, -1, 0, -1, 3]
    store_kv(k, v, caches[0], caches[1], torch.tensor(slots))
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(caches[0, slot // 2, slot % 2], k[token])
            assert torch.equal(caches[1, slot // 2, slot % 2], v[token])
    written = caches.isfinite().flatten(3).all(-1).flatten(1)
    assert written.sum(dim=1).tolist() == [3, 3]
