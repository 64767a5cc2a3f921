"""Messages of the API to arrays and back. Requests and answers are those of the SDK's own schema (`tinker.proto`)."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import SampleRequest, TensorData

from treewise.base import features
from treewise.base.http.bodies import KEPT_ENDS
from treewise.errors import DataError
from treewise.rl.samplers.protocol import Completion
from treewise.serve.rows_loss import LossRow, RowsLoss, make_row
from treewise.serve.weights import ServedModel
from treewise.tree.images import ImageSpan

if TYPE_CHECKING:
    from tinker.types._pydantic_types.tensor_data import TensorData as SentTensor

PROTOBUF = "application/x-protobuf"
UNPUBLISHED = {
    "stable_reinforce": "its formula is not published; give the recipe loss_fn=importance_sampling, or the server "
    "--stable_reinforce importance_sampling (ppo, cispo), which then stands in for it",
    "custom": "a loss that was sent as a graph is not run here; the SDK then computes custom losses at the client",
}
_MASK_LOGPROB = -99999.0  # of a place in a table of top log-probs that holds none
_DTYPES: dict[int, tuple[Literal["int64", "float32"], type[np.generic]]] = {
    pb.DTYPE_FLOAT32: ("float32", np.float32),
    pb.DTYPE_INT64: ("int64", np.int64),
}
_NO_CALL = "the body is no ForwardBackwardRequest of the SDK's protobuf schema."
_NUMBERS = {each.name: each.number for each in pb.ForwardBackwardRequest.DESCRIPTOR.fields}
_MODEL_ID, _SEQ_ID, _FORWARD_ONLY = (_NUMBERS[name] for name in ("model_id", "seq_id", "forward_only"))
_MODEL = re.compile(rb'(?<!\\)"model_id"\s*:\s*"([\w:-]{1,120})"')
_SEQ = re.compile(rb'(?<!\\)"seq_id"\s*:\s*(\d{1,17})\b')
_MAX_CELLS = 1 << 24  # of what a request makes the server lay out beyond its own size


def named_in(body: bytes) -> tuple[str, int] | None:
    """The model and the sequence number that a request is about, as far as its body can be read: also if it is cut,
    is no JSON, or has values that are refused."""
    body = body if len(body) <= 2 * KEPT_ENDS else body[:KEPT_ENDS] + body[-KEPT_ENDS:]
    with suppress(ValueError):  # of JSON
        (first, name), (second, number) = islice(_fields(body), 2)
        if (first, second) == (_MODEL_ID, _SEQ_ID) and isinstance(name, memoryview) and isinstance(number, int):
            return bytes(name).decode("utf-8", "replace"), number
    model, seq = _MODEL.search(body), _SEQ.search(body)
    return (model[1].decode(), int(seq[1])) if model and seq else None


class CallHead(NamedTuple):
    """What a call is about."""

    model_id: str
    seq_id: int
    forward_only: bool


def read_head(body: bytes) -> CallHead:
    """Of a request for forward (`forward_only`) or forward_backward in protobuf, whose data stay unread until they are
    computed. Raises `DataError` where it is none."""
    found: dict[int, int | memoryview | bytes] = dict(_fields(body))
    name, number, forward_only = found.get(_MODEL_ID, b""), found.get(_SEQ_ID, 0), found.get(_FORWARD_ONLY, 0)
    if isinstance(name, int) or not isinstance(number, int):
        raise DataError(_NO_CALL)
    try:
        return CallHead(bytes(name).decode(), number, bool(forward_only))
    except UnicodeDecodeError:
        raise DataError(_NO_CALL) from None


def _fields(body: bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message, one after the other, without what is in them. Parsed whole, by the
    library as a message without fields, this would take as long as the data do.

    Raises:
        DataError: they do not follow one another, at the first that does not.
    """
    view, at = memoryview(body), 0
    while at < len(view):
        tag, at = _varint(view, at)
        kind, size = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if kind in (0, 2):
            size, at = _varint(view, at)
        elif not size:
            raise DataError(_NO_CALL)
        if kind == 0:
            yield tag >> 3, size
        elif at + size > len(view):
            raise DataError(_NO_CALL)
        else:
            yield tag >> 3, view[at : at + size]
            at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, the lowest first, and where it ends."""
    number = 0
    for place, byte in enumerate(view[at : at + 10]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, at + place + 1
    raise DataError(_NO_CALL)


def read_rows(body: bytes, model: ServedModel) -> list[LossRow]:
    """The data of a call. Raises `DataError`, naming the datum."""
    message, stand_in = pb.ForwardBackwardRequest(), model.settings.stable_reinforce
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise DataError(_NO_CALL) from None
    if any(len(UnknownFieldSet(part)) for part in (message, *message.data)):
        raise DataError("the request has fields that this server does not know; its SDK is newer.")
    loss = stand_in if message.loss_fn == "stable_reinforce" and stand_in != "refused" else message.loss_fn
    if loss in UNPUBLISHED:
        raise DataError(f"loss_fn={loss!r}: {UNPUBLISHED[loss]}.")
    settings = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise DataError(f"loss_fn_config: {name} must be a number.")
        settings[name] = float(value.number)
    if not message.data:
        raise DataError("data: no datum given.")
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    check_cells(abs(math.prod(tensor.shape)) for tensor in tensors if tensor.HasField("sparse_csr"))
    rows = []
    for index, datum in enumerate(message.data):
        try:
            ids, images = read_prompt(datum.model_input, model, "model_input")
            given = {name: _tensor(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
            experts = given.pop("routed_experts", None)
            row = replace(make_row(ids, given, loss, settings), images=images)
            check_ids(row.token_ids, model.vocabulary, "target_tokens")
            check_ids(row.targets[row.targets >= 0], model.vocabulary, "target_tokens")
            if experts is not None:
                experts = features.routes.checked_experts(experts, "routed_experts", len(ids) + 1, "the datum")
                model.check_experts(experts)
                row = replace(row, routed_experts=experts)
        except ValueError as error:
            raise DataError(f"data[{index}]: {error}") from None
        if row.token_ids[-1] == model.image_token:  # a target, of which no image is there
            row.token_ids[-1] = 0
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
            ids = np.frombuffer(own.tokens, np.int32) if isinstance(own.tokens, bytes) else np.array(own.tokens)
            check_ids(ids, model.vocabulary, location)
        elif kind != "image" or model.image_token is None:
            raise DataError(f"{location}: chunks of type {kind} are not taken by this model; send encoded_text.")
        elif not 1 <= (own.expected_tokens or 0) <= _MAX_CELLS or str(getattr(own, "override_dimensions", "")):
            raise DataError(f"{location}: an image needs expected_tokens, and takes no override_dimensions.")
        else:
            ids = np.full(own.expected_tokens, model.image_token)
            images.append(ImageSpan(own.data, size, size + len(ids)))
        parts.append(ids.astype(np.int32))
        size += len(ids)
    if not size:
        raise DataError(f"{location}: no token given.")
    return np.concatenate(parts), tuple(images)


def _tensor(message: pb.Tensor, location: str) -> np.ndarray:
    """Dense, [T] or [T, K]; what a sparse tensor does not list is 0. Raises `ValueError`."""
    if message.dtype not in _DTYPES:
        raise DataError(f"{location}: a tensor of dtype {message.dtype} is not taken.")
    (name, dtype), csr, shape = _DTYPES[message.dtype], message.sparse_csr, list(message.shape)
    if not message.HasField("sparse_csr"):
        return dense(TensorData(np.frombuffer(message.dense, dtype), name, shape or None), location)
    ends, columns = (np.frombuffer(part, np.int64).tolist() for part in (csr.crow_indices, csr.col_indices))
    return dense(TensorData(np.frombuffer(csr.values, dtype), name, shape, ends, columns), location)


def dense(tensor: "TensorData | SentTensor", location: str, fill: int = 0) -> np.ndarray:
    """What a sparse tensor does not list is `fill`. Raises `DataError` for indices that do not fit its shape."""
    try:
        return tensor.to_numpy(fill)
    except (RuntimeError, TypeError, AssertionError) as error:  # of torch, and of the SDK for what is missing
        raise DataError(f"{location}: {str(error).splitlines()[0]}") from None


def check_cells(counts: Iterable[int]) -> None:
    """Raises `DataError` for sparse tensors, or tables that are asked for, which may not fit in memory."""
    if (cells := sum(counts)) > _MAX_CELLS:
        raise DataError(f"sparse tensors or tables of {cells:,} cells in a request; at most {_MAX_CELLS:,} are taken.")


# -- answers ----------------------------------------------------------------------------------------------------------


def call_answer(loss: RowsLoss, low: int, high: int, facts: Mapping[str, float]) -> bytes:
    """Of a forward or forward_backward with the rows low..high. Clients add up the metrics that end in `:sum` over the
    parts of a call.

    facts: `tree_tokens`, `computed_tokens` and `share_ratio` of the forest that the rows were computed in, or of what a
    window had not computed of it; metrics of recorded experts are of this forest, too.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    new = int(loss.num_new[low:high].sum())
    message.metrics["loss:sum"] = float(loss.losses[loss.bounds[low] : loss.bounds[high]].sum())
    message.metrics["flat_tokens:sum"] = sum(len(row.token_ids) for row in loss.rows[low:high])
    message.metrics["tree_tokens:sum"] = new
    message.metrics["computed_tokens:sum"] = facts["computed_tokens"] * new / max(1, facts["tree_tokens"])
    message.metrics["share_ratio:mean"] = facts["share_ratio"]
    for name, value in loss.replay.items():
        message.metrics[f"{name}:mean"] = value
    for index in range(low, high):
        found = loss.logprobs[loss.bounds[index] : loss.bounds[index + 1]].astype(np.float32).tobytes()
        array = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1).fields["logprobs"]
        array.dtype, array.data, array.offsets = pb.DTYPE_FLOAT32, found, np.array([0, len(found)]).tobytes()
        array.trailing_shape.extend(loss.rows[index].shape[1:])
    return message.SerializeToString()


def sample_answer(asked: SampleRequest, completions: Sequence[Completion], scores: Mapping[str, np.ndarray]) -> bytes:
    """Of a sampling request of the SDK's type. scores: of `prompt_scores`, where any were asked for."""
    message = pb.SampleResponse()
    for completion in completions:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if completion.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=completion.token_ids.astype(np.int32).tobytes(),
            logprobs=completion.logprobs.astype(np.float32).tobytes(),
        )
        if completion.top_ids is not None and completion.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, completion.top_ids, completion.top_logprobs)
    if asked.prompt_logprobs:
        message.prompt_logprobs = scores["own"].astype(np.float32).tobytes()
    if asked.topk_prompt_logprobs:
        _write_top(message.topk_prompt_logprobs, scores["top_ids"], scores["top"])
    if asked.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, scores["targets"])
    if asked.prompt_alt_tokens_k:
        _write_tensor(message.prompt_alt_tokens.tokens, scores["drawn_ids"])
        _write_tensor(message.prompt_alt_tokens.logprobs, scores["drawn"])
    return message.SerializeToString()


def _write_top(message: pb.TopkLogprobs, ids: np.ndarray, logprobs: np.ndarray) -> None:
    is_there = np.isfinite(logprobs)
    message.length, message.k = ids.shape
    message.token_ids = np.where(is_there, ids, 0).astype(np.int32).tobytes()
    message.logprobs = np.where(is_there, logprobs, _MASK_LOGPROB).astype(np.float32).tobytes()


def _write_tensor(message: pb.Tensor, array: np.ndarray) -> None:
    """array: int64 or float32."""
    message.dtype = pb.DTYPE_INT64 if array.dtype == np.int64 else pb.DTYPE_FLOAT32
    message.shape.extend(array.shape)
    message.dense = array.tobytes()
