"""verl's own engine with the line and without: log-probs, entropies, losses, gradients, weights after updates.

All runs of one number of processes take place in the same forked ones. Skipped where verl is not installed
(docs/verl.md tells how).
"""

import logging
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.test_mesh import fork_ranks
from tests.integrations import verl_runs
from tests.replayed_rows import replayed
from treewise import share_prefixes
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.tree.trajectory import Trajectory

verl = pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, ray and torch, as without the line

CASES = {
    "packed": {},
    "padded": {"use_remove_padding": False},
    "two micro-batches, checkpoints": {"micro_batch_size": 2, "enable_gradient_checkpointing": True},
    "dynamic": {"max_tokens": 40},
    "tokens of padding": {"engine": (("pad_to_length", True), ("pad_to_length_bucket", 64))},
    "adapters": {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]},
    "fsdp1": {"strategy": "fsdp", "family": "untied"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "bf16": {"precision": "bf16"},
}
ON_TWO = ("packed", "dynamic", "two micro-batches, checkpoints", "fsdp1")


def run_all(folder, cases):
    """Each case without the line, and with it."""
    verl_runs.prepare()
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    before = FSDPEngineWithLMHead.initialize
    logging.getLogger("treewise").setLevel(logging.ERROR)
    found = {}
    for line in (False, True):
        library = {"external_lib": "treewise.integrations.verl"} if line else {}
        for name in cases:
            settings = CASES[name] | library
            torch.manual_seed(0)
            family = settings.pop("family", "llama")
            found[name, line] = verl_runs.outcome(folder / family, **settings)
        dealt = verl_runs.dealt_outcome(folder / "llama", 60, by_trees=line, **library)
        found["dealt to ranks", line] = dealt
    for packed in (True, False) if torch.distributed.get_world_size() == 1 else (True,):
        line = {"external_lib": "treewise.integrations.verl"}
        found["replay", packed] = verl_runs.replayed_outcome(folder / "qwen3_moe", use_remove_padding=packed, **line)
    FSDPEngineWithLMHead.initialize = before  # as without the line
    return found | {"refusals": refusals(folder) if torch.distributed.get_world_size() == 1 else None}


def refusals(folder):
    """The message of each error."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

    told = {}

    def tell(name, change, family="llama"):
        engine = verl_runs.engine_of(folder / family)
        change(engine)
        with pytest.raises((ConfigError, UnsupportedModelError)) as caught:
            share_prefixes(engine)
        told[name] = str(caught.value)

    def set_of(part, key, value):
        return lambda engine: object.__setattr__(getattr(engine, part), key, value)

    tell("ulysses", set_of("engine_config", "ulysses_sequence_parallel_size", 2))
    tell("no fused kernels", set_of("model_config", "use_fused_kernels", value=False))
    tell("not fused", lambda engine: delattr(engine.module, "_verl_fused_kernels_backend"))
    tell("offloading", set_of("model_config", "enable_activation_offload", value=True))
    tell("tiles", set_of("model_config", "tiled_mlp", {"enabled": True}))
    tell("more tokens at a time", set_of("model_config", "mtp", SimpleNamespace(enable=True)))
    tell("routers", set_of("engine_config", "router_replay", SimpleNamespace(mode="R2")))
    tell("critic", lambda engine: setattr(engine, "__class__", FSDPEngineWithValueHead))
    tell("own unit", lambda _: None, "untied")
    tell("no model", lambda engine: setattr(engine, "module", None))
    engine = verl_runs.engine_of(folder / "llama")
    sharing = share_prefixes(engine)
    told["repr"] = repr(sharing)
    own = sharing._own

    def wrong(model, **kwargs):
        output = own(model, **kwargs)
        output.log_probs = output.log_probs + 0.5 * (kwargs.get("input_ids") is not None)
        return output

    sharing._own = wrong
    with pytest.raises(UnsupportedModelError) as caught, engine.eval_mode():
        engine.infer_batch(verl_runs.batch_of(0, engine))
    told["differs"] = str(caught.value)
    sharing.remove()
    told["removed"] = "forward" not in vars(engine.module) and "forward_backward_batch" not in vars(engine)
    with pytest.raises(ConfigError) as caught:
        share_prefixes(engine, 100)
    told["budget"] = str(caught.value)
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    for family in ("llama", "qwen3_moe"):
        verl_runs.save_model(folder / family, family)
    verl_runs.save_model(folder / "untied", tie_word_embeddings=False)
    found = {1: fork_ranks(1, lambda: run_all(folder, CASES), folder)}
    return folder, found | {2: fork_ranks(2, lambda: run_all(folder, ON_TWO), folder)}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(1, each) for each in CASES] + [(2, each) for each in (*ON_TWO, "dealt to ranks")],
    ids=lambda value: str(value),
)
def test_everything_is_what_it_is_without_the_line(runs, ranks, case):
    tolerance = {"rtol": 0.1, "atol": 0.1} if case == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    for found in runs[1][ranks]:
        (plain, none), (tree, counts) = found[case, False], found[case, True]
        assert none is None
        assert counts.num_left == 0
        assert counts.share_ratio > 1.4
        torch.testing.assert_close(tree, plain, **tolerance)


@pytest.mark.parametrize("packed", [True, False])
def test_experts_that_the_rollout_recorded_are_taken(runs, packed):
    folder, every = runs
    found, model = every[1][0]["replay", packed], verl_runs.save_model(folder / "qwen3_moe", "qwen3_moe")
    for number, ids in enumerate(verl_runs.rows_of(3)):
        item = Trajectory(ids, routed_experts=found["experts"][number][:-1])
        with torch.no_grad(), replayed(model) as replayer, replayer.row(item):
            logprobs = (model(torch.tensor(ids)[None]).logits[0] / 0.7).log_softmax(-1)
        alone = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(found["found"][number][:-1], alone, rtol=1e-5, atol=1e-5)
        assert (found["found"][number] - found["live"][number])[:-1].abs().max() > 1e-4
    assert found["router"].abs().max() > 0
    assert 0 < found["counts"].num_otherwise <= found["counts"].num_recorded
    assert found["counts"].num_left == 0


@pytest.mark.parametrize(("ranks", "packed"), [(1, True), (1, False), (2, True)])
def test_an_update_logs_the_gap_to_the_rollout_with_its_experts_and_without(runs, ranks, packed):
    for every in runs[1][ranks]:
        found = every["replay", packed]
        metrics, rows = found["metrics"], range(verl_runs.ANSWERS // 2)  # of the first of two micro-batches
        for name, logprobs in (("replayed_gap", found["found"]), ("live_gap", found["live"])):
            gaps = [
                (values - logprobs[row][verl_runs.PROMPT - 1 : -1]).abs().exp()[mask]
                for row, (values, mask) in ((row, found["rollout"][row]) for row in rows)
            ]
            assert metrics[name] == pytest.approx([torch.cat(gaps).mean().item()], rel=1e-5)
        assert metrics["replayed_gap"] != metrics["live_gap"]
        assert len(metrics["routed_otherwise"]) == found["num_trained"] == 2
        assert all(0 < each <= 1 for each in metrics["routed_otherwise"])


def test_log_probs_and_entropies_are_those_of_each_row_alone(runs):
    folder, found = runs
    model = verl_runs.save_model(folder / "llama")
    outcome, _ = found[1][0]["packed", True]
    for row, logprobs, entropies in zip(verl_runs.rows_of(0), outcome["log_probs"], outcome["entropy"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(row)[None]).logits[0] / 0.7
        every = logits.log_softmax(-1)
        alone = every[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        torch.testing.assert_close(logprobs[:-1], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ulysses", "ulysses_sequence_parallel_size=2 cuts sequences over ranks"),
        ("no fused kernels", "actor_rollout_ref.model.use_fused_kernels=True"),
        ("not fused", "fused_kernel_options.impl_backend must be torch"),
        ("offloading", "actor_rollout_ref.model.enable_activation_offload counts on forwards of flat rows"),
        ("tiles", "actor_rollout_ref.model.tiled_mlp.enabled counts on forwards of flat rows"),
        ("more tokens at a time", "actor_rollout_ref.model.mtp.enable counts on forwards of flat rows"),
        ("routers", "actor_rollout_ref.actor.router_replay counts on forwards of flat rows"),
        ("critic", "found a FSDPEngineWithValueHead"),
        ("own unit", "use a model with tied embeddings"),
        ("no model", "call engine.initialize() first"),
        ("budget", "set ppo_micro_batch_size_per_gpu"),
        ("differs", "differ from those of verl's own forward by 0.5 (limit 0.01)"),
    ],
)
def test_what_trees_cannot_follow_is_an_error(runs, name, words):
    told = runs[1][1][0]["refusals"]
    assert words in told[name]
    assert told["removed"]
    assert told["repr"].startswith("EngineSharing(0 batches")
