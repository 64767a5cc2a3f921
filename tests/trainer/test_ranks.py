"""Data-parallel ranks together are one process: the same losses, gradients and parameters."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.helpers import losses, some_trees, tiny_model

WORKER = """
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
model = tiny_model(seed=int(__import__("os").environ["RANK"]))  # rank 0's parameters must win
trainer = TreeTrainer(model, args, train_dataset=trees, eval_dataset=trees)
trainer.train()
evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
state = {"losses": losses(trainer), "eval": evaluated, "model": trainer.model.state_dict()}
torch.save(state, f"{folder}/rank{args.process_index}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_train_like_one(make_trainer, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "tests"), *sys.path]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
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
