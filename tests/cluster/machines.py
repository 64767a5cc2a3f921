"""Machines that are network namespaces of this one: own addresses and hostnames on one bridge, one file system.

They need root, and a system that allows namespaces; `missing` says where that is not so.
"""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ETC = Path("/etc/netns")  # `ip netns exec` puts its files in place of those of /etc


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@cache
def missing() -> str:
    """Why there can be no such machines here; "" where there can."""
    if any(shutil.which(each) is None for each in ("ip", "unshare", "bash")):
        return "needs iproute2, util-linux and bash"
    name = f"treewise-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "unshare", "--uts", "hostname", "try")
        _ip("-n", name, "link", "add", "try", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces: {' '.join(error.stderr.decode().split())}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


def require() -> None:
    """Skips the test that runs now where there can be no machines."""
    if why := missing():
        pytest.skip(why)


class Machines:
    """Machines `n0`, `n1`, ... while entered. Their names are known on each of them."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self._own = f"tw{secrets.token_hex(3)}"  # several tests may have machines at a time
        self._switch = f"{self._own}-switch"

    def _space(self, name: str) -> str:
        return f"{self._own}-{name}"

    def __enter__(self) -> "Machines":
        hosts = ["127.0.0.1 localhost", *(f"10.60.0.{number + 1} {name}" for number, name in enumerate(self.names))]
        _ip("netns", "add", self._switch)  # the bridge, too, is apart from this machine's network
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            space = self._space(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", self._switch, "link", "set", name, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.60.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            (ETC / space).mkdir(parents=True)
            (ETC / space / "hosts").write_text("\n".join(hosts) + "\n")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False)
            shutil.rmtree(ETC / self._space(name), ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self._switch], check=False)

    def words(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that runs another on a machine."""
        script = f'hostname {name} && exec "$@"'
        return ["ip", "netns", "exec", self._space(name), "unshare", "--uts", "bash", "-c", script, "bash", *command]

    def kill(self, name: str) -> None:
        """All that runs there, at once."""
        for number in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def processes(self, name: str) -> list[int]:
        """The process ids of all that runs there."""
        done = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=False)
        return [int(each) for each in done.stdout.split()]

    def lose(self, name: str) -> None:
        """As without power: nothing is closed, the others hear nothing any more."""
        _ip("-n", self._switch, "link", "set", name, "down")
        self.kill(name)

    def bring_back(self, name: str) -> None:
        """A machine that was lost."""
        _ip("-n", self._switch, "link", "set", name, "up")
