"""Runs on meshes of processes: as near a run in float64 as one process, whole checkpoints, resumed to the bit."""

import hashlib

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from tests.distributed.test_mesh import fork_ranks
from tests.needs import MESHES
from tests.nn.recurrent.wide import widened
from tests.trainer.helpers import losses, some_trees
from treewise.distributed.mesh import load_on_mesh
from treewise.errors import ConfigError
from treewise.nn.wrapped import unwrap_model
from treewise.testing import tiny_model
from treewise.testing.oracle import LEAST_ROUNDING, TIMES_FLAT
from treewise.trainer import TreeTrainer, TreeTrainingArguments

pytestmark = MESHES
SETTINGS = {
    "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "seed": 3, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "max_tokens": 12, "per_device_train_batch_size": 2, "weight_decay": 0.1,
    "adam_epsilon": 1e-2,  # with the default the first update is the gradient's sign, which rounding can turn
}  # fmt: skip
# Family and settings of a run; batches of one process times their number.
TWO = {
    "tensor": ("qwen3", {"tp_size": 2}),
    "experts": ("qwen3_moe", {"ep_size": 2, "sharded": True}),
    "context": ("qwen3", {"context_size": 2}),
}
COMPILED = {
    "tensor": ("qwen3", {"tp_size": 2}),
    "experts": ("qwen3_moe", {"ep_size": 2, "sharded": True}),
    "context": ("qwen3", {"context_size": 2, "gradient_checkpointing": True}),
    "shards": ("qwen3", {"sharded": True, "shard_config": {"state_dict_type": "FULL_STATE_DICT"}}),
}
# At most, of two runs: of the first layer and of later ones, with gradients and without, of one token and of more.
GRAPHS = {"tensor": 70, "experts": 40, "context": 12, "shards": 12}
FOUR = {
    "tensor": ("qwen3", {"tp_size": 2, "sharded": True}),
    "experts": ("qwen3_moe", {"ep_size": 2, "sharded": True, "shard_config": {"cpu_offload": True}}),
    "both": ("qwen3_moe", {"tp_size": 2, "ep_size": 4, "sharded": True}),
    "copies": ("qwen3_moe", {"tp_size": 2, "ep_size": 2}),
    "hybrid": (
        "qwen3_moe",
        {"tp_size": 2, "ep_size": 2, "sharded": True, "shard_config": {"dp_replicate_size": 2}},
    ),
    "context": (
        "qwen3_moe",
        {"context_size": 2, "sharded": True, "shard_config": {"state_dict_type": "FULL_STATE_DICT"}},
    ),
}


def model_folder(folder, family):
    path = folder / family
    if not path.exists():
        changes = {"output_router_logits": True} if family == "qwen3_moe" else {}
        tiny_model(family, num_hidden_layers=2, **changes).save_pretrained(path)
    return path


def trainer_of(folder, family, run, settings):
    """A trainer of the model on its mesh; batches of a step are the same whatever the mesh."""
    args = TreeTrainingArguments(**{**SETTINGS, **settings}, output_dir=str(folder / run))
    args.per_device_train_batch_size = 4 // args.data_size
    sizes = {"tp_size": args.tp_size, "ep_size": args.ep_size}
    is_on_mesh = args.tp_size * args.ep_size > 1
    model = load_on_mesh(str(folder / family), **sizes, dtype=torch.float32) if is_on_mesh else type_of(folder, family)
    return TreeTrainer(model, args, train_dataset=some_trees())


def whole_weights(model):
    return {name: each.data.full_tensor() if isinstance(each.data, DTensor) else each.data.clone()
            for name, each in unwrap_model(model).named_parameters()}  # fmt: skip


def digest(weights):
    return hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in weights.values())).hexdigest()


def run_all(cases, folder):
    """Each run, and the same resumed from its second step; what its ends have."""
    found = {}
    for name, (family, settings) in cases.items():
        torch.compiler.reset()  # what this process compiled before it was forked
        counters.clear()
        trainer = trainer_of(folder, family, name, settings)
        trainer.train()
        weights = whole_weights(trainer.model)
        again = trainer_of(folder, family, name, settings)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
        norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
        found[name] = {
            "weights": weights, "losses": losses(trainer), "norms": norms,
            "digests": [digest(weights), digest(whole_weights(again.model))],
            "graphs": counters["stats"]["unique_graphs"],
        }  # fmt: skip
    return found


def one_process(folder, family, is_wide):
    """The run of one process, in float32 or in float64."""
    args = TreeTrainingArguments(**{**SETTINGS, "save_strategy": "no"}, output_dir=str(folder / "one"))
    args.per_device_train_batch_size = 4
    model = type_of(folder, family)
    trainer = TreeTrainer(widened(model) if is_wide else model, args, train_dataset=some_trees())
    trainer.train()
    norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
    return whole_weights(trainer.model), losses(trainer), norms


def type_of(folder, family):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)


def largest_distance(weights, exact):
    """Of any weight from that of the run in float64."""
    assert weights.keys() == exact.keys()
    return max(float((weights[name].double() - value).abs().max()) for name, value in exact.items())


def largest_ratio(values, exact):
    return max(abs(value / right - 1) for value, right in zip(values, exact, strict=True))


def check(found, folder, name, family):
    one, exact = (one_process(folder, family, is_wide) for is_wide in (False, True))
    distances = largest_distance, largest_ratio, largest_ratio  # of weights, losses, norms
    allowed = [
        TIMES_FLAT * max(LEAST_ROUNDING, distance(of_one, right))
        for distance, of_one, right in zip(distances, one, exact, strict=True)
    ]
    assert max(allowed) < 1e-5, "float32 is too far from float64 to compare anything with"
    for run in (own[name] for own in found):
        assert len({*run["digests"], *found[0][name]["digests"]}) == 1, "resumed to other bits"
        of_run = run["weights"], run["losses"], run["norms"]
        for distance, values, right, limit in zip(distances, of_run, exact, allowed, strict=True):
            assert distance(values, right) <= limit
    loaded = type_of(folder / name, "checkpoint-4")  # whole, as from_pretrained reads it
    for key, value in loaded.named_parameters():
        torch.testing.assert_close(value.data, found[0][name]["weights"][key], rtol=0, atol=0)


def launched(num_ranks, cases, folder):
    """The folder, and what each process found."""
    for family, _ in cases.values():
        model_folder(folder, family)
    return folder, fork_ranks(num_ranks, lambda: run_all(cases, folder), folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_like_one_and_resume(two, name):
    check(two[1], two[0], name, TWO[name][0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMPILED)
def test_two_processes_with_compiled_layers_train_like_one_without(name, tmp_path):
    """A layer is two graphs for each kind of call here, too; divided products and experts, which are left out of them,
    stand between more."""
    family, settings = COMPILED[name]
    compiled = {"torch_compile_backend": "aot_eager"}
    folder, found = launched(2, {name: (family, settings | compiled)}, tmp_path)
    check(found, folder, name, family)
    for run in found:
        assert 0 < run[name]["graphs"] <= GRAPHS[name]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launched(4, FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_like_one_and_resume(four, name):
    check(four[1], four[0], name, FOUR[name][0])


def test_settings_of_another_mesh_are_an_error(tmp_path):
    def run():
        model = load_on_mesh(str(model_folder(tmp_path, "qwen3")), tp_size=2, dtype=torch.float32)
        with pytest.raises(ConfigError, match=r"tp_size=1, ep_size=1, and the model was loaded with tp_size=2"):
            TreeTrainer(model, TreeTrainingArguments(**SETTINGS, output_dir=str(tmp_path)), train_dataset=some_trees())
        sharded = trainer_of(tmp_path, "qwen3", "run", {"tp_size": 2, "sharded": True})
        with pytest.raises(ConfigError, match="sharded=True has nothing to shard over: tp_size=2 divides every layer"):
            sharded.train()

    model_folder(tmp_path, "qwen3")
    fork_ranks(2, run, tmp_path)
