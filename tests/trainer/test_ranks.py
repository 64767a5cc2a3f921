"""Processes together are one process: the same losses, gradients and parameters, sharded or not, resumed or not.

SGD, whose updates are gradients: Adam would blow up rounding where a gradient is all but zero.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.test_mesh import fork_ranks
from tests.trainer.ranks import exhaustive_wanted, launch, outcome, train, train_all
from treewise.errors import ConfigError
from treewise.nn.platform.releases import recomputation_name
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.store import read_manifest

pytestmark = pytest.mark.xdist_group("trainer/test_ranks")

SGD = {"optim": "sgd", "learning_rate": 0.5}
EVALUATED = {"evaluates": True, "eval_strategy": "steps", "eval_steps": 3}  # before each checkpoint
CUT = {"max_tokens": 14}  # trunks that are computed twice, trunks that are held, and pieces
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 3}
RECOMPUTE = f"{recomputation_name()}_checkpointing"
LORA = {"model": {"lora": True}, RECOMPUTE: True, **CUT}
EXPERTS = {"model": {"family": "mixtral"}, "max_tokens": None}  # and a budget of none: each batch is one micro-batch
ROUTERS = {  # a loss on routers, which belongs to the step of all batches and processes
    "model": {"family": "mixtral", "router_aux_loss_coef": 0.7, "output_router_logits": True, "pad_token_id": None},
    "gradient_accumulation_steps": 2,
    **CUT,
}
TIED = {"model": {"family": "gemma"}, "max_tokens": None, "gradient_accumulation_steps": 2}
UNEVEN = {"num_trees": 3, **CUT}  # the last step of an epoch has no tree for one rank
APART = {"rows_apart": True, "policy_gradient": {"ratio_level": "sequence", "normalization": "rollout_mean"}, **CUT}
NESTED = {"weighting": "once", "merge_across_trees": False, **CUT}

# name: (settings of all, settings of several processes alone, settings of one process alone), for two processes
TWO = {
    "ddp": ({**SGD, **CUT, **EVALUATED, **CHECKPOINTS}, {}, {}),
    "sharded": ({**SGD, **CUT, **EVALUATED, **CHECKPOINTS}, {"sharded": True}, {}),
    "kept whole": (  # layers, from forward to backward
        {**SGD, **CUT, **EVALUATED, **CHECKPOINTS},
        {"sharded": True, "shard_config": {"reshard_after_forward": False}},
        {},
    ),
    "adapters": ({**SGD, **LORA, **CHECKPOINTS}, {"sharded": True}, {}),
    "experts": ({**SGD, **EXPERTS}, {"sharded": True}, {}),
    "routers": ({**SGD, **ROUTERS}, {}, {}),
    "routers sharded": ({**SGD, **ROUTERS}, {"sharded": True}, {}),
    "tied": ({**SGD, **TIED}, {"sharded": True, "shard_config": {"reshard_after_forward": False}}, {}),
    "recomputation": (SGD, {RECOMPUTE: "auto", "max_tokens": "auto"}, {"max_tokens": None}),
    "uneven": ({**SGD, **UNEVEN}, {"fsdp": "full_shard"}, {}),
    "bfloat16": ({**SGD, **CUT, "bf16": True}, {"sharded": True}, {}),
    "offloaded": ({**SGD, **CUT}, {"sharded": True, "shard_config": {"cpu_offload": True}}, {}),
    "small": ({**SGD}, {"max_tokens": "auto", "trouble": "small"}, {"max_tokens": 14}),
    "small sharded": ({**SGD}, {"max_tokens": "auto", "trouble": "small", "sharded": True}, {"max_tokens": 14}),
    "strided": ({**SGD, **CUT}, {"sharded": True, "balance_ranks": False}, {}),
    "weighted": ({**SGD, **NESTED}, {"sharded": True}, {}),
    "rows apart": ({**SGD, **APART}, {"balance_ranks": False}, {}),
}

# The same for four processes, from the first step: plans that are cut, and whole ones.
FOUR = {
    "whole ddp": ({**SGD, "max_tokens": None}, {}, {}),
    "whole sharded": ({**SGD, "max_tokens": None}, {"sharded": True}, {}),
    "cut ddp": ({**SGD, **CUT}, {}, {}),
    "cut sharded": ({**SGD, **CUT}, {"sharded": True}, {}),
    "copies of shards": ({**SGD, **CUT}, {"sharded": True, "shard_config": {"dp_replicate_size": 2}}, {}),
}


# A save that rank 1 cannot write; the run goes on without it.
SURVIVED = {**SGD, **CUT, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
DISKS = {
    "full ddp": (SURVIVED, {"on_save_failure": "continue", "trouble": "full disk"}, {}),
    "full sharded": (SURVIVED, {"on_save_failure": "continue", "trouble": "full disk", "sharded": True}, {}),
    "late sharded": (SURVIVED, {"on_save_failure": "continue", "trouble": "late", "sharded": True}, {}),
}
# What `make test` runs of these: the representatives of the tests below.
COMMON = ("ddp", "sharded", "kept whole", "routers sharded", "rows apart", "full sharded")


def batch_of(trees_per_step, num_ranks, settings):
    num_parts = num_ranks * settings.get("gradient_accumulation_steps", 1)
    return {"per_device_train_batch_size": trees_per_step // num_parts}


@pytest.fixture(scope="module")
def of_two(request, tmp_path_factory):
    """The folder and the outcomes of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    cases = {**TWO, **DISKS}
    if not exhaustive_wanted(request):
        cases = {name: cases[name] for name in COMMON}
    runs = {name: {**both, **several, **batch_of(4, 2, both)} for name, (both, several, _) in cases.items()}
    whole = {"sharded": True, "shard_config": {"state_dict_type": "FULL_STATE_DICT"}}
    runs["signalled"] = {**SGD, **CUT, **whole, "trouble": "signal", **batch_of(4, 2, {})}
    if exhaustive_wanted(request):
        runs["signalled in save"] = {**runs["sharded"], "trouble": "signal in save"}
    return folder, fork_ranks(2, lambda: train_all(folder, runs), folder)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """Outcomes of one process, by the settings that they were made with."""
    made = {}

    def run(settings):
        key = repr(settings)
        if key not in made:
            made[key] = outcome(train(tmp_path_factory.mktemp("one"), **settings))
        return made[key]

    return run


def assert_same(found, expected, atol=1e-6):
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-5)
    for name, value in expected["model"].items():
        assert torch.allclose(found["model"][name], value, rtol=0, atol=atol), name


@pytest.mark.representatives("ddp", "sharded", "routers sharded", "rows apart")
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_like_one(of_two, of_one, name):
    first, second = (outcomes[name] for outcomes in of_two[1])
    both, _, alone = TWO[name]
    expected = of_one({**both, **alone, **batch_of(4, 1, both), "save_strategy": "no"})
    if name == "bfloat16":
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-2)
    else:
        assert_same(first, expected)
    assert first["losses"] == second["losses"]
    assert first["budget"] == second["budget"]
    for key, value in first["model"].items():
        assert torch.equal(value, second["model"][key])
    assert first["kinds"] == (
        ["Tensor"] if name in ("ddp", "small", "routers", "recomputation", "rows apart") else ["DTensor"]
    )


# -- checkpoints of several processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_four(of_two, tmp_path_factory):
    """Four processes, from the start and from the third step of two: outcomes of rank 0."""
    folder = tmp_path_factory.mktemp("four")
    runs = {name: {**both, **several, **batch_of(4, 4, both)} for name, (both, several, _) in FOUR.items()}
    for name in ("ddp", "sharded"):
        both, several, _ = TWO[name]
        runs[name] = {**both, **several, **batch_of(4, 4, both), "resume": str(of_two[0] / name / "checkpoint-3")}
    # From shards to whole parameters, and back.
    runs["to ddp"] = {**runs["ddp"], "resume": runs["sharded"]["resume"]}
    runs["to shards"] = {**runs["sharded"], "resume": runs["ddp"]["resume"]}
    return folder, launch(4, folder, runs)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_like_one(of_four, of_one, name):
    both, several, _ = FOUR[name]
    assert_same(of_four[1][name], of_one({**both, **batch_of(4, 1, both)}))
    assert of_four[1][name]["kinds"] == (["DTensor"] if several else ["Tensor"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ddp", "sharded", "to ddp", "to shards"])
def test_four_processes_go_on_where_two_stopped(of_four, of_one, name):
    both = TWO["ddp"][0]
    expected = of_one({**both, **batch_of(4, 1, both), "save_strategy": "no"})
    assert_same(of_four[1][name], expected)
    assert of_four[1][name]["kinds"] == (["Tensor"] if name in ("ddp", "to ddp") else ["DTensor"])


@pytest.mark.representatives("sharded", "kept whole")
@pytest.mark.parametrize("name", ["ddp", "sharded", "kept whole", "adapters"])
def test_one_process_goes_on_where_two_stopped(of_two, of_one, tmp_path, name):
    both = TWO[name][0]
    expected = of_one({**both, **batch_of(4, 1, both), "save_strategy": "no"})
    checkpoint = of_two[0] / name / "checkpoint-3"
    found = outcome(train(tmp_path, **{**both, **batch_of(4, 1, both), "resume": str(checkpoint)}))
    assert_same(found, expected)


@pytest.mark.representatives("signalled-3")
@pytest.mark.parametrize(("name", "step"), [("signalled", 3), ("signalled in save", 4)])
def test_a_signal_to_one_process_ends_and_saves_all(of_two, name, step):
    for outcomes in of_two[1]:
        assert len(outcomes[name]["losses"]) == step
    for checkpoint in store.checkpoints(of_two[0] / name):
        read_manifest(checkpoint)
    assert store.step_of(store.checkpoints(of_two[0] / name)[-1]) == step


def test_a_whole_model_beside_shards_loads_with_transformers_alone(of_two):
    model = AutoModelForCausalLM.from_pretrained(of_two[0] / "signalled" / "checkpoint-3")
    for name, value in of_two[1][0]["signalled"]["model"].items():
        assert torch.equal(model.get_parameter(name), value)


def test_a_sharded_checkpoint_is_sealed_and_holds_nothing_pickled(of_two):
    folder = of_two[0] / "sharded" / "checkpoint-3"
    read_manifest(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert len(list((folder / "weights").iterdir())) == 2
    assert not list(folder.glob("model*.safetensors"))


# -- saves that fail on one rank --------------------------------------------------------------------------------------


@pytest.mark.representatives("full sharded")
@pytest.mark.parametrize("name", DISKS)
def test_a_disk_that_refuses_one_process_harms_neither_the_run_nor_other_checkpoints(of_two, of_one, name):
    both, _, _ = DISKS[name]
    expected = of_one({**SGD, **CUT, **batch_of(4, 1, both)})
    for outcomes in of_two[1]:
        assert_same({**outcomes[name], "eval": []}, {**expected, "eval": []})
    folder = of_two[0] / name
    assert sorted(path.name for path in folder.glob("*checkpoint*")) == [f"checkpoint-{step}" for step in (2, 4, 5)]
    for checkpoint in store.checkpoints(folder):
        read_manifest(checkpoint)


def test_sharding_without_processes_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="needs a process group; start the run with torchrun"):
        train(tmp_path, sharded=True)
