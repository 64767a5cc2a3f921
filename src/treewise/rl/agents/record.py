"""`treewise record`: the endpoint alone. Any key names an episode, and what an episode sampled becomes rows of data.

An episode begins with the first call of a key (or `POST /v1/episodes`, which gives out a key), and ends with
`POST /v1/episodes/end`, after `idle_seconds` without a call, or with the server.
"""

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

import numpy as np

from treewise.base.durable import append
from treewise.base.http.server import listening_socket, serve_on, url_of
from treewise.base.progress import busy_with
from treewise.errors import DiskError, num
from treewise.rl.agents.endpoint import Endpoint
from treewise.rl.agents.episodes import Episode, Episodes
from treewise.rl.agents.record_settings import RecordSettings
from treewise.rl.agents.recording import Account
from treewise.rl.agents.rows import AgentRow
from treewise.rl.agents.wire.protocol import addresses
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import Sampler
from treewise.rl.samplers.batching import Batcher

logger = logging.getLogger("treewise")
LAST_SECONDS, SECONDS_BETWEEN_TRIES = 60.0, 5.0  # that the last rows wait for room


class RowsFile:
    """Rows of episodes as they end, each episode's at once, and what they add up to.

    say: is given a line for each episode.
    """

    def __init__(self, path: Path, tokenizer: Any, say: Callable[[str], object] = lambda _: None) -> None:
        self.path, self.num_episodes = path, 0
        self.rows_in = Counter[Path]()
        self.total, self.reasons, self.ignored = Account(), Counter[str](), Counter[str]()
        self._tokenizer, self._say = tokenizer, say
        self._names: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, episode: Episode) -> dict[str, object]:
        """Writes the rows of an episode that has ended; what they are.

        Raises:
            DiskError: they cannot be written; none is, and the episode may be added again.
        """
        rows, account = episode.rows()
        with self._lock:
            number = self._names[episode.name] + 1
            name = episode.name if number == 1 else f"{episode.name}-{number}"
            for row in rows:
                row["rollout"] = name
            written = [self._with_text(row) for row in rows]
            append(self.path, b"".join(json.dumps(row).encode() + b"\n" for row in written))
            self._names[episode.name] = number
            for kind, value in asdict(account).items():
                setattr(self.total, kind, getattr(self.total, kind) + value)
            self.reasons += episode.recording.reasons
            self.ignored += episode.ignored
            self.rows_in[self.path] += len(rows)
            self.num_episodes += 1
        if account.fault is not None:
            logger.error("episode %s: %s", name, account.fault)
        reward = "" if episode.reward is None else f", reward {episode.reward:g}"
        self._say(f"{name}: {num(account.calls, 'call')}, {tokens_line(account)}, {num(len(rows), 'row')}{reward}")
        return {"rollout": name, "rows": len(rows), **asdict(account), "forks": dict(episode.recording.reasons)}

    def add_last(self, episode: Episode) -> dict[str, object]:
        """The same where nobody tries again. Without room the rows go to a file in the folder for temporary ones, which
        a line names; without room there, too, they wait for some, up to `LAST_SECONDS`."""
        path, end = self.path, time.monotonic() + LAST_SECONDS
        while True:
            try:
                return self.add(episode)
            except DiskError as error:
                if self.path == path:
                    self.path = Path(tempfile.gettempdir()) / f"treewise-{os.getpid()}-{path.name}"
                    self._say(f"{error} The rows of {episode.name} go to {self.path}; append them to {path}.")
                elif time.monotonic() > end:
                    raise
                else:
                    self._say(f"{error} Waiting for room for the rows of {episode.name}.")
                    time.sleep(SECONDS_BETWEEN_TRIES)

    def close(self) -> None:
        """Leaves no file without a row."""
        if self.path.is_file() and not self.path.stat().st_size:
            self.path.unlink()

    def summary(self) -> str:
        """Of all episodes, for a terminal."""
        lines = [
            f"{num(self.num_episodes, 'episode')}, {num(self.total.calls, 'call')}, "
            + (" and ".join(f"{num(count, 'row')} in {path}" for path, count in self.rows_in.items()) or "no row"),
            tokens_line(self.total),
            *(f"{count:>6,} {reason}" for reason, count in self.reasons.most_common()),
            *(f"{count:>6,} calls with {name}, ignored" for name, count in self.ignored.most_common()),
        ]
        return "\n".join(lines)

    def _with_text(self, row: AgentRow) -> dict[str, object]:
        """A row with its text beside it, for people; log-probs are null where nothing was sampled."""
        ids, weights = row["token_ids"], row["loss_weights"]
        first = int(np.argmax(np.array(weights) > 0))
        logprobs = [value if weight else None for value, weight in zip(row["sampler_logprobs"], weights, strict=True)]
        texts = [self._tokenizer.decode(part) for part in (ids[:first], ids[first:])]
        return {**row, "sampler_logprobs": logprobs, "prompt_text": texts[0], "completion_text": texts[1]}


def tokens_line(account: Account) -> str:
    """`12 tokens sampled = 12 recorded = 12 trained`, and what was written again."""
    context = f" + {account.context:,} context" if account.context else ""
    again = f", {account.again:,} written again at forks" if account.again else ""
    again += f", {account.beyond:,} beyond the ends of turns" if account.beyond else ""
    recorded, trained = f"{account.recorded:,} recorded{context}", f"{account.trained:,} trained{context}"
    return f"{num(account.sampled, 'token')} sampled = {recorded} = {trained}{again}"


def record(settings: RecordSettings, say: Callable[[str], object]) -> None:
    """Serves until a signal ends it; then all episodes end, and their rows are written.

    Raises:
        ConfigError: the model cannot be sampled from, or the address not be listened on.
        OSError: the file of rows cannot be made.
    """
    path = Path(settings.output)
    with listening_socket(settings.host, settings.port) as own:  # before the model is loaded, which takes long
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        try:
            _serve(settings, own, path, say)
        finally:  # also where it did not begin
            RowsFile(path, None).close()


def _serve(settings: RecordSettings, own: socket.socket, path: Path, say: Callable[[str], object]) -> None:
    tokenizer, sampler, most, generation_config = loaded(settings)
    limits = settings.of_endpoint(most)
    ways: Any = {"on_hidden": "warn", "keeps_thinking": limits.keeps_thinking}
    chat = ChatTokens(tokenizer, settings.chat_template, settings.template_date, generation_config, **ways)
    batcher = Batcher(sampler).serve()
    episodes = Episodes(chat, batcher, limits, takes_any_key=True)
    file = RowsFile(path, tokenizer, say)
    is_over = threading.Event()

    def close() -> None:  # while the server ends: a signal may end the process once it has
        is_over.set()
        for episode in episodes.all_open:
            try:
                episodes.end(episode, file.add_last, 0.0)
            except DiskError as error:
                logger.error("%s Episode %s is lost.", error, episode.name)
        batcher.close()
        sampler.close()
        say("\n".join([file.summary(), *(f"note: {note}" for note in chat.notes)]))
        file.close()

    endpoint = Endpoint(
        episodes,
        name=settings.model,
        host=settings.host,
        token=settings.token,
        on_end=file.add,
        on_close=close,
    )
    say(f"tool calls and thinking are read by: {chat.reader.name}")
    address = url_of(own, settings.host)
    # An agent's own client would ask a proxy for this address.
    direct = f" NO_PROXY={settings.host}" if getproxies() and not proxy_bypass(settings.host) else ""
    say(" ".join(f"{name}={value}" for name, value in addresses(address).items()) + direct)
    if settings.idle_seconds:
        watch = threading.Thread(target=_end_idle, args=(episodes, file, settings.idle_seconds, is_over), daemon=True)
        watch.start()
    with busy_with("serving"):
        serve_on(own, settings.host, endpoint.app(), timeout_graceful_shutdown=2)


def loaded(settings: RecordSettings) -> tuple[Any, Sampler, int | None, Any]:
    """The tokenizer, the sampler, the tokens that the model follows, and the generation config that it came with."""
    from treewise.models.load_model import load_config, load_generation_config, load_tokenizer, load_weights
    from treewise.nn.device import chosen_device, on_device
    from treewise.nn.model_checks import num_positions
    from treewise.rl.recorder.lengths import longest_row
    from treewise.rl.samplers import sampler_named
    from treewise.rl.samplers.by_name import entry_of, row_limit

    tokenizer, given = load_tokenizer(settings.model), dict(settings.sampler_settings or {})
    if entry_of(settings.sampler).is_on_servers:
        sampler = sampler_named(settings.sampler, given, None, of_servers={"weights": "fixed"})
        known = [num_positions(load_config(settings.model)), row_limit(sampler)]
        most = min((limit for limit in known if limit is not None), default=None)
        return tokenizer, sampler, most, load_generation_config(settings.model)
    model = load_weights(settings.model, None, settings.dtype)
    model = on_device(model, chosen_device(None if settings.device == "auto" else settings.device)).eval()
    sampler = sampler_named(settings.sampler, given, model)
    return tokenizer, sampler, longest_row(model), model.generation_config


def _end_idle(episodes: Episodes, file: RowsFile, seconds: float, is_over: threading.Event) -> None:
    told = set[str]()
    while not is_over.wait(min(seconds / 4, 10.0)):
        for episode in episodes.all_open:
            if time.monotonic() - episode.last_call > seconds:
                try:
                    episodes.end(episode, file.add)
                except DiskError as error:  # it is ended again at the next look
                    if episode.key not in told:
                        logger.warning("%s Episode %s waits for it.", error, episode.name)
                    told.add(episode.key)
