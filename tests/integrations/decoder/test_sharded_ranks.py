"""Two processes whose model FSDP2 shards: each computes its own rows as a tree, against the same loop without the line.

All cases run in the same two processes, which are forked from this one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import treewise as tw
from tests.distributed.test_mesh import fork_ranks
from tests.integrations.decoder.test_ranks import PROMPTS, ROWS
from tests.integrations.decoder.test_seam import model_of, padded
from treewise.errors import TreewiseError
from treewise.nn.wrapped import unwrap_model
from treewise.testing.oracle import gradient_error

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("integrations/decoder/test_sharded_ranks")]

CLOSE = 1e-6  # in float64; transformers computes norms in float32
MORE = ROWS + [PROMPTS[0] + [20, 21, 22, 23, 24, 25, last] for last in (1, 2, 3)]
BUDGET = 12  # cuts the rows of a rank into four passes, and those of the other into two
NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

# units: what is sharded apart from layers and the model. options: of `fully_shard`. changes: of the configuration.
CASES = {
    "whole": {},
    "at a budget": {"budget": BUDGET},
    "everything a unit, logits read": {"units": "decoder head embedding", "reads_logits": True},
    "everything a unit, checkpoints, at a budget": {
        "units": "decoder head",
        "checkpoints": "not reentrant",
        "budget": BUDGET,
        "options": {"reshard_after_forward": True},
    },
    "as accelerate does, two calls a backward": {"units": "embedding tail", "num_calls": 2, "budget": BUDGET},
    "one call in passes, one whole, in a backward": {"num_calls": 2, "last_rows": ROWS[:3], "budget": BUDGET},
    "tied, accumulated, scored in between": {
        "units": "tail",
        "changes": {"tie_word_embeddings": True},
        "num_backwards": 2,
        "scores": True,
        "budget": BUDGET,
    },
    "adapters, reentrant checkpoints": {"adapters": True, "checkpoints": "reentrant", "budget": BUDGET},
    "copies (HSDP)": {"mesh": (2, 1), "budget": BUDGET},
}


def rows_of(rank, number=0):
    """Of one process: six rows or eleven, padded on the left or on the right."""
    return padded(("right", "left")[number % 2], MORE if (rank + number) % 2 else ROWS[:6])


def drawn_rows(seed):
    """Rows with drawn forks of two processes, and a budget."""
    random = np.random.default_rng(seed)
    rows = [[int(each) for each in random.integers(5, 60, 6)]]
    for _ in range(int(random.integers(2, 9))):
        row = rows[int(random.integers(len(rows)))]
        rows.append(
            row[: int(random.integers(4, len(row) + 1))] + random.integers(5, 60, random.integers(1, 7)).tolist()
        )
    cut = int(random.integers(1, len(rows)))
    side = str(random.choice(["left", "right"]))
    return [padded(side, each) for each in (rows[:cut], rows[cut:])], int(random.integers(6, 20))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients_of(model):
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def sharded(model, units="", mesh=None, **options):
    """Layers and the model as units of FSDP2, and what else is named."""
    if mesh is not None:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards"))
    base = unwrap_model(model)
    base = base.get_base_model() if hasattr(base, "peft_config") else base
    for layer in base.model.layers:
        fully_shard(layer, **options)
    is_tied = base.lm_head.weight is base.model.embed_tokens.weight
    tail = [base.model.norm, *([base.model.embed_tokens] if is_tied else []), base.lm_head]
    parts = {"decoder": base.model, "head": base.lm_head, "embedding": base.model.embed_tokens, "tail": tail}
    for name in reversed(units.split()):
        fully_shard(parts[name], **options)
    fully_shard(model, **options)
    return model


def built(case):
    model = model_of(dtype=case.get("dtype", torch.float64), **case.get("changes", {}))
    if case.get("adapters"):
        torch.manual_seed(3)
        names = ["q_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).double()
    if "checkpoints" in case:
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpoints"] == "reentrant"})
        model.enable_input_require_grads()
        model.train()
    return sharded(model, case.get("units", ""), case.get("mesh"), **case.get("options", {}))


def loss_of(model, rows, *, reads_logits):
    out = model(**rows)
    if not reads_logits:
        return out.loss
    return (out.logits.float().log_softmax(-1)[..., 3] * rows["attention_mask"]).mean()


def loop(case, line):
    """Losses and whole gradients of a loop; what was shared; how many layers were whole at once in its backwards."""
    rank, model, most = torch.distributed.get_rank(), built(case), [0]
    sharing = tw.share_prefixes(model, max_tokens=case.get("budget")) if line else None
    layers = [each for each in model.modules() if type(each).__name__.endswith("LlamaDecoderLayer")]

    def count(*_):
        if torch._C._current_graph_task_id() != -1:
            most[0] = max(most[0], sum(not isinstance(next(each.parameters()), DTensor) for each in layers))

    layers[-1].register_forward_pre_hook(count)
    losses = []
    for number in range(num_backwards := case.get("num_backwards", 1)):
        if case.get("scores"):
            with torch.no_grad():
                losses.append(model(**rows_of(rank, number + 1)).loss)
        model.set_requires_gradient_sync(number == num_backwards - 1)
        calls = range(number, number + case.get("num_calls", 1))
        batches = [rows_of(rank, each) for each in calls]
        if "last_rows" in case:
            batches[-1] = padded("right", case["last_rows"])
        parts = [loss_of(model, each, reads_logits=case.get("reads_logits")) for each in batches]
        sum(parts).backward()
        losses += parts
    return [each.item() for each in losses], gradients_of(model), sharing, most[0]


def compared(case):
    losses, gradients, _, _ = loop(case, line=False)
    found, tree, sharing, most = loop(case, line=True)
    return SimpleNamespace(
        losses=[*zip(found, losses, strict=True)],
        names=(sorted(tree), sorted(gradients)),
        error=gradient_error(tree, gradients),
        counts=sharing.counts,
        printed=str(sharing),
        num_whole=most,
    )


def drawn():
    """Of drawn rows: the larger error of loss and gradient."""
    rank, errors = torch.distributed.get_rank(), []
    own, tree = (sharded(model_of(), "head") for _ in range(2))
    sharing = tw.share_prefixes(tree, min_ratio=0)
    for seed in range(6):
        rows, budget = drawn_rows(seed)
        sharing.engine.budget.tokens = budget
        losses = []
        for model in (own, tree):
            model.zero_grad()
            losses.append(model(**rows[rank]).loss)
            losses[-1].backward()
        errors.append(max(abs(float(losses[0] - losses[1])), gradient_error(*map(gradients_of, (tree, own)))))
    return errors, sharing.counts


def narrow():
    """Errors of gradients in bfloat16, without the line and with it, against float32."""
    rows, found = rows_of(torch.distributed.get_rank()), []
    for options, line in (({}, False), ({"mp_policy": NARROW}, False), ({"mp_policy": NARROW}, True)):
        model = sharded(model_of(dtype=torch.float32), "decoder head", **options)
        if line:
            tw.share_prefixes(model, max_tokens=BUDGET)
        model(**rows).loss.backward()
        found.append(gradients_of(model))
    return [gradient_error(each, found[0]) for each in found[1:]]


def steps_of_accelerate(line):
    """Weights after three clipped steps of accelerate's loop, which shards a model for GPUs alone unless it is told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapped)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = model_of()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sharing = tw.share_prefixes(model, max_tokens=BUDGET) if line else None
    for number in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(**rows_of(accelerator.process_index, number)).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert sharing is None or sharing.counts.num_calls == 6, sharing
    return {name: whole(each) for name, each in model.named_parameters()}


def left():
    """Rank 1 has documents in its mask: both leave the call to the model. Later calls are shared."""
    rank, errors = torch.distributed.get_rank(), []
    own, tree = (sharded(model_of(), "decoder") for _ in range(2))
    sharing = tw.share_prefixes(tree, max_tokens=BUDGET)
    for number in range(2):
        rows = rows_of(rank, number)
        rows["attention_mask"] *= 1 + (rank == 1 and number == 0)
        for model in (own, tree):
            model.zero_grad()
            model(**rows).loss.backward()
        errors.append(gradient_error(*map(gradients_of, (tree, own))))
    return errors, sharing.counts


def generated():
    """Tokens without the line and with it, and what was counted."""
    found, sharing = [], None
    for line in (False, True):
        model = sharded(model_of()).eval()
        sharing = tw.share_prefixes(model) if line else None
        with torch.no_grad():
            found.append(model.generate(torch.tensor(PROMPTS), max_new_tokens=3, do_sample=False))
    return found, sharing.counts


def verified():
    """In float64, and what is said in bfloat16."""
    rows = rows_of(torch.distributed.get_rank())
    report = tw.share_prefixes(sharded(model_of(), "head"), max_tokens=BUDGET).verify(rows)
    low = sharded(model_of(dtype=torch.float32), mp_policy=NARROW)
    return report, said(lambda: tw.share_prefixes(low).verify(rows))


def said(work):
    try:
        work()
    except TreewiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors_of_one():
    """What both processes say where one has a token without an embedding, or a loss that reads padding; or both a model
    that leaks between rows."""
    rank, found = torch.distributed.get_rank(), {}
    rows, model = rows_of(rank), sharded(model_of())
    tw.share_prefixes(model, max_tokens=BUDGET)
    if rank == 1:
        rows["input_ids"][0, 0] = 10_000
    found["token"] = said(lambda: model(**rows))
    rows, model = rows_of(rank), sharded(model_of())
    tw.share_prefixes(model)
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    read = logits if rank == 0 else logits * rows["attention_mask"][..., None]
    found["padding"] = said(read.sum().backward)
    leaking = sharded(model_of())
    leaking.model.norm.register_forward_hook(lambda _module, _inputs, rows: rows + rows.mean(1, keepdim=True))
    tw.share_prefixes(leaking)
    found["leak"] = said(lambda: leaking(**rows_of(rank)))
    return found


def refusals():
    rank, found = torch.distributed.get_rank(), {}
    found["auto"] = said(lambda: tw.share_prefixes(sharded(model_of()), max_tokens="auto"))
    meshes = [DeviceMesh("cpu", [each]) for each in range(2)]
    alone = model_of()
    fully_shard(alone, mesh=meshes[rank])
    found["alone"] = said(lambda: tw.share_prefixes(alone))
    divided, mesh = model_of(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    query = divided.model.layers[0].self_attn.q_proj
    query.weight = torch.nn.Parameter(distribute_tensor(query.weight.detach(), mesh["tensor"], [Shard(0)]))
    fully_shard(divided.model.layers[0], mesh=mesh["data"])
    found["divided"] = said(lambda: tw.share_prefixes(divided))
    hooked = sharded(model_of())
    sharing = tw.share_prefixes(hooked, max_tokens=BUDGET)
    hooked.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    found["hook"] = said(lambda: hooked(**rows_of(rank)))
    with pytest.raises(TreewiseError, match="a window belongs to one process"), sharing.window():
        pass
    return found


def work():
    found = {name: compared(case) for name, case in CASES.items()}
    found |= {each.__name__: each() for each in (drawn, narrow, left, generated, verified, errors_of_one, refusals)}
    found["accelerate"] = [steps_of_accelerate(line) for line in (False, True)]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return fork_ranks(2, work, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_without_the_line(two, case):
    for found in (each[case] for each in two):
        assert (found.counts.num_calls, found.counts.num_left) == (len(found.losses), 0), found.printed
        for tree, flat in found.losses:
            assert tree == pytest.approx(flat, rel=CLOSE)
        assert found.names[0] == found.names[1]
        assert found.error < CLOSE


def test_layers_are_whole_in_their_own_passes_alone(two):
    """Before the last layer's forward within a backward, the one before it may be gathered ahead."""
    assert [each["at a budget"].num_whole for each in two] == [1, 1]


def test_it_says_how_calls_ran(two):
    for each in two:
        assert "(FSDP2): 0 of 1 calls in several passes" in each["whole"].printed
        assert "(FSDP2): 1 of 1 calls in several passes" in each["at a budget"].printed
        assert "share nothing with one another: a window belongs to one process" in each["whole"].printed


def test_drawn_rows_at_drawn_budgets(two):
    for errors, counts in (each["drawn"] for each in two):
        assert max(errors) < CLOSE
        assert counts.num_calls == 6
        assert counts.num_computed_tokens > counts.num_tree_tokens


def test_low_precision_is_as_good_as_without_the_line(two):
    for flat, tree in (each["narrow"] for each in two):
        assert 0 < tree < 1.5 * flat


def test_steps_of_accelerate_are_those_without_the_line(two):
    for flat, tree in (each["accelerate"] for each in two):
        for name, each in flat.items():
            torch.testing.assert_close(tree[name], each, rtol=CLOSE, atol=CLOSE)


def test_rows_that_one_leaves_are_left_by_all(two):
    for (errors, counts), start in zip(
        (each["left"] for each in two), ("another process leaves", "attention"), strict=True
    ):
        assert max(errors) < CLOSE
        assert counts.num_calls == 1
        ((reason, count),) = counts.left.items()
        assert count == 1
        assert reason.startswith(start)
        assert "other numbers than 0 and 1" in reason


def test_generation_is_the_models_own(two):
    for (flat, tree), counts in (each["generated"] for each in two):
        assert torch.equal(flat, tree)
        assert (counts.num_cached, counts.num_left, counts.num_calls) == (3, 0, 0)


def test_verify(two):
    for report, low in (each["verified"] for each in two):
        assert report.passed
        assert report.share_ratio > 1.5
        assert low.startswith("ConfigError: verify compares a model in torch.bfloat16 with a copy in float32")


def test_an_error_of_one_is_raised_on_all(two):
    for found in (each["errors_of_one"] for each in two):
        assert found["token"].startswith("DataError: token id 10000")
        assert found["leak"].startswith("UnsupportedModelError: LlamaModel leaks between branches")
        assert found["padding"].startswith("UnsupportedModelError: the loss reads logits or hidden rows of padding")


def test_what_is_refused_by_name(two):
    for found in (each["refusals"] for each in two):
        assert found["auto"].startswith("ConfigError: max_tokens='auto' measures")
        assert "is sharded over 1 of 2 processes" in found["alone"]
        assert "is divided along 2 axes" in found["divided"]
        assert "each pass over a batch above max_tokens would run it" in found["hook"]
