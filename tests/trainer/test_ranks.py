"""Data-parallel ranks together are one process: the same losses, gradients and parameters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.helpers import losses, some_trees, tiny_model

WORKER = """
import os
import sys
import torch
from trainer.helpers import losses, some_trees, tiny_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments

folder = sys.argv[1]
args = TreeTrainingArguments(
    output_dir=folder, per_device_train_batch_size=1, max_steps=5, learning_rate=0.5, optim="sgd",
    seed=3, lr_scheduler_type="cosine", report_to="none", use_cpu=True, disable_tqdm=True,
    save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=5, gradient_accumulation_steps=2,
)
trees = some_trees()
model = tiny_model(seed=int(os.environ["RANK"]))  # rank 0's parameters must win
trainer = TreeTrainer(model, args, train_dataset=trees, eval_dataset=trees)
trainer.train()
evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
state = {"losses": losses(trainer), "eval": evaluated, "model": trainer.model.state_dict()}
torch.save(state, f"{folder}/rank{args.process_index}.pt")
torch.distributed.barrier()
os._exit(0)  # torch 2.13 aborts now and then while it takes gloo's threads down, after all work is done
"""


@pytest.mark.slow
def test_two_ranks_train_like_one(make_trainer, tmp_path):
    root = Path(__file__).parents[2]
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    # The rendezvous picks a free port itself, so tests that run beside this one cannot take it.
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, str(worker), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "tests"), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    one = make_trainer(
        some_trees(),
        model=tiny_model(),
        eval_dataset=some_trees(),
        per_device_train_batch_size=4,
        max_steps=5,
        learning_rate=0.5,
        optim="sgd",
        eval_strategy="steps",
        eval_steps=5,
    )
    one.train()
    assert first["losses"] == second["losses"] == pytest.approx(losses(one), rel=1e-5)
    assert first["eval"] == second["eval"] == pytest.approx([one.state.log_history[-2]["eval_loss"]], rel=1e-5)
    for name, value in one.model.state_dict().items():
        assert torch.equal(first["model"][name], second["model"][name])
        assert torch.allclose(first["model"][name], value, atol=1e-6)
