"""Ids of tool calls, for environments and agents: some templates write them, so what a policy saw and sampled decides
them, and nothing else does.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIZE = 9  # what the templates of Mistral ask for


def call_ids(token_ids: Sequence[int] | np.ndarray, count: int, repeat: tuple[int, ...] = ()) -> list[str]:
    """Of the calls of a turn.

    Parameters:
        token_ids: of a conversation, up to the end of the turn.
        repeat: numbers that tell the turn from others that may have the same tokens; none for the first of them.
    """
    path = hashlib.sha256(np.asarray(token_ids, dtype=np.int32).tobytes())
    found = []
    for number in range(count):
        own = path.copy()
        own.update(repr((number, *repeat)).encode())
        value, letters = int.from_bytes(own.digest()[:8], "big"), ""
        for _ in range(SIZE):
            value, rest = divmod(value, len(ALPHABET))
            letters += ALPHABET[rest]
        found.append(letters)
    return found
