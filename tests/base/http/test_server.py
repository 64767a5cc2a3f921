"""A port that is taken, other names for this machine, and a token."""

import pytest

from treewise.base.http.server import check_host, host_guard, is_token, listening_socket, url_of
from treewise.errors import ConfigError


def test_a_port_that_is_taken_is_named():
    with listening_socket("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        assert url_of(own, "127.0.0.1") == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 cannot be listened on"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"port 0 of 203\.0\.113\.1"):
        listening_socket("203.0.113.1", 0)


def test_other_machines_need_a_token():
    for host in ("127.0.0.1", "localhost", "::1"):
        check_host(host, None, "tml-...")
    check_host("0.0.0.0", "tml-x", "tml-...")
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0 can be reached .* give --token tml-\.\.\., or leave"):
        check_host("0.0.0.0", None, "tml-...")


def test_a_server_on_this_machine_answers_to_its_own_names():
    """A page that a browser shows can send requests to another name that leads here (DNS rebinding)."""
    assert "*" not in host_guard("127.0.0.1").kwargs["allowed_hosts"]
    assert host_guard("0.0.0.0").kwargs["allowed_hosts"] == ["*"]


def test_a_token_is_compared_as_bytes():
    assert is_token("tml-é", "tml-é")
    assert not is_token("tml-e", "tml-é")
