"""Tokens and bytes of processes that share micro-batches, beside counts by hand."""

import pytest
import torch

from treewise.nn.flops import flop_model
from treewise.planning.planner import plan
from treewise.report.analysis.context_facts import ContextReport, report_context
from treewise.testing import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VALUES = 3 * 2 * (8 + 8)  # of a token: layers, key heads, sizes of keys and values


@pytest.mark.parametrize(
    ("budget", "dtype", "live", "read", "sent"),
    [
        # Tokens 0 to 4 and 5 to 7: the second process has three tokens, which see five of the first one.
        (None, torch.float32, 5, 0, 5 * (4 + 4)),
        (None, torch.bfloat16, 5, 0, 5 * (2 + 4)),
        # The prompt as 3 and 1, forward, and forward and backward again; the answers as 2 and 2.
        (4, torch.float32, 3, 0, (3 + 2 + 3) * 4 + (2 + 3) * 4),
    ],
)
def test_a_prompt_of_four_tokens_and_two_answers_by_hand(budget, dtype, live, read, sent):
    forest = Forest.from_trajectories([Trajectory([3, 4, 5, 6, answer, answer]) for answer in (7, 8)])
    report = report_context(plan(forest, budget, hold="never"), flop_model(tiny_model("llama")), 2, dtype)
    assert report == ContextReport(2, live, read, VALUES * sent)


def test_held_tokens_stay_until_their_backward():
    forest = Forest.from_trajectories([Trajectory([3, 4, 5, 6, *[answer] * 4]) for answer in (7, 8)])
    held = report_context(plan(forest, 8, hold="always"), flop_model(tiny_model("llama")), 2, torch.float32)
    # Three micro-batches of four tokens, each cut into three and one.
    assert (held.live_tokens, held.bytes_sent) == (3 + 3, VALUES * 3 * 3 * (4 + 4))


def test_the_last_process_of_a_long_path_reads_the_tokens_of_the_others():
    # Attention weighs most and its keys take most bytes, so the last process has few tokens and reads all others.
    flops = flop_model(tiny_model("llama", num_key_value_heads=4, head_dim=4096, hidden_size=4, intermediate_size=4))
    report = report_context(plan(Forest.from_trajectories([Trajectory(range(3, 43))])), flops, 4, torch.float32)
    assert report.live_tokens + report.read_tokens == 40
    assert report.read_tokens > 30
