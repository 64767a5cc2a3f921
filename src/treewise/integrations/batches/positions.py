"""How a model's own forward reads the positions of a row, tried out on it: most families cut packed rows where
positions start anew and see differences of positions alone, and some do not.
"""

import torch

from treewise.nn.decoder import DecoderAndHead

# Two sequences of one row: no model needs more to show that the second sees the first.
_FIRST, _SECOND = [0, 1, 2, 1], [2, 0, 1]
# How far the second may be from itself alone, in parts of how far it is where it goes on from the first.
_MOST, _MOST_IN_LOW_PRECISION = 1e-3, 0.1


def cuts_packed_rows(lm: DecoderAndHead) -> bool:
    """Whether the second of two sequences of a row is computed as if it stood alone, without a mask.

    Recurrent layers carry their states on, chunks of an attention are counted from the row's beginning, and a family
    may build its masks without positions. The decoder's forward has to be its own.
    """
    kinds = getattr(lm.decoder.config, "layer_types", None) or ()
    if lm.is_recurrent or "chunked_attention" in kinds:
        return False
    return _is_as_alone(lm, _FIRST + _SECOND, [*range(len(_FIRST)), *range(len(_SECOND))])


def has_relative_positions(lm: DecoderAndHead) -> bool:
    """Whether rows that begin at another position are computed alike: no table of positions, no scaling by them. The
    decoder's forward has to be its own."""
    for module in lm.decoder.modules():
        rotary = getattr(vars(module).get("config"), "rope_parameters", None) or {}
        if rotary.get("llama_4_scaling_beta") or vars(module).get("attn_temperature_tuning"):  # from far positions on
            return False
    return _is_as_alone(lm, _SECOND, [*range(len(_FIRST), len(_FIRST) + len(_SECOND))])


@torch.no_grad()
def _is_as_alone(lm: DecoderAndHead, ids: list[int], positions: list[int]) -> bool:
    """Whether the last sequence of a row is computed as in a row of its own, by how far it is behind another one."""
    joined = _FIRST + _SECOND
    alone = _second(lm, _SECOND, [*range(len(_SECOND))])
    found, behind = _second(lm, ids, positions), _second(lm, joined, [*range(len(joined))])
    limit = _MOST_IN_LOW_PRECISION if alone.dtype.itemsize < 4 else _MOST
    return bool((found - alone).norm() <= limit * (behind - alone).norm())


def _second(lm: DecoderAndHead, ids: list[int], positions: list[int]) -> torch.Tensor:
    """Hidden rows of the last sequence of a row."""
    device = lm.device
    with torch.autocast(device.type, enabled=False):
        output = lm.decoder(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
        )
    rows: torch.Tensor = output.last_hidden_state[0, -len(_SECOND) :]
    return rows
