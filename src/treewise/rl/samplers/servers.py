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
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from treewise.data.io.field_checks import printable
from treewise.distributed import ranks
from treewise.errors import ConfigError, SamplerError, check_choice, pip_install
from treewise.rl.samplers.protocol import Completion, SampleRequest
from treewise.rl.samplers.server_answers import (
    LOGPROBS_MODES,
    answered,
    question,
    refuse_unanswerable,
)
from treewise.rl.samplers.server_weights import Handover, Held

logger = logging.getLogger("treewise")

MAX_STARTS = 3  # of a server, for which a batch is sampled once more
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_PATH = "/v1/completions"


class Server:
    """One server: where it is, calls to it, and whether it may have lost the weights that it was given.

    url: with or without `/v1`. patience_seconds: how long a call is tried again while the server is away or busy.
    """

    def __init__(self, url: str, client: Any, patience_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.lock = threading.Lock()
        self.was_away = False
        self.num_trees = 0
        self._client = client
        self._patience = patience_seconds

    def call(
        self,
        path: str,
        payload: Any = None,
        *,
        retried: Sequence[int] = RETRIED,
        before: Callable[[], None] | None = None,
    ) -> Any:
        """The answer's JSON (its text, where it is none) to a POST of `payload`, or to a GET where there is none.

        Parameters:
            retried: statuses after which the same call may succeed; a lost connection is always tried again.
            before: is called before each try.

        Raises:
            SamplerError: the server refuses, or does not answer for `patience_seconds`.
        """
        import httpx

        end, delay = time.monotonic() + self._patience, min(0.5, self._patience / 8)
        while True:
            try:
                if before is not None:
                    before()
                return self._once(path, payload)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status not in retried or time.monotonic() > end:
                    text = printable(error.response.text[:300])
                    raise SamplerError(f"{self.url}{path}: the server answers {status}: {text}") from error
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    why = f"{type(error).__name__}: {printable(error)}"
                    away = SamplerError(f"{self.url}{path}: no answer for {self._patience:g} s ({why}).")
                    away.is_away = True
                    raise away from error
            time.sleep(random.uniform(0.0, delay))  # not all of them at once
            delay = min(2 * delay, 10.0)

    def start(self) -> str | None:
        """What tells one start of the server from another: the time of its start, out of vLLM's metrics. None where it
        does not say.
        """
        try:
            lines = str(self.call("/metrics")).splitlines()
        except SamplerError:
            return None
        return next((line.split()[1] for line in lines if line.startswith("process_start_time_seconds ")), None)

    def has(self, path: str) -> bool:
        """Whether it has a call: one without its fields is refused there, and not found elsewhere."""
        try:
            self.call(path, {}, retried=())
        except SamplerError as error:
            return not any(f" {status}: " in str(error) for status in (404, 405))
        return True

    def _once(self, path: str, payload: Any) -> Any:
        import httpx

        try:
            response = self._client.request("GET" if payload is None else "POST", self.url + path, json=payload)
        except httpx.TransportError:
            self.was_away = True
            raise
        response.raise_for_status()
        try:
            return response.json()
        except ValueError:
            return response.text


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
        self._client = httpx.Client(timeout=timeout_seconds, headers=headers, limits=limits)
        self.servers = [Server(url, self._client, patience_seconds) for url in urls]
        self.model, self.logprobs_mode = model, logprobs_mode
        self.max_concurrent, self.num_entropy_top = max_concurrent, num_entropy_top
        self._weights = Handover(weights, self.servers, weights_folder)
        self._held = Held()
        self._homes: dict[int, Server] = {}
        self._lock = threading.Lock()  # several threads may sample

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """See `Sampler`; several threads may call it.

        Raises:
            ConfigError: a request that the server's log-probs cannot answer.
            SamplerError: a server does not answer, refuses, or answers without token ids.
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
        self._name_model()
        for _ in range(MAX_STARTS):
            starts = dict(self._held.starts)
            if len(jobs) == 1:
                flat = [self._complete(*jobs[0])]
            else:
                with ThreadPoolExecutor(max_workers=min(self.max_concurrent, len(jobs))) as executor:
                    flat = list(executor.map(lambda job: self._complete(*job), jobs))
            if not self._were_restarted(dict.fromkeys(homes), starts):
                break
        else:
            raise SamplerError(
                f"a server was started anew while it sampled, {MAX_STARTS} times for one batch; or an address is that "
                "of several servers, which take weights one by one: give base_url the address of each."
            )
        rest = iter(flat)
        return [tuple(next(rest) for _ in range(request.num_continuations)) for request in requests]

    def update(self, model: nn.Module) -> None:
        """Hands the weights of the first process's model to all servers; each process of a run calls this.

        Raises:
            ConfigError: it was not said how (`weights`), or that way cannot take this model.
            SamplerError: a server does not take them.
        """
        self.begin_update(model)()

    def begin_update(self, model: nn.Module) -> Callable[[], None]:
        """See `Sampler`: weights that go through a folder are written first, and loaded then."""
        load: list[Callable[[], Held]] = []
        ranks.on_first_rank(lambda: load.append(self._weights.hand_over(model)))

        def finish() -> None:
            self._held = ranks.on_first_rank(lambda: load[0]())
            self._homes.clear()  # what servers computed for these trees is of the weights before
            for server in self.servers:
                server.was_away, server.num_trees = False, 0

        return finish

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

    def _name_model(self) -> None:
        """The name by which requests ask for the model. Raises `SamplerError` where a server names none or several."""
        if self.model is None:
            url, listed = self.servers[0].url, self.servers[0].call("/v1/models")
            try:
                names = [model["id"] for model in listed["data"] if not model.get("parent")]  # adapters have one
            except (KeyError, TypeError, AttributeError):
                raise SamplerError(f"{url}/v1/models does not list models; is this a server of completions?") from None
            if len(names) != 1:
                raise SamplerError(f"{url} serves {', '.join(names) or 'no model'}; give model=.")
            self.model = names[0]

    def _complete(self, server: Server, request: SampleRequest, continuation: int) -> Completion:
        num_top = max(request.num_top, self.num_entropy_top if request.want_entropy else 0)
        payload = question(request, continuation, self._held.adapter or str(self.model), num_top)
        answer = server.call(_PATH, payload, before=lambda: self._restore(server))
        return answered(answer, request, num_top, server.url + _PATH)

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
