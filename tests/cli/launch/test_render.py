"""What is submitted is valid by the schema of its scheduler, whatever the run is and however its files are called."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from tests.cli.launch.helpers import ONLINE, TRAIN, job, text_of
from tests.needs import program
from treewise.cli.launch.render import rendered, slurm_options

KUBERNETES = json.loads((Path(__file__).parent / "kubernetes-1.37.json").read_text(encoding="utf-8"))
DEFINITIONS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
}
# Options of sbatch 22.05 to 25.05 that a job of ours has, with what their values look like.
SBATCH = {
    "job-name": r"[a-z0-9-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"1",
    "gpus-per-node": r"[1-9]\d*",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "signal": r"B:USR1@\d+",
    "open-mode": r"append|truncate",
    "chdir": r"/.*",
    "output": r"/.*%j.*",
    "exclusive": "",
    "requeue": "",
}
AGENT = "agent: my.py:run\n"
ODD = 'my runs/it\'s "one" $HOME 100%'
SHAPES = {
    "train": (TRAIN, {}),
    "sharded": (TRAIN + "sharded: true\n", {"nodes": 2}),
    "online": (ONLINE, {"nodes": 4, "server_nodes": 2}),
    "agents": (ONLINE + AGENT, {"nodes": 3, "server_nodes": 1, "gpus_per_server": 4}),
    "cpu": (ONLINE, {"nodes": 2, "server_nodes": 1, "gpus_per_node": 0}),
    "odd": (ONLINE.replace("runs/first", json.dumps(ODD)), {"nodes": 2, "server_nodes": 1}),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def of(shape: str, folder: Path, scheduler: str) -> str:
    text, changes = SHAPES[shape]
    return text_of(folder, text, "--learning_rate", "1e-6", scheduler=scheduler, **changes)


def scripts_of(text: str) -> dict[str, str]:
    """What runs on the nodes, out of the script of a job."""
    return dict(re.findall(r"^read -r -d '' (\w+) << '\w+' \|\| true\n(.*?)^[A-Z]+$", text, re.DOTALL | re.MULTILINE))


def pods_of(text: str) -> dict:
    (made,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]
    return made["spec"]


def validator_of(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{DEFINITIONS[kind]}", **KUBERNETES})


# -- schemas ----------------------------------------------------------------------------------------------------------


@shapes
def test_kubernetes_takes_the_manifests(shape: str, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(of(shape, tmp_path, "k8s")))
    assert [each["kind"] for each in documents] == ["Service", "ConfigMap", "Job"]
    for each in documents:
        validator_of(each["kind"]).validate(each)
    names = [each["metadata"]["name"] for each in documents]
    assert len(set(names)) == 1
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", names[0])


def test_the_schema_finds_a_mistake(tmp_path: Path) -> None:
    (made,) = [each for each in yaml.safe_load_all(of("online", tmp_path, "k8s")) if each["kind"] == "Job"]
    made["spec"]["completionsMode"] = made["spec"].pop("completionMode")
    with pytest.raises(jsonschema.ValidationError, match="completionsMode"):
        validator_of("Job").validate(made)


@shapes
def test_options_are_those_of_sbatch(shape: str, tmp_path: Path) -> None:
    text = of(shape, tmp_path, "slurm")
    head, rest = text.split("\nset -euo", 1)
    assert head.startswith("#!/bin/bash\n")
    assert "#SBATCH" not in rest  # sbatch reads none behind the first command
    lines = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        (word,) = shlex.split(line)
        name, _, value = word.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value), line


@program("sbatch")
@shapes
def test_sbatch_reads_the_options(shape: str, tmp_path: Path) -> None:
    text, changes = SHAPES[shape]
    made, settings = job(tmp_path, text, **changes, submit_args="--partition=gpu -A 'my account'")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\nSlurmctldTimeout=1\n"
        "NodeName=n[1-4] CPUs=1\nPartitionName=gpu Nodes=ALL Default=YES State=UP\n"
    )
    (tmp_path / "job.sh").write_text(rendered("slurm", made, settings, "x"))
    words = ["sbatch", "-vv", "--test-only", str(tmp_path / "job.sh")]
    with subprocess.Popen(
        words,
        env={"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": "/usr/bin:/bin"},
        text=True,
        stderr=subprocess.PIPE,
    ) as sbatch:
        assert sbatch.stderr is not None
        lines = "".join(iter(sbatch.stderr.readline, "sbatch: end of defined options\n"))
        sbatch.kill()  # there is no controller to ask
    read = dict(re.findall(r"^sbatch: ([\w-]+) +: (.*)$", lines, re.MULTILINE))
    assert read["account"] == "my account"
    assert read["output"] == f"{made.logs.replace('%', '%%')}/job-%j.log"
    assert (read["chdir"], read["nodes"], read["signal"]) == (made.folder, str(settings.nodes), "B:USR1@300")
    assert {"exclusive", "requeue"} <= set(read)


@shapes
@pytest.mark.parametrize("scheduler", ["slurm", "local", "k8s"])
def test_scripts_are_bash(shape: str, scheduler: str, tmp_path: Path) -> None:
    text = of(shape, tmp_path, scheduler)
    scripts = {"job": text, **scripts_of(text)}
    if scheduler == "k8s":
        (container,) = pods_of(text)["template"]["spec"]["containers"]
        scripts = {"pod": container["args"][0]}
        if "livenessProbe" in container:
            scripts["probe"] = container["livenessProbe"]["exec"]["command"][2]
    assert scripts
    for script in scripts.values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@program("shellcheck")
@shapes
@pytest.mark.parametrize("scheduler", ["slurm", "local", "k8s"])
def test_shellcheck_finds_nothing(shape: str, scheduler: str, tmp_path: Path) -> None:
    text = of(shape, tmp_path, scheduler)
    scripts = [text, *scripts_of(text).values()]
    if scheduler == "k8s":
        scripts = [pods_of(text)["template"]["spec"]["containers"][0]["args"][0]]
    for script in scripts:
        given = "SC2154,SC2089,SC2090"  # PORT and others; quotes in names of folders, which are meant
        command = ["shellcheck", "--shell=bash", "--severity=warning", f"--exclude={given}", "-"]
        done = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


# -- what they start --------------------------------------------------------------------------------------------------


def started(script: str, **variables: str) -> list[list[str]]:
    """The words of each program that a script of a node would start, which a stand-in prints."""
    prelude = (
        "exec 3>&1 2> /dev/null\n"
        "exec() { [ $# = 0 ] || { printf '%s\\0' \"$@\" $'\\1'; exit 0; }; }\n"
        "vllm() { printf '%s\\0' vllm \"$@\" $'\\1' >&3; exit 0; }\n"
        "cd() { :; }\nkill() { wait; exit; }\n"
    )
    given = {"NODE": "n0", "FIRST": "n0", "IS_FIRST": "true", "SERVERS": "", "PORT": "2000", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", prelude + script.replace("[ ! -r ", "[ -z ")],  # pods have other files
        env={**given, **variables},
        capture_output=True,
        start_new_session=True,  # a server's script ends all processes of its group
        check=False,
    )
    lines = done.stdout.decode().split("\1\0")
    return [line.split("\0")[:-1] for line in lines if line]


def torchrun(words: list[str]) -> object:
    """What torchrun makes of its words."""
    assert words[1:3] == ["-m", "treewise.cli.launch.torchrun"]
    return get_args_parser().parse_args(words[3:])


def test_torchrun_takes_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = of("agents", tmp_path, "slurm")
    (words,) = started(scripts_of(text)["trainer"].split('trainer-$NODE.pid"\n')[1], NODE="n1", SERVERS="s0 s1")
    given = torchrun(words)
    assert (given.nnodes, given.nproc_per_node, given.rdzv_endpoint) == ("2", "8", "n0:2000")
    assert given.module
    assert given.training_script == "treewise"
    command, config, *rest = given.training_script_args
    assert (command, config) == ("rl", str(tmp_path / "run.yaml"))
    place = rest.index("--sampler_settings.base_url")
    assert rest[place + 1 : place + 5] == [f"http://{s}:{p}/v1" for s in ("s0", "s1") for p in (2001, 2002)]
    assert rest[place + 5 :] == ["--agent_settings.host", "n1", "--resume"]
    assert rest[:2] == ["--learning_rate", "1e-6"]
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "280")
    config = config_from_args(given)[0]
    assert config.rdzv_configs["is_host"] == "true"
    assert config.max_restarts == 3


def test_each_server_has_a_port_and_gpus_of_its_own(tmp_path: Path) -> None:
    text = of("agents", tmp_path, "slurm")
    script = scripts_of(text)["server"].replace("vllm serve", 'vllm "$CUDA_VISIBLE_DEVICES" serve')
    found = started(script.partition("\n")[2], CUDA_VISIBLE_DEVICES="a,b,c,d,e,f,g,h")
    assert sorted(each[1] for each in found) == ["a,b,c,d", "e,f,g,h"]
    assert sorted(each[each.index("--port") + 1] for each in found) == ["2001", "2002"]


@shapes
def test_the_run_gets_its_words_whole(shape: str, tmp_path: Path) -> None:
    """Of a folder with spaces, quotes and a dollar, too."""
    text = of(shape, tmp_path, "slurm")
    (words,) = started(scripts_of(text)["trainer"].split('trainer-$NODE.pid"\n')[1], SERVERS="s0")
    assert torchrun(words).training_script_args[-1] == "--resume"
    logs = re.search(r"^logs=(.*)$", text, re.MULTILINE)
    assert logs is not None
    folder = yaml.safe_load(SHAPES[shape][0])["output_dir"]
    assert shlex.split(logs[1]) == [str(tmp_path / folder / "logs")]


def test_a_pod_has_the_role_of_its_index(tmp_path: Path) -> None:
    spec = pods_of(of("online", tmp_path, "k8s"))
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert spec["successPolicy"]["rules"] == [{"succeededIndexes": "0-1"}]  # servers never end by themselves
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 280
    (container,) = spec["template"]["spec"]["containers"]
    script = re.sub(r"^exec > .*$|^mkdir .*$", "", container["args"][0], flags=re.MULTILINE)
    (words,) = started(script, JOB_COMPLETION_INDEX="1")
    given = torchrun(words)
    assert given.rdzv_endpoint == "treewise-first-0.treewise-first:29500"
    assert given.local_addr == "treewise-first-1.treewise-first"
    assert given.rdzv_conf == "is_host=false"
    assert given.training_script_args[1] == "/launch/run.yaml"
    assert "http://treewise-first-2.treewise-first:29501/v1" in given.training_script_args
    servers = started(script, JOB_COMPLETION_INDEX="2")  # the first of them
    assert len(servers) == 8
    assert {each[:3] == ["vllm", "serve", "my-model"] for each in servers} == {True}


def test_the_configuration_is_in_the_manifests(tmp_path: Path) -> None:
    (made,) = [each for each in yaml.safe_load_all(of("odd", tmp_path, "k8s")) if each["kind"] == "ConfigMap"]
    assert made["data"] == {"run.yaml": SHAPES["odd"][0]}


def test_torchrun_waits_for_a_step_and_the_scheduler_for_torchrun(tmp_path: Path) -> None:
    made, settings = job(tmp_path, TRAIN, grace=100)
    assert "--signal=B:USR1@100" in slurm_options(made, settings)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80 " in rendered("slurm", made, settings, "x")
