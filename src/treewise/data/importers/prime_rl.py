"""prime-rl: `token_exports/step_N/rank_R.jsonl` (`enable_token_export`), and the `traces.jsonl` that verifiers defines.

Read from the public sources of PrimeIntellect-ai/prime-rl (`trainer/rl/token_export.py`, `monitors/file.py`). A line
of an export is one sequence with its streams, each as long as `token_ids`. It names no group and no rollout, and holds
advantages in place of rewards.
"""

from collections.abc import Iterable, Iterator

from treewise.data.importers import verifiers
from treewise.data.importers.common import Context, Placed, Record, integers, numbers, token_row


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of exports or traces, in order."""
    for record in records:
        if "token_ids" in record.value:
            yield from _export(record, context)
        else:
            yield from verifiers.read([record], context)


def _export(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    ids = integers(value["token_ids"], "token_ids", location)
    weights = numbers(value.get("loss_mask"), "loss_mask", len(ids), location)
    rl_weights = value.get("rl_weights")
    if isinstance(rl_weights, list) and any(each is not None for each in rl_weights):
        factors = numbers(rl_weights, "rl_weights", len(ids), location)
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    streams = {"sampler_logprobs": "inference_logprobs", "advantages": "advantages"}
    fields = {
        ours: numbers(value[theirs], theirs, len(ids), location)
        for ours, theirs in streams.items()
        if value.get(theirs) is not None
    }
    for name in ("ce_weights", "ref_kl_weights"):
        if isinstance(value.get(name), list) and any(value[name]):
            context.warn(f"{name} (another component of prime-rl's loss) is not imported")
    yield from token_row(context, location, ids, weights, **fields)
