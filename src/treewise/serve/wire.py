"""Messages of the API to arrays and back. Requests and answers are those of the SDK's own schema (`tinker.proto`)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker.proto import tinker_public_pb2 as pb

from treewise.errors import DataError
from treewise.rl.samplers.protocol import Completion
from treewise.serve.losses import Row, make_row
from treewise.serve.weights import ServedModel
from treewise.tree.images import ImageSpan

PROTOBUF = "application/x-protobuf"
MASK_LOGPROB = -99999.0  # of a place in a table of top log-probs that holds none
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_MAX_CELLS = 1 << 24  # of what a request makes the server lay out beyond its own size


def read_call(body: bytes) -> Any:
    """A request for forward (`forward_only`) or forward_backward in protobuf. Raises `DataError` where it is
    none."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise DataError("the body is no ForwardBackwardRequest of the SDK's protobuf schema.") from None
    return message


def read_rows(body: bytes, model: ServedModel) -> list[Row]:
    """The data of a call. Raises `DataError`, naming the datum."""
    message, stand_in = read_call(body), model.settings.stable_reinforce
    if any(len(UnknownFieldSet(each)) for each in (message, *message.data)):
        raise DataError("the request has fields that this server does not know; its SDK is newer.")
    loss = stand_in if message.loss_fn == "stable_reinforce" and stand_in != "refused" else message.loss_fn
    settings = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise DataError(f"loss_fn_config: {name} must be a number.")
        settings[name] = float(value.number)
    if not message.data:
        raise DataError("data: no datum given.")
    tensors = (each for datum in message.data for each in datum.loss_fn_inputs.values())
    check_cells(abs(math.prod(each.shape)) for each in tensors if each.WhichOneof("encoding") == "sparse_csr")
    rows = []
    for index, datum in enumerate(message.data):
        location = f"data[{index}]"
        ids, images = read_prompt(datum.model_input, model, f"{location}.model_input")
        given = {name: _tensor(each, f"{location}.{name}") for name, each in datum.loss_fn_inputs.items()}
        row = replace(make_row(ids, given, loss, settings, location), images=images)
        check_ids(row.token_ids, model.vocabulary, location)
        if row.token_ids[-1] == model.image_token:  # a target, of which no image is there
            row.token_ids[-1] = 0
        check_ids(row.targets[row.targets >= 0], model.vocabulary, f"{location}.target_tokens")
        rows.append(row)
    return rows


def check_ids(ids: np.ndarray, vocabulary: int, location: str) -> None:
    """Raises `DataError` for a token id that the model does not have."""
    bad = ids[(ids < 0) | (ids >= vocabulary)]
    if len(bad):
        raise DataError(f"{location}: token id {int(bad[0])}; the model has ids 0 to {vocabulary - 1}.")


def read_prompt(chunks: Sequence[Any], model: ServedModel, location: str) -> tuple[np.ndarray, tuple[ImageSpan, ...]]:
    """Token ids, int32, and images of chunks, of the protobuf schema or of the SDK's types. An image becomes as many
    placeholders as the client expects, which the model's tower has to make of it. Raises `DataError`.
    """
    parts, images, size = [], [], 0
    for chunk in chunks:
        kind = chunk.type if hasattr(chunk, "type") else chunk.WhichOneof("chunk")
        own = getattr(chunk, str(kind), chunk)
        if kind == "encoded_text":
            ids = _numbers(own.tokens, np.int32, location) if isinstance(own.tokens, bytes) else np.array(own.tokens)
            check_ids(ids, model.vocabulary, location)
        elif kind != "image" or model.image_token is None:
            raise DataError(f"{location}: chunks of type {kind} are not taken by this model; send encoded_text.")
        elif not 1 <= (own.expected_tokens or 0) <= _MAX_CELLS or _has(own, "override_dimensions"):
            raise DataError(f"{location}: an image needs expected_tokens, and takes no override_dimensions.")
        else:
            ids = np.full(own.expected_tokens, model.image_token)
            images.append(ImageSpan(own.data, size, size + len(ids)))
        parts.append(ids.astype(np.int32))
        size += len(ids)
    if not size:
        raise DataError(f"{location}: no token given.")
    return np.concatenate(parts), tuple(images)


def _has(message: Any, name: str) -> bool:
    return hasattr(message, "HasField") and message.HasField(name)


def _numbers(raw: bytes, dtype: Any, location: str) -> np.ndarray:
    if len(raw) % np.dtype(dtype).itemsize:
        raise DataError(f"{location}: {len(raw)} bytes are no whole number of {np.dtype(dtype).name}.")
    return np.frombuffer(raw, dtype=dtype)


def _tensor(message: Any, location: str) -> np.ndarray:
    """Dense, [T] or [T, K]; what a sparse tensor does not list is 0."""
    dtype, shape = _DTYPES.get(message.dtype), tuple(message.shape)
    if dtype is None or len(shape) > 2 or any(size < 0 for size in shape):
        raise DataError(f"{location}: a tensor of dtype {message.dtype} and shape {shape} is not taken.")
    if message.WhichOneof("encoding") != "sparse_csr":
        dense = _numbers(message.dense, dtype, location)
        if dense.size != math.prod(shape or (dense.size,)):
            raise DataError(f"{location}: {dense.size} numbers for shape {shape}.")
        return dense.reshape(shape or (dense.size,))
    csr = message.sparse_csr
    values = _numbers(csr.values, dtype, location)
    ends, columns = (_numbers(each, np.int64, location) for each in (csr.crow_indices, csr.col_indices))
    return from_csr(shape, ends, columns, values, location)


def check_cells(counts: Iterable[int]) -> None:
    """Raises `DataError` for sparse tensors, or tables that are asked for, which may not fit in memory."""
    if (cells := sum(counts)) > _MAX_CELLS:
        raise DataError(f"sparse tensors or tables of {cells:,} cells in a request; at most {_MAX_CELLS:,} are taken.")


def from_csr(
    shape: tuple[int, ...], ends: np.ndarray, columns: np.ndarray, values: np.ndarray, location: str, fill: int = 0
) -> np.ndarray:
    """[shape] of compressed rows. Raises `DataError` for indices that do not fit."""
    counts = np.diff(ends)
    is_whole = len(shape) == 2 and len(ends) == shape[0] + 1 and ends[0] == 0 and (counts >= 0).all()
    if not is_whole or not ends[-1] == len(columns) == len(values) or ((columns < 0) | (columns >= shape[1])).any():
        raise DataError(f"{location}: a sparse tensor of shape {shape} whose indices do not fit it.")
    whole = np.full(shape, fill, dtype=values.dtype)
    whole[np.repeat(np.arange(shape[0]), counts), columns] = values
    return whole


# -- answers ----------------------------------------------------------------------------------------------------------


def call_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Of a forward or forward_backward. logprobs: of each datum, in the shape of its targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    low = 0
    while low < len(logprobs):  # one record for data of one width
        width = logprobs[low].shape[1:]
        high = next((i for i in range(low, len(logprobs)) if logprobs[i].shape[1:] != width), len(logprobs))
        arrays = [np.ascontiguousarray(each, dtype=np.float32) for each in logprobs[low:high]]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(each.tobytes() for each in arrays)
        field.offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype(np.int64).tobytes()
        field.trailing_shape.extend(width)
        low = high
    return message.SerializeToString()


# What was asked about a prompt of n tokens, by name: `logprobs` ([n],), NaN where none is known; `top`, ids and
# log-probs [n, k]; `targets` ([n - 1, K],); `drawn`, ids and log-probs [n - 1, k].
PromptScores = dict[str, tuple[np.ndarray, ...]]


def sample_answer(completions: Sequence[Completion], scores: PromptScores) -> bytes:
    """Of a sampling request."""
    message = pb.SampleResponse()
    for each in completions:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if each.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=each.token_ids.astype(np.int32).tobytes(),
            logprobs=each.logprobs.astype(np.float32).tobytes(),
        )
        if each.top_ids is not None and each.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, each.top_ids, each.top_logprobs)
    if "logprobs" in scores:
        message.prompt_logprobs = scores["logprobs"][0].astype(np.float32).tobytes()
    if "top" in scores:
        _write_top(message.topk_prompt_logprobs, *scores["top"])
    if "targets" in scores:
        _write_tensor(message.target_prompt_logprobs, scores["targets"][0].astype(np.float32))
    if "drawn" in scores:
        _write_tensor(message.prompt_alt_tokens.tokens, scores["drawn"][0].astype(np.int64))
        _write_tensor(message.prompt_alt_tokens.logprobs, scores["drawn"][1].astype(np.float32))
    return message.SerializeToString()


def _write_top(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    is_there = np.isfinite(logprobs)
    message.length, message.k = ids.shape
    message.token_ids = np.where(is_there, ids, 0).astype(np.int32).tobytes()
    message.logprobs = np.where(is_there, logprobs, MASK_LOGPROB).astype(np.float32).tobytes()


def _write_tensor(message: Any, array: np.ndarray) -> None:
    message.dtype = pb.DTYPE_INT64 if array.dtype == np.int64 else pb.DTYPE_FLOAT32
    message.shape.extend(array.shape)
    message.dense = np.ascontiguousarray(array).tobytes()
