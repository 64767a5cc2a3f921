"""slime: what `--save-debug-rollout-data` writes, or the same samples one per line.

Read from the public sources of THUDM/slime (`slime/utils/types.py`, `Sample`; `slime/observability/
rollout_data_utils.py`). `tokens` is prompt and response; `loss_mask` and `rollout_log_probs` cover the last
`response_length` tokens. Samples of one execution (compaction, sub-agents) share `rollout_id`.
"""

from collections.abc import Iterable, Iterator

from treewise.data.importers.common import Context, Placed, Record, integers, numbers, only_dicts, token_row
from treewise.data.io.printable import shown
from treewise.errors import DataError


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of samples, in order."""
    for record in records:
        if "samples" in record.value:
            for index, sample in enumerate(only_dicts(record.value["samples"], "samples", record.location)):
                yield from _sample(Placed(f"{record.location}: samples[{index}]", sample), context)
        else:
            yield from _sample(record, context)


def _sample(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    if value.get("remove_sample"):
        context.leave_out(location, "remove_sample is set")
        return
    if value.get("multimodal_inputs"):
        raise DataError(f"{location}: the sample has multimodal inputs, which this importer does not read.")
    ids = integers(value.get("tokens"), "tokens", location)
    length = value.get("response_length")
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(ids):
        raise DataError(f"{location}: response_length {shown(length)} does not fit {len(ids)} tokens.")
    before = [0.0] * (len(ids) - length)
    loss_mask = value.get("loss_mask")
    mask = [1.0] * length if loss_mask is None else numbers(loss_mask, "loss_mask", length, location)
    streams = {}
    for ours, theirs in (("sampler_logprobs", "rollout_log_probs"), ("teacher_logprobs", "teacher_log_probs")):
        if value.get(theirs) is not None and len(value[theirs]):
            streams[ours] = before + numbers(value[theirs], theirs, length, location)
    if streams.pop("teacher_logprobs", None) is not None:
        context.warn("teacher_log_probs are not imported: compute reference log-probs with --reference")
    rollout = value.get("rollout_id")
    yield from token_row(
        context,
        location,
        ids,
        before + mask,
        **streams,
        group=value.get("group_index"),
        rollout=value.get("index") if rollout is None else rollout,
        reward=context.reward(value.get("reward"), location),
    )
