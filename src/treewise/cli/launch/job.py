"""The run that a job consists of: its configuration read and checked as its own command would, for all its nodes."""

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from treewise.base import features
from treewise.cli import agent_run, keys, online_run, training_run
from treewise.cli.aliases import ALIASES
from treewise.cli.config import RunConfig, parse_flags, read_config
from treewise.cli.launch.settings import LaunchSettings, Scheduler
from treewise.cli.values import read_file
from treewise.errors import ConfigError, num
from treewise.rl.samplers.by_name import entry_of

LOGS = "logs"  # a folder in that of the run
MOUNTED = "/launch/run.yaml"  # the configuration in a pod
_OF_ONE_NODE = tuple(dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm", "/run", tempfile.gettempdir())))
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM takes
_SIZES = ("tp_size", "ep_size", "context_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """What all templates are made from.

    name: of the job. command: `train` or `rl`. folder: where the run is started; its paths are relative to it. config:
    the file. output, logs: folders. words: of the run's command behind its configuration. server: the words that start
    one, but for its port. server_environment: of servers. opens_endpoint: whether agents' calls may come from other
    nodes. gpus_per_node: 0 on CPUs. first_server_gpu: of those of a node.
    """

    name: str
    command: str
    folder: str
    config: str
    config_text: str
    output: str
    logs: str
    python: str
    words: tuple[str, ...]
    server: tuple[str, ...]
    server_environment: Mapping[str, str]
    opens_endpoint: bool
    trainer_nodes: int
    processes: int
    servers_per_node: int
    gpus_per_node: int
    first_server_gpu: int


def job_of(
    scheduler: Scheduler, path: str | None, overrides: Sequence[str], settings: LaunchSettings, folder: Path
) -> ClusterJob:
    """The job that runs a configuration. overrides: flags of the run. folder: the present one.

    Raises:
        ConfigError: a configuration that its command would refuse, or a job that could not run it.
    """
    if path is None:
        raise ConfigError("give the configuration of a run, as in: treewise launch slurm run.yaml --nodes 2.")
    text = _text(path)
    command, config = run_of(path, overrides)
    if scheduler == "k8s":
        settings = replace(settings, shared=settings.shared or "/runs")
        if settings.image is None:
            raise ConfigError("k8s needs --image, one that has treewise (and vLLM where servers are).")
    check_ranks(config, settings)
    sampling = _sampling(config, settings)
    root = PurePosixPath(settings.shared) if scheduler == "k8s" and settings.shared else folder
    output = root / str(config.training["output_dir"])
    own = PurePosixPath(MOUNTED) if scheduler == "k8s" else folder / path
    if scheduler != "local":
        places: dict[str, PurePath] = {"output_dir": output}
        if scheduler == "slurm":
            model = {"model": folder / config.model} if (folder / config.model).exists() else {}
            places |= {"the configuration": own, **model}
        _check_shared(scheduler, settings, folder, places)
    own_name = str(config.training.get("run_name") or PurePosixPath(output).name)
    return ClusterJob(
        name=slug(own_name),
        command=command,
        folder=str(root),
        config=str(own),
        config_text=text,
        output=str(output),
        logs=str(output / LOGS),
        python=settings.python or ("python" if scheduler == "k8s" else sys.executable),
        words=(*overrides, *sampling),
        server=_server(config, settings) if settings.server_nodes else (),
        server_environment=_server_environment(config) if settings.server_nodes else {},
        opens_endpoint=config.more.get("agent") is not None and "host" not in (config.more.get("agent_settings") or {}),
        **_shape(scheduler, settings),
    )


def _shape(scheduler: Scheduler, settings: LaunchSettings) -> dict[str, int]:
    """What each node is for. On this machine nodes are shares of it: one torchrun, and servers on the last GPUs."""
    is_here = scheduler == "local"
    trainers, servers = settings.trainer_nodes, settings.server_nodes
    return {
        "trainer_nodes": 1 if is_here else trainers,
        "processes": settings.processes * (trainers if is_here else 1),
        "servers_per_node": settings.servers_per_node * (servers if is_here else 1),
        "gpus_per_node": settings.gpus_per_node * (settings.nodes if is_here else 1),
        "first_server_gpu": settings.gpus_per_node * trainers if is_here else 0,
    }


def slug(name: str) -> str:
    """A name of a job that every scheduler takes: `treewise-my-run` of "My run!"."""
    return "-".join(["treewise", *re.findall("[a-z0-9]+", name.lower())])[:45].rstrip("-")


# -- the run ----------------------------------------------------------------------------------------------------------


def _text(path: str) -> str:
    read_file(Path(path), ("model", "output_dir"))  # whose errors name file and line
    return Path(path).read_text(encoding="utf-8")


def run_of(path: str, overrides: Sequence[str]) -> tuple[str, RunConfig]:
    """The command that a configuration is for, and the configuration as that reads it.

    Raises:
        ConfigError: a key or value that the command would refuse.
    """
    in_file = {key: value for key, (value, _) in read_file(Path(path), ("model", "output_dir")).items()}
    given = {ALIASES.get(key, key): value for key, value in {**in_file, **parse_flags(overrides)}.items()}
    if "tasks" in given:
        more = {**keys.RL, **online_run.keys()}
        own = (online_run.REQUIRED, online_run.ELSEWHERE)
        command, config = "rl", read_config(path, overrides, more, keys.rl_aliases(), *own)
    elif _is_of_rollouts(given):
        command, config = "rl", read_config(path, overrides, keys.RL, keys.rl_aliases())
    else:
        command, config = "train", read_config(path, overrides, keys.TRAIN)
    one_process = {key: value for key, value in config.training.items() if key not in _SIZES}
    training_run.training_arguments(replace(config, training=one_process))  # sizes: `check_ranks`
    if "tasks" in given:
        _check_online(config)
    return command, config


def _check_online(config: RunConfig) -> None:
    from treewise.rl.online.settings import OnlineSettings  # slow to import

    OnlineSettings(**online_run.loop_values(config))
    if config.more.get("agent") is not None:
        agent_run.settings_of(config)


def _is_of_rollouts(given: Mapping[str, Any]) -> bool:
    from treewise.objectives.registry import OBJECTIVES, PREFERENCES  # slow to import

    own = {*keys.RL} - {*keys.TRAIN} | {*keys.rl_aliases()} - {"weighting", "normalization", "constant"}
    objective = given.get("objective")
    return bool(own & set(given)) or (objective in OBJECTIVES and objective not in ("sft", *PREFERENCES))


def check_ranks(config: RunConfig, settings: LaunchSettings) -> None:
    """Raises `ConfigError` for a mesh that the trainers' processes cannot be divided into."""
    num_ranks = settings.trainer_nodes * settings.processes
    tensor, expert, context = (int(config.training.get(name, 1)) for name in _SIZES)
    each = num(settings.processes, "process", "processes")
    of_nodes = f" (nodes {settings.nodes} - server_nodes {settings.server_nodes}, {each} on each)"
    try:
        if tensor * expert != 1:
            features.mesh.check_mesh_sizes(tensor, expert, num_ranks)
        features.context.check_context_size(context, num_ranks, tensor, expert)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')}{of_nodes}.") from None
    shards = config.training.get("shard_config") or {}
    copies = shards.get("dp_replicate_size", 1)
    if isinstance(copies, int) and copies > 0 and num_ranks // tensor % copies:
        rest = f"{num_ranks // tensor} processes with the same parts"
        raise ConfigError(f"dp_replicate_size={copies} does not divide the {rest}{of_nodes}.")


def _sampling(config: RunConfig, settings: LaunchSettings) -> tuple[str, ...]:
    """Words that hand the servers over. Raises `ConfigError` where the run and its servers do not fit one another."""
    sampler = str(config.more.get("sampler") or "transformers")
    is_on_servers = entry_of(sampler).is_on_servers
    given = config.more.get("sampler_settings") or {}
    address = given.get("base_url")
    if settings.server_nodes and "tasks" not in config.more:
        raise ConfigError(
            f"server_nodes={settings.server_nodes}, but the run trains on recorded data and samples nothing; leave "
            "server_nodes out, or give tasks."
        )
    if settings.server_nodes and not is_on_servers:
        raise ConfigError(
            f"server_nodes={settings.server_nodes}, but the run samples by itself (sampler: {sampler}); give sampler: "
            "vllm, or leave server_nodes out."
        )
    if settings.server_nodes and address:
        raise ConfigError(
            f"server_nodes={settings.server_nodes}, but sampler_settings.base_url names servers that are there "
            f"({address}); leave one of the two out."
        )
    if is_on_servers and not settings.server_nodes and not address:
        raise ConfigError(
            f"the run samples on servers (sampler: {sampler}), and the job has none: give --server_nodes 1 of more "
            "--nodes, or sampler_settings.base_url."
        )
    if not settings.server_nodes or "patience_seconds" in given:
        return ()
    return ("--sampler_settings.patience_seconds", str(settings.server_seconds))


def _server(config: RunConfig, settings: LaunchSettings) -> tuple[str, ...]:
    """The words that start a server; `{port}` is put in on its node."""
    if config.gguf_file or str(config.model).endswith(".gguf") or config.model == "smollm2-demo":
        raise ConfigError(f"model {config.model}: servers load a folder or a name of the Hub; save it as a folder.")
    given = config.more.get("sampler_settings") or {}
    if settings.server_command is not None:
        words = shlex.split(settings.server_command)
        if not any("{port}" in word for word in words):
            raise ConfigError(f"server_command {settings.server_command!r} has no {{port}}: where would it listen?")
    else:
        mode = str(given.get("logprobs_mode", "processed_logprobs"))
        words = ["vllm", "serve", "{model}", "--host", "0.0.0.0", "--port", "{port}", "--logprobs-mode", mode]
        if settings.gpus_per_node and settings.gpus_per_server > 1:
            words += ["--tensor-parallel-size", str(settings.gpus_per_server)]
        if given.get("weights") == "adapter":
            rank = int((config.lora or {}).get("r") or 8)
            most = next((each for each in _RANKS if each >= rank), rank)
            words += ["--enable-lora", "--max-lora-rank", str(most)]
    words += shlex.split(settings.server_args)
    return tuple(word.replace("{model}", config.model) for word in words)


def _server_environment(config: RunConfig) -> dict[str, str]:
    given = config.more.get("sampler_settings") or {}
    weights = given.get("weights", "reload")
    found = {} if weights == "fixed" else {"VLLM_SERVER_DEV_MODE": "1"}  # calls by which weights arrive
    if weights == "adapter":
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if given.get("api_key"):
        found["VLLM_API_KEY"] = str(given["api_key"])
    return found


# -- what nodes share -------------------------------------------------------------------------------------------------


def _check_shared(scheduler: Scheduler, settings: LaunchSettings, folder: Path, places: Mapping[str, PurePath]) -> None:
    """Raises `ConfigError` for a folder that other nodes would not see."""
    for what, place in places.items():
        if settings.shared is not None:
            root = folder / settings.shared
            if not _is_below(place, root):
                hint = "its path in the pods" if scheduler == "k8s" else "a folder in it"
                raise ConfigError(f"{what} {place} is not in {root} (--shared), which all nodes see; give {hint}.")
        elif settings.nodes > 1 and (own := [each for each in _OF_ONE_NODE if _is_below(place, PurePosixPath(each))]):
            raise ConfigError(
                f"{what} {place} is in {own[0]}, which each node has for itself: a job of {settings.nodes} nodes needs "
                f"one that all see. If this one is, say so by --shared {own[0]}."
            )


def _is_below(place: PurePath, root: PurePath) -> bool:
    def parts(path: PurePath) -> tuple[str, ...]:
        return (path if not isinstance(path, Path) else path.resolve()).parts

    inner, outer = parts(place), parts(root)
    return inner[: len(outer)] == outer and ".." not in inner
