"""A wrong draw as a program that stands by itself: the model, the rows and the settings that differ, in plain calls.

What is shrunk is mostly one step of the engine, which is written out. A draw that still needs more (a trainer,
processes, hooks, pictures) is checked by this package, with its settings.
"""

from typing import Any

import numpy as np

from treewise.testing.crossings import space
from treewise.testing.crossings.case import Case, make_case, mark_pattern
from treewise.testing.crossings.drawing import Draw
from treewise.testing.crossings.sides import budget_of, quiet
from treewise.tree.trajectory import Trajectory

NEEDS_MORE = ("images", "interface", "accumulation", "compiled", "clip", "optimizer", "hooks", "resumed", "processes")


def script(draw: Draw) -> str:
    """The program of a draw; one of its first step where the settings allow it."""
    defaults = {name: values[0] for name, values in space.SETTINGS.items()}
    plain = all(draw[name] == defaults[name] for name in NEEDS_MORE)
    if not plain or draw["trained"] in space.ADAPTERS or draw["objective"] in space.FUNCTIONS:
        return f"from treewise.testing.crossings import sides\n\nsides.check({draw!r})\n"
    with quiet():
        case = make_case(draw)
        pattern = mark_pattern(case.model, draw)
        budget = budget_of(case)
    rows = [item for tree in case.steps[0] for item in tree]
    changes = "".join(f", {name}={value!r}" for name, value in space.VARIANTS[draw["variant"]].items())
    settings = {
        "max_tokens": budget,
        **{
            name: draw[name] for name in ("attention", "hold", "offload", "temperature") if draw[name] != defaults[name]
        },
        **({} if draw["probe"] else {"check": False}),
    }
    checkpoints = f"model.gradient_checkpointing_enable({{'use_reentrant': {draw['checkpoints'] == 'reentrant'}}})\n"
    return "".join(
        (
            "import copy, re\n\nimport torch\nfrom numpy import inf\n\nimport treewise as tw\n",
            "from treewise.objectives import *\n"
            if draw["objective"] != "sft"
            else "from treewise.objectives import SFT\n",
            "from treewise.testing import tiny_model\n",
            "from treewise.testing.flat_objectives import loss_of_rows, run_alone\n\n",
            f"model = tiny_model({draw['family']!r}, torch.{draw['dtype']}, seed={draw['seed'] % 1000}{changes})\n",
            "for name, parameter in model.named_parameters():\n",
            f"    parameter.requires_grad_(re.search({pattern!r}, name) is not None)\n",
            "items = [\n",
            *(f"    {_row(item, case)},\n" for item in rows),
            f"]\nobjective = {case.objective!r}\n",
            "flat = copy.deepcopy(model).double()\n",
            f"rows = run_alone(flat, items, temperature={draw['temperature']})\n",
            "loss_of_rows(rows, items, objective).backward()\n",
            "" if draw["checkpoints"] == "none" else checkpoints,
            f"engine = tw.TreeEngine(model, {', '.join(f'{name}={value!r}' for name, value in settings.items())})\n",
            "engine.step(tw.Forest.from_trajectories(items), objective)\n",
            "for (name, ours), theirs in zip(model.named_parameters(), flat.parameters()):\n",
            "    if theirs.grad is not None:\n",
            "        off = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()\n",
            '        print(f"{off:.1e} {name}")\n',
        )
    )


def _row(item: Trajectory, case: Case) -> str:
    """A trajectory as a call, with the streams that its objective reads."""
    given: dict[str, Any] = dict(item.streams)
    if case.draw["objective"] in ("sft", *space.DISTILLATIONS):
        given.pop("advantages", None)
    parts = [f"{name}={np.asarray(value).tolist()}" for name, value in given.items()]
    labels = {"group": item.group, "reward": item.reward, "rollout": item.rollout}
    return (
        f"tw.Trajectory({item.token_ids.tolist()}, {', '.join([*parts, *(f'{k}={v!r}' for k, v in labels.items())])})"
    )
