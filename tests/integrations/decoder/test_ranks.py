"""Two processes under DDP: each computes its own rows as a tree, and together they are one process with all rows."""

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

import treewise as tw
from tests.distributed.test_mesh import fork_ranks
from tests.integrations.decoder.test_seam import model_of, padded, through
from treewise.errors import ConfigError
from treewise.testing.oracle import gradient_error, gradients_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("integrations/decoder/test_ranks")]

CLOSE = 1e-6  # in float64; transformers computes norms in float32
PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42, 43, 44]]
ROWS = [prompt + answer for prompt in PROMPTS for answer in ([10, 11, 12], [10, 12, 13], [14, 15, 16], [14, 15, 17])]


def rows_of(rank):
    """Of one process: two rows of each prompt, so that it shares less than all rows together."""
    return padded("right", ROWS[rank::2])


def one_backward():
    """Gradients of a backward under DDP, which means them over the processes; what was shared."""
    rank = torch.distributed.get_rank()
    model = model_of()
    parallel = DistributedDataParallel(model)
    sharing = tw.share_prefixes(parallel)
    _, gradients, _ = through(parallel, rows_of(rank))
    return {name.removeprefix("module."): each for name, each in gradients.items()}, sharing.counts.share_ratio


def steps_of_accelerate(line, rows, gradient_accumulation_steps):
    """Weights after three steps of a plain loop; calls of a step share with one another in one process alone."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    sharing = tw.share_prefixes(model) if line else None
    for _ in range(3 * gradient_accumulation_steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(**rows).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert sharing is None or sharing.counts.num_calls > 0
    return {name: each.detach().clone() for name, each in accelerator.unwrap_model(model).named_parameters()}, sharing


def cut():
    """What a batch says that exceeds the budget: passes of one process would not be those of the other."""
    model = model_of()
    tw.share_prefixes(model, max_tokens=12)
    with pytest.raises(ConfigError) as error:
        model(**padded("right", ROWS))
    return str(error.value)


def work():
    rank = torch.distributed.get_rank()
    found = {"gradients": one_backward(), "cut": cut()}
    for number in (1, 2):
        weights, sharing = steps_of_accelerate(True, rows_of(rank), number)
        found[f"steps {number}"] = weights, str(sharing)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return fork_ranks(2, work, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def expected():
    model = model_of()
    through(model, padded("right", ROWS))
    return gradients_of(model)


def test_gradients_are_those_of_one_process(two, expected):
    for rank in range(2):
        gradients, share_ratio = two[rank]["gradients"]
        assert share_ratio > 1.3
        assert gradient_error(gradients, expected) < CLOSE


@pytest.mark.parametrize("number", [1, 2])
def test_steps_of_accelerate_are_those_of_one_process(two, number):
    flat, _ = steps_of_accelerate(False, padded("right", ROWS), number)
    for rank in range(2):
        weights, printed = two[rank][f"steps {number}"]
        for name, each in flat.items():
            torch.testing.assert_close(weights[name], each, rtol=CLOSE, atol=CLOSE)
        assert f"one another: {0 if number == 1 else 3} steps so far" in printed


def test_what_is_refused_by_name(two):
    for found in two:
        assert "several ranks share_prefixes computes a batch whole" in found["cut"]
