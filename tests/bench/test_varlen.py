"""Baselines take the kernel that is installed, by the function and the arguments that it has."""

import logging
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from treewise.bench import varlen
from treewise.bench.varlen import FLASH, kernel, varlen_attention
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
    monkeypatch.setattr(varlen, "kernel", lambda *_: "torch varlen")
    torch.testing.assert_close(varlen_attention(*inputs, 4, 5, softmax_scale=scale), expected)


def test_a_torch_whose_causal_attention_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v, *bounds: q)
    monkeypatch.setattr(varlen, "kernel", lambda *_: "torch varlen")
    with pytest.raises(ConfigError, match=r"varlen_attn of torch .* no causal attention that is known here"):
        varlen_attention(*calls(), 4, 5)


@pytest.mark.parametrize(
    ("name", "release"), [("flash_attn 2", flash_2), ("flash_attn 3", flash_2), ("flash_attn 4", flash_4)]
)
def test_flash_attention_is_given_what_its_signature_has(name, release, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = calls()
    expected = varlen_attention(*inputs, 4, 5, softmax_scale=0.3)
    monkeypatch.setattr(varlen, "kernel", lambda *_: name)
    monkeypatch.setattr(varlen, "flash_function", lambda _: release)
    torch.testing.assert_close(varlen_attention(*inputs, 4, 5, softmax_scale=0.3), expected)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Puts modules in place, each with the function or without; torch's own is there. On a card of a capability."""

    def put(capability: tuple[int, int], **modules: bool | Exception) -> None:
        kernel.cache_clear()
        varlen.flash_function.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        found = {}
        for name, has_function in modules.items():
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
    kernel.cache_clear()
    varlen.flash_function.cache_clear()


@pytest.mark.parametrize(
    ("capability", "modules", "expected"),
    [
        ((9, 0), {}, "torch varlen"),
        ((9, 0), {"flash_attn": True}, "flash_attn 2"),
        # The wheel of flash-attn-4 alone: a folder `flash_attn` without the function.
        ((9, 0), {"flash_attn": False, "flash_attn_cute": True}, "flash_attn 4"),
        ((8, 0), {"flash_attn": False, "flash_attn_cute": True}, "torch varlen"),
        ((9, 0), {"flash_attn": False}, "torch varlen"),
        ((9, 0), {"flash_attn": True, "flash_attn_cute": True, "flash_attn_interface": True}, "flash_attn 3"),
        ((10, 0), {"flash_attn": True, "flash_attn_cute": True, "flash_attn_interface": True}, "flash_attn 4"),
        ((7, 5), {"flash_attn": True}, "sdpa"),
    ],
)
def test_the_function_is_looked_for_and_not_the_package(installed, capability, modules, expected) -> None:
    installed(capability, **modules)
    assert kernel("cuda", torch.bfloat16) == expected
    assert kernel("cuda", torch.float32) == kernel("cpu", torch.bfloat16) == "sdpa"


def test_on_rocm_what_is_installed_is_taken(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of its chips are no compute capabilities: gfx7 is as good as any."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    installed((7, 0), flash_attn=True)
    assert kernel("cuda", torch.bfloat16) == "flash_attn 2"
    installed((7, 0))
    assert kernel("cuda", torch.bfloat16) == "torch varlen"


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
        assert kernel("cuda", torch.bfloat16) == "flash_attn 2"
    assert f"flash_attn 4 is installed and cannot be used: {type(error).__name__}: {error}" in caplog.text


def test_what_is_not_installed_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    varlen.flash_function.cache_clear()
    with caplog.at_level(logging.WARNING, "treewise"):
        assert [varlen.flash_function(name) for name in FLASH] == [None, None, None]
    assert not caplog.text
    varlen.flash_function.cache_clear()
