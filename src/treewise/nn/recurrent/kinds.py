"""How each kind of recurrent layer is computed on a tree: a replacement for its function over tokens.

transformers' mixers call such functions (`causal_conv1d_fn`, `torch_chunk_gated_delta_rule`, ...) by name, whatever
kernel is behind the name. `FUNCTIONS` maps each to its replacement while a mixer runs on a tree; the replacement calls
the mixer's own function on arranged inputs. It gets the layer's context, the mixer's own function, and the function's
own arguments. Two mixers have their recurrence written into their forward; `MIXERS` maps them to a replacement of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treewise.base.shapes import Float
from treewise.nn.recurrent.rows import LayerContext, collect, gather, spread
from treewise.nn.recurrent.segments import GATEWAY, NOTHING, SegmentBatch

# -- Recurrences and short convolutions on a tree: each segment once, from its parent's end state ---------------------


# [B, L, ...] inputs padded with zeros on the right, [B, ...] initial states or None for zeros, and whether end states
# are wanted, to [B, L, ...] outputs and [B, ...] end states. A row of zeros must leave the state unchanged.
Scan = Callable[[list[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]
# [1, C, L] to [1, C, L], causal, zeros before the first row.
Conv = Callable[[torch.Tensor], torch.Tensor]
_SMALLEST_CHUNK = 16


def tree_scan(layer: LayerContext, inputs: Sequence[Float[Tensor, "1 T ..."]], scan: Scan) -> Float[Tensor, "1 T ..."]:
    """A recurrence over [1, T, ...] inputs; returns [1, T, ...]. States and their gradients follow the tree."""
    rows, device = layer.rows, inputs[0].device
    schedule = rows.schedule
    order = rows.tensor("order", schedule.order, device)
    where = rows.tensor("position", schedule.position, device)
    # Rows in batches, by one copy; then split, whose backward is one concatenation.
    parts = [spread(each[0], order, where).split(schedule.sizes) for each in inputs]
    entering = layer.entering(inputs)
    outs: list[torch.Tensor] = []
    ends: list[torch.Tensor | None] = []
    for index, batch in enumerate(schedule.batches):
        shape = (len(batch.segments), batch.length)
        padded = [part[index].unflatten(0, shape) for part in parts]
        initial = _initial(layer, index, batch, ends, entering)
        out, end = scan(padded, initial, batch.wants_states)
        outs.append(out.flatten(0, 1))
        ends.append(end)
    out = collect(torch.cat(outs), order, where)[None]
    leaving = None
    if schedule.cuts:
        leaving = torch.stack([_kept(ends[batch])[row] for batch, row in schedule.cuts])
    return layer.leaving(out, leaving)


def _initial(
    layer: LayerContext, index: int, batch: SegmentBatch, ends: list[torch.Tensor | None], entering: torch.Tensor | None
) -> torch.Tensor | None:
    """[B, ...] initial states of batch `index` of the schedule; None where all are zero."""
    if all(source.batch == NOTHING for source in batch.sources):
        return None
    states_or_counts: list[torch.Tensor | int] = []
    for position, source in enumerate(batch.sources):
        if source.batch == NOTHING:
            states_or_counts.append(len(source.index))
            continue
        states = _kept(entering if source.batch == GATEWAY else ends[source.batch])
        rows = layer.rows.tensor(("source", index, position), source.index, states.device)
        states_or_counts.append(states.index_select(0, rows))
    like = next(each for each in states_or_counts if isinstance(each, torch.Tensor))
    zeros = like.new_zeros
    return torch.cat([zeros(each, *like.shape[1:]) if isinstance(each, int) else each for each in states_or_counts])


def _kept(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None, "segments with others below them have end states"
    return states


def padded_chunk(length: int, largest: int) -> int:
    """Tokens per chunk for short segments: the smallest power of two that holds them, so that padding stays small."""
    return max(min(_SMALLEST_CHUNK, largest), min(largest, 1 << max(length - 1, 0).bit_length()))


def tree_conv(layer: LayerContext, inputs: Float[Tensor, "1 C T"], width: int, conv: Conv) -> Float[Tensor, "1 C T"]:
    """A causal convolution over [1, C, T] inputs; row t sees itself and the `width - 1` tokens above it.

    Computes T + S * (width - 1) rows for S segments. Where the path above a segment is shorter, it is
    padded with zeros, as at the beginning of a sequence.
    """
    rows, segments = layer.rows, layer.rows.segments
    is_one_path = segments.num_segments == 1 and segments.gateway[0] < 0  # from a first token
    if width == 1 or (is_one_path and not len(segments.cuts)):
        return conv(inputs)
    index = rows.conv_index(width, inputs.device)
    own_TC = inputs[0].transpose(0, 1)
    axis = [own_TC, own_TC.new_zeros(1, own_TC.shape[1])]
    tails = layer.entering([inputs])
    if tails is not None:
        axis.append(tails.to(own_TC.dtype).flatten(0, 1))
    extended = torch.cat(axis)
    out = conv(gather(extended, index.gather).transpose(0, 1)[None])
    out = out.index_select(2, index.keep)
    leaving = None
    if len(rows.segments.cuts):
        leaving = gather(extended, index.tails.flatten()).unflatten(0, index.tails.shape)
    return layer.leaving(out, leaving)


TreeFunction = Callable[..., Any]
MaybeTensor = torch.Tensor | None
Original = Callable[..., torch.Tensor]
WithState = Callable[..., tuple[torch.Tensor, MaybeTensor]]
LayerOf = Callable[[str], LayerContext]  # by the name of a function of the layer
CHUNK = 64  # of transformers' delta rules and of flash-linear-attention's kernels
# Of a call over whole sequences. A tree has its own bounds of rows, enters no state here, and returns none.
_OF_SEQUENCES = (
    *("initial_state", "initial_states", "cu_seqlens"),
    *("output_final_state", "return_final_states", "return_last_state"),
)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments by keyword of a call, without those about whole sequences."""
    given = {name: options.pop(name, None) for name in _OF_SEQUENCES}
    assert all(each is None or each is False for name, each in given.items() if name != "cu_seqlens")
    return options


# -- short causal convolutions: LFM2's token mixer, and the first step of delta nets and Mamba ------------------------


def tree_causal_conv(
    layer: LayerContext,
    original: Original,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """`causal_conv1d_fn` on a tree: [1, C, T] inputs, [C, width] weight."""
    return tree_conv(layer, hidden_states, weight.shape[-1], lambda each: original(each, weight, *args, **kwargs))


# -- delta rules: gated delta nets (Qwen3-Next, Qwen3.5, OLMo-hybrid) and Kimi delta attention ------------------------
# Yang et al., Gated Delta Networks (2024), section 3; Kimi Linear (2025), section 3. The state S [H, Dk, Dv] is decayed
# by exp(g), then moved towards writing v at key k with strength beta. A row of zeros (g = 0, beta = 0, k = 0) leaves it
# unchanged, so padding is zeros.


def tree_delta_rule(
    layer: LayerContext,
    original: WithState,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = CHUNK,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`chunk_gated_delta_rule` and `chunk_kda` on a tree: [1, T, H, ...] inputs; no end state is returned."""
    options = _options(options)

    def scan(inputs: list[torch.Tensor], initial: MaybeTensor, wants_states: bool) -> tuple[torch.Tensor, MaybeTensor]:
        query, key, value, g, beta = inputs
        chunk = padded_chunk(query.shape[1], chunk_size)
        states = {"initial_state": initial, "output_final_state": wants_states}
        return original(query, key, value, g=g, beta=beta, chunk_size=chunk, **states, **options)

    return tree_scan(layer, (query, key, value, g, beta), scan), None


# -- Mamba2's scan (Nemotron-H, Granite-hybrid, Bamba, Falcon-H1, Zamba2) ---------------------------------------------
# Dao and Gu, Transformers are SSMs (2024), section 6. The state [H, P, N] is decayed by exp(dt A) and gains dt B x.
# Step sizes are computed here, so that padding can have dt = 0, which leaves the state unchanged.


def tree_chunk_scan(
    layer: LayerContext,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    **options: Any,
) -> torch.Tensor:
    """`mamba_chunk_scan_combined` on a tree: [1, T, H, P] inputs, [1, T, H] dt, [1, T, G, N] B and C."""
    options = _options(options)
    dt = _step_sizes(dt, options.pop("dt_bias", None), options.pop("dt_softplus", False))
    dt = dt.clamp(*options.pop("dt_limit", (0.0, float("inf"))))

    def scan(inputs: list[torch.Tensor], initial: MaybeTensor, wants_states: bool) -> tuple[torch.Tensor, MaybeTensor]:
        hidden_states, dt, B, C = inputs
        states = {"initial_states": initial, "return_final_states": wants_states}
        chunk = padded_chunk(dt.shape[1], chunk_size)
        found: tuple[torch.Tensor, MaybeTensor] | torch.Tensor
        found = original(hidden_states, dt, A, B, C, chunk_size=chunk, **states, **options)
        return (found, None) if isinstance(found, torch.Tensor) else found

    return tree_scan(layer, (hidden_states, dt, B, C), scan)


def _step_sizes(dt: torch.Tensor, bias: MaybeTensor, is_softplus: bool) -> torch.Tensor:
    """[1, T, H] with biases of the heads."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if is_softplus else dt


# -- Mamba's selective scan (Jamba, Zamba, Mamba, Falcon-Mamba) -------------------------------------------------------
# Gu and Dao, Mamba (2023), section 3: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t. The kernels and
# transformers' function begin with h = 0 and take no other state. The recurrence is linear in h, so the contribution of
# an initial state h_0 is added afterwards: C_t exp(A sum of dt up to t) h_0 to the outputs, exp(A sum of all dt) h_0 to
# the end state. The end state is computed here, because the kernel's carries no gradient.


def tree_selective_scan(
    layer: LayerContext,
    original: Original,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: MaybeTensor = None,
    **options: Any,
) -> torch.Tensor:
    """`selective_scan_fn` on a tree: [1, C, T] inputs, dt and z, [C, N] A, [1, N, T] B and C."""
    options = _options(options)
    z: MaybeTensor = options.pop("z", None)
    bias: MaybeTensor = options.pop("delta_bias", None)
    bias = None if bias is None else bias[..., None]
    dt = _step_sizes(dt, bias, options.pop("delta_softplus", False))

    def scan(inputs: list[torch.Tensor], initial: MaybeTensor, wants_states: bool) -> tuple[torch.Tensor, MaybeTensor]:
        x, dt, B, C = (each.transpose(1, 2) for each in inputs)
        out = original(x, dt, A, B, C, **options)
        total = dt.to(torch.promote_types(dt.dtype, torch.float32)).cumsum(-1)
        if initial is not None:
            out = out + _carried(total, A, C, initial).to(out.dtype)
        return out.transpose(1, 2), _end_state(x, dt, total, A, B, initial) if wants_states else None

    over_rows = [each.transpose(1, 2) for each in (hidden_states, dt, B, C)]
    out = tree_scan(layer, over_rows, scan).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return out if z is None else out * F.silu(z)


def _carried(total: torch.Tensor, A: torch.Tensor, C: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """[B, C, L], the contribution of an initial state to the outputs. total: [B, C, L] sums of dt; A is negative."""
    wide = torch.promote_types(initial.dtype, torch.float32)
    decayed = torch.exp(total[..., None].to(wide) * A[:, None].to(wide)) * initial[:, :, None].to(wide)
    return torch.einsum("bcln,bnl->bcl", decayed, C.to(wide))


def _end_state(
    x: torch.Tensor, dt: torch.Tensor, total: torch.Tensor, A: torch.Tensor, B: torch.Tensor, initial: MaybeTensor
) -> torch.Tensor:
    """[B, C, N] in float32 or wider. Every term decays by exp(A times the sum of the later dt), at most 1."""
    wide = torch.promote_types(A.dtype, torch.float32)
    left = total[..., -1:] - total
    decay = torch.exp(left[..., None].to(wide) * A[:, None].to(wide))
    gained = (dt.to(wide) * x.to(wide))[..., None] * B.transpose(1, 2)[:, None].to(wide)
    end = (decay * gained).sum(2)
    if initial is not None:
        end = end + torch.exp(total[..., -1:].to(wide) * A.to(wide)) * initial.to(wide)
    return end


# -- lightning attention (MiniMax): linear attention whose state decays by a constant per head ------------------------
# Qin et al., Lightning Attention-2 (2024), section 3: S_t = exp(-slope) S_{t-1} + k_t v_t, o_t = q_t S_t. The mixer's
# own forward contains this recurrence, so its steps are called here one by one.


class LightningMixer(Protocol):
    """What of `MiniMaxLightningAttention` is called here."""

    num_attention_heads: int
    head_dim: int
    block_size: int
    slope_rate: torch.Tensor

    def act_fn(self, qkv: torch.Tensor, /) -> torch.Tensor: ...
    def qkv_proj(self, hidden_states: torch.Tensor, /) -> torch.Tensor: ...
    def out_proj(self, values: torch.Tensor, /) -> torch.Tensor: ...
    def output_gate(self, hidden_states: torch.Tensor, /) -> torch.Tensor: ...
    def norm(self, values: torch.Tensor, /) -> torch.Tensor: ...


def tree_lightning(
    mixer: LightningMixer, layer_of: LayerOf, hidden_states: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, None]:
    """`MiniMaxLightningAttention` on a tree: [1, T, M] in, ([1, T, M], None) out."""
    shape = (*hidden_states.shape[:2], mixer.num_attention_heads, 3 * mixer.head_dim)
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states)).reshape(shape)
    query, key, value = qkv.split(mixer.head_dim, dim=3)
    slope_H = mixer.slope_rate.flatten().to(torch.promote_types(qkv.dtype, torch.float32))
    decay = (-slope_H).expand(*shape[:3])

    def scan(inputs: list[torch.Tensor], initial: MaybeTensor, _: bool) -> tuple[torch.Tensor, MaybeTensor]:
        query, key, value, decay = inputs
        return decayed_attention(query, key, value, decay, initial, mixer.block_size)

    out = tree_scan(layer_of("lightning"), (query, key, value, decay), scan).flatten(2)
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * mixer.norm(out)), None


def decayed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    initial: MaybeTensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of linear attention: [B, L, H, D] each, [B, L, H] log decays; [B, L, H, D] and end states [B, H, D, D].

    A row of zeros (no key, no decay) leaves the state unchanged.
    """
    query, key, value, decay = (each.transpose(1, 2) for each in (query, key, value, decay))
    batch, heads, length, width = key.shape
    state = key.new_zeros(batch, heads, width, value.shape[-1]) if initial is None else initial.to(key.dtype)
    outs = []
    for start in range(0, length, block_size):
        part = slice(start, start + block_size)
        q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
        total = decay[:, :, part].cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).tril()
        seen = between.exp().tril().to(q.dtype)
        since = total.exp().to(q.dtype)[..., None]
        left = (total[..., -1:] - total).exp().to(q.dtype)[..., None]
        outs.append((q @ k.transpose(-1, -2) * seen) @ v + (q * since) @ state)
        state = state * since[..., -1:, :] + (k * left).transpose(-1, -2) @ v
    return torch.cat(outs, dim=2).transpose(1, 2), state


# -- the real-gated linear recurrent unit of RecurrentGemma, and the convolution before it ----------------------------
# De et al., Griffin (2024), section 2.4: h_t = a_t h_{t-1} + x_t, channel by channel. The block's own forward runs,
# with its convolution and its scan over tokens replaced.


class Replaced:
    """A module with a few attributes replaced; what its forward sets is kept here and not in the module."""

    def __init__(self, module: nn.Module, **replaced: object) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def tree_recurrent_block(block: Any, layer_of: LayerOf, *args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRecurrentBlock` on a tree: [1, T, M] in, ([1, T, M], None) out."""

    def conv(inputs: torch.Tensor) -> torch.Tensor:
        own: nn.Conv1d = block.conv_1d
        return tree_conv(layer_of("conv"), inputs, own.kernel_size[0], lambda each: own(each)[..., : each.shape[-1]])

    def scan(
        hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, None]:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        is_token = hidden_states.new_ones(*hidden_states.shape[:2], 1)
        inputs = (hidden_states.to(wide), (recurrent_gate * ~reset).to(wide), is_token)
        return tree_scan(layer_of("scan"), inputs, linear_recurrence).to(hidden_states.dtype), None

    def unit(activations: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        forward: Callable[..., torch.Tensor] = type(block.rg_lru).forward
        return forward(Replaced(block.rg_lru, _rnn_scan=scan), activations, position_ids)

    forward: Callable[..., tuple[torch.Tensor, None]] = type(block).forward
    return forward(Replaced(block, conv_1d=conv, rg_lru=unit), *args, **kwargs)


def linear_recurrence(
    inputs: list[torch.Tensor], initial: MaybeTensor, _wants_states: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = a_t h_{t-1} + x_t over [B, L, C], by doubling (Hillis and Steele, 1986): log2(L) passes, no step per token.

    The third input is 0 at padded rows, which leave the state unchanged.
    """
    state, gate, is_token = inputs
    gate = torch.where(is_token > 0, gate, 1.0)
    reach = 1
    while reach < state.shape[1]:
        state = torch.cat([state[:, :reach], state[:, reach:] + gate[:, reach:] * state[:, :-reach]], dim=1)
        gate = torch.cat([gate[:, :reach], gate[:, reach:] * gate[:, :-reach]], dim=1)
        reach *= 2
    if initial is not None:
        state = state + gate * initial[:, None].to(state.dtype)
    return state, state[:, -1]


# -- by name ----------------------------------------------------------------------------------------------------------


def no_shortcut(*_: object, **__: object) -> None:
    """Replaces kernels over convolution and scan together, which a tree cannot use: with None, which transformers has
    when no kernel is installed, the mixer calls one after the other."""


FUNCTIONS: dict[str, TreeFunction] = {
    "causal_conv1d_fn": tree_causal_conv,
    "torch_chunk_gated_delta_rule": tree_delta_rule,
    "chunk_kimi_delta_attention": tree_delta_rule,
    "mamba2_chunk_scan": tree_chunk_scan,
    "mamba_selective_scan": tree_selective_scan,
    "mamba2_split_conv1d_scan_combined": no_shortcut,
    "mamba_inner_fn": no_shortcut,
}
KINDS = {
    "causal_conv1d_fn": "short convolution",
    "torch_chunk_gated_delta_rule": "gated delta net",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba2",
    "mamba_selective_scan": "Mamba",
}
# Single steps from a cache, which a mixer takes only with a cache.
SINGLE_STEPS = {
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
}
# Class of a mixer -> (kind, what runs instead of its forward: a function of the mixer and of names to layer contexts).
MIXERS: dict[str, tuple[str, TreeFunction]] = {
    "MiniMaxLightningAttention": ("lightning attention", tree_lightning),
    "RecurrentGemmaRecurrentBlock": ("short convolution, gated linear recurrence", tree_recurrent_block),
}
