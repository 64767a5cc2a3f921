"""`accelerate launch` as a user types it: several processes end with the weights of one, sharded where asked for."""

import os
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.cli.helpers import save_tiny_model, write_rows
from tests.trainer.forked_ranks import free_port
from treewise.cli.main import main
from treewise.trainer.checkpoint.store import read_manifest

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("trainer/test_launchers")]

ROWS = [
    {"token_ids": [1, 2, 3, 4 + tree, *range(20 + end, 25)], "group": f"g{tree}"}
    for tree in range(5)
    for end in range(3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration, and what one process makes of it in `alone`."""
    folder = tmp_path_factory.mktemp("launched")
    settings = {
        "model": str(save_tiny_model(folder / "model")),
        "data": str(write_rows(folder / "rows.jsonl", ROWS)),
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_steps": 3,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": "none",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    assert train(folder, "alone", 2) == 0
    return folder


def train(folder, name, batch_size):
    """Runs the command here."""
    return main(["train", str(folder / "run.yaml"), *flags(folder, name, batch_size)])


def flags(folder, name, batch_size):
    return ["--output_dir", str(folder / name), "--per_device_train_batch_size", str(batch_size)]


def launch(words):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("how", ["--multi_gpu", "--use_fsdp"])
def test_accelerate_launches_processes_that_train_like_one(folder, how):
    name = how.strip("-")
    launcher = ["-m", "accelerate.commands.launch", how, "--num_processes", "2", "--main_process_port", "0"]
    version = ["--fsdp_version", "2"] if how == "--use_fsdp" else []
    command = ["-m", "treewise", "train", str(folder / "run.yaml"), *flags(folder, name, 1)]
    ended = launch([*launcher, *version, *command])
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "3 of 2 trees" in ended.stdout
    found, expected = (load_file(folder / each / "model.safetensors") for each in (name, "alone"))
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-6), key
    read_manifest(folder / name / "checkpoint-3")
    shards = list((folder / name / "checkpoint-3").glob("weights/*.safetensors"))
    assert len(shards) == (2 if how == "--use_fsdp" else 0)  # only parameters that are shards are saved so


RESTARTED = """
import os, signal, sys, threading, time
from pathlib import Path

def die():
    while not Path(sys.argv[-1], "checkpoint-1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if (rank, attempt) == ("1", "0"):
    threading.Thread(target=die, daemon=True).start()
if (rank, attempt) == ("0", "1"):
    time.sleep(2)  # the other one comes first, and finds what the attempt before has left in the store
from treewise.cli.main import main
from treewise.distributed import watchdog
if (rank, attempt) == ("1", "1"):  # the processes have just found one another
    watchdog.begin = lambda _: os.kill(os.getpid(), signal.SIGKILL)
Path(sys.argv[0]).with_name(f"attempt-{attempt}").touch()
sys.exit(main(sys.argv[1:]))
"""


def test_processes_that_torchrun_starts_again_find_one_another_and_go_on(folder):
    (folder / "script.py").write_text(RESTARTED)
    port = ["--master_port", str(free_port())]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "2", *port]
    more = ["--max_steps", "60", "--save_steps", "1", "--ddp_timeout", "60", "--per_device_train_batch_size", "1"]
    words = ["train", str(folder / "run.yaml"), *more, "--resume", "--output_dir", str(folder / "again")]
    ended = launch([*torchrun, str(folder / "script.py"), *words])
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "resuming from" in ended.stdout
    assert (folder / "attempt-2").exists()  # one died in a step, then one while it started
    read_manifest(folder / "again" / "checkpoint-60")
