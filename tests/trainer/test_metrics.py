"""What a run logs besides the loss."""

import pytest
import torch

from tests.trainer.helpers import tiny_model
from treewise.engine.prepared import StepOutput
from treewise.nn.model_flops import flop_model
from treewise.trainer import metrics
from treewise.trainer.batches import PreparedBatch
from treewise.tree.forest import Forest


def test_logs_tell_throughput_and_ratio(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=4, logging_steps=2)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["step"] == 2
    assert entry["share_ratio"] > 1
    assert entry["tokens_per_second_flat"] > entry["tokens_per_second_tree"] > 0
    assert {"loss", "grad_norm", "learning_rate", "tree_tokens"} <= set(entry)
    assert 0 < entry["batch_wait_share"] < 1
    assert entry["memory_bytes"] > 2**20


def test_the_memory_of_a_gpu_is_what_the_allocator_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 300)
    assert metrics.Throughput().take(2, 1, 2)["memory_bytes"] == 300


def test_logs_tell_the_flop_bound_and_a_lower_bound_of_efficiency(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=1, per_device_train_batch_size=7, merge_across_trees=False)
    trainer.train()
    entry = trainer.state.log_history[0]
    costs = flop_model(trainer.model)
    forests = [Forest.from_trajectories(tree) for tree in trees]
    needed = sum(costs.tree(each) for each in forests)
    assert entry["flop_bound"] == pytest.approx(sum(costs.flat(each) for each in forests) / needed, rel=1e-3)
    assert trainer.state.total_flos == pytest.approx(needed)
    seconds = entry["tree_tokens"] / entry["tokens_per_second_tree"]
    fastest = metrics.matmul_flops("cpu", torch.float32, trainer.model.config.hidden_size)
    assert entry["efficiency_at_least"] == pytest.approx(needed / seconds / fastest, rel=0.1)
    assert 0 < entry["efficiency_at_least"] < 1
    assert entry["tokens_per_second_computed"] == pytest.approx(
        entry["tokens_per_second_tree"], rel=1e-3
    )  # whole trees


def test_a_model_of_unknown_shapes_has_no_efficiency(make_trainer, trees, monkeypatch):
    def unknown(model):
        raise AttributeError("num_attention_heads")

    monkeypatch.setattr(metrics, "flop_model", unknown)
    trainer = make_trainer(trees, max_steps=1)
    trainer.train()
    assert not {"flop_bound", "efficiency_at_least"} & set(trainer.state.log_history[0])
    assert trainer.state.total_flos > 0


def test_mfu_is_the_speed_over_the_peak_of_the_device(trees, monkeypatch):
    """The vendor's figure where it is known and the run computes in bfloat16, else the measured rate."""
    monkeypatch.setattr(metrics, "matmul_flops", lambda kind, dtype, width: 1e6)
    monkeypatch.setattr(metrics.torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    monkeypatch.setattr(metrics.time, "perf_counter", iter([0.0, 0.5, 2.0] * 3).__next__)
    forests = [Forest.from_trajectories(tree) for tree in trees]
    model, found = tiny_model(), {}
    needed = sum(flop_model(model).tree(forest) for forest in forests)
    for name, dtype in (("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float32)):
        throughput = metrics.Throughput()
        throughput.begin_run(torch.device(name), dtype)
        with throughput.waiting_for_batches():
            pass
        batch = PreparedBatch(tuple(forests), (), None, throughput.flops_of(model, forests))
        assert throughput.add_flops(model, batch) == needed
        throughput.end_step()
        found[name, dtype] = throughput.take(1.0, 1.0, 1.0)
        assert found[name, dtype]["batch_wait_share"] == 0.25
        assert found[name, dtype]["efficiency_at_least"] == pytest.approx(needed / 2 / 1e6, rel=1e-3)
    peaks = {("cpu", torch.bfloat16): 1e6, ("cuda", torch.bfloat16): 756e12, ("cuda", torch.float32): 1e6}
    for key, peak in peaks.items():
        assert found[key]["mfu"] == pytest.approx(needed / 2 / peak, rel=1e-3)


def test_means_are_weighted_and_start_anew():
    means = metrics.MetricMeans()
    means.add(output(kl=1.0, weight=1.0))
    means.add(output(kl=4.0, weight=2.0))
    assert means.take(lambda *values: list(values), is_alone=True) == {"kl": 3.0}
    assert means.take(lambda *values: list(values), is_alone=True) == {}


def output(weight, **means):
    return StepOutput(0.0, 1, 1, 1, 1, 1, means, weight)
