"""Flags that contradict one another are errors that say what to give."""

import pytest

from treewise.cli.launch.settings import LaunchSettings
from treewise.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 2, "server_nodes": 2}, r"server_nodes=2 of nodes=2 leave none that trains.*--nodes 3"),
        ({"nodes": 2, "server_nodes": 1, "gpus_per_server": 3}, r"gpus_per_server=3 does not divide the 8 GPUs"),
        ({"time": "soon"}, r"time='soon'; give minutes"),
        ({"port": 80}, r"port=80; give one from 1024"),
        ({"grace": 5}, r"grace"),
        ({"nodes": 0}, r"nodes"),
        ({"submit_args": "--a\n--b"}, r"submit_args has several lines"),
    ],
)
def test_what_cannot_be_is_an_error(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchSettings(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "per_server", "expected"), [(8, 1, 8), (8, 4, 2), (0, 1, 1), (0, 2, 1)])
def test_gpus_of_a_node_are_divided_among_servers(gpus: int, per_server: int, expected: int) -> None:
    settings = LaunchSettings(nodes=2, server_nodes=1, gpus_per_node=gpus, gpus_per_server=per_server)
    assert settings.servers_per_node == expected
    assert settings.trainer_nodes == 1
