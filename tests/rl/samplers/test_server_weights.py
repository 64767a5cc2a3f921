"""Weights on their way to servers: what arrives, that the model in training keeps its bits, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")

from tests.rl.online.helpers import digest
from tests.rl.samplers.stand_in import StandIn, asked_of, largest_gap, running
from tests.rl.samplers.test_servers import REQUEST, sampler_on, server, trained  # noqa: F401 - a fixture
from treewise.errors import ConfigError, SamplerError
from treewise.rl.samplers import server_weights
from treewise.rl.samplers.server_weights import whole_weights
from treewise.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # peft asks by the old name


def adapted(**settings: Any) -> Any:
    """The stand-in's model with an adapter that does something."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(**{"target_modules": ["q_proj", "up_proj"], "r": 2, **settings})
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("mode", ["reload", "adapter"])
def test_servers_sample_from_what_they_were_given(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with running(StandIn()) as one, running(StandIn()) as other:
        with sampler_on(one, other, weights=mode, weights_folder=str(folder)) as sampler:
            for _ in range(2):
                model = adapted()
                bits = digest(model)
                sampler.update(model)
                assert digest(model) == bits
                for tree in (1, 2):
                    (completions,) = sampler.sample([type(REQUEST)(REQUEST.prefix_ids, 2, 6, 0.7, seed=1, tree=tree)])
                    assert largest_gap(model, REQUEST, completions) < 1e-5
                assert largest_gap(one.first, REQUEST, completions) > 1e-2
                assert len(list(folder.iterdir())) == 1  # what was handed over before is gone
        assert not folder.exists()
        assert len(one.adapters) == len(other.adapters) == (1 if mode == "adapter" else 0)


@pytest.mark.parametrize("place", ["run/server_weights", "seen/by/servers"])
def test_a_saved_model_is_read_where_weights_are_handed_over(place: str, tmp_path: Path) -> None:
    """From its own folder where that is beside them, else from a copy; nothing of it is left."""
    model, rows = trained(), [np.arange(3, 12), np.arange(5, 60)]
    model.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-1").mkdir()
    given = str(tmp_path / place)
    with running(StandIn()) as one, sampler_on(one, weights="reload", weights_folder=given) as sampler:
        found = sampler.read_saved(tmp_path / "run", model, rows)
        (asked,) = asked_of(one, "/collective_rpc")
        read_from = Path(asked["kwargs"]["weights_path"])
        assert (read_from == tmp_path / "run") is (place == "run/server_weights")
        assert read_from.exists() is (place == "run/server_weights")
    assert (found.why_not, found.dtype) == ("", torch.float32)
    for row, own in zip(rows, found.logprobs, strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(model.eval()(input_ids=torch.tensor(row[None])).logits[0].float(), -1)
        expected = logprobs[:-1].gather(1, torch.tensor(row[1:, None]))[:, 0].numpy()
        np.testing.assert_allclose(own, expected, atol=1e-5)


def test_an_adapter_comes_onto_the_model_that_it_is_of() -> None:
    """The server holds what another run handed over."""
    model = adapted()
    with running(StandIn()) as one:
        with sampler_on(one, weights="reload") as sampler:
            sampler.update(trained())
        with sampler_on(one, weights="adapter") as sampler:
            for _ in range(2):
                sampler.update(model)
            assert largest_gap(model, REQUEST, sampler.sample([REQUEST])[0]) < 1e-5
        assert sum(bool(asked) for asked in asked_of(one, "/collective_rpc")) == 2  # of the runs, one each


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": "all-linear"}]
)
def test_merged_weights_are_those_of_merge_and_unload_and_leave_every_bit(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    names = set(tiny_model("llama").state_dict())
    bits = digest(model)
    sent = {name: tensor.clone() for name, tensor in whole_weights(model)}
    assert digest(model) == bits
    base = {name: tensor.clone() for name, tensor in whole_weights(model, merged=False)}
    for name, tensor in tiny_model("llama").state_dict().items():
        torch.testing.assert_close(base[name], tensor, atol=0, rtol=0)
    expected = model.merge_and_unload().state_dict()
    assert set(sent) == set(expected) == names
    for name in names:
        torch.testing.assert_close(sent[name], expected[name], atol=0, rtol=0)


def test_old_weights_are_not_sampled_from_in_silence(server: StandIn) -> None:  # noqa: F811
    with sampler_on(server, weights=None) as sampler, pytest.raises(ConfigError, match="old weights"):
        sampler.update(server.model)
    handed: list[Any] = []
    with sampler_on(server, weights=handed.append) as sampler:
        sampler.update(server.model)
    assert handed == [server.model]


def test_a_server_that_cannot_take_them_says_what_to_start_it_with(server: StandIn) -> None:  # noqa: F811
    server.missing = {"/collective_rpc", "/v1/load_lora_adapter"}
    with sampler_on(server, weights="reload") as sampler, pytest.raises(SamplerError, match="VLLM_SERVER_DEV_MODE"):
        sampler.update(trained())
    with sampler_on(server, weights="adapter") as sampler:
        with pytest.raises(ConfigError, match="has none"):
            sampler.update(trained())
        with pytest.raises(SamplerError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            sampler.update(adapted())
    assert not asked_of(server, "/v1/completions")


def test_a_cache_that_is_held_is_emptied_as_soon_as_it_is_free(server: StandIn) -> None:  # noqa: F811
    answers = [False, False, True]
    server.on_reset_prefix_cache = lambda _: (200, {"success": answers.pop(0)})  # type: ignore[method-assign]
    with sampler_on(server, weights="reload") as sampler:
        sampler.update(trained())
    assert not answers


def test_a_server_that_came_back_may_be_busy_with_other_ranks_as_long_as_it_may_be_away(
    server: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each process of a run gives it the weights, while others sample already."""
    with sampler_on(server, weights="reload", patience_seconds=60.0) as sampler:
        sampler.update(trained())
        server.start_anew()
        sampler.servers[0].was_away = True
        monkeypatch.setattr(server_weights, "BUSY_SECONDS", 0.0)
        answers = [False, False, True]
        server.on_reset_prefix_cache = lambda _: (200, {"success": answers.pop(0)})  # type: ignore[method-assign]
        sampler.sample([REQUEST])
    assert not answers


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_an_adapter_on_a_tied_head_is_not_lost_in_merging() -> None:
    """The embedding has the head's weights and not its adapter: there is no one tensor that is both."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("llama", tie_word_embeddings=True), peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2)
    )
    with pytest.raises(ConfigError, match="lm_head has an adapter and shares"):
        list(whole_weights(model))
    assert list(whole_weights(model, merged=False))
    with model.disable_adapter():
        assert list(whole_weights(model))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("settings", "is_one"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"trainable_token_indices": {"lm_head": [3]}}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"trainable_token_indices": [3, 4]}, True),
    ],
    ids=str,
)
def test_copies_of_tied_tables_are_merged_where_they_are_one(settings: dict[str, object], is_one: bool) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("llama", tie_word_embeddings=True), peft.LoraConfig(target_modules=["q_proj"], r=2, **settings)
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    if not is_one:
        with pytest.raises(ConfigError, match="has an adapter and shares its weights"):
            list(whole_weights(model))
        return
    other = tiny_model("llama", tie_word_embeddings=True)
    other.load_state_dict({name: each.clone() for name, each in whole_weights(model)}, strict=False)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
