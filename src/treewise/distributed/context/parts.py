"""One micro-batch cut into parts for several ranks (context parallelism).

A part is a run of the micro-batch's tokens in depth-first order. What it needs of the others is what a micro-batch
needs of the open ones above it: keys and values of its tokens' ancestors, which all lie in earlier parts. So a part has
the layout of a micro-batch, with the tokens that it reads from other ranks behind the gateway tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from treewise.planning.plans import Layout


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One rank's part of a micro-batch of T tokens.

    layout: of its own tokens; where it has none, of the micro-batch's first token, so that its rank computes layers
    like the others. num_own: its tokens. rows: [n] int64, the rows of the micro-batch that it reads from other ranks,
    ascending: keys behind those of gateways. bounds: [ranks + 1] int64, the rows where each part begins.
    """

    layout: Layout
    num_own: int
    rows: np.ndarray
    bounds: np.ndarray


def part_bounds(token_cost: np.ndarray, num_parts: int) -> np.ndarray:
    """[parts + 1] int64, where each part begins, so that costs are as equal as whole tokens allow.

    token_cost: [T] float64, positive. Every part has a token if there are enough.
    """
    num_tokens = len(token_cost)
    total = np.cumsum(token_cost)
    wanted = total[-1] * np.arange(1, num_parts) / num_parts
    inner = np.searchsorted(total, wanted, side="left") + 1
    number = np.arange(1, num_parts)
    # Each part takes at least one token, and leaves one for each part behind it, while there are any.
    least = np.minimum(number, num_tokens)
    most = np.maximum(num_tokens - (num_parts - number), least)
    inner = np.maximum.accumulate(np.clip(inner, least, most))
    return np.concatenate([[0], inner, [num_tokens]]).astype(np.int64)


def context_part(layout: Layout, bounds: np.ndarray, index: int) -> ContextPart:
    """The part number `index` of a micro-batch."""
    start, end = int(bounds[index]), int(bounds[index + 1])
    num_own = end - start
    if num_own == 0:
        start, end = 0, 1
    num_gateway = len(layout.lo) - layout.num_tokens
    lo = np.maximum(layout.lo - start, 0)
    hi = np.minimum(layout.hi, end) - start
    is_seen = lo < hi
    is_seen[num_gateway + start :] = False  # own tokens come last; no part sees a later one
    if num_own == 0:
        is_seen[:] = False
    seen = np.flatnonzero(is_seen)
    keys = np.concatenate([seen, num_gateway + np.arange(start, end)])
    counts = np.diff(np.searchsorted(seen, layout.gateway_bounds))
    own_hi = hi[keys] if num_own else np.ones(1, dtype=np.int32)
    return ContextPart(
        layout=replace(
            layout,
            positions=layout.positions[start:end],
            token_ids=layout.token_ids[start:end],
            depth=layout.depth[start:end],
            lo=lo[keys].astype(np.int32),
            hi=own_hi.astype(np.int32),
            key_depth=layout.key_depth[keys],
            gateway_batches=layout.gateway_batches[counts > 0],
            gateway_rows=layout.gateway_rows[seen[seen < num_gateway]],
            gateway_bounds=np.concatenate([[0], np.cumsum(counts[counts > 0])]).astype(np.int64),
        ),
        num_own=num_own,
        rows=seen[seen >= num_gateway] - num_gateway,
        bounds=bounds,
    )
