"""Bins of at most a given size: which pieces are computed together in one micro-batch.

`best_fit` uses the fewest bins that a simple deterministic rule finds; `in_order` keeps neighbours together, so that
few gateways are alive at a time.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing (Johnson et al., 1974): the largest first, each into the fullest bin that still takes it.

    Returns the indices in each bin, ascending; bins by their first index. Equal sizes keep their order.
    """
    bins: list[list[int]] = []
    # Residuals ascending; for equal ones the oldest bin first.
    residuals: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size = sizes[item]
        index = bisect_left(residuals, (size, -1))
        if index == len(residuals):
            bins.append([item])
            insort(residuals, (capacity - size, len(bins) - 1))
        else:
            residual, bin_index = residuals.pop(index)
            bins[bin_index].append(item)
            insort(residuals, (residual - size, bin_index))
    return sorted(sorted(items) for items in bins)


def in_order(sizes: Sequence[int], capacity: int, num_open_bins: int) -> list[list[int]]:
    """First fit over the `num_open_bins` newest bins, in the order given."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item, size in enumerate(sizes):
        for index in range(max(0, len(bins) - num_open_bins), len(bins)):
            if rooms[index] >= size:
                bins[index].append(item)
                rooms[index] -= size
                break
        else:
            bins.append([item])
            rooms.append(capacity - size)
    return bins
