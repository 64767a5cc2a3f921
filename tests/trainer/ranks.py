"""Runs a trainer in several processes, and in one to compare with.

As a script, under torchrun: `ranks.py FOLDER`, where `runs.json` says what to train.
"""

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerCallback

from tests.trainer.helpers import losses, some_trees, tiny_model
from treewise.engine import budget
from treewise.errors import StoppedError
from treewise.objectives import PolicyGradient
from treewise.testing.families import tiny_model as family_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.checkpoint import contents

ROOT = Path(__file__).parents[2]


def model_of(family="llama", lora=False, **changes):
    """The same model in every process, apart from what rank 0 must win: other ranks start from other numbers."""
    model = tiny_model() if family == "llama" else family_model(family, **changes)
    if lora:
        import peft

        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    if os.environ.get("RANK", "0") != "0":
        for parameter in model.parameters():
            parameter.data += 0.1
    return model


class Trouble(TrainerCallback):
    """What goes wrong on rank 1 alone, and is survived: `signal` before a step; in the save of the third step
    `signal in save`, `full disk` (no file over a thousand bytes) and `late` (only the last of its files); `small`
    memory from the start.
    """

    def __init__(self, how):
        self.how = how
        self._write_texts = contents.write_texts
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._choose_budget = budget.choose_budget
        if how == "small":
            budget.choose_budget = lambda *_: 14 if os.environ["RANK"] == "1" else 40

    def on_train_end(self, args, state, control, **kwargs):
        budget.choose_budget = self._choose_budget
        contents.write_texts = self._write_texts

    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == 1:
            contents.write_texts = self._write_texts
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
            if self.how == "signal" and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 3:
            if self.how == "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self._limits[1]))
            elif self.how in ("signal in save", "late"):
                contents.write_texts = self.save

    def save(self, folder, *args):
        if self.how == "late":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.how == "signal in save":
            os.kill(os.getpid(), signal.SIGTERM)
        self._write_texts(folder, *args)


def with_advantages(trees):
    """The trees with what objectives of reinforcement learning need."""
    rng = np.random.default_rng(1)
    return [
        [
            replace(
                item,
                advantages=np.full(len(item.token_ids), rng.normal()),
                **{name: -4 * rng.random(len(item.token_ids)) for name in ("old_logprobs", "sampler_logprobs")},
            )
            for item in tree
        ]
        for tree in trees
    ]


def train(
    folder,
    model=None,
    resume=None,
    num_trees=7,
    evaluates=False,
    trouble=None,
    policy_gradient=None,
    rows_apart=False,
    **settings,
):
    """One run; returns its trainer. policy_gradient: settings of such an objective; None: the one of the arguments.
    rows_apart: each row is an item of its own, and two of a tree are one rollout.
    """
    args = TreeTrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 5,
            "learning_rate": 1e-2,
            "seed": 3,
            "lr_scheduler_type": "cosine",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **settings,
        },
    )
    trees = some_trees(num_trees)
    if policy_gradient is not None:
        trees = with_advantages(trees)
    if rows_apart:
        trees = [
            replace(row, group=group, rollout=place // 2)
            for group, own in enumerate(trees)
            for place, row in enumerate(own)
        ]
    model = model_of(**(model or {}))
    trainer = TreeTrainer(
        model,
        args,
        train_dataset=trees,
        eval_dataset=trees if evaluates else None,
        objective=None if policy_gradient is None else PolicyGradient(**policy_gradient),
        callbacks=[Trouble(trouble)] if trouble else [],
    )
    with contextlib.suppress(StoppedError):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def outcome(trainer):
    """What runs are compared by: losses, evaluations, gradient norms, whole parameters."""
    history = trainer.state.log_history
    named = list(trainer.model.named_parameters())
    return {
        "losses": losses(trainer),
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "kinds": sorted({type(each.data).__name__ for _, each in named}),
        "budget": trainer.engine.max_tokens,
        "model": {
            name: (each.data.full_tensor() if hasattr(each.data, "full_tensor") else each.data).clone()
            for name, each in named
        },
    }


def exhaustive_wanted(request):
    """Whether a test of this file that is marked `exhaustive` will run: fixtures run the cases of the others alone."""
    own = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("exhaustive") for item in own)


def launch(num_ranks, folder, runs, timeout=1200):
    """Trains one run after the other under torchrun; returns the outcomes of each rank by the name of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    # The rendezvous picks a free port itself, so tests that run beside this one cannot take it.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    program = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    result = subprocess.run(
        [*program, *rendezvous, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def train_all(folder, runs):
    """Trains one run after the other as one of the processes; returns the outcomes by the name of the run."""
    outcomes = {}
    for name, settings in runs.items():
        outcomes[name] = outcome(train(folder / name, **settings))
    return outcomes


def main():
    folder = Path(sys.argv[1])
    outcomes = train_all(folder, json.loads((folder / "runs.json").read_text()))
    torch.save(outcomes, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    os._exit(0)  # torch 2.13 aborts now and then while it takes gloo's threads down, after all work is done


if __name__ == "__main__":
    main()
