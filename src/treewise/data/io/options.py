"""Options of how records become token sequences, and the report of a load."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from typing import Annotated, Any, Literal

from annotated_types import Ge

from treewise.data.io.field_checks import shown
from treewise.data.io.files import DEFAULT_MAX_RECORD_BYTES
from treewise.errors import ConfigError, check_fields, did_you_mean


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How chat records are rendered and grouped.

    Parameters:
        thinking: `as_inference` renders every call as the model saw it, so the tree forks where the template drops
            earlier reasoning; `keep` renders one sequence per record with all reasoning kept.
        train_on: which assistant turns are trained. A turn of `weight` 0 never is.
        merge_siblings: merge declared siblings with equal tokens, or keep them apart.
        routing_replay: of recorded experts (`routed_experts`): `exact` trains through them, and trajectories part where
            they differ; `by_tokens` merges by tokens alone and gives all the experts of the first, which is not exact;
            `off` leaves them out.
        group_by: field that names a record's training tree, in place of `group` or `task_id`.
        max_length: longest trajectory allowed, in tokens; a longer one is an error, never cut.
        chat_template: a Jinja template, a file that holds one, or `chatml`; the tokenizer's own where not given.
        on_drift: `warn` or `error` where a row's text gives other token ids than the row holds, which are trained.
        on_hidden: `error` or `warn` where a message holds a field that the chat template does not write.
        max_record_bytes: longest line (or `.json` file), in bytes after decompression; a longer one is an error.
        max_image_bytes: largest image, in bytes as stored (a file, base64 or a download); a larger one is an error.
        images_from_network: download the images of http and https addresses, which are an error otherwise.
        images_from_local_network: also those of addresses of this machine and its private network.
        image_folder: where image files may lie besides the folder of the data's file, with all below; "/" for anywhere.
        chat_template_kwargs: further variables for the template (`enable_thinking`, ...).
        template_date: the date that a chat template writes as today's, as 2026-11-28; that of the first start where not
            given.

    Raises:
        ConfigError: a value outside its choices.
    """

    thinking: Literal["as_inference", "keep"] = "as_inference"
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
    merge_siblings: bool = True
    routing_replay: Literal["exact", "by_tokens", "off"] = "exact"
    group_by: str | None = None
    max_length: Annotated[int, Ge(2)] | None = None
    chat_template: str | None = None
    on_drift: Literal["warn", "error"] = "warn"
    on_hidden: Literal["error", "warn"] = "error"
    max_record_bytes: Annotated[int, Ge(1)] = DEFAULT_MAX_RECORD_BYTES
    max_image_bytes: Annotated[int, Ge(1)] = 50_000_000
    images_from_network: bool = False
    images_from_local_network: bool = False
    image_folder: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_date(self.template_date)
        try:
            json.dumps(dict(self.chat_template_kwargs))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"chat_template_kwargs must be plain JSON values ({error}).") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RenderOptions":
        """Options from a configuration file; an unknown key is an error that names the nearest one."""
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known, f"Known: {', '.join(known)}.")
                raise ConfigError(f"unknown data option {key!r}.{hint}")
        return cls(**values)

    def to_json(self) -> str:
        """One line that is equal for equal options; without the date, which few templates write."""
        values = asdict(self) | {"chat_template_kwargs": dict(self.chat_template_kwargs)}
        return json.dumps({name: value for name, value in values.items() if name != "template_date"}, sort_keys=True)


def today_as() -> str:
    """Today's date as a setting."""
    return date.today().isoformat()


def check_date(value: str | None) -> None:
    """Raises `ConfigError` where `template_date` is no date."""
    with suppress(ValueError):
        if value is None or date.fromisoformat(value).isoformat() == value:
            return
    raise ConfigError(f"template_date is {shown(value)}; write a date as 2026-11-28.")


@dataclass(slots=True)
class LoadReport:
    """What was read: counts, records left out with the reason, and findings that are likely mistakes.

    `num_compared` rows hold both token ids and text; the text of `num_drifted` of them gives other ids. `unused_keys`
    are keys that nothing reads, with the number of records that hold each.
    `num_preferences` records are preference pairs or labelled completions, which SFT must not imitate.
    `dates` are those that chat templates wrote as today's.
    """

    num_files: int = 0
    num_records: int = 0
    num_trees: int = 0
    num_trajectories: int = 0
    num_compared: int = 0
    num_drifted: int = 0
    unused_keys: dict[str, int] = field(default_factory=dict)
    num_preferences: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)

    def dropped_lines(self) -> list[str]:
        """`rows.jsonl:3: why` for every record that was left out; errors name its place themselves."""
        return [why if why.startswith(location) else f"{location}: {why}" for location, why in self.dropped]

    def unused_key_lines(self) -> list[str]:
        """`meta (367 records)` for every key that nothing reads, the most frequent first."""
        counts = sorted(self.unused_keys.items(), key=lambda item: -item[1])
        return [f"{shown(name)[1:-1]} ({count:,} {'record' if count == 1 else 'records'})" for name, count in counts]

    @classmethod
    def joined(cls, reports: "Sequence[LoadReport]", num_trees: int) -> "LoadReport":
        """The report of several data sets, of whose trees `num_trees` are used."""
        joined = cls()
        for report in reports:
            for item in fields(cls):
                own = getattr(report, item.name)
                so_far = getattr(joined, item.name)
                is_count = isinstance(own, dict)
                setattr(joined, item.name, dict(Counter(so_far) + Counter(own)) if is_count else so_far + own)
        joined.num_trees = num_trees
        return joined
