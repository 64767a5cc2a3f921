"""Layers that are computed again in the backward: as asked for, or chosen by predicted memory and time."""

import logging

import pytest
import torch

from tests.rl.online.helpers import new_trainer
from tests.trainer.helpers import losses, tiny_model
from treewise.engine import budget
from treewise.engine.engine import TreeEngine
from treewise.engine.step_memory import step_memory
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.recomputation import set_recomputation
from treewise.objectives import SFT
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model as family_model
from treewise.trainer import TreeTrainingArguments, recomputation
from treewise.trainer.recomputation import choose_recomputation
from treewise.tree.forest import Forest

NAME = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TreeTrainingArguments.__dataclass_fields__
)
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def is_on(model: torch.nn.Module) -> bool:
    return any(getattr(each, "gradient_checkpointing", False) is True for each in model.modules())


@pytest.fixture
def forest(trees) -> Forest:
    return Forest.from_trajectories([item for tree in trees for item in tree])


def has_free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    for module in (recomputation, budget):
        monkeypatch.setattr(module, "free_bytes", lambda _: int(num_bytes))


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_layers_run_once_while_the_predicted_peak_fits(monkeypatch, forest, max_tokens):
    model = tiny_model()
    engine = TreeEngine(model, max_tokens, check=False)
    peak = step_memory(model, plan(forest, max_tokens)).total
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    for share, expected in ((1.01, False), (0.99, True)):
        has_free(monkeypatch, share * peak / 0.9 + gradients + 1000)
        assert choose_recomputation(engine, forest, SFT(), reserve_bytes=1000) is expected
        assert is_on(model) is expected


def test_where_memory_cannot_be_predicted_layers_are_computed_again(caplog, forest):
    """A loop over the experts that were chosen has no shapes without data."""
    model = family_model("qwen3_moe")
    engine = TreeEngine(model, check=False)
    assert choose_recomputation(engine, forest, SFT()) is is_on(model) is False
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModelError, match=r"cannot be predicted, because shapes of its layers depend on"):
        step_memory(model, plan(forest))
    assert choose_recomputation(engine, forest, SFT()) is is_on(model) is True
    assert "layers are computed again, which takes least. Qwen3MoeForCausalLM: what a step takes" in caplog.text


def test_with_a_measured_budget_the_faster_way_is_taken(monkeypatch, forest, caplog):
    """Memory for a few tokens with activations: cut trees run their trunks twice, recomputed layers every token."""
    caplog.set_level(logging.INFO, logger="treewise")
    found = set()
    for share in (100, 1.2, 0.5, 0.25, 0.12):
        model = tiny_model()
        costs = []
        for wanted in (False, True):
            set_recomputation(model, wanted)
            has_free(monkeypatch, share * 1.5e6)
            alone = TreeEngine(model, "auto", check=False)
            made = alone.plan(forest)
            costs.append(made.relative_cost + wanted * forest.num_tokens / 3)
        set_recomputation(model, wanted=False)
        engine = TreeEngine(model, "auto", check=False)
        chosen = choose_recomputation(engine, forest, SFT())
        assert chosen is (costs[1] < costs[0])
        assert is_on(model) is chosen
        found.add(engine.max_tokens)
    assert len(found) > 2
    assert "activation_checkpointing=auto" in caplog.text


def test_a_frozen_model_computes_nothing_again(monkeypatch, forest):
    model = tiny_model().requires_grad_(False)
    has_free(monkeypatch, 0)
    assert choose_recomputation(TreeEngine(model, 40, check=False), forest, SFT()) is False


@pytest.mark.parametrize(("free", "expected"), [(2**40, False), (0, True)])
def test_a_run_chooses_and_trains_the_same(monkeypatch, make_trainer, trees, free, expected):
    has_free(monkeypatch, free)
    runs = {}
    for setting in (False, "auto"):
        trainer = make_trainer(trees, max_steps=2, max_tokens=40, **{NAME: setting})
        trainer.train()
        runs[setting] = losses(trainer)
        assert is_on(trainer.model) is (expected if setting else False)
    assert runs["auto"] == runs[False]


@pytest.mark.parametrize("setting", [True, False, "auto"])
def test_an_online_run_does_as_the_settings_say(monkeypatch, tmp_path, setting):
    has_free(monkeypatch, 0)
    trainer = new_trainer(tmp_path / "run", iterations=1, arguments_={NAME: setting})
    trainer.train()
    assert is_on(trainer.model) is bool(setting)


def test_settings(tmp_path):
    assert TreeTrainingArguments(tmp_path, **{NAME: "auto"}).recomputation == "auto"
    assert TreeTrainingArguments(tmp_path, gradient_checkpointing="auto").recomputation == "auto"
    assert TreeTrainingArguments(tmp_path, **{NAME: True}).recomputation is True
    assert TreeTrainingArguments(tmp_path).recomputation is False
    with pytest.raises(ConfigError, match=f"{NAME}='sometimes' is unknown"):
        TreeTrainingArguments(tmp_path, **{NAME: "sometimes"})
    with pytest.raises(ConfigError, match="not with sharded; give true or false"):
        TreeTrainingArguments(tmp_path, sharded=True, **{NAME: "auto"})
