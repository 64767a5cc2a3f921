"""Rows that hold token ids already: never tokenised again, only checked, and compared with their text where given.

`input_ids` with `labels` (-100: not trained) or a mask are such rows under other names.
"""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base import features
from treewise.data.io.field_checks import flat_list, label, number_list, shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.data.io.rows import RecordResult, Row, row_from_trajectory
from treewise.data.other_names import OTHER_MASKS, check_names
from treewise.data.records import Label, RecordReader, rollout_of
from treewise.data.render.messages import IMAGES, clean_conversation, find_tools
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.prefix_merge import common_prefix
from treewise.tree.trajectory import STREAMS, Trajectory

if TYPE_CHECKING:
    from treewise.data.images import ImageReader

MAX_LOGPROB = 0.01  # engines round
IGNORED_LABEL = -100
PER_TOKEN = (*OTHER_MASKS, "attention_mask", "position_ids")


def rewritten(record: Record, form: str, location: str) -> Record:
    """The same with `token_ids` and `loss_weights` for other names of them; without any mask every token is trained.

    Positions of which `attention_mask` is 0 are padding, and left out; they must stand at the ends.
    """
    if form == "input_ids":
        rest = {key: value for key, value in record.items() if key != "input_ids"}
        return with_mask({**rest, "token_ids": record["input_ids"]}, location, "input_ids")
    is_masked = form == "token_row" and any(name in record for name in PER_TOKEN)
    return with_mask(record, location) if is_masked else record


def read(reader: RecordReader, result: RecordResult, form: str, item: Placed, group: Label) -> None:
    """Reads one row, or the rows of a group."""
    if form == "grouped_rows":
        result.rows, result.key = grouped_rows(item, group), None
    else:
        [row] = result.rows = [token_row(item, group, rollout_of(item), reader.images)]
        if group is None:
            row.group = prompt_group(row)
            result.is_grouped_by_prompt = True
            result.rollout = label(item.value.get("rollout"), "rollout", item.location)
            result.belongs_to(row.group, item.location)
        compare(reader, result, item)
    result.counted |= Counter(doubled for row in result.rows for doubled in doubled_tokens(row, reader.tokenizer))
    result.warnings += [line for row in result.rows for line in unlikely_logprobs(row, item.location)]


def token_row(item: Placed, group: Label, rollout: Label, reader: "ImageReader | None" = None) -> Row:
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
        elif STREAMS[name].is_routes:
            streams[name] = features.encoded_arrays.decoded(streams[name], name, location, len(ids))
    trajectory = Trajectory(
        token_ids=ids,
        **{**streams, "loss_weights": weights},
        images=() if record.get("images") is None else features.image_records.row_images(item, ids, reader),
        group=group,
        reward=record.get("reward"),
        rollout=rollout,
        source=location,
    )
    return row_from_trajectory(trajectory)


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
    begin: int | None = getattr(tokenizer, "bos_token_id", None)
    end: int | None = getattr(tokenizer, "eos_token_id", None)
    if begin is not None and begin != end and ids[:2].tolist() == [begin, begin]:
        found.append("rows of token ids begin with two begin tokens; they are trained as they are")
    weights = row.streams.get("loss_weights")
    if weights is None:
        weights = np.zeros(len(ids))
        for start, stop in zip(row.spans[::2], row.spans[1::2], strict=True):
            weights[start:stop] = 1
    if end is not None and ids[-2:].tolist() == [end, end] and np.count_nonzero(weights[-2:]) == 2:
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
        rollout = label(seq.get("rollout"), "rollout", where)
        row = token_row(Placed(where, values), group, f"{location}#{index}" if rollout is None else rollout)
        del row.streams["loss_weights"]
        row.spans = [int(bound) for span in seq["loss"] for bound in span]
        row.span_weights = [1.0] * len(seq["loss"])
        rows.append(row)
    return rows


def compare(reader: RecordReader, result: RecordResult, item: Placed) -> None:
    """Compares the ids of a row with its text, where it has one. The ids are trained either way."""
    record, location = item.value, item.location
    parts = [
        record.get(name) for name in (("text",) if isinstance(record.get("text"), str) else ("prompt", "completion"))
    ]
    texts = [part for part in parts if isinstance(part, str)]
    plain = "".join(texts) if len(texts) == len(parts) else None
    if reader.tokenizer is None or ("messages" not in record and plain is None):
        return
    try:
        if "messages" in record:
            talk = reader.template.prepare(clean_conversation(record["messages"], location), location)
            if "images" in record or any(message.get(IMAGES) for message in talk.messages):
                raise DataError(f"{location}: the row holds images.")
            text = reader.template.render([talk.messages], find_tools(item), location)[0]
        else:
            text = plain or ""
    except DataError as error:  # the ids are sound all the same
        if reader.options.on_drift == "error":
            raise
        result.warnings.append(f"{error} So its text was not compared with its token ids, which are trained.")
        return
    result.is_compared = True
    warning = drift_warning(
        result.rows[0].token_ids, text, reader.template.encoder, location, is_plain="messages" not in record
    )
    if warning is not None and reader.options.on_drift == "error":
        raise DataError(f"{warning} (on_drift: error)")
    result.drift = [] if warning is None else [warning]


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


def with_mask(record: Record, location: str, ids_name: str = "token_ids") -> Record:
    """A token row whose `labels`, mask and padding are `loss_weights`; without a mask every token is trained.

    ids_name: what the record calls its token ids, for messages.

    Raises:
        DataError: two masks, a mask of another length, labels that are not the tokens, padding between tokens, or
            positions that do not rise by 1 (`packed_rows` cuts rows of several samples).
    """
    ids = checks.as_array(flat_list(record["token_ids"], ids_name, location), ids_name, location)
    masks = [name for name in ("loss_weights", *OTHER_MASKS) if name in record]
    if len(masks) > 1:
        raise DataError(f"{location}: {' and '.join(masks)} both mark what is trained; give one of them.")
    per_token = [name for name in record if name in ("attention_mask", "position_ids", *masks)]
    arrays = {name: checks.as_array(flat_list(record[name], name, location), name, location) for name in per_token}
    for name, values in arrays.items():
        if len(values) != len(ids):
            raise DataError(f"{location}: {len(values)} {name} for {len(ids)} {ids_name}; they must align.")
    weights = _weights(masks, arrays, ids, ids_name, location)
    mask, keep = arrays.get("attention_mask"), None
    if mask is not None and not np.isin(mask, (0, 1)).all():
        raise DataError(f"{location}: attention_mask holds other values than 0 and 1.")
    if mask is not None and not mask.all():
        seen = np.flatnonzero(mask)
        if not len(seen) or len(seen) != seen[-1] - seen[0] + 1:
            raise DataError(f"{location}: attention_mask has zeros between ones; padding is at the ends only.")
        keep = slice(int(seen[0]), int(seen[-1]) + 1)
    positions = arrays.get("position_ids", np.arange(len(ids)))[slice(None) if keep is None else keep]
    if positions.ndim == 1 and (positions.dtype.kind not in "iuf" or (np.diff(positions) != 1).any()):
        raise DataError(f"{location}: position_ids do not rise by 1 from token to token.")
    rest = {key: value for key, value in record.items() if key not in ("token_ids", *per_token)}
    if keep is not None:
        for name, value in rest.items():
            if isinstance(value, list | np.ndarray) and len(value) == len(ids):
                rest[name] = np.asarray(value)[keep]
        weights = weights[keep]
        ids = ids[keep]
        weights[:1] = 0
    return {**rest, "token_ids": ids, "loss_weights": weights}


def _weights(
    masks: list[str], arrays: dict[str, np.ndarray], ids: np.ndarray, ids_name: str, location: str
) -> np.ndarray:
    """Loss weights of the tokens, from the labels or the mask that is given."""
    weights = np.ones(len(ids), dtype=np.float32)
    if masks == ["labels"]:
        weights = (arrays["labels"] != IGNORED_LABEL).astype(np.float32)
        differs = np.flatnonzero((weights > 0) & (arrays["labels"] != ids))
        if len(differs):
            at = int(differs[0])
            raise DataError(
                f"{location}: labels[{at}] is {arrays['labels'][at]} and {ids_name}[{at}] is {ids[at]}; a label is the "
                "token at its own position (not shifted), or -100."
            )
    elif masks:
        weights = arrays[masks[0]]
    if len(weights) and weights.dtype.kind in "iufb":
        weights = weights.astype(np.float32)
        weights[:1] = 0  # nothing predicts a first token, and flat training does not count it
    return weights


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
