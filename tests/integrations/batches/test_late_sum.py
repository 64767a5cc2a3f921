"""Two processes under DDP with micro-batches: windows, and gradients that are added up at their end."""

from contextlib import nullcontext, suppress

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

import treewise as tw
from tests.distributed.test_mesh import fork_ranks
from tests.integrations.batches.test_accumulation import ROWS, collate, model_of, three_steps
from treewise.errors import ConfigError
from treewise.testing.oracle import gradient_error

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("integrations/batches/test_late_sum")]

CLOSE = 1e-6  # in float64; transformers computes norms in float32
ACCUMULATE = 4
APART = [([number, number + 1, number + 2], [7]) for number in range(8, 48, 4)]


def adapted(model):
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.to(torch.float64)


CASES = {
    "evaluation": {"looks": True},
    "views of buckets": {
        "ddp": {"gradient_as_bucket_view": True},
        "model": {"tie_word_embeddings": True},
        "set_to_none": False,
    },
    "adapters": {"adapt": True, "ddp": {"find_unused_parameters": True}},
    "one shares nothing": {"rows": (ROWS, APART), "ddp": {"find_unused_parameters": True}},
    "budget": {"line": {"max_tokens": 12}},
    "an error in the last forward": {"fails": True},
    "compressed": {"compresses": True, "close": 1e-2},
}


def steps(case, line):
    """Norms of gradients and weights after three steps of a loop of accelerate; batch size 1."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        kwargs_handlers=[DistributedDataParallelKwargs(**case.get("ddp", {}))],
    )
    model = model_of(**case.get("model", {}))
    model = adapted(model) if case.get("adapt") else model
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    sharing = tw.share_prefixes(model, **case.get("line", {})) if line else None
    model, optimizer = accelerator.prepare(model, optimizer)
    if case.get("compresses"):
        model.register_comm_hook(None, fp16_compress_hook)
    rows = case.get("rows", (ROWS, [*reversed(ROWS)]))[rank]
    norms = []
    for number in range(3 * ACCUMULATE):
        batch = collate([rows[number % len(rows)]])
        with accelerator.accumulate(model):
            if case.get("fails") and accelerator.sync_gradients:
                with pytest.raises(ValueError, match="input_ids"):
                    model(input_ids=None)
            accelerator.backward(model(**batch).loss)
            if case.get("looks"):
                with torch.no_grad():
                    model(**batch)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
    sharing = sharing and (str(sharing), sharing.counts.share_ratio)
    inner = accelerator.unwrap_model(model)
    return norms, {name: each.detach().clone() for name, each in inner.named_parameters()}, sharing


def trained(folder, line):
    """Weights of a Trainer on several processes."""
    torch.manual_seed(0)
    args = three_steps(folder, per_device_train_batch_size=1, gradient_accumulation_steps=ACCUMULATE)
    trainer = Trainer(model_of(), args, train_dataset=ROWS, data_collator=collate)
    sharing = tw.share_prefixes(trainer.model) if line else None
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    weights = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    return norms, weights, sharing and (str(sharing), sharing.counts.share_ratio)


def own_loop(line):
    """Gradients of a loop of one's own; an error in a first window leaves DDP as it was."""
    torch.manual_seed(0)
    model = DistributedDataParallel(model_of())
    rows = ROWS[torch.distributed.get_rank() :: 2]
    sharing = tw.share_prefixes(model) if line else None
    if line:
        with suppress(KeyError), sharing.window():
            model(**collate(rows[:1])).loss.backward()
            raise KeyError
        assert model.require_backward_grad_sync
        model.zero_grad()
    with sharing.window() if line else nullcontext():
        for number, row in enumerate(rows):
            with nullcontext() if number == len(rows) - 1 else model.no_sync():
                model(**collate([row])).loss.backward()
    grads = {name: each.grad.clone() for name, each in model.module.named_parameters()}
    return grads, sharing and sharing.counts.share_ratio


def inside_alone():
    """What is said where DDP is not known, and would add up in each backward."""
    model = model_of()
    sharing = tw.share_prefixes(model)
    parallel = DistributedDataParallel(model)
    with pytest.raises(ConfigError) as error, sharing.window():
        parallel(**collate(ROWS[:1]))
    return str(error.value)


def wrapped_again():
    """Weights after a step of two trainers, one after the other, each with a DDP of its own around one model."""
    found = []
    for line in (True, False):
        torch.manual_seed(0)
        model = model_of()
        sharing = tw.share_prefixes(model) if line else None
        for rows in (ROWS[:4], ROWS[4:8]):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wrapped, optimizer = accelerator.prepare(model, optimizer)
            for row in rows if torch.distributed.get_rank() else [*rows[2:], *rows[:1], *rows[:1]]:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**collate([row])).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.free_memory()
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
        if line:
            assert "2 steps so far" in str(sharing)
    return found


def nothing_here():
    """Gradients where one process has none at all: half of the other's, and nobody waits."""
    kinds = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=kinds)
    model, alone = model_of(), model_of()
    tw.share_prefixes(model)
    wrapped = accelerator.prepare(model)
    for row in ROWS[:2]:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**collate([row])).loss
            accelerator.backward(loss if torch.distributed.get_rank() else loss.detach().requires_grad_())
        (alone(**collate([row])).loss / 4).backward()
    return [{name: each.grad for name, each in one.named_parameters()} for one in (model, alone)]


def joined():
    """What is said where a process may have fewer batches, and no window to end with the others."""
    model = DistributedDataParallel(model_of())
    sharing = tw.share_prefixes(model)
    with model.join(), pytest.raises(ConfigError) as error, sharing.window():
        pass
    return str(error.value)


def hooked():
    """What is printed where a hook on a gradient would run on a part of it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    sharing = tw.share_prefixes(model)
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(**collate(ROWS[:2])).loss)
    return str(sharing)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")

    def work():
        found = {name: (steps(case, True), steps(case, False)) for name, case in CASES.items()}
        found["Trainer"] = trained(folder, True), trained(folder, False)
        found["wrapped again"], found["nothing here"] = wrapped_again(), nothing_here()
        found["inside alone"] = inside_alone()
        found["own loop"] = own_loop(line=True), own_loop(line=False)
        return {**found, "hooks": hooked(), "joined": joined()}

    return fork_ranks(2, work, folder)


@pytest.mark.parametrize("name", [*CASES, "Trainer"])
def test_steps_are_those_without_the_line(two, name):
    close = CASES.get(name, {}).get("close", CLOSE)
    for rank, found in enumerate(two):
        (norms, weights, (printed, ratio)), (expected_norms, expected, _) = found[name]
        assert norms == pytest.approx(expected_norms, rel=close)
        for key, each in expected.items():
            torch.testing.assert_close(weights[key], each, rtol=close, atol=close)
        assert "calls of one step share with one another" in printed
        assert ratio > 1.5 or (name, rank) == ("one shares nothing", 1)
    for key, each in two[0][name][0][1].items():
        assert torch.equal(each, two[1][name][0][1][key])


def test_a_loop_of_ones_own(two):
    for (found, ratio), (expected, _) in (each["own loop"] for each in two):
        assert gradient_error(found, expected) < CLOSE
        assert ratio > 1.5


def test_a_model_that_is_wrapped_again(two):
    for found, expected in (each["wrapped again"] for each in two):
        assert gradient_error(found, expected) < CLOSE


def test_a_process_without_gradients_meets_the_others(two):
    for found, expected in (each["nothing here"] for each in two):
        assert gradient_error(found, expected) < CLOSE


def test_a_window_that_knows_no_ddp_refuses_its_calls(two):
    for found in two:
        assert "the model with DDP around it" in found["inside alone"]


def test_uneven_inputs_are_refused(two):
    for found in two:
        assert "uneven inputs" in found["joined"]


def test_hooks_on_gradients_leave_ddp_as_it_is(two):
    for found in two:
        assert "hooks on gradients" in found["hooks"]
