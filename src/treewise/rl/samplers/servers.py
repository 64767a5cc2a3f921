"""A sampler on one or several servers that complete token ids: a call per continuation, answers checked and cut.

`ServerSampler` speaks OpenAI's `POST /v1/completions` as vLLM extends it (`server_answers.py`), and hands the weights
over after each update (`server_weights.py`). Start vLLM with
`--logprobs-mode processed_logprobs`; its default, raw log-probs, holds at temperature 1 alone. `treewise doctor
--sampler URL` says what a server lacks.

Rollouts of a tree share prefixes, so each tree stays on the server that its first request went to: the one with the
fewest trees at that time. A server that goes away is waited for. It comes back with the weights that it was started
with, so it gets the newest again before it is asked: after a failed connection, and after a batch during which it was
started anew, which is then sampled once more. Seeds are the request's, so neither changes what is sampled.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from treewise.base import features
from treewise.base.addresses import client_settings
from treewise.distributed import ranks
from treewise.errors import ConfigError, RequestRefusedError, SamplerError, check_choice, pip_install
from treewise.rl.samplers.protocol import Completion, SampleRequest, TextStops
from treewise.rl.samplers.server import Server
from treewise.rl.samplers.server_answers import (
    LOGPROBS_MODES,
    answered,
    prompt_logprobs,
    question,
    question_of_prompt,
    question_of_scores,
    refuse_unanswerable,
    scored,
)
from treewise.rl.samplers.server_weights import Handover, Held
from treewise.rl.tasks.calls import Beside

if TYPE_CHECKING:
    from treewise.trainer.saved_model import Reading

logger = logging.getLogger("treewise")

MAX_STARTS = 3  # of a server, for which a batch is sampled once more
OF_ONE_REQUEST = (400, 413, 422)  # statuses that say what is wrong with a request, not with the server
_PATH = "/v1/completions"


class ServerSampler:
    """A sampler on servers. Needs the extra `rl` (httpx).

    Parameters:
        base_url: of one server or several, with or without `/v1`.
        model: the name that the servers give the model; None: the one that they name.
        weights: how servers get them after each update (`server_weights.WEIGHTS`), or a function of the model that
            hands them over; None is an error at the first update.
        weights_folder: where weights are written for the servers, which must see it under the same path; None: a
            temporary one of this machine.
        logprobs_mode: what the servers' log-probs are; see `refuse_unanswerable`.
        num_entropy_top: most likely log-probs from which entropies are bounded; vLLM gives 20 unless it was started
            with another `--max-logprobs`.
        max_concurrent: calls that are under way at once.
        timeout_seconds: of one call. patience_seconds: how long a server that is away or busy is waited for.

    Raises:
        ConfigError: settings that are unknown or contradict one another.
    """

    takes_rules = True

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str | None = None,
        *,
        weights: str | Callable[[nn.Module], None] | None = None,
        weights_folder: str | None = None,
        logprobs_mode: str = "processed_logprobs",
        num_entropy_top: int = 20,
        api_key: str | None = None,
        max_concurrent: int = 32,
        timeout_seconds: float = 600.0,
        patience_seconds: float = 300.0,
    ) -> None:
        check_choice("logprobs_mode", logprobs_mode, LOGPROBS_MODES)
        if max_concurrent < 1 or num_entropy_top < 1:
            raise ConfigError(
                f"max_concurrent ({max_concurrent}) and num_entropy_top ({num_entropy_top}) must be at least 1."
            )
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not urls or any(not str(url).startswith("http") for url in urls):
            raise ConfigError(f"base_url={base_url!r}; give the address of a server, as in http://localhost:8000/v1.")
        try:
            import httpx
        except ImportError:
            raise ConfigError(f"a sampler on a server needs httpx: {pip_install('httpx')}.") from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=max_concurrent)
        try:
            self._client = httpx.Client(headers=headers, limits=limits, **client_settings(urls, timeout_seconds))
        except (ImportError, ValueError) as error:  # of a proxy that the environment names
            raise ConfigError(f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: {error}.") from None
        self.servers = [Server(url, self._client, patience_seconds) for url in urls]
        self.model, self.logprobs_mode = model, logprobs_mode
        self.max_concurrent, self.num_entropy_top = max_concurrent, num_entropy_top
        self._weights = Handover(weights, self.servers, weights_folder)
        self._held = Held()
        self._homes: dict[int, Server] = {}
        self._lock = threading.Lock()  # several threads may sample
        self.max_length: int | None = None  # of a row, where the servers say
        self._reaching, self._has_reached = threading.Lock(), False

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """See `Sampler`; several threads may call it.

        Raises:
            ConfigError: a request that the server's log-probs cannot answer.
            SamplerError: a server does not answer, refuses, or answers without token ids; `RequestRefusedError` where
                it answers other requests.
        """
        for request in requests:
            refuse_unanswerable(request, self.logprobs_mode)
        homes = [self._home(request) for request in requests]
        jobs = [
            (server, request, i)
            for server, request in zip(homes, requests, strict=True)
            for i in range(request.num_continuations)
        ]
        if not jobs:
            return []
        self.reach()
        for _ in range(MAX_STARTS):
            starts = dict(self._held.starts)
            flat = self._completed(jobs)
            if not self._were_restarted(dict.fromkeys(homes), starts):
                break
        else:
            raise SamplerError(
                f"a server was started anew while it sampled, {MAX_STARTS} times for one batch; or an address is that "
                "of several servers, which take weights one by one: give base_url the address of each."
            )
        rest = iter(flat)
        return [tuple(next(rest) for _ in range(request.num_continuations)) for request in requests]

    def _completed(self, jobs: Sequence[tuple[Server, SampleRequest, int]]) -> list[Completion]:
        """Side by side, in threads that hold up no exit."""
        if len(jobs) == 1:
            return [self._complete(*jobs[0])]
        found: dict[int, Completion] = {}
        with Beside(self.max_concurrent) as threads:
            for number, job in enumerate(jobs):
                threads.start(number, partial(self._complete, *job))
            for _ in jobs:
                number, found[number] = threads.take()
        return [found[number] for number in range(len(jobs))]

    def update(self, model: nn.Module) -> None:
        """Hands the weights of the first process's model to all servers; each process of a run calls this.

        Raises:
            ConfigError: it was not said how (`weights`), or that way cannot take this model.
            SamplerError: a server does not take them.
        """
        self.begin_update(model)()

    def begin_update(self, model: nn.Module) -> Callable[[], None]:
        """See `Sampler`: weights that go through a folder are written first, and loaded then."""
        self.reach()
        load: list[Callable[[], Held]] = []
        ranks.on_first_rank(lambda: load.append(self._weights.hand_over(model)))

        def finish() -> None:
            self._held = ranks.on_first_rank(lambda: load[0]())
            self._homes.clear()  # what servers computed for these trees is of the weights before
            for server in self.servers:
                server.was_away, server.num_trees = False, 0

        return finish

    def read_saved(self, folder: Path, saved: nn.Module, rows: Sequence[np.ndarray]) -> "Reading":
        """What the first server computes of rows with a saved model (`trainer/saved_model.py`); it then has again what
        it had. No other thread may sample meanwhile.
        """
        server, found = self.servers[0], []
        reading = partial(features.verified_saves.Reading, f"the server at {server.url}")
        try:
            self.reach()
            most = self.max_length or sys.maxsize  # of a row with one token behind it
            with self._weights.reading(server, folder, saved) as adapter:
                for row in rows:
                    asked = row[: most - 1].tolist()
                    answer = server.call(_PATH, question_of_prompt(asked, adapter or str(self.model)))
                    found.append(prompt_logprobs(answer, asked, server.url))
            dtype = getattr(torch, server.dtype() or "bfloat16")  # vLLM's own choice for most models
        except (ConfigError, SamplerError, OSError) as error:  # adapters that cannot be merged, no server, a full disk
            return reading(why_not=str(error).rstrip("."))
        return reading(found, dtype)

    def close(self) -> None:
        """Closes all connections."""
        self._weights.close()
        self._client.close()

    def _home(self, request: SampleRequest) -> Server:
        """Where the requests of a tree go."""
        with self._lock:
            if request.tree not in self._homes:
                self._homes[request.tree] = min(self.servers, key=lambda server: server.num_trees)
                self._homes[request.tree].num_trees += 1
            return self._homes[request.tree]

    def reach(self) -> None:
        """Asks each server, once, for its models: names those that do not answer, learns the name by which requests ask
        for the model, and how long a row may get.

        Raises:
            SamplerError: a server does not answer; or it names no model, or several, and none was given.
        """
        with self._reaching:
            if self._has_reached:
                return
            listed = [self._models_of(server) for server in self.servers]
            names = [str(model["id"]) for model in listed[0] if not model.get("parent")]  # adapters have one
            if self.model is None and len(names) != 1:
                raise SamplerError(f"{self.servers[0].url} serves {', '.join(names) or 'no model'}; give model=.")
            self.model = self.model or names[0]
            sizes = [model.get("max_model_len") for models in listed for model in models]
            self.max_length = min((size for size in sizes if isinstance(size, int)), default=None)
            self._has_reached = True

    def _models_of(self, server: Server) -> list[dict[str, Any]]:
        try:
            models: list[dict[str, Any]] = server.call("/v1/models")["data"]
            _ = [model["id"] for model in models]
        except (KeyError, TypeError, AttributeError):
            models = []
        except SamplerError as error:
            if self.model is None or not error.status:
                raise
            models = []  # a server of completions alone
        if not models and self.model is None:
            raise SamplerError(f"{server.url}/v1/models does not list models; is this a server of completions?")
        return models

    def _complete(self, server: Server, request: SampleRequest, continuation: int) -> Completion:
        num_top = max(request.num_top, self.num_entropy_top if request.want_entropy else 0)
        payload = question(request, continuation, self._held.adapter or str(self.model), num_top)
        is_over = request.is_cancelled if isinstance(request, TextStops) else bool

        def call(asked: Any) -> Any:
            try:
                return server.call(_PATH, asked, before=lambda: self._restore(server), is_over=is_over)
            except SamplerError as error:
                if not self._is_of_request(server, error):
                    raise
                raise RequestRefusedError(str(error)) from error

        found = answered(call(payload), request, num_top, server.url + _PATH)
        if "structured_outputs" in payload:
            found = scored(call(question_of_scores(request, found, payload["model"])), request, found, server.url)
        return found

    def _is_of_request(self, server: Server, error: SamplerError) -> bool:
        """Whether a server answers others than the request that it refused, or was too slow for."""
        import httpx

        is_slow = isinstance(error.__cause__, httpx.ReadTimeout)
        if error.status in OF_ONE_REQUEST or not (is_slow or error.status >= 500):
            return error.status in OF_ONE_REQUEST
        try:
            plain = SampleRequest((1,), max_new_tokens=1)
            server.call(_PATH, question(plain, 0, self._held.adapter or str(self.model), 0), retried=())
        except SamplerError:
            return False
        return True

    def _restore(self, server: Server) -> None:
        """Gives a server that was away what it should hold, if it was started anew or does not say."""
        if not server.was_away:
            return
        with server.lock:
            if server.was_away:
                known = self._held.starts.get(server.url)
                if known is None or server.start() != known:
                    self._held = self._weights.restore(server, self._held)
                server.was_away = False

    def _were_restarted(self, servers: Iterable[Server], starts: Mapping[str, str | None]) -> bool:
        """Whether a server was started anew since `starts`: some of its answers may be of the weights it began with."""
        lost = [
            server for server in servers if starts.get(server.url) is not None and server.start() != starts[server.url]
        ]
        for server in lost:
            logger.warning("%s was started anew; it gets the weights again, and the batch is repeated", server.url)
            if self._held.starts[server.url] == starts[server.url]:
                server.was_away = True
        return bool(lost)
