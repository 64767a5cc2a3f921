"""docs/errors.md: every exception has its section, and the messages that it quotes are those that are raised."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import treewise as tw
from treewise import errors
from treewise.cli.config import read_config
from treewise.data import load_trees
from treewise.engine.prepared import Budget
from treewise.engine.step import with_less_memory
from treewise.testing.families import tiny_model
from treewise.trainer.checkpoint.json_values import to_plain
from treewise.trainer.checkpoint.store import read_manifest
from treewise.trainer.step import NonFiniteGuard

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = [
    each
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if each.__module__ == errors.__name__ and issubclass(each, Exception)
]
ITEM = tw.Trajectory([1, 2, 3])


def bad_rows() -> None:
    Path("rollouts.jsonl").write_text('{"token_ids": [1, 2, 3], "old_logprobs": [0, -0.1]}\n')
    load_trees("rollouts.jsonl")


def no_advantages() -> None:
    tw.TreeEngine(tiny_model()).step(tw.Forest.from_trajectories([ITEM]), tw.GRPO())


def beyond_vocabulary() -> None:
    tw.TreeEngine(tiny_model()).step(tw.Forest.from_trajectories([tw.Trajectory([1, 70], source="rollouts.jsonl:4")]))


def no_budget() -> None:
    tw.plan(tw.Forest.from_trajectories([ITEM]), max_tokens=0)


def unknown_key() -> None:
    Path("run.yaml").write_text("model: m\ndata: d\noutput_dir: o\nmax_token: 8\n")
    read_config("run.yaml")


def dropout() -> None:
    model = tiny_model(attention_dropout=0.1).train()
    tw.TreeEngine(model).step(tw.Forest.from_trajectories([ITEM]))


def differs() -> None:
    branches = [tw.Trajectory([1, 2, 3, *range(first, first + 20)]) for first in (4, 24, 40)]
    tw.verify(tiny_model(), branches, max_tokens=7, tolerance=1e-30).raise_if_failed()


def out_of_memory() -> None:
    def step() -> None:
        raise MemoryError("not enough memory: you tried to allocate 4096 bytes.")

    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    with_less_memory(step, Budget(8192), 20_000, [*model.parameters()])


def not_finite() -> None:
    guard = NonFiniteGuard("stop", 5, 10.0, Path("nonfinite.jsonl"))
    forest = tw.Forest.from_trajectories([tw.Trajectory([1, 2], source="rollouts.jsonl:4")])
    guard.check_step(17, float("nan"), [forest], is_finite=False)


def no_checkpoint() -> None:
    Path("runs/a/checkpoint-50").mkdir(parents=True)
    read_manifest(Path("runs/a/checkpoint-50"))


def not_plain() -> None:
    to_plain({"state": {"0": {"lambda": ITEM}}})


RAISED = {
    bad_rows: errors.DataError,
    beyond_vocabulary: errors.DataError,
    no_advantages: errors.DataError,
    no_budget: errors.PlanError,
    unknown_key: errors.ConfigError,
    dropout: errors.UnsupportedModelError,
    lambda: tw.TreeEngine(tiny_model("bloom")): errors.UnsupportedModelError,
    out_of_memory: errors.OutOfMemoryError,
    not_finite: errors.NonFiniteError,
    no_checkpoint: errors.CheckpointError,
    not_plain: errors.CheckpointError,
}


def section_of(name: str) -> str:
    """The text of the page below `## name`."""
    _, _, rest = PAGE.partition(f"\n## {name}\n")
    return rest.split("\n## ")[0]


@pytest.mark.parametrize("kind", [each for each in CLASSES if each is not errors.TreewiseError])
def test_every_exception_has_a_section_that_names_its_standard_type(kind: type[Exception]) -> None:
    standard = next(base.__name__ for base in kind.__bases__ if base.__module__ == "builtins")
    assert f"`{standard}`" in section_of(kind.__name__)


@pytest.mark.parametrize(("act", "kind"), RAISED.items())
def test_quoted_messages_are_raised(
    act: Callable[[], object], kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        act()
    assert f"{kind.__name__}: {caught.value}" in section_of(kind.__name__)


def test_the_message_of_a_difference() -> None:
    """Its numbers are those of the run, so only its words are compared."""
    with pytest.raises(errors.VerificationError, match=r"tree and flat training differ: .*Worst parameter: "):
        differs()
    assert "VerificationError: LlamaForCausalLM: tree and flat training differ: " in section_of("VerificationError")
