"""`treewise record`: the endpoint alone. Any key names an episode, and what an episode sampled becomes rows of data.

An episode begins with the first call of a key (or `POST /v1/episodes`, which gives out a key), and ends with
`POST /v1/episodes/end`, after `idle_seconds` without a call, or with the server.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from treewise.errors import num
from treewise.rl.agents.batching import Batcher
from treewise.rl.agents.endpoint import Endpoint
from treewise.rl.agents.episodes import Episode, Episodes
from treewise.rl.agents.forks import AGAIN, BRANCHED, NEW
from treewise.rl.agents.record_settings import RecordSettings
from treewise.rl.agents.recording import Account
from treewise.rl.agents.stop_ids import stop_ids_of
from treewise.rl.agents.writing import Writer
from treewise.rl.samplers import Sampler

logger = logging.getLogger("treewise")


class RowsFile:
    """Rows of episodes as they end, each episode's at once, and what they add up to.

    say: is given a line for each episode.
    """

    def __init__(self, path: Path, tokenizer: Any, say: Callable[[str], object] = lambda _: None) -> None:
        self.path, self.num_rows, self.num_episodes = path, 0, 0
        self.total, self.reasons = Account(), Counter[str]()
        self._tokenizer, self._say = tokenizer, say
        self._names: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, episode: Episode) -> dict[str, Any]:
        """Writes the rows of an episode that has ended; what they are."""
        rows, account = episode.rows()
        with self._lock:
            self._names[episode.name] += 1
            number = self._names[episode.name]
            name = episode.name if number == 1 else f"{episode.name}-{number}"
            written = [self._with_text({**row, "rollout": name}) for row in rows]
            self._write(written)
            for kind, value in asdict(account).items():
                setattr(self.total, kind, getattr(self.total, kind) + value)
            self.reasons += episode.recording.reasons
            self.num_rows, self.num_episodes = self.num_rows + len(rows), self.num_episodes + 1
        if account.sampled != account.recorded + account.context or account.recorded != account.trained:
            logger.error("episode %s: %s do not add up; this is a fault of treewise, please report it", name, account)
        reward = "" if episode.reward is None else f", reward {episode.reward:g}"
        self._say(f"{name}: {num(account.calls, 'call')}, {tokens_line(account)}, {num(len(rows), 'row')}{reward}")
        return {"rollout": name, "rows": len(rows), **asdict(account), "forks": dict(episode.recording.reasons)}

    def summary(self) -> str:
        """Of all episodes, for a terminal."""
        lines = [
            f"{num(self.num_episodes, 'episode')}, {num(self.total.calls, 'call')}, {num(self.num_rows, 'row')} in "
            f"{self.path}",
            tokens_line(self.total),
            *(f"{count:>6,} {reason}" for reason, count in self.reasons.most_common()),
        ]
        return "\n".join(lines)

    def _with_text(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with its text beside it, for people; log-probs are null where nothing was sampled."""
        ids, weights = row["token_ids"], row["loss_weights"]
        first = int(np.argmax(np.array(weights) > 0))
        logprobs = [value if weight else None for value, weight in zip(row["sampler_logprobs"], weights, strict=True)]
        texts = [self._tokenizer.decode(part) for part in (ids[:first], ids[first:])]
        return {**row, "sampler_logprobs": logprobs, "prompt_text": texts[0], "completion_text": texts[1]}

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("ab") as stream:
            stream.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            stream.flush()
            os.fsync(stream.fileno())


def tokens_line(account: Account) -> str:
    """`12 tokens sampled = 12 recorded = 12 trained`, and what was written again."""
    context = f" + {account.context:,} context" if account.context else ""
    again = f", {account.again:,} written again at forks" if account.again else ""
    recorded, trained = f"{account.recorded:,} recorded{context}", f"{account.trained:,} trained{context}"
    return f"{num(account.sampled, 'token')} sampled = {recorded} = {trained}{again}"


def forks_of(reasons: Counter[str]) -> dict[str, int]:
    """The reasons for which something was written again."""
    return {reason: count for reason, count in reasons.items() if reason not in (NEW, AGAIN, BRANCHED)}


def record(settings: RecordSettings, say: Callable[[str], object]) -> None:
    """Serves until a signal ends it; then all episodes end, and their rows are written.

    Raises:
        ConfigError: the model cannot be sampled from, or the address not be listened on.
    """
    tokenizer, sampler, most, stop_ids = loaded(settings)
    limits = settings.of_endpoint(most)
    writer = Writer(tokenizer, settings.chat_template, keeps_thinking=limits.keeps_thinking)
    batcher = Batcher(sampler)
    episodes = Episodes(writer, batcher, limits, stop_ids, takes_any_key=True)
    file = RowsFile(Path(settings.output), tokenizer, say)
    is_over = threading.Event()

    def close() -> None:  # while the server ends: a signal may end the process once it has
        is_over.set()
        for episode in episodes.all_open:
            episodes.end(episode)
            file.add(episode)
        batcher.close()
        sampler.close()
        say("\n".join([file.summary(), *(f"note: {note}" for note in writer.notes)]))

    endpoint = Endpoint(
        episodes,
        name=settings.model,
        host=settings.host,
        token=settings.token,
        on_end=file.add,
        on_close=close,
    )
    say(f"tool calls and thinking are read by: {writer.template_of({})[1].name}")
    address = f"http://{settings.host}:{settings.port}"
    say(f"OPENAI_BASE_URL={address}/v1 ANTHROPIC_BASE_URL={address}")
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.touch()
    if settings.idle_seconds:
        watch = threading.Thread(target=_end_idle, args=(episodes, file, settings.idle_seconds, is_over), daemon=True)
        watch.start()
    config = uvicorn.Config(
        endpoint.app(),
        settings.host,
        settings.port,
        access_log=False,
        timeout_graceful_shutdown=2,
        ws="none",
        http="h11",
    )
    uvicorn.Server(config).run()  # prints the address


def loaded(settings: RecordSettings) -> tuple[Any, Sampler, int | None, list[int]]:
    """The tokenizer, the sampler, the tokens that the model follows, and the ids that end a turn."""
    from treewise.models.load_model import load_config, load_tokenizer, load_weights
    from treewise.nn.device import chosen_device
    from treewise.nn.model_checks import length_limit, num_positions
    from treewise.rl.samplers import sampler_named

    tokenizer, given = load_tokenizer(settings.model), dict(settings.sampler_settings or {})
    if settings.sampler != "transformers":
        most = num_positions(load_config(settings.model))
        sampler = sampler_named(settings.sampler, {"weights": "fixed", **given}, None)  # type: ignore[arg-type]
        return tokenizer, sampler, most, stop_ids_of(tokenizer, settings.chat_template, None)
    model = load_weights(settings.model, None, settings.dtype)
    model = model.to(chosen_device(None if settings.device == "auto" else settings.device)).eval()
    found = [num_positions(model.config), (length_limit(model) or (None,))[0]]
    most = min((limit for limit in found if limit is not None), default=None)
    sampler = sampler_named(settings.sampler, given, model)
    return tokenizer, sampler, most, stop_ids_of(tokenizer, settings.chat_template, model)


def _end_idle(episodes: Episodes, file: RowsFile, seconds: float, is_over: threading.Event) -> None:
    while not is_over.wait(min(seconds / 4, 10.0)):
        for episode in episodes.all_open:
            if time.monotonic() - episode.last_call > seconds:
                episodes.end(episode)
                file.add(episode)
