"""What is this machine's own, and that no proxy is asked for it."""

import pytest

from treewise.base.addresses import client_settings, is_loopback

httpx = pytest.importorskip("httpx")
OTHER = "http://models.example/v1"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("a.localhost", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_what_is_this_machine(host, expected):
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("urls", "direct", "by_proxy"),
    [
        (["http://127.0.0.1:8000/v1", "http://localhost"], ["http://127.0.0.1:8000/", "http://localhost/"], []),
        (["http://[::1]:80/v1", OTHER], ["http://[::1]:80/a"], [OTHER]),
        ([OTHER], [], [OTHER]),
    ],
)
def test_a_proxy_is_asked_for_others_alone(urls, direct, by_proxy, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with httpx.Client(**client_settings(urls, 60.0)) as client:
        assert (client.timeout.read, client.timeout.connect) == (60.0, 5.0)
        for url in (*direct, *by_proxy):
            is_direct = client._transport_for_url(httpx.URL(url)) is client._transport
            assert is_direct == (url in direct)
