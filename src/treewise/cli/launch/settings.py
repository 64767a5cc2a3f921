"""What `treewise launch` can be set to; its flags are made from these declarations."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from typing_extensions import Doc

from treewise.errors import ConfigError, check_fields, num

Scheduler = Literal["slurm", "k8s", "local"]
SCHEDULERS: tuple[Scheduler, ...] = ("slurm", "k8s", "local")
MIN_GRACE = 30
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # minutes, or days-hours:minutes:seconds


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Raises `ConfigError` for a value beyond its limits."""

    nodes: Annotated[int, Ge(1), Doc("machines of the job; with local: shares of this one")] = 1
    server_nodes: Annotated[int, Ge(0), Doc("of these, those that sample for the others; with sampler: vllm")] = 0
    gpus_per_node: Annotated[int, Ge(0), Doc("of a node, a process for each; 0: one process on a CPU")] = 8
    gpus_per_server: Annotated[int, Ge(1), Doc("that a server spreads its model over")] = 1
    server_command: Annotated[
        str | None, Doc("that starts a server, with {model} and {port}; vllm serve where not given")
    ] = None
    server_args: Annotated[str, Doc("added to it, as --server_args='--max-model-len 8192'")] = ""
    server_seconds: Annotated[int, Ge(1), Doc("that the run waits for a server that starts (patience_seconds)")] = 1800
    python: Annotated[str | None, Doc("of the trainers; this one, or python in an image")] = None
    shared: Annotated[str | None, Doc("folder that all nodes see; output_dir has to be in it. k8s: /runs")] = None
    port: Annotated[int, Ge(0), Doc("first of the ports on each node; 0: by the number of the job")] = 0
    time: Annotated[str, Doc("that the job may take, as Slurm writes it")] = "24:00:00"
    grace: Annotated[int, Ge(MIN_GRACE), Doc("seconds before its end in which a run saves itself")] = 300
    max_restarts: Annotated[int, Ge(0), Doc("times that trainers begin again at their newest checkpoint")] = 3
    image: Annotated[str | None, Doc("k8s: that has treewise, and vLLM where servers are")] = None
    claim: Annotated[str, Doc("k8s: volume claim (ReadWriteMany) that becomes the folder --shared")] = "treewise-runs"
    submit_args: Annotated[str, Doc("slurm: more options of sbatch, as --submit_args='--partition=gpu -A me'")] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.server_nodes >= self.nodes:
            raise ConfigError(
                f"server_nodes={self.server_nodes} of nodes={self.nodes} leave none that trains: nodes are all "
                f"machines of the job, so give at least --nodes {self.server_nodes + 1}."
            )
        if self.server_nodes and self.gpus_per_node and self.gpus_per_node % self.gpus_per_server:
            gpus = num(self.gpus_per_node, "GPU")
            raise ConfigError(f"gpus_per_server={self.gpus_per_server} does not divide the {gpus} of a node.")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"time={self.time!r}; give minutes, H:MM:SS or DAYS-H:MM:SS, as 24:00:00.")
        if self.port and not 1024 <= self.port <= 65000:
            raise ConfigError(f"port={self.port}; give one from 1024 to 65000, or leave it out.")
        if "\n" in self.submit_args:
            raise ConfigError("submit_args has several lines; give options of sbatch in one, with spaces between.")

    @property
    def trainer_nodes(self) -> int:
        """Nodes that train."""
        return self.nodes - self.server_nodes

    @property
    def processes(self) -> int:
        """Of each node that trains."""
        return max(1, self.gpus_per_node)

    @property
    def servers_per_node(self) -> int:
        """0 where the run has no servers of its own."""
        return max(1, self.gpus_per_node // self.gpus_per_server) if self.server_nodes else 0
