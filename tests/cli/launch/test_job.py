"""What a job is made of follows from the run's configuration; what cannot run is an error before anything waits."""

from pathlib import Path

import pytest

from tests.cli.launch.helpers import ONLINE, TRAIN, job
from treewise.cli.launch.job import run_of, slug
from treewise.errors import ConfigError

PREFERENCES = TRAIN + "objective: dpo\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRAIN, "train"),
        (TRAIN + "objective: sft\n", "train"),
        (PREFERENCES, "train"),
        (TRAIN + "objective: grpo\n", "rl"),
        (TRAIN + "objective: dapo\nlr: 1e-6\n", "rl"),
        (ONLINE, "rl"),
    ],
)
def test_the_command_follows_from_the_keys(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert run_of(str(tmp_path / "run.yaml"), ())[0] == expected


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TRAIN)
    command, config = run_of(str(tmp_path / "run.yaml"), ("--objective", "grpo", "--learning_rate", "2e-6"))
    assert (command, config.training["learning_rate"]) == ("rl", 2e-6)


@pytest.mark.parametrize(
    ("text", "flags", "changes", "message"),
    [
        (
            TRAIN + "learnin_rate: 1\n",
            (),
            {},
            r"run\.yaml:5: unknown key 'learnin_rate'\. Did you mean 'learning_rate'",
        ),
        (TRAIN + "learning_rate: fast\n", (), {}, r"run\.yaml:5: learning_rate must be a number"),
        (TRAIN, ("--max_step", "1"), {}, r"unknown key 'max_step'"),
        ("model: [\n", (), {}, r"run\.yaml:2: not valid YAML"),
        ("data: rows.jsonl\noutput_dir: x\n", (), {}, r"run\.yaml: no model"),
        (
            TRAIN + "sharded: true\ntp_size: 3\n",
            (),
            {"nodes": 2},
            r"tp_size=3 does not divide the 16 processes.*8 proc",
        ),
        (TRAIN + "context_size: 5\n", (), {"nodes": 2}, r"context_size=5 does not divide the 16 processes"),
        (
            TRAIN + "sharded: true\nshard_config: {dp_replicate_size: 3}\n",
            (),
            {"nodes": 2},
            r"dp_replicate_size=3 does not divide the 16",
        ),
        (TRAIN, (), {"nodes": 2, "server_nodes": 1}, r"server_nodes=1, but the run trains on recorded data"),
        (ONLINE.replace("sampler: vllm\n", ""), (), {"nodes": 2, "server_nodes": 1}, r"samples by itself"),
        (ONLINE, (), {"nodes": 2}, r"the job has none: give --server_nodes 1"),
        (
            ONLINE + "sampler_settings: {base_url: 'http://a:1/v1'}\n",
            (),
            {"nodes": 2, "server_nodes": 1},
            r"names servers that are there \(http://a:1/v1\)",
        ),
        (ONLINE, (), {"nodes": 2, "server_nodes": 1, "server_command": "serve {model}"}, r"has no \{port\}"),
        (ONLINE + "iterations: 0\n", (), {"nodes": 2, "server_nodes": 1}, r"iterations"),
        (
            ONLINE + "agent: my.py:run\ntokens_per_iteration: 9\n",
            (),
            {"nodes": 2, "server_nodes": 1},
            r"tokens_per_iteration decides how many episodes",
        ),
        (
            ONLINE + "agent: my.py:run\nagent_settings: {episods: 9}\n",
            (),
            {"nodes": 2, "server_nodes": 1},
            r"unknown setting agent_settings.episods. Did you mean 'episodes'",
        ),
        (ONLINE.replace("my-model", "x.gguf"), (), {"nodes": 2, "server_nodes": 1}, r"model x.gguf: servers load"),
    ],
)
def test_what_cannot_run_is_an_error(
    tmp_path: Path, text: str, flags: tuple[str, ...], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, text, *flags, **changes)


def test_a_folder_that_other_nodes_do_not_see(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output_dir /dev/shm/x is in /dev/shm.*--shared /dev/shm"):
        job(tmp_path, TRAIN.replace("runs/first", "/dev/shm/x"), nodes=2, shared=None)
    with pytest.raises(ConfigError, match=r"output_dir /elsewhere/x is not in .* \(--shared\)"):
        job(tmp_path, TRAIN.replace("runs/first", "/elsewhere/x"), nodes=2)
    with pytest.raises(ConfigError, match=r"is not in /runs \(--shared\)"):
        job(tmp_path, TRAIN.replace("runs/first", "/elsewhere/x"), scheduler="k8s")
    with pytest.raises(ConfigError, match=r"model /proc is not in .* \(--shared\)"):
        job(tmp_path, TRAIN.replace("my-model", "/proc"), nodes=2)
    job(tmp_path, TRAIN.replace("runs/first", "/dev/shm/x"), nodes=1, shared=None)
    job(tmp_path, TRAIN.replace("runs/first", "/dev/shm/x"), nodes=2, shared=None, scheduler="local")


def test_pods_need_an_image(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k8s needs --image"):
        job(tmp_path, TRAIN, scheduler="k8s", image=None)


def test_no_configuration_is_an_error(tmp_path: Path) -> None:
    from treewise.cli.launch.job import job_of
    from treewise.cli.launch.settings import LaunchSettings

    with pytest.raises(ConfigError, match="give the configuration of a run"):
        job_of("slurm", None, (), LaunchSettings(), tmp_path)


def test_servers_follow_from_how_they_get_weights(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "server_nodes": 1}
    made, _ = job(tmp_path, ONLINE, **nodes)
    assert made.server[:3] == ("vllm", "serve", "my-model")
    assert made.server_environment == {"VLLM_SERVER_DEV_MODE": "1"}
    settings = "sampler_settings: {weights: adapter, logprobs_mode: raw_logprobs}\nlora: {r: 12}\n"
    made, _ = job(tmp_path, ONLINE + settings, **nodes, gpus_per_server=4)
    words = " ".join(made.server)
    assert "--logprobs-mode raw_logprobs --tensor-parallel-size 4 --enable-lora --max-lora-rank 16" in words
    assert made.server_environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    settings = "sampler_settings: {weights: fixed, api_key: a b}\n"
    made, _ = job(tmp_path, ONLINE + settings, **nodes, server_args="--max-model-len 8")
    assert made.server[-2:] == ("--max-model-len", "8")
    assert made.server_environment == {"VLLM_API_KEY": "a b"}  # no word of a command, which others of a node see


def test_the_run_waits_for_servers_unless_it_says_how_long(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "server_nodes": 1, "server_seconds": 77}
    assert job(tmp_path, ONLINE, **nodes)[0].words == ("--sampler_settings.patience_seconds", "77")
    assert job(tmp_path, ONLINE + "sampler_settings: {patience_seconds: 5}\n", **nodes)[0].words == ()


def test_the_endpoint_is_opened_for_other_nodes_unless_the_run_says_where(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "server_nodes": 1}
    assert not job(tmp_path, ONLINE, **nodes)[0].opens_endpoint
    assert job(tmp_path, ONLINE + "agent: my.py:run\n", **nodes)[0].opens_endpoint
    settings = "agent: my.py:run\nagent_settings: {host: 10.0.0.1}\n"
    assert not job(tmp_path, ONLINE + settings, **nodes)[0].opens_endpoint


def test_on_this_machine_nodes_are_shares_of_it(tmp_path: Path) -> None:
    made, _ = job(tmp_path, ONLINE, scheduler="local", nodes=3, server_nodes=1, gpus_per_node=2)
    assert (made.trainer_nodes, made.processes) == (1, 4)
    assert (made.servers_per_node, made.gpus_per_node, made.first_server_gpu) == (2, 6, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("My run! (2)", "treewise-my-run-2"),
        ("", "treewise"),
        ("x" * 99, "treewise-" + "x" * 36),
        ("ÄÖ_a", "treewise-a"),
    ],
)
def test_names_of_jobs_are_plain(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_a_name_with_spaces_is_that_of_the_job(tmp_path: Path) -> None:
    assert job(tmp_path, TRAIN + "run_name: A b\n")[0].name == "treewise-a-b"
    assert job(tmp_path, TRAIN.replace("first", "my run"))[0].name == "treewise-my-run"
