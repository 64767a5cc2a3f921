"""What a run sampled is written and shown with its text."""

import json

import pytest

from tests.rl.online.helpers import TOKENIZER, new_trainer
from treewise.data import RenderOptions, load_trees
from treewise.report import read_run
from treewise.rl.online.records import MAX_SHOWN, Sample, draws_file, lines_of, rollouts_file


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_held_out_samples_hold_what_was_sampled_as_text(tmp_path, capsys):
    trainer = new_trainer(tmp_path / "run", iterations=3, show_every=2, save_every=100, num_items=2)
    trainer.train()
    printed = capsys.readouterr().out
    for iteration in (1, 2, 3):
        rows = records(rollouts_file(trainer.folder, iteration))
        assert rows
        for row in rows:
            first = row["loss_weights"].index(1.0)
            assert row["prompt_text"] == TOKENIZER.decode(row["token_ids"][:first])
            assert row["completion_text"] == TOKENIZER.decode(row["token_ids"][first:])
    evaluations = {path.name: records(path) for path in (trainer.folder / "evaluations").iterdir()}
    assert sorted(evaluations) == [f"iteration-{iteration:05d}.jsonl" for iteration in (0, 2, 3)]
    logged = {int(entry["iteration"]): entry["eval_reward"] for entry in trainer.log_history if "eval_reward" in entry}
    for iteration, reward in logged.items():
        samples = evaluations[f"iteration-{iteration:05d}.jsonl"]
        assert [each["key"] for each in samples] == ["even/held_out/0", "even/held_out/1"]
        assert [each["prompt"] for each in samples] == [
            f"<|im_start|>user\nh{index}<|im_end|>\n<|im_start|>assistant\n" for index in (0, 1)
        ]
        assert sum(each["reward"] for each in samples) / 2 == pytest.approx(reward)
    # Iterations 1, 2 and the last one: each followed by samples; held-out ones follow each evaluation.
    assert printed.count("  sampled\n") == 3
    assert printed.count("  held out") == 3
    assert "ETA" in printed
    # The report compares with what came the predictions of items that had been tried: of all after the first iteration.
    draws = [each for n in (2, 3) for each in json.loads(draws_file(trainer.folder, n).read_text())["draws"]]
    online = read_run(trainer.folder).online
    assert sum(online.trials) == sum(each["trials"] for each in draws) > 0
    # Rows with text are rows as before: the text is not compared with ids that were sampled.
    loaded = load_trees([rollouts_file(trainer.folder, 1)], TOKENIZER, options=RenderOptions(on_drift="error"))
    assert len(loaded) == 2
    assert not loaded.report.unused_keys


def test_nothing_is_shown_where_show_every_is_zero(tmp_path, capsys):
    new_trainer(tmp_path / "run", iterations=1, show_every=0, save_every=100).train()
    printed = capsys.readouterr().out
    assert "sampled\n" not in printed
    assert "held out" not in printed


def test_a_sample_cannot_write_control_characters_or_flood_the_terminal():
    long = "x" * (MAX_SHOWN + 1)
    lines = lines_of(
        "sampled", [Sample("a", "p\x1b[2J", "one\x1b]0;t\x07\ntwo", 1.0), Sample("a", "p\x1b[2J", long, None)]
    )
    assert "\x1b" not in lines
    assert lines.count("\n") == 4  # the title, the prompt once, two rollouts
    assert "one\\x1b]0;t\\x07\\ntwo" in lines
    assert long not in lines
    assert "reward  none" in lines
