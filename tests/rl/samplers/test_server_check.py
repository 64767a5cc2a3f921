"""`treewise doctor --sampler`: each thing that may be wrong with a server is found, and the way out is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.rl.samplers.stand_in import StandIn, running
from tests.rl.samplers.test_servers import as_text, trained
from treewise.cli.main import main
from treewise.rl.samplers.server_check import check_server
from treewise.testing import tiny_model


def findings(server: StandIn, model: Any = None) -> dict[str, Any]:
    return {each.name: each for each in check_server(server.url, model, patience_seconds=0.5)}


def test_a_server_that_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    model.save_pretrained(tmp_path / "m")
    with running(StandIn(model=model)) as server:
        assert main(["doctor", "--sampler", server.url, "--model", str(tmp_path / "m")]) == 0
        said = capsys.readouterr().out
        assert "FAILED" not in said
        assert "processed" in said
        assert "logprob_gap 1.000000" in said
        assert main(["doctor", "--sampler", server.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)[server.url]
        assert all(each["passed"] in (True, None) for each in found)


def raw(server: StandIn) -> None:
    server.raw = True


def keeps_text(server: StandIn) -> None:
    server.edit = as_text


def few(server: StandIn) -> None:
    server.most_top = 1


def closed(server: StandIn) -> None:
    server.missing |= {"/collective_rpc", "/v1/load_lora_adapter"}


def silent(server: StandIn) -> None:
    server.missing |= {"/metrics"}


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (raw, "log-probs", "raw"),
        (keeps_text, "ids", "no token ids"),
        (few, "candidates", "--max-logprobs"),
        (closed, "handing over", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_is_wrong_is_found_with_the_way_out(spoil: Callable[[StandIn], None], name: str, words: str) -> None:
    with running(StandIn()) as server:
        spoil(server)
        found = findings(server)[name]
    assert found.passed is False
    assert words in found.text + found.way_out


def test_weights_and_lengths_are_held_against_the_model() -> None:
    with running(StandIn()) as server:
        found = findings(server, trained())
        assert found["weights"].passed is False
        assert "max_length: 64" in found["lengths"].way_out  # the model's positions reach further
        assert findings(server, tiny_model("llama"))["weights"].passed
        silent(server)
        assert findings(server)["restarts"].passed is None


def test_no_server_is_one_finding() -> None:
    (found,) = check_server("http://127.0.0.1:9", patience_seconds=0.05)
    assert found.passed is False
    assert "no answer" in found.text
