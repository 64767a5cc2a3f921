"""Launch files for schedulers that `treewise launch` has not, as far as they can be checked without one: they parse,
torchrun takes their flags, and what they start is the command, which goes on with a run that was cut off.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from tests.needs import program
from treewise.cli.parser import COMMANDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "launch"
SKY = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
RAY = (FOLDER / "ray_verl.sh").read_text(encoding="utf-8")


def words_after_torchrun(script: str) -> list[str]:
    """Of a shell script; variables are numbers."""
    command = re.search(r"bin/torchrun\"?((?:.*\\\n)*.*)", script)
    assert command is not None
    text = command[1].replace("\\\n", " ").rstrip("& \n").replace("$COMMAND", "rl").replace("$CONFIG", "rl.yaml")
    return shlex.split(re.sub(r"\$\{[^}]*\}|\$\w+", "1", text))


def test_torchrun_takes_the_words_of_skypilot() -> None:
    given = get_args_parser().parse_args(words_after_torchrun(SKY["run"]))
    assert given.module
    assert given.training_script == "treewise"
    assert given.training_script_args[0] in COMMANDS
    assert given.training_script_args[-1] == "--resume"


def test_torchrun_waits_for_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = SKY["envs"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert seconds == "280"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    config = config_from_args(get_args_parser().parse_args(["--master_port", "0", "script.py"]))[0]
    assert getattr(config, "shutdown_timeout", 280) == 280  # torchrun of torch 2.11 has 30 in its code


def test_skypilot_starts_a_job_anew_on_the_folder_of_the_run() -> None:
    """What SkyPilot 0.14's schema has."""
    known = {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "setup", "run"}
    assert set(SKY) == known
    assert SKY["resources"] == {"accelerators": "H100:8", "use_spot": True}
    (mount,) = SKY["file_mounts"]
    assert f"--output_dir {mount}/" in SKY["run"]


def words_of_verl() -> dict[str, object]:
    """The settings of the Ray job, as hydra reads them."""
    before, _, command = RAY.partition(" -- \\\n")
    (environment,) = re.findall(r"--runtime-env-json '(.*)'", before)
    assert set(json.loads(environment)) == {"env_vars"}
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words[3:])}


def test_verl_on_ray_trains_on_trees_and_goes_on() -> None:
    found = words_of_verl()
    assert found["trainer.v1.trainer_mode"] == "treewise_sync"
    assert found["trainer.resume_mode"] == "auto"
    assert found["trainer.nnodes"] == 2
    assert found["actor_rollout_ref.model.use_fused_kernels"] is True
    ran = (ROOT / "tests" / "integrations" / "test_verl_ray.py").read_text(encoding="utf-8")  # main_ppo took these
    names = [key.rpartition(".")[2] for key in found]
    assert {name for name in names if f"{name}=" not in ran} <= {"default_local_dir"}


@program("bash")
@pytest.mark.parametrize("script", [SKY["setup"], SKY["run"], RAY], ids=["setup", "run", "ray"])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
