"""Baselines take the kernel that is installed, by the function and the arguments that it has."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from torch.nn.attention import SDPBackend

from treewise.bench import varlen
from treewise.bench.varlen import CUDNN, FLASH, LOOP, TORCH, AttentionHeads, fastest, kernels, varlen_attention
from treewise.errors import ConfigError
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention


def test_varlen_attention_is_aligned_at_the_end() -> None:
    """Against the reference, where keys before the first query are a gateway's."""
    torch.manual_seed(0)
    lengths = [(3, 5), (4, 4), (1, 6)]
    parts = [(torch.randn(q, 4, 8), torch.randn(k, 2, 8), torch.randn(k, 2, 8)) for q, k in lengths]
    query, key, value = (torch.cat(each) for each in zip(*parts, strict=True))
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(each)], dtype=torch.int32) for each in zip(*lengths, strict=True))
    found = varlen_attention(query, key, value, cu_q, cu_k, 4, 6, softmax_scale=0.3)
    for (q, k), own, part in zip(lengths, parts, found.split([q for q, _ in lengths]), strict=True):
        before = k - q
        lo = np.concatenate([np.zeros(before), np.arange(q)]).astype(np.int32)
        mask = TreeMask(lo, np.full(k, q, dtype=np.int32), np.arange(k, dtype=np.int32), q)
        rows = [each.transpose(0, 1)[None] for each in own]
        expected = reference_attention(*rows, mask, LayerRule(0.3))
        torch.testing.assert_close(part.transpose(0, 1)[None], expected)


# Stand-ins with the signatures of releases, which hand what they get to the loop over sequences.


def flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """flash-attn 2.8 and flash_attn_interface 3.0, as far as it matters."""
    assert (max_seqlen_q, max_seqlen_k, causal) == (4, 5, True)
    return varlen._loop(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale)


def flash_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    softmax_scale=None,
    causal=False,
):
    """flash-attn-4 4.0.0b36, whose fourth position is another; returns the log-sum-exp besides."""
    assert qv is None
    assert min_seqlen_k is None
    found = flash_2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal)
    return found, "log-sum-exp"


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return flash_2(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal=is_causal)


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size == (-1, 0)
    return flash_2(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, True)


def torch_2_12(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def calls() -> tuple[torch.Tensor, ...]:
    lengths_q, lengths_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)
    return torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8), lengths_q, lengths_k


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("release", [torch_2_10, torch_2_11, torch_2_12])
def test_torch_is_given_what_its_signature_has(release, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = calls()
    expected = varlen_attention(*inputs, 4, 5, softmax_scale=scale)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", release)
    torch.testing.assert_close(varlen_attention(*inputs, 4, 5, softmax_scale=scale, kernel=TORCH), expected)


def test_a_torch_whose_causal_attention_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v, *bounds: q)
    with pytest.raises(ConfigError, match=r"varlen_attn of torch .* no causal attention that is known here"):
        varlen_attention(*calls(), 4, 5, kernel=TORCH)


@pytest.mark.parametrize(
    ("name", "release"), [("flash_attn 2", flash_2), ("flash_attn 3", flash_2), ("flash_attn 4", flash_4)]
)
def test_flash_attention_is_given_what_its_signature_has(name, release, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = calls()
    expected = varlen_attention(*inputs, 4, 5, softmax_scale=0.3)
    monkeypatch.setattr(varlen, "flash_function", lambda _: release)
    torch.testing.assert_close(varlen_attention(*inputs, 4, 5, softmax_scale=0.3, kernel=name), expected)


def test_cudnn_has_each_sequence_to_itself_and_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sequences of one token, which it does not take."""
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    inputs = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8), bounds, bounds
    expected = varlen_attention(*inputs, 5, 5, softmax_scale=0.3)
    asked: list[object] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: object) -> torch.Tensor:
        asked[-1:] = [(asked[-1] if asked else None, query.shape[2], given["is_causal"], given["enable_gqa"])]
        return attend(query, key, value, **given)

    @contextmanager
    def only(backend: SDPBackend) -> Iterator[None]:
        asked.append(backend)
        yield
        asked.append(None)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", seen)
    monkeypatch.setattr(varlen, "sdpa_kernel", only)
    torch.testing.assert_close(varlen_attention(*inputs, 5, 5, softmax_scale=0.3, kernel=CUDNN), expected)
    cudnn = SDPBackend.CUDNN_ATTENTION
    assert asked == [(cudnn, 3, True, True), (None, 1, True, True), (cudnn, 5, True, True), None]


# -- the fastest of those at hand -------------------------------------------------------------------------------------

HEADS = AttentionHeads(4, 2, 8, 8)
HERE = torch.device("cpu")


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch):
    """Puts kernels in place by name, each a function of FlashAttention's contract; and the seconds that each takes."""

    def put(seconds: dict[str, float], **functions: object) -> None:
        clock, took = [0.0], {name.replace(" ", "_"): value for name, value in seconds.items()}

        def function(name: str):
            def run(*given: object, **more: object) -> object:
                clock[0] += took[name.replace(" ", "_")]
                return functions.get(name.replace(" ", "_"), flash_3)(*given, **more)

            return run

        fastest.cache_clear()
        monkeypatch.setattr(varlen, "kernels", lambda *_: tuple(seconds))
        monkeypatch.setattr(varlen, "flash_function", function)
        monkeypatch.setattr(varlen, "synchronized_clock", lambda _: clock[0])

    yield put
    fastest.cache_clear()


def flash_3(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    assert causal
    return varlen._loop(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale)


def test_the_fastest_that_is_right_is_taken(at_hand, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong: one that sees a key too many, one whose gradients are those of twice its output, one that raises."""

    def beyond(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **_):
        return varlen._loop(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), 1.02 * 8**-0.5)

    def doubled(q, k, v, **given):
        out = flash_3(q, k, v, **given)
        return 2 * out - out.detach()

    def broken(*_, **__):
        raise RuntimeError("no kernel image is available")

    seconds = {"a": 3.0, "b": 2.0, "beyond": 1.0, "doubled": 1.0, "broken": 1.0}
    at_hand(seconds, beyond=beyond, doubled=doubled, broken=broken)
    with caplog.at_level(logging.WARNING, "treewise"):
        found = fastest(HERE, torch.float32, HEADS, (5, 7), (5, 7))
    assert (found.name, found.seconds) == ("b", {"a": 3.0, "b": 2.0})
    assert "flat rows: beyond is left out: RuntimeError: its relative error is " in caplog.text
    assert "flat rows: doubled is left out: RuntimeError: its relative error is " in caplog.text
    assert "flat rows: broken is left out: RuntimeError: no kernel image is available" in caplog.text


def test_cudnn_is_not_asked_for_rows_with_more_keys(at_hand) -> None:
    at_hand({CUDNN: 1.0, "a": 2.0, "b": 3.0})
    assert fastest(HERE, torch.float32, HEADS, (5, 7), (9, 7)).name == "a"


def test_where_none_is_right_each_sequence_has_a_call_of_its_own(at_hand) -> None:
    at_hand({"a": 1.0, "b": 1.0}, a=lambda q, *_, **__: q, b=lambda q, *_, **__: q)
    assert fastest(HERE, torch.float32, HEADS, (5, 7), (5, 7)) == varlen.VarlenKernel(LOOP, {})


def test_nothing_is_timed_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_seconds", None)
    assert fastest(HERE, torch.float32, HEADS, (5, 7), (5, 7)) == varlen.VarlenKernel(LOOP, {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Puts modules in place, each with the function or without; torch's own is there. On a card of a capability."""

    def put(capability: tuple[int, int], **modules: bool | Exception) -> None:
        kernels.cache_clear()
        varlen.flash_function.cache_clear()
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: "cudnn" in modules)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        found = {}
        for name, has_function in modules.items() - {("cudnn", True)}:
            found[name] = module = ModuleType(name)
            if has_function is True:
                module.flash_attn_varlen_func = flash_2

        def import_module(name: str) -> ModuleType:
            if name == "torch.nn.attention.varlen":
                return torch.nn.attention.varlen
            given = modules.get(name.replace(".", "_"))
            if isinstance(given, Exception):
                raise given
            if given is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return found[name.replace(".", "_")]

        monkeypatch.setattr(varlen, "import_module", import_module)

    yield put
    kernels.cache_clear()
    varlen.flash_function.cache_clear()


@pytest.mark.parametrize(
    ("capability", "modules", "expected"),
    [
        ((9, 0), {}, (TORCH,)),
        ((9, 0), {"cudnn": True}, (CUDNN, TORCH)),
        ((9, 0), {"flash_attn": True}, ("flash_attn 2", TORCH)),
        # The wheel of flash-attn-4 alone: a folder `flash_attn` without the function.
        ((9, 0), {"flash_attn": False, "flash_attn_cute": True}, ("flash_attn 4", TORCH)),
        ((8, 0), {"flash_attn": False, "flash_attn_cute": True}, (TORCH,)),
        (
            (9, 0),
            {"flash_attn": True, "flash_attn_cute": True, "flash_attn_interface": True, "cudnn": True},
            ("flash_attn 3", "flash_attn 4", "flash_attn 2", CUDNN, TORCH),
        ),
        ((10, 0), {"flash_attn_cute": True, "flash_attn_interface": True}, ("flash_attn 4", TORCH)),
        ((7, 5), {"flash_attn": True, "cudnn": True}, (LOOP,)),
    ],
)
def test_the_function_is_looked_for_and_not_the_package(installed, capability, modules, expected) -> None:
    installed(capability, **modules)
    assert kernels("cuda", torch.bfloat16) == expected
    assert kernels("cuda", torch.float32) == kernels("cpu", torch.bfloat16) == (LOOP,)


def test_on_rocm_what_is_installed_is_taken(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of its chips are no compute capabilities: gfx7 is as good as any."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    installed((7, 0), flash_attn=True)
    assert kernels("cuda", torch.bfloat16) == ("flash_attn 2", TORCH)
    installed((7, 0))
    assert kernels("cuda", torch.bfloat16) == (TORCH,)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: _ZN3c105Error"),
        ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
        AttributeError("module 'cutlass' has no attribute 'Int32'"),
    ],
)
def test_what_is_installed_and_broken_is_named(installed, error, caplog: pytest.LogCaptureFixture) -> None:
    installed((9, 0), flash_attn=True, flash_attn_cute=error)
    with caplog.at_level(logging.WARNING, "treewise"):
        assert kernels("cuda", torch.bfloat16) == ("flash_attn 2", TORCH)
    assert f"flash_attn 4 is installed and cannot be used: {type(error).__name__}: {error}" in caplog.text


def test_what_is_not_installed_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    varlen.flash_function.cache_clear()
    with caplog.at_level(logging.WARNING, "treewise"):
        assert [varlen.flash_function(name) for name in FLASH] == [None, None, None]
    assert not caplog.text
    varlen.flash_function.cache_clear()
