"""What users of TRL's trainers type: models by name, `peft_config=`, records, preferences without a reference."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

import treewise as tw
from tests.cli.helpers import save_tiny_model
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.models.load_model import load_weights
from treewise.nn.adapters import adapted
from treewise.objectives import with_mismatched
from treewise.trainer.references import ScoredTrees, with_references

ROWS = [
    {"token_ids": [3, 4, 5, 6 + i, 7 + i], "loss_weights": [0, 0, 0, 1, 1], "group": f"g{i % 2}", "reward": i // 2}
    for i in range(4)
]


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def args(tmp_path):
    return tw.TreeTrainingArguments(
        str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=1, save_strategy="no", disable_tqdm=True
    )


def weights(trainer):
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}


def test_a_model_by_name_trains_as_the_loaded_one(folder, args):
    datasets = pytest.importorskip("datasets")
    trained = []
    as_dataset = datasets.Dataset.from_list(ROWS)
    for model, rows in ((str(folder), ROWS), (folder, as_dataset), (load_weights(str(folder)), ROWS)):
        trainer = tw.TreeTrainer(model, args, train_dataset=rows)
        trainer.train()
        trained.append(weights(trainer))
    for other in trained[1:]:
        assert all(torch.equal(value, other[name]) for name, value in trained[0].items())


def test_peft_config_makes_adapters_and_its_folder_is_a_model(folder, args, tmp_path):
    peft = pytest.importorskip("peft")
    for config in (peft.LoraConfig(r=2, task_type="CAUSAL_LM"), {"r": 2}):
        trainer = tw.TreeTrainer(str(folder), args, train_dataset=ROWS, peft_config=config)
        assert weights(trainer)
        assert all("lora_" in name for name in weights(trainer))
    trainer.train()
    trainer.save_model(str(tmp_path / "lora"))
    again = tw.TreeTrainer(str(tmp_path / "lora"), args, train_dataset=ROWS)
    for name, value in weights(trainer).items():
        assert torch.equal(weights(again)[name], value)
    with pytest.raises(ConfigError, match="trained further without lora"):
        tw.TreeTrainer(str(tmp_path / "lora"), args, train_dataset=ROWS, peft_config={"r": 2})


@pytest.mark.parametrize("given", ["none", "name", "rows"])
@pytest.mark.parametrize("objective", [tw.DPO(), tw.KTO()], ids=["dpo", "kto"])
def test_the_reference_is_the_model_as_it_starts_with_its_adapters(folder, args, objective, given):
    pytest.importorskip("peft")
    model = adapted(load_weights(str(folder)), {"r": 2, "init_lora_weights": False})
    args.learning_rate = 0.1
    start = deepcopy(load_weights(str(folder)) if given == "name" else model)
    reference = {"reference": str(folder)} if given == "name" else {}
    trainer = tw.TreeTrainer(model, args, train_dataset=ROWS, eval_dataset=ROWS, objective=objective, **reference)
    if given == "rows":
        scored = with_references(trainer.train_dataset, objective, start, None, args)
        trees = [scored[index] for index in range(len(scored))]
        trainer = tw.TreeTrainer(model, args, train_dataset=trees, eval_dataset=trees, objective=objective)
    trainer.train()
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert isinstance(trainer.train_dataset, ScoredTrees) == (given != "rows")
    rows = [row for index in range(len(trainer.train_dataset)) for row in trainer.train_dataset[index]]
    bare = [replace(row, ref_logprobs=None) for row in rows]
    for scorer, is_it in ((start, True), (model, False)):
        for row, wanted in zip(rows, TreeEngine(scorer).scored(bare, "ref_logprobs"), strict=True):
            assert np.allclose(row.ref_logprobs[1:], wanted.ref_logprobs[1:], rtol=0, atol=1e-5) == is_it


@pytest.mark.parametrize("budget", [None, 4])
def test_kto_has_one_baseline_in_all_batches_of_a_step(folder, tmp_path, budget):
    """As steps of one batch, and by the losses of one call of the engine."""
    found = []
    rows = [
        [tw.Trajectory([i, 4, 5 + i, 9 - i, 7 + 2 * i], [0, 0, 1, 1, i % 3], reward=i % 2, group=f"g{i}", rollout=i)]
        for i in range(4)
    ]
    trees = with_mismatched(rows)
    trees = [[replace(row, ref_logprobs=np.full(len(row), -9.0)) for row in tree] for tree in trees]
    for batch, accumulated in ((4, 1), (2, 2), (1, 4)):
        args = tw.TreeTrainingArguments(
            str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, learning_rate=0.1,
            logging_steps=1, max_tokens=budget, optim="sgd",  # Adam makes rounding as large as a gradient
        )  # fmt: skip
        trainer = tw.TreeTrainer(str(folder), args, train_dataset=trees, objective=tw.KTO(beta=0.5))
        trainer.train()
        found.append((weights(trainer), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    alone = tw.KTO(beta=0.5, baseline="zero")
    engine = TreeEngine(load_weights(str(folder)), budget)
    whole, zero = (engine.evaluate(trees, each).loss for each in (tw.KTO(beta=0.5), alone))
    assert abs(whole - zero) > 1e-3  # the baseline is not 0
    for others, losses in found:
        assert losses == pytest.approx(found[0][1], rel=1e-6)
        assert losses[0] == pytest.approx(whole, rel=1e-6)
        for name, value in others.items():
            torch.testing.assert_close(value, found[0][0][name], rtol=0, atol=1e-6)


def test_an_objective_that_is_not_called_is_a_sentence(folder, args):
    model = load_weights(str(folder))
    rows = [tw.Trajectory([3, 4, 5]), tw.Trajectory([3, 4, 6])]
    for objective, said in ((tw.GRPO, "GRPO without brackets"), (tw.DPO, "DPO without brackets"), ("grpo", "'grpo'")):
        wanted = rf"the objective is {said}; call it, with its settings inside: tw\.\w+\(\)\."
        with pytest.raises(ConfigError, match=wanted):
            TreeEngine(model).step(rows, objective)
        with pytest.raises(ConfigError, match=wanted):
            tw.TreeTrainer(model, args, train_dataset=ROWS, objective=objective)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer": None}, "TreeTrainer takes no tokenizer: it is processing_class"),
        ({"reward_funcs": [len]}, "takes no reward_funcs: .*OnlineTrainer"),
        ({"trian_dataset": ROWS}, "takes no trian_dataset: see help"),
        ({"model": None}, "a run needs a model"),
        ({"model": 5}, "the model is a int; give a model"),
        ({"train_dataset": {"token_ids": [[1, 2]]}}, "train_dataset is a dict; give a list of records"),
        ({"objective": lambda logprobs: logprobs[0].sum()}, "the objective is a function; .*for engine.step"),
        ({"peft_config": 5}, "peft_config is a int; give a peft.LoraConfig"),
    ],
)
def test_what_no_run_begins_with_is_a_sentence(folder, args, given, message):
    model = {"model": str(folder), "train_dataset": ROWS} | given
    with pytest.raises(ConfigError, match=message):
        tw.TreeTrainer(model.pop("model"), args, **model)


def test_rows_and_names_where_trajectories_and_models_are_wanted(folder):
    with pytest.raises(ConfigError, match="verify takes a model, found a str"):
        tw.verify(str(folder), [tw.Trajectory(row["token_ids"]) for row in ROWS])
    with pytest.raises(tw.DataError, match="trajectory 0 is a dict; wrap its tokens"):
        tw.advantages.group_normalized(ROWS)
