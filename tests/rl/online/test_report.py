"""The line that is printed of an iteration."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from treewise.rl.online.report import PrintedLine


@pytest.mark.parametrize(("count", "expected"), [(1, "1 token, 1 rollout"), (1200, "1,200 tokens, 1,200 rollouts")])
def test_counts_stand_with_their_nouns(count, expected, tmp_path):
    written = []
    line = PrintedLine(written.append)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    state = TrainerState(max_steps=3)
    line.on_train_begin(args, state, TrainerControl())
    line.on_log(args, state, TrainerControl(), logs={"iteration": 1, "sampled_tokens": count, "num_rollouts": count})
    assert written == [f"iteration 1/3: {expected}\n"]


def test_an_evaluation_without_held_out_tasks_prints_no_line(tmp_path):
    written = []
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    PrintedLine(written.append).on_log(args, TrainerState(max_steps=3), TrainerControl(), logs={"iteration": 0})
    assert written == []
