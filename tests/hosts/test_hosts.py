"""What `make hosts` compares by, and that the page shows what was run."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from tests.environments import update_error
from tests.hosts.__main__ import HOSTS, PAGE, RESULTS, Run, log_error, table
from tests.hosts.material import HIDDEN, WIDTH, agent_calls, preferences, problems, reordered


def test_the_page_shows_what_was_run():
    results = json.loads(RESULTS.read_text())
    for name, found in results.items():
        assert found["recipes"].keys() <= set(HOSTS[name].recipes)
        assert {each["outcome"] for each in found["recipes"].values()} <= {"equal", "refused"}, name
    assert table() in PAGE.read_text(), "python -m tests.hosts --table"


def test_units_in_another_order_are_the_same_model():
    config = LlamaConfig(vocab_size=32, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2)
    model = LlamaForCausalLM(config).double()
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)  # norms, too
    ids = torch.arange(20).view(2, 10)
    expected, state = model(ids).logits, {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(reordered(state))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)  # norms are in float32
    for name, each in reordered(model.state_dict(), back=True).items():
        assert torch.equal(each, state[name])
        assert not torch.equal(model.state_dict()[name], state[name])


def test_adapters_follow_the_order_of_units():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=1)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora).double()
    base, ids = model.get_base_model(), torch.arange(20).view(2, 10)
    expected, adapter = model(ids).logits, get_peft_model_state_dict(model)
    whole = {name: each for name, each in base.state_dict().items() if "lora_" not in name}
    plain = {name.replace(".base_layer", ""): name for name in whole}
    moved = reordered({name: whole[own] for name, own in plain.items()})
    base.load_state_dict({plain[name]: each for name, each in moved.items()}, strict=False)
    assert (model(ids).logits - expected).abs().max() > 1e-3
    set_peft_model_state_dict(model, reordered(adapter))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    for name, each in reordered(reordered(adapter), back=True).items():
        assert torch.equal(each, adapter[name])


def test_differences_of_logs():
    before = {"loss": 0.7, "rewards/margins": 0.0, "rewards/accuracies": 0.0}
    after = {"loss": 200.0, "rewards/margins": 0.3, "rewards/accuracies": 0.5}

    def runs_with(**changes):
        return Run([before, after | changes], {}, 1.0, "")

    flat = runs_with()
    assert log_error(runs_with(loss=202.0), flat) == pytest.approx(0.01)
    assert log_error(runs_with(**{"rewards/accuracies": 0.75}), flat) == pytest.approx(0.25)
    tie = Run([before | {"rewards/accuracies": 1.0}, after], {}, 1.0, "")
    assert log_error(tie, flat) == 0.0


def test_differences_of_updates():
    flat = Run([], {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, 1.0, "")
    found = Run([], {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([4.4])}, 1.0, "")
    assert update_error(found.updates, flat.updates) == pytest.approx(0.1)


def test_rows_form_trees():
    """Every two rows of the agent begin alike, pairs share their problem, and a problem has several pairs."""
    calls, pairs = agent_calls(), preferences()
    assert all(row["messages"][:2] == calls[0]["messages"][:2] for row in calls)
    assert {row["messages"][-1]["role"] for row in calls} == {"assistant"}
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
    assert len({pair["prompt"] for pair in pairs}) < len(pairs) / 4
    assert len(problems()) > 4
