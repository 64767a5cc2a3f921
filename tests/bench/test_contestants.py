"""Every contestant computes the loss and the gradients of flat training, so a comparison of seconds is fair."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.test_carried import TOWER, seeing_case, train_only
from tests.needs import IMAGES
from treewise.bench import Settings, make, random_model, workloads
from treewise.bench.contestants import Contestant, builders, layers_of, plain_parts, prepare, twin
from treewise.bench.flat import FlatRows, merged_trajectories
from treewise.engine.flat import FlatLoss
from treewise.errors import ConfigError, OutOfMemoryError
from treewise.nn import compilation, liger
from treewise.nn.platform import memory
from treewise.objectives import SFT
from treewise.testing import tiny_model
from treewise.testing.oracle import FlatGradients, flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import trajectories
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

pytestmark = pytest.mark.xdist_group("bench/test_contestants")

CPU = torch.device("cpu")

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_model("qwen3-tiny", torch.float32, CPU)


@IMAGES
def test_a_row_of_text_gives_a_tower_nothing() -> None:
    seeing, images, items, _ = seeing_case("llava")
    rows = FlatRows(plain_parts(train_only(seeing, TOWER)), items, max_row_tokens=1, packs=False, processor=images)
    loss = FlatLoss(items, SFT(), images).run(seeing, CPU).loss
    assert rows.step() == pytest.approx(loss, rel=1e-6)


def weighted(name: str) -> list[Trajectory]:
    """A workload whose trained tokens weigh differently."""
    rng = np.random.default_rng(1)
    items = make(name, "tiny", 64).trajectories
    return [
        replace(item, loss_weights=item.loss_weights * rng.choice([0.5, 1.0, 2.0], len(item)).astype(np.float32))
        for item in items
    ]


@pytest.mark.representatives("tau2")
@pytest.mark.parametrize("name", ["search", "tau2"])
def test_all_contestants_have_the_flat_gradients(model: torch.nn.Module, name: str) -> None:
    items = weighted(name)
    forest = Forest.from_trajectories(items)
    loss, _, expected = flat_sft(twin(model), items)
    budgets = [forest.num_tokens // 3, int(forest.path_lengths.max())]
    made = builders(twin(model), items, Settings(with_checkpointing=True), budgets)
    assert {"flat", "merged-ckpt", "trl", "trl-ckpt", "tree-ckpt", f"tree@{budgets[0]}", f"trl@{budgets[1]}"} <= set(
        made
    )
    for key, build in made.items():
        check(model, prepare(build), key, loss, expected)


def test_hybrids_have_the_flat_gradients() -> None:
    pytest.importorskip("tree_recurrence")
    model = random_model("hybrid-tiny", torch.float32, CPU)
    items = weighted("tau2")
    loss, _, expected = flat_sft(twin(model), items)
    made = builders(twin(model), items, Settings())
    assert "trl" not in made
    for key in ("flat", "tree-recurrence", "tree"):
        check(model, prepare(made[key]), key, loss, expected)


def check(model: torch.nn.Module, made: Contestant | str, key: str, loss: float, expected: FlatGradients) -> None:
    assert isinstance(made, Contestant), made
    model.zero_grad()
    assert made.step() == pytest.approx(loss, rel=expected.tolerance), key
    assert gradient_error(gradients_of(model), expected) < expected.tolerance, key


def test_what_cannot_run_is_named() -> None:
    """TRL's attention looks for a `Linear` in each layer, of which GPT-2 has none."""
    items = make("grpo", "tiny", 64).trajectories
    made = builders(tiny_model("gpt2"), items, Settings(), [10_000])
    assert "TRL's tree rows do not run this model" in str(prepare(made["trl"]))
    assert "fit the budget" in str(prepare(made["tree@10000"]))


@given(trajectories())
def test_merged_trajectories_weigh_every_token_as_all_do(items: list[Trajectory]) -> None:
    forest, merged = Forest.from_trajectories(items), merged_trajectories(Forest.from_trajectories(items))
    again = Forest.from_trajectories(merged)
    assert again.share_ratio == pytest.approx(forest.leaf_ratio)
    np.testing.assert_array_equal(again.token_ids, forest.token_ids)
    np.testing.assert_allclose(again.token_weights(), forest.token_weights(), rtol=1e-6)


def test_rows_hold_what_fits(model: torch.nn.Module) -> None:
    items = make("no-sharing", "tiny", 64).trajectories
    total = sum(map(len, items))
    parts = plain_parts(model)
    assert len(FlatRows(parts, items, max_row_tokens=total, packs=True).rows) == 1
    rows = FlatRows(parts, items, max_row_tokens=max(map(len, items)), packs=True).rows
    assert 1 < len(rows) <= len(items)
    assert len(FlatRows(parts, items, max_row_tokens=total, packs=False).rows) == len(items)


@pytest.mark.parametrize("attention", ["flex", "reference"])
def test_other_attention_is_counted_by_its_own_blocks(model: torch.nn.Module, attention: str) -> None:
    items = make("grpo", "tiny", 64).trajectories
    made = prepare(builders(twin(model), items, Settings([], attention=attention))["tree"])
    assert isinstance(made, Contestant)
    # 73 tokens: flex reads one block of 128 keys, the reference every key for every query.
    assert made.key_rows_per_token == pytest.approx(128 / 73 if attention == "flex" else 73)
    made.step()


def test_who_cannot_take_part_says_why(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    items = make("grpo", "tiny", 64).trajectories
    with pytest.raises(ConfigError, match="'verl' is unknown"):
        builders(model, items, Settings(["verl"]))
    many = prepare(builders(twin(model), items, Settings(["flat"]))["flat"])
    monkeypatch.setattr("treewise.bench.contestants.free_bytes", lambda _: 300_000)
    few = prepare(builders(twin(model), items, Settings(["flat"]))["flat"])
    assert few.num_micro_batches > many.num_micro_batches == 1  # rows shrink until they fit
    monkeypatch.setattr("treewise.nn.platform.memory.free_bytes", lambda _: 1000)
    with pytest.raises(OutOfMemoryError, match="weights and gradients take"):
        random_model("qwen3-tiny", torch.float32, CPU)


def test_layers_of_all_contestants_are_fused_alike(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of treewise's model and of the twin that flat rows run on."""
    fused: list[torch.nn.Module] = []
    monkeypatch.setattr(compilation, "compile_layers", lambda lm: fused.append(lm.decoder))
    items = make("tau2", "tiny", 64).trajectories
    made = builders(twin(model), items, Settings(["flat"], layers="compiled"))
    ours, plain = fused
    assert ours is not plain
    assert next(ours.parameters()) is next(plain.parameters())
    flat, tree = (prepare(made[name]) for name in ("flat", "tree"))
    assert isinstance(flat, Contestant)
    assert isinstance(tree, Contestant)
    assert flat.flops > tree.flops > 0
    with pytest.raises(ConfigError, match="--layers 'fast' is unknown; choose one of auto, plain, compiled, liger"):
        builders(twin(model), items, Settings(layers="fast"))
    assert [layers_of("auto", torch.device(kind)) for kind in ("cpu", "cuda")] == ["plain", "compiled"]


def test_rows_on_ligers_layers_leave_the_others_theirs(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package replaces a function of the model's module for the whole process: here one that counts its calls."""
    module, calls = sys.modules[type(model).__module__], []
    plain = module.apply_rotary_pos_emb

    def use_liger(patched: torch.nn.Module, _: torch.device) -> list[str]:
        assert patched is not model
        module.apply_rotary_pos_emb = lambda *given, **more: calls.append(1) or plain(*given, **more)
        return ["rope"]

    monkeypatch.setattr(liger, "use_liger", use_liger)
    items = weighted("tau2")
    loss, _, expected = flat_sft(twin(model), items)
    made = builders(twin(model), items, Settings(["trl", "trl-liger"]))
    steps = {name: prepare(build) for name, build in made.items() if name.startswith("trl")}
    assert list(steps) == ["trl", "trl-liger"]
    for name, num_calls in (("trl-liger", 2), ("trl", 0), ("trl-liger", 2)):  # of two layers
        calls.clear()
        check(model, steps[name], name, loss, expected)
        assert len(calls) == num_calls
        assert module.apply_rotary_pos_emb is plain
    assert steps["trl-liger"].note.startswith("layers of Liger's; copies the path")


def test_rows_on_ligers_layers_say_what_they_lack(model: torch.nn.Module) -> None:
    made = builders(twin(model), make("tau2", "tiny", 64).trajectories, Settings(["trl-liger"]))
    assert "use_liger_kernel" in str(prepare(made["trl-liger"]))  # not installed, or the model is on a CPU
    assert "trl-liger" not in builders(twin(model), make("tau2", "tiny", 64).trajectories, Settings())


def test_of_a_mixture_as_many_layers_are_made_as_fit(monkeypatch, capsys):
    """Those of 30B-A3B have 0.6 B parameters each, so here of a small one."""
    monkeypatch.setattr(workloads, "CUT_TO_FIT", {"mixture-tiny": 0.5})
    kind, fields = workloads.SHAPES["mixture-tiny"]
    monkeypatch.setitem(workloads.SHAPES, "mixture-tiny", (kind, {**fields, "num_hidden_layers": 5}))
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2 * 8 * size_of_layers(4, kind, fields))
    model = random_model("mixture-tiny", torch.float32, CPU)
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert "mixture-tiny: 4 of 5 layers fit into" in capsys.readouterr().err


def size_of_layers(number, kind, fields):
    config = AutoConfig.for_model(kind, **{**fields, "num_hidden_layers": number, "pad_token_id": None})
    with torch.device("meta"):
        return sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
