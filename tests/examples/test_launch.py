"""Launch files for clusters, as far as they can be checked without one: they parse, torchrun takes their flags, and
what it starts is the command, which goes on with a run that was cut off."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from treewise.cli.parser import COMMANDS

FOLDER = Path(__file__).parents[2] / "examples" / "launch"


def words_after_torchrun(script: str) -> list[str]:
    """Of a shell script; variables are numbers."""
    command = re.search(r"bin/torchrun\"?((?:.*\\\n)*.*)", script)
    assert command is not None
    text = re.sub(r'"\$@"', "rl rl.yaml", command[1].replace("\\\n", " ").rstrip("& \n"))
    text = text.replace("$COMMAND", "rl").replace("$CONFIG", "rl.yaml")
    return shlex.split(re.sub(r"\$\{[^}]*\}|\$\w+", "1", text))


def launched(name: str) -> list[str]:
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name == "slurm.sh":
        return words_after_torchrun(text)
    if name == "skypilot.yaml":
        return words_after_torchrun(yaml.safe_load(text)["run"])
    (container,) = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    return [str(word) for word in container["args"]]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_torchrun_takes_the_words(name: str) -> None:
    given = get_args_parser().parse_args(launched(name))
    assert given.module
    assert given.training_script == "treewise"
    assert given.training_script_args[0] in COMMANDS
    assert given.training_script_args[-1] == "--resume"


def test_torchrun_waits_for_an_iteration_and_the_cluster_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))[1]["spec"]["template"][
        "spec"
    ]
    (container,) = pod["containers"]
    slurm = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))["envs"]
    given = {
        **{each["name"]: each["value"] for each in container["env"]},
        "slurm": re.search(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", slurm, re.MULTILINE)[1],
        "sky": sky["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
    }
    assert set(given.values()) == {"280"}
    assert pod["terminationGracePeriodSeconds"] > 280
    assert int(re.search(r"--signal=B:USR1@(\d+)", slurm)[1]) > 280
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given["sky"])
    config = config_from_args(get_args_parser().parse_args(["--master_port", "0", "script.py"]))[0]
    assert getattr(config, "shutdown_timeout", 280) == 280  # torchrun of torch 2.11 has 30 in its code


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
def test_scripts_are_bash(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    parts = [text] if name == "slurm.sh" else [yaml.safe_load(text)[part] for part in ("setup", "run")]
    for part in parts:
        subprocess.run(["bash", "-n"], input=part, text=True, check=True)
