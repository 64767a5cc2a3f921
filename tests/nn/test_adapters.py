"""Every adapter of PEFT that builds on a tiny llama's head and query projections, against flat training.

Adapters are stirred, because a fresh one is the identity.
"""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from tests.needs import TIED_LORA, require
from treewise import SFT, Forest, Trajectory, TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradients_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on settings that do not matter here

ROLLOUTS = [Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 5, 9, 10]), Trajectory([3, 4, 11, 12, 13, 14, 15])]
# In float64, but for what norms and some types compute in float32 whatever the dtype.
TOLERANCE = 1e-6

# What a type needs beside its targets.
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {"feedforward_modules": []},
    "OFT": {"oft_block_size": 8},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 8},
    "HRA": {"r": 4},
    "LILY": {"r": 2},
    "ADALORA": {"total_step": 10, "init_r": 4},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "WAVEFT": {"n_frequency": 32},
    "FOURIERFT": {"n_frequency": 32},
    "VBLORA": {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2},
    "VERA": {"r": 4},
    "RANDLORA": {"r": 4},
    "MISS": {"r": 4},
    "SHIRA": {"r": 2},
    "ROAD": {"group_size": 8},
}
# Those that learn a prompt, wrap whole layers, need a package that is not installed, or are refused.
OTHERS = {
    *("ADAMSS", "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "P_TUNING", "POLY"),
    *("PREFIX_TUNING", "PROMPT_TUNING", "PVERA", "SHADOW", "TRAINABLE_TOKENS", "XLORA"),
}
KINDS = sorted({str(getattr(each, "value", each)) for each in PEFT_TYPE_TO_CONFIG_MAPPING} - OTHERS)


def adapted(kind: str, target: str, **settings: Any) -> PeftModel:
    torch.manual_seed(0)
    base = tiny_model(tie_word_embeddings=False)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](target_modules=[target], task_type="CAUSAL_LM", **settings)
    return stirred(get_peft_model(base, config))


def stirred(model: nn.Module) -> Any:
    """In float64."""
    model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def check(model: nn.Module) -> None:
    loss, logprobs, expected = flat_sft(model, ROLLOUTS)
    forest = Forest.from_trajectories(ROLLOUTS)
    for max_tokens in (None, 4):
        model.zero_grad()
        engine = TreeEngine(model, max_tokens)
        with torch.no_grad():
            for ours, theirs in zip(engine.logprobs(forest), logprobs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        out = engine.step(forest, SFT())
        assert out.loss == pytest.approx(loss, rel=TOLERANCE)
        computed = gradients_of(model)
        assert computed.keys() == expected.keys()
        whole = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
        for name, grad in expected.items():
            assert float((computed[name] - grad).norm()) <= TOLERANCE * (float(grad.norm()) + 0.1 * whole), name


@pytest.mark.representatives("LORA-lm_head", "IA3-lm_head", "VERA-lm_head", "LOKR-q_proj")
@pytest.mark.parametrize("target", ["lm_head", "q_proj"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_is_exact(kind: str, target: str) -> None:
    check(adapted(kind, target, **SETTINGS.get(kind, {})))


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}], ids=str
)
def test_variants_of_lora_on_the_head(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    base = tiny_model(tie_word_embeddings=False)
    if "lora_bias" in settings:
        base.lm_head.bias = nn.Parameter(torch.zeros(64))
    check(stirred(get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], **settings))))


def test_two_active_adapters_and_a_disabled_one() -> None:
    model = adapted("LOHA", "lm_head")
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    check(stirred(model))
    with model.disable_adapter(), torch.no_grad():
        forest = Forest.from_trajectories(ROLLOUTS)
        ours = TreeEngine(model).logprobs(forest)
        plain = TreeEngine(tiny_model_like(model)).logprobs(forest)
    for left, right in zip(ours, plain, strict=True):
        torch.testing.assert_close(left, right)


def tiny_model_like(model: PeftModel) -> nn.Module:
    """The model that was adapted, without adapters."""
    torch.manual_seed(0)
    assert isinstance(model, PeftModel)
    return tiny_model(dtype=torch.float64, tie_word_embeddings=False)


def test_trained_tokens() -> None:
    torch.manual_seed(0)
    config = TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[3, 5], task_type="CAUSAL_LM")
    for is_tied in (False, True):
        check(stirred(get_peft_model(tiny_model(tie_word_embeddings=is_tied), config)))


TABLES: list[tuple[bool, dict[str, Any]]] = [
    *[(True, {"modules_to_save": each, "ensure_weight_tying": True}) for each in (["embed_tokens"], ["lm_head"])],
    (True, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    *[(is_tied, {"modules_to_save": ["embed_tokens", "lm_head"]}) for is_tied in (False, True)],
    *[(is_tied, {"trainable_token_indices": [3, 5, 63]}) for is_tied in (False, True)],
    *[(is_tied, {"trainable_token_indices": {"lm_head": [3, 63]}}) for is_tied in (False, True)],
    (False, {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]}}),
]


@pytest.mark.parametrize(("is_tied", "settings"), TABLES, ids=str)
def test_tables_of_tokens_that_are_trained_beside_lora(is_tied: bool, settings: dict[str, Any]) -> None:
    if settings.get("modules_to_save") == ["lm_head"]:
        require(TIED_LORA)
    torch.manual_seed(0)
    base = tiny_model(tie_word_embeddings=is_tied)
    check(stirred(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], **settings))))


def test_a_table_without_an_active_copy_is_the_model_s_own() -> None:
    torch.manual_seed(0)
    first = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny_model(tie_word_embeddings=False), first)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    check(stirred(model))


def test_a_hook_on_a_wrapper_of_the_head_counts() -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = stirred(get_peft_model(tiny_model(tie_word_embeddings=False), settings))
    model.base_model.model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 0.5 * logits)
    check(model)


def test_a_merged_copy_of_a_tied_head_has_its_weights_sizes() -> None:
    """PEFT makes the copy as a layer with as many outputs as the model is wide, and leaves it in the merged model."""
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    merged = stirred(get_peft_model(tiny_model(tie_word_embeddings=True), settings)).merge_and_unload()
    assert merged.lm_head.out_features == 32
    assert TreeEngine(merged).lm.num_logits == 64
    check(merged.requires_grad_())


@TIED_LORA
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_lora_that_is_to_be_tied_is_refused_by_name(target: str) -> None:
    """Of PEFT 0.21: two parameters over one memory until the model is moved, of which a merge adds each."""
    settings = LoraConfig(r=2, target_modules=["q_proj", target], ensure_weight_tying=True)
    with pytest.raises(UnsupportedModelError, match=r"adapter 'default' is to be tied .*modules_to_save"):
        TreeEngine(get_peft_model(tiny_model(tie_word_embeddings=True), settings))


@pytest.mark.parametrize("kind", sorted({"LILY", "POLY", "PVERA"} & PEFT_TYPE_TO_CONFIG_MAPPING.keys()))
@pytest.mark.parametrize("target", ["lm_head", "q_proj"])
def test_adapters_that_depend_on_the_row_are_refused_by_name(kind: str, target: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"adapter 'default' \({kind}\)"):
        TreeEngine(adapted(kind, target, **SETTINGS.get(kind, {})))


def test_activated_lora_is_refused_by_name() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match=r"\(ALORA\).*use LoRA"):
        TreeEngine(get_peft_model(tiny_model(), config))
