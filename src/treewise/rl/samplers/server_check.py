"""`treewise doctor --sampler URL`: whether a server can sample for a run, and what to start it with where not.

A handful of short requests. Which log-probs it gives is read off two answers to one prompt: at half the temperature
processed log-probs lie twice as far apart, raw ones as far as before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.errors import SamplerError, TreewiseError
from treewise.objectives import logprob_gap
from treewise.rl.checks import MAX_GAP
from treewise.rl.samplers.protocol import Completion, SampleRequest
from treewise.rl.samplers.server import Server
from treewise.rl.samplers.servers import ServerSampler
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOP = 5  # of which distances are compared
Found = tuple[bool | None, str] | tuple[bool | None, str, str]  # what was found: `passed`, `text` and `way_out`
_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One thing that was looked at. passed: None where it is only said. way_out: what to do, where it failed."""

    name: str
    passed: bool | None
    text: str
    way_out: str = ""

    def as_line(self) -> str:
        """A line for people, and a second one with what to do."""
        mark = {True: "ok", False: "FAILED", None: ""}[self.passed]
        return f"  {mark:6} {self.name:12} {self.text}" + (f"\n{'':22}{self.way_out}" if self.way_out else "")


def check_server(
    url: str, model: "PreTrainedModel | None" = None, patience_seconds: float = 5.0
) -> list[ServerFinding]:
    """What a server is and does.

    Parameters:
        model: with the weights that it should have; None: they are not looked at.
        patience_seconds: how long it is waited for.
    """
    sampler = ServerSampler(url, weights="fixed", patience_seconds=patience_seconds)
    server = sampler.servers[0]
    checks: dict[str, Callable[[], Found]] = {
        "answers": lambda: _answers(server),
        "ids": lambda: _ids(sampler),
        "log-probs": lambda: _logprobs(sampler),
        "seeds": lambda: _seeds(sampler),
        "lengths": lambda: _lengths(server, model),
        "weights": lambda: _weights(sampler, model),
        "candidates": lambda: _candidates(sampler),
        "restarts": lambda: _restarts(server),
        "handing over": lambda: _handing_over(server),
    }
    if model is None:
        del checks["weights"]
    found: list[ServerFinding] = []
    try:
        for name, check in checks.items():
            try:
                found.append(ServerFinding(name, *check()))
            except TreewiseError as error:
                found.append(ServerFinding(name, passed=False, text=str(error)))
            if not found[0].passed:
                break
    finally:
        sampler.close()
    return found


def _answers(server: Server) -> Found:
    models = [model["id"] for model in server.call("/v1/models")["data"]]
    try:
        version = f"vLLM {server.call('/version', retried=())['version']}"
    except (SamplerError, KeyError, TypeError):
        version = "a server of OpenAI's protocol"
    return True, f"{version} with {', '.join(models)}"


def _ids(sampler: ServerSampler) -> Found:
    completion = _one(sampler, SampleRequest(_PROMPT, max_new_tokens=4))
    return True, f"token ids in and out, with log-probs ({completion.num_tokens} of 4)"


def _logprobs(sampler: ServerSampler) -> Found:
    """Distances of the most likely ids of one position, at temperature 1 and 0.5."""
    request = SampleRequest(_PROMPT, max_new_tokens=1, num_top=NUM_TOP)
    whole, half = (_distances(_one(sampler, replace(request, temperature=temperature))) for temperature in (1.0, 0.5))
    common = [token for token in whole if token in half and whole[token] < -1e-3]
    if not common:
        return False, "the most likely ids differ by temperature; nothing to compare"
    factor = float(np.median([half[token] / whole[token] for token in common]))
    if abs(factor - 2) < 0.1:
        return True, "processed: after the temperature, as training computes them"
    text = f"raw: those of temperature 1 at every temperature (factor {factor:.2f}, not 2)"
    if abs(factor - 1) > 0.1:
        text = f"neither raw nor processed: at half the temperature their distances grow by {factor:.2f}"
    way_out = "start vLLM with --logprobs-mode processed_logprobs, or train at temperature 1 with logprobs_mode"
    return False, text, f"{way_out} raw_logprobs"


def _distances(completion: Completion) -> dict[int, float]:
    assert completion.top_ids is not None
    assert completion.top_logprobs is not None
    values = completion.top_logprobs[0].astype(float)
    return dict(zip(completion.top_ids[0].tolist(), (values - values[0]).tolist(), strict=True))


def _seeds(sampler: ServerSampler) -> Found:
    request = SampleRequest(_PROMPT, 4, 8, seed=1)
    first, again = ([completion.token_ids.tolist() for completion in sampler.sample([request])[0]] for _ in range(2))
    if len({tuple(ids) for ids in first}) == 1:
        return False, "four seeds gave the same tokens", "seeds are not honoured"
    if first != again:
        return None, "the same seed gives other tokens: resumed runs sample again what was not yet in the journal"
    return True, "the same seed gives the same tokens"


def _lengths(server: Server, model: "PreTrainedModel | None") -> Found:
    from treewise.nn.model_checks import num_positions

    served = server.call("/v1/models")["data"][0].get("max_model_len")
    own = None if model is None else num_positions(model.config)
    if served is None:
        return None, "the server does not say how long a row may get"
    text = f"up to {served:,} tokens" + ("" if own is None else f"; the model's positions reach {own:,}")
    if own is not None and served < own:
        return False, text, f"give the run max_length: {served}, or raise --max-model-len"
    return True, text


def _weights(sampler: ServerSampler, model: Any) -> Found:
    """At temperature 1, where raw and processed log-probs are the same."""
    from treewise.engine.engine import TreeEngine

    request, num_prompt = SampleRequest(_PROMPT, 4, 16, seed=2), len(_PROMPT)
    rows = [
        Trajectory(
            np.concatenate([_PROMPT, completion.token_ids]),
            np.repeat([0.0, 1.0], [num_prompt, completion.num_tokens]),
            sampler_logprobs=np.concatenate([np.zeros(num_prompt), completion.logprobs]),
        )
        for completion in sampler.sample([request])[0]
    ]
    scored = TreeEngine(model).scored(rows, stream="old_logprobs")
    gap = logprob_gap(scored)
    pairs: list[tuple[Any, Any]] = [(row.old_logprobs, row.sampler_logprobs) for row in scored]
    most = max(float(np.abs(own - served).max()) for own, served in pairs)
    text = f"log-probs differ from the model's by {most:.1e} at most (logprob_gap {gap:.6f}; 1: none)"
    way_out = "other weights, or a coarser dtype; start it from the model's folder (a run hands them over at its start)"
    return (True, text) if gap <= MAX_GAP else (False, text, way_out)


def _candidates(sampler: ServerSampler) -> Found:
    for count in (sampler.num_entropy_top, NUM_TOP):
        try:
            _one(sampler, SampleRequest(_PROMPT, max_new_tokens=1, num_top=count))
        except SamplerError:
            continue
        return True, f"{count} or more log-probs a token: branching by lcr and entropy"
    way_out = "branching by lcr and entropy needs them: start vLLM with --max-logprobs 20"
    return False, f"fewer than {NUM_TOP} log-probs a token", way_out


def _restarts(server: Server) -> Found:
    if server.start() is not None:
        return True, "a server that is started anew is noticed, and gets the weights again"
    return (
        None,
        "the server does not tell one start from another: only a lost connection makes it get the weights again",
    )


def _handing_over(server: Server) -> Found:
    """In which ways the server takes weights from a folder."""
    ways = {"reload": "/collective_rpc", "adapter": "/v1/load_lora_adapter"}
    found = [way for way, path in ways.items() if server.has(path)]
    way_out = "start vLLM with VLLM_SERVER_DEV_MODE=1 for weights: reload"
    if not found:
        way_out += ", or with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora for weights: adapter"
        return False, "the server takes no weights from a folder", way_out
    return True, f"weights: {' or '.join(found)}", "" if "reload" in found else way_out


def _one(sampler: ServerSampler, request: SampleRequest) -> Completion:
    return sampler.sample([request])[0][0]
