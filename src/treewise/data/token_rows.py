"""Rows that hold token ids already: never tokenised again, only checked, and compared with their text where given."""

import hashlib
from typing import Any

import numpy as np

from treewise.data.images import NEEDS_PROCESSOR, ImageReader
from treewise.data.io.field_checks import flat_list, number_list, shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import check_names
from treewise.data.io.rows import Row, row_from_trajectory
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.images import ImageSpan
from treewise.tree.prefix_merge import common_prefix
from treewise.tree.trajectory import STREAMS, Trajectory

Label = str | int | float | None
MAX_LOGPROB = 0.01  # engines round


def token_row(item: Placed, group: Label, rollout: Label, reader: ImageReader | None = None) -> Row:
    """A row of `token_ids`, streams and images. Log-probs may be null where the loss weight is 0 (context has none).

    reader: reads images.

    Raises:
        DataError: values that are invalid in a `Trajectory`; a missing log-prob of a trained token; an image that
            cannot be read or placed.
    """
    record, location = item.value, item.location
    check_names(record, location)
    ids = flat_list(record["token_ids"], "token_ids", location)
    weights = record.get("loss_weights")
    if isinstance(weights, int | float):
        raise DataError(f"{location}: loss_weights is one number; give one per token (0 for context), or leave it out.")
    if weights is not None:
        weights = number_list(weights, "loss_weights", location)
    streams = {name: record[name] for name in STREAMS if name in record}
    for name in streams:
        if STREAMS[name].is_logprob:
            streams[name] = _without_null_context(streams[name], weights, name, location)
    trajectory = Trajectory(
        token_ids=ids,
        **{**streams, "loss_weights": weights},
        images=tuple(row_images(item, ids, reader)),
        group=group,
        reward=record.get("reward"),
        rollout=rollout,
        source=location,
    )
    return row_from_trajectory(trajectory)


def row_images(item: Placed, token_ids: object, reader: ImageReader | None) -> list[ImageSpan]:
    """The images of a row or a node of token ids, at their placeholders.

    Raises:
        DataError: no reader, an image that cannot be read, or another number of placeholders.
    """
    if item.value.get("images") is None:
        return []
    if reader is None:
        raise DataError(f"{item.location}: the record {NEEDS_PROCESSOR}")
    ids = checks.token_ids(token_ids, item.location)
    return reader.spans(item.value["images"], ids, item.file, item.location)


def unlikely_logprobs(row: Row, location: str) -> list[str]:
    """A warning where log-probs are positive by more than rounding: probabilities, or another sign, were given."""
    warnings = []
    for name, stream in row.streams.items():
        if STREAMS[name].is_logprob and stream.max() > MAX_LOGPROB:
            at = int(np.argmax(stream))
            warnings.append(
                f"{location}: {name}[{at}] is {stream[at]:g}; natural logarithms of probabilities are at most 0."
            )
    return warnings


def doubled_tokens(row: Row, tokenizer: Any) -> list[str]:
    """What a row holds twice where a model is given or samples it once; it is trained as it is."""
    found, ids = [], row.token_ids
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    if begin is not None and begin != end and len(ids) > 1 and (ids[:2] == begin).all():
        found.append("rows of token ids begin with two begin tokens; they are trained as they are")
    weights = row.streams.get("loss_weights")
    if weights is None:
        weights = np.zeros(len(ids))
        for start, stop in zip(row.spans[::2], row.spans[1::2], strict=True):
            weights[start:stop] = 1
    if end is not None and len(ids) > 1 and (ids[-2:] == end).all() and (weights[-2:] != 0).all():
        found.append("rows of token ids train two end tokens in a row; they are trained as they are")
    return found


def prompt_group(row: Row) -> str | None:
    """A group of its own for every prompt: the tokens before the first trained one.

    None for a prompt of one token: every row may begin with it, so it identifies no prompt.
    """
    start = int(np.flatnonzero(row.streams["loss_weights"])[0])
    if start < 2:
        return None
    digest = hashlib.sha256(np.ascontiguousarray(row.token_ids[:start]).tobytes())
    for image in row.images:
        if image.start < start:
            digest.update(f"{image.start} {image.digest}".encode())
    return "prompt-" + digest.hexdigest()[:16]


def grouped_rows(item: Placed, group: Label) -> list[Row]:
    """One row for each of `seqs`: `ids`, trained spans `loss`, and log-probs of the trained tokens.

    Raises:
        DataError: spans outside the sequence or in the wrong order, or log-probs that do not align.
    """
    seqs, location = item.value["seqs"], item.location
    if not isinstance(seqs, list) or not seqs:
        raise DataError(f"{location}: seqs must be a non-empty list of {{ids, loss, ...}}.")
    rows = []
    for index, seq in enumerate(seqs):
        where = f"{location}: seqs[{index}]"
        if not isinstance(seq, dict) or "ids" not in seq or "loss" not in seq:
            raise DataError(f"{where} needs ids and loss ([[start, end], ...]).")
        weights = _weights_from_spans(seq["loss"], len(flat_list(seq["ids"], "ids", where)), where)
        values = {"token_ids": seq["ids"], "loss_weights": weights, "reward": seq.get("reward")}
        if "advantages" in seq:
            values["advantages"] = seq["advantages"]
        if seq.get("behaviour_logprobs") is not None:  # of the trained tokens alone, or of all
            given, trained = number_list(seq["behaviour_logprobs"], "behaviour_logprobs", where), weights > 0
            if len(given) not in (len(weights), trained.sum()):
                raise DataError(
                    f"{where}: {len(given)} behaviour_logprobs for {trained.sum()} trained tokens; they must align."
                )
            values["sampler_logprobs"] = given
            if len(given) != len(weights):
                values["sampler_logprobs"] = np.zeros(len(weights), dtype=np.float32)
                values["sampler_logprobs"][trained] = given
        row = token_row(Placed(where, values), group, seq.get("rollout", f"{location}#{index}"))
        del row.streams["loss_weights"]
        row.spans = [int(bound) for span in seq["loss"] for bound in span]
        row.span_weights = [1.0] * len(seq["loss"])
        rows.append(row)
    return rows


def drift_warning(sampled: np.ndarray, text: str, encoder: Encoder, location: str, *, is_plain: bool) -> str | None:
    """A warning where the text of a row no longer gives its token ids (retokenisation drift, another tokenizer).

    is_plain: the text is no rendered conversation, so the tokenizer may have put a begin token before it.
    """
    rendered = joined(encoder.encode([text])[0])
    begin = encoder.begin_ids() if is_plain else rendered[:0]
    begins = [common_prefix(ids, begin) == len(begin) for ids in (sampled, rendered)]
    if begins == [True, False]:
        rendered = np.concatenate([begin, rendered])
    at = common_prefix(sampled, rendered)
    if at == len(sampled):
        return None
    if at == len(rendered):
        return (
            f"{location}: token_ids has {len(sampled)} tokens but its messages render to {len(rendered)}; "
            "the text is incomplete. The ids are trained as they are."
        )
    was, now = (encoder.tokenizer.decode([int(ids[at])]) for ids in (sampled, rendered))
    return (
        f"{location}: retokenisation drift at token {at}: sampled {int(sampled[at])} ({shown(was)}), the text gives "
        f"{int(rendered[at])} ({shown(now)}). The sampled ids are trained; check the tokenizer if this is early."
    )


def _without_null_context(values: Any, weights: Any, name: str, location: str) -> object:
    if not isinstance(values, list) or None not in values:
        return values
    trained = np.ones(len(values), dtype=bool) if weights is None else np.asarray(weights) != 0
    if weights is None:
        trained[:1] = False
    missing = [i for i, value in enumerate(values) if value is None]
    bad = [i for i in missing if i < len(trained) and trained[i]]
    if bad:
        raise DataError(f"{location}: {name}[{bad[0]}] is null but token {bad[0]} is trained; give its log-prob.")
    return [0.0 if value is None else value for value in values]


def _weights_from_spans(spans: Any, length: int, location: str) -> np.ndarray:
    weights = np.zeros(length, dtype=np.float32)
    last = 0
    for span in spans if isinstance(spans, list) else [spans]:
        numbers = isinstance(span, list | tuple) and all(type(bound) is int for bound in span)
        if not numbers or len(span) != 2 or not last <= span[0] < span[1] <= length:
            raise DataError(
                f"{location}: loss span {shown(span)} must be [start, end) with {last} <= start < end <= {length}."
            )
        weights[span[0] : span[1]] = 1
        last = span[1]
    return weights
