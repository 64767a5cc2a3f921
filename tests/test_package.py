"""The package as installed: its version, what importing it costs, its type marker."""

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys

import pytest

import treewise

HEAVY_MODULES = {"accelerate", "datasets", "jinja2", "pandas", "peft", "pyarrow", "rich", "torch", "transformers"}


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_version_is_the_installed_one():
    assert treewise.__version__ == importlib.metadata.version("treewise")


@pytest.mark.parametrize("statement", ["import treewise", "import treewise; dir(treewise)"])
def test_import_loads_no_heavy_module(statement):
    assert not modules_loaded_by(statement) & HEAVY_MODULES


def test_types_are_shipped():
    assert importlib.resources.files("treewise").joinpath("py.typed").is_file()


def test_command_is_declared():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="treewise")
    assert command.value == "treewise.cli.main:main"


def test_public_names():
    """Nothing is added or lost by accident."""
    errors = {name for name in treewise.__all__ if name.endswith("Error")}
    assert errors == {
        "CheckpointError",
        "ConfigError",
        "DataError",
        "NonFiniteError",
        "OutOfMemoryError",
        "PlanError",
        "TreewiseError",
        "UnsupportedModelError",
        "VerificationError",
    }
    others = {"Forest", "Plan", "SFT", "Trajectory", "TreeEngine", "TreeTrainer", "TreeTrainingArguments"}
    policy = {"CISPO", "DAPO", "DrGRPO", "GRPO", "GSPO", "PPO", "PolicyGradient", "REINFORCE"}
    functions = {"advantages", "logprob_gap", "plan", "share_prefixes", "verify"}
    assert set(treewise.__all__) == errors | others | policy | {"Distillation"} | functions
    assert all(getattr(treewise, name) is not None for name in treewise.__all__)
