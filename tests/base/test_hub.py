"""Without a network a name of the Hub is an error in seconds, which names it, or is read from the Hub's cache."""

import socket
import threading

import pytest
from huggingface_hub import constants

from treewise.base import hub
from treewise.data import load_trees
from treewise.errors import ConfigError, DataError
from treewise.models.load_model import load_config, load_tokenizer, load_weights, locate

ENVIRONMENT = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY")


@pytest.fixture
def asked(monkeypatch):
    """The addresses that were asked; none answers."""
    for name in (*ENVIRONMENT, "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "_found", None)
    found = []

    def refuse(address, timeout):
        found.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    return found


@pytest.mark.parametrize("load", [locate, load_config, load_weights, load_tokenizer])
def test_a_model_of_the_hub_without_a_network_is_an_error_that_names_both(load, asked):
    with pytest.raises(
        ConfigError, match=r"^org/model: no such folder, not in the Hub's cache, and the network does not"
    ):
        load("org/model")
    with pytest.raises(ConfigError, match=r"huggingface\.co: Name or service not known"):
        load("org/model")
    assert asked == [("huggingface.co", 443)]  # once


def test_a_tokenizer_and_a_data_set_of_the_hub_too(asked):
    with pytest.raises(ConfigError, match="the network does not lead to the Hub"):
        load_trees([{"text": "a"}], "org/tokenizer")
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"hf:org/data: .* The Hub cannot be reached \(huggingface\.co: Name or serv"):
        load_trees("hf:org/data")
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE is True  # as it was


def test_what_is_in_the_cache_is_read_from_there(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    folder = tmp_path / "models--org--model" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text(commit)
    assert locate("org/model") == (str(folder), None)
    assert load_config("org/model").model_type == "llama"


@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("HF_ENDPOINT", "http://mirror.example:8080", ("mirror.example", 8080)),
        ("HF_ENDPOINT", "http://mirror.example", ("mirror.example", 80)),
        ("https_proxy", "http://proxy.example:3128", ("proxy.example", 3128)),
        ("https_proxy", "proxy.example:3128", ("proxy.example", 3128)),
    ],
)
def test_the_mirror_or_the_proxy_is_asked(name, value, address, asked, monkeypatch):
    monkeypatch.setenv(name, value)
    assert "Name or service not known" in hub.why_unreachable()
    assert asked == [address]


def test_nobody_is_asked_where_the_user_says_so(asked, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.why_unreachable() is None
    assert asked == []


def test_a_resolver_that_never_answers_is_not_waited_for(asked, monkeypatch):
    free = threading.Event()

    def waiting(*_, **__):
        free.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", waiting)
    monkeypatch.setattr(hub, "SECONDS", 0.001)
    assert hub.why_unreachable() == "no answer in 0.002 seconds"
    free.set()


def test_a_hub_that_answers_is_asked_once(asked, monkeypatch):
    class Answer:
        def close(self):
            asked.append("closed")

    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: Answer())
    assert locate("org/model") == locate("org/model") == ("org/model", None)
    assert asked == ["closed"]
