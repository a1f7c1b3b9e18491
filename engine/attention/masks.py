"""Which keys a query sees."""

import torch


def causal_mask(
    queries: range, keys: range, dtype: torch.dtype, window: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """`[queries, keys]`, to be added to scores: 0 where the query at one position sees the key at another, else -inf.
    It sees itself and what came before, of these the last `window`."""
    at, of = (torch.arange(places.start, places.stop, device=device) for places in (queries, keys))
    distance = at[:, None] - of
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
