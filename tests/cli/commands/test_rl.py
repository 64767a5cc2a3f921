"""`treewise rl`: updates equal to flat ones, what is scored and kept, what is said, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests import needs
from tests.cli.helpers import files_of, save_tiny_model, write_rows
from tests.distributed.test_mesh import fork_ranks
from treewise.cli.main import main
from treewise.rl import update
from treewise.testing import tiny_model

pytestmark = pytest.mark.xdist_group("cli/commands/test_rl")

LEARNING_RATE = 0.5
FAST = ["--learning_rate", LEARNING_RATE, "--optim", "sgd", "--save_strategy", "no", "--max_grad_norm", 1e9]
ORDERED = ["--train_sampling_strategy", "sequential"]


def make_rows(num_groups=4, seed=0):
    """Groups of three rollouts of one prompt; the last group has equal rewards."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = random.integers(1, 97, size=6).tolist()
        for number in range(3):
            completion = random.integers(1, 97, size=int(random.integers(2, 6))).tolist()
            reward = 1.0 if group == num_groups - 1 else float(number == group % 3)
            rows.append(
                {
                    "token_ids": prompt + completion,
                    "loss_weights": [0] * len(prompt) + [1] * len(completion),
                    "sampler_logprobs": [None] * len(prompt) + [-4.5] * len(completion),
                    "reward": reward,
                    "group": f"g{group}",
                }
            )
    return rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    torch.manual_seed(0)
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rl(folder, model_folder, capsys):
    """Runs the command on `rows`; returns its exit code, output and errors."""

    def run(rows, *flags, output="out"):
        if rows is not None:
            write_rows(folder / "rows.jsonl", rows)
        words = ["--data", "rows.jsonl", "--model", model_folder, "--output", output, "--max_tokens", 12, *flags]
        code = main(["rl", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def parameters(path):
    return load_file(Path(path) / "model.safetensors")


def logged(path, key):
    """The values of `key` in the steps' lines of the run's log, in order."""
    lines = map(json.loads, (Path(path) / "log.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


# -- what is computed -------------------------------------------------------------------------------------------------


def flat_logprobs(model, row):
    ids = torch.tensor(row["token_ids"])
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.tensor(row["loss_weights"][1:]) > 0]


def flat_grpo(model_folder, rows, steps, beta):
    """GRPO by hand, row after row: mean over each rollout's tokens, then over the rollouts of a step."""
    model = LlamaForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        old = [flat_logprobs(model, row) for row in rows]
    advantages = []
    for start in range(0, len(rows), 3):
        rewards = torch.tensor([row["reward"] for row in rows[start : start + 3]])
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    for step in steps:
        model.zero_grad()
        loss = 0
        for index in step:
            logprobs = flat_logprobs(model, rows[index])
            ratio = torch.exp(logprobs - old[index])
            gain = torch.minimum(ratio * advantages[index], ratio.clamp(0.8, 1.2) * advantages[index])
            gap = old[index] - logprobs
            loss = loss + (beta * (gap.exp() - gap - 1) - gain).mean()
        (loss / len(step)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
    return dict(model.named_parameters())


def test_updates_equal_flat_ones(rl, model_folder):
    rows = make_rows()
    code, out, _ = rl(rows, "--objective", "grpo", "--beta", 0.5, "--epochs", 2, "--mini_batches", 2, *FAST, *ORDERED)
    assert code == 0
    halves = [list(range(0, 6)), list(range(6, 12))]
    expected = flat_grpo(model_folder, rows, halves * 2, beta=0.5)
    start = dict(LlamaForCausalLM.from_pretrained(model_folder).named_parameters())
    found = parameters("out")
    for name, value in expected.items():
        if name not in found:
            continue
        moved = (value - start[name]).detach()
        error = (found[name] - value).detach().norm() / moved.norm()
        assert error < 1e-4, name  # of what four steps of float32 moved
    assert "epoch 2: loss" in out
    assert len(logged("out", "clip_fraction")) == 4  # one a step
    assert out.count("clip_fraction") == 2  # one an epoch


MESHES = {"tp_size": "qwen3", "ep_size": "qwen3_moe", "context_size": "qwen3"}


@needs.MESHES
def test_two_processes_on_a_mesh_score_and_update_as_one(folder):
    """Four steps on old log-probs of the policy; the KL is to the policy, or to a reference that is whole."""
    write_rows(folder / "rows.jsonl", make_rows())
    for family in {*MESHES.values()}:
        tiny_model(family, vocab_size=97, num_hidden_layers=2).save_pretrained(folder / family)

    def run(key, output, *flags):
        own = ["--reference", "qwen3_moe"] if key == "ep_size" else []
        words = ["--data", "rows.jsonl", "--model", MESHES[key], "--output", output, "--max_tokens", 12, *own, *flags]
        words += ["--objective", "grpo", "--beta", 0.5, "--epochs", 2, "--mini_batches", 2, *FAST, *ORDERED]
        assert main(["rl", *map(str, words)]) == 0

    for key in MESHES:
        run(key, f"{key}-1")
    fork_ranks(2, lambda: [run(key, f"{key}-2", f"--{key}", 2) for key in MESHES], folder)
    for key, family in MESHES.items():
        start, one, two = (parameters(folder / name) for name in (family, f"{key}-1", f"{key}-2"))
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert (two[name] - value).norm() < 1e-4 * (value - start[name]).norm(), (key, name)


@pytest.mark.representatives("gspo")
@pytest.mark.parametrize("objective", ["grpo", "dapo", "gspo", "reinforce"])
def test_a_rollout_counts_once_however_its_rows_are_cut(rl, objective):
    random = np.random.default_rng(3)
    whole, cut = [], []
    for number in range(4):
        parts = [random.integers(1, 97, size=size).tolist() for size in (5, 2 + number, 3, 4)]
        prompt, first, result, second = parts if number == 0 else (whole[0]["token_ids"][:5], *parts[1:])
        label = {"group": "g", "rollout": number, "reward": float(number % 2) + 0.1 * number}
        ids = [*prompt, *first, *result, *second]
        weights = [0] * 5 + [1] * len(first) + [0] * 3 + [1] * 4
        whole.append({"token_ids": ids, "loss_weights": weights, **label})
        end = 5 + len(first)  # one row per call, as engines log them
        cut.append({"token_ids": ids[:end], "loss_weights": weights[:end], **label})
        cut.append({"token_ids": ids, "loss_weights": [0] * (end + 3) + [1] * 4, **label})
    flags = ["--objective", objective, "--epochs", 2, *FAST[2:], "--learning_rate", 0.1]
    assert "rollouts                 4 in 1 group, 4 rows" in rl(whole, *flags)[1]
    assert "rollouts                 4 in 1 group, 8 rows" in rl(cut, *flags, output="cut")[1]
    first, second = parameters("out"), parameters("cut")
    for name, value in first.items():
        assert torch.allclose(value, second[name], atol=2e-6), name


def test_one_update_needs_no_old_log_probs_and_is_the_same_with_them(rl):
    rows = make_rows()
    _, out, _ = rl(rows, "--objective", "grpo", *FAST)
    assert "not needed (one update" in out
    rl(None, "--objective", "grpo", "--old_logprobs", "recompute", *FAST, output="b")
    first, second = parameters("out"), parameters("b")
    for name, value in first.items():
        assert torch.allclose(value, second[name], atol=1e-6)


def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(rl, folder, monkeypatch):
    flags = ["--objective", "gspo", "--beta", 0.1, "--epochs", 3, "--learning_rate", 0.01]
    assert rl(make_rows(), *flags)[0] == 0
    expected = parameters("out")
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / "out" / name).unlink()
    for step in (2, 3):
        shutil.rmtree(folder / "out" / f"checkpoint-{step}")
    assert rl(None, *flags)[0] == 2  # a run is there

    def fail(*_):
        raise AssertionError("scored again")

    monkeypatch.setattr(update, "scored", fail)
    assert rl(None, *flags, "--resume")[0] == 0
    found = parameters("out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    files = files_of(folder / "out")
    code, out, _ = rl(None, *flags, "--resume")  # once more, at its end
    assert code == 0
    assert "out holds a finished run of 3 steps, and the settings ask for no more" in out
    assert files_of(folder / "out") == files


# -- what is said -----------------------------------------------------------------------------------------------------


def test_groups_without_variance_are_counted_and_may_be_left_out(rl):
    _, out, _ = rl(make_rows(), "--objective", "grpo", "--dry_run")
    assert "rollouts                 12 in 4 groups, 12 rows" in out
    assert "groups without variance  1 of 4 (nothing is learned from them)" in out
    assert "trees            4" in out
    _, out, _ = rl(None, "--objective", "grpo", "--drop_flat_groups", "true", "--dry_run")
    assert "groups without variance  1 of 4 (left out)" in out
    assert "trees            3" in out


def test_rows_advantages_win_where_nothing_is_chosen(rl):
    rows = [{**row, "advantages": 1.0} for row in make_rows()]
    assert "advantages               given" in rl(rows, "--objective", "ppo", "--dry_run")[1]
    assert "leave_one_out" in rl(None, "--objective", "ppo", "--advantages", "rloo", "--dry_run")[1]
    assert "logprob gap              measured in the first step" in rl(None, "--objective", "ppo", "--dry_run")[1]


MISTAKES = {
    "no objective": ([], {}, "give --objective"),
    "unknown objective": (["--objective", "grpa"], {}, "Did you mean 'grpo'"),
    "unknown setting": (["--objective", "grpo", "--objective_settings.bet", 1], {}, "Did you mean 'beta'"),
    "missing setting": (["--objective", "dr_grpo"], {}, "Give --objective_settings.max_length"),
    "unknown key": (["--objective", "grpo", "--bett", 1], {}, "Did you mean 'beta'"),
    "unknown advantages": (["--objective", "grpo", "--advantages", "gae"], {}, "advantages='gae' is unknown"),
    "advantage setting": (
        ["--objective", "grpo", "--advantages_settings.scal", "batch"],
        {},
        "unknown setting 'scal' of advantages='grpo'",
    ),
    "no advantages": (["--objective", "ppo"], {}, "has no usual advantages"),
    "advantages not there": (["--objective", "grpo", "--advantages", "given"], {}, "the rows have no advantages"),
    "no rewards": (["--objective", "grpo"], {"reward": None}, "no reward"),
    "no sampler": (["--objective", "grpo", "--old_logprobs", "given"], {}, "the rows have no old_logprobs"),
    "no reference": (["--objective", "grpo", "--reference", "x"], {}, "no KL to it (--beta)"),
    "unknown old": (["--objective", "grpo", "--old_logprobs", "mine"], {}, "old_logprobs='mine' is unknown"),
    "too many steps": (["--objective", "grpo", "--mini_batches", 9], {}, "mini_batches=9: give 1 to 4"),
    "no step": (["--objective", "grpo", "--mini_batches", 0], {}, "mini_batches=0 must be at least 1"),
    "two sizes": (
        ["--objective", "grpo", "--mini_batches", 2, "--per_device_train_batch_size", 3],
        {},
        "give one of them",
    ),
    "evaluation": (["--objective", "grpo", "--eval_data", "rows.jsonl"], {}, "eval_data is not a key"),
    "twice": (["--objective", "grpo", "--epochs", 1, "--num_train_epochs", 2], {}, "the same key"),
}


@pytest.mark.parametrize(("flags", "change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_clean_line_and_leaves_nothing(rl, folder, flags, change, message):
    rows = [{name: value for name, value in {**row, **change}.items() if value is not None} for row in make_rows()]
    code, _, err = rl(rows, *flags)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (folder / "out").exists()


def test_a_stream_on_some_rows_only_is_an_error(rl):
    rows = make_rows()
    rows[0]["ref_logprobs"] = [0.0] * len(rows[0]["token_ids"])
    code, _, err = rl(rows, "--objective", "grpo", "--beta", 0.1)
    assert code == 2
    assert "rows.jsonl:2: no ref_logprobs, but 1 of 12 rows have them" in err


def test_the_samplers_log_probs_on_some_rows_only_are_left_out_or_refused(rl):
    rows = make_rows()
    del rows[3]["sampler_logprobs"], rows[4]["sampler_logprobs"]
    code, out, _ = rl(rows, "--objective", "grpo", *FAST)
    assert code == 0
    assert "logprob gap              unknown (2 of 12 rows have no sampler_logprobs)" in out
    code, _, err = rl(None, "--objective", "grpo", "--sampler_correction", "truncate", output="b")
    assert code == 2
    assert "rows.jsonl:4: no sampler_logprobs, but 10 of 12 rows have them" in err


def test_a_null_reward_is_set_aside_as_in_the_online_loop(rl):
    rows = make_rows()
    without = [{**row, "reward": None} if number == 1 else row for number, row in enumerate(rows)]
    code, out, _ = rl(without, "--objective", "grpo", *FAST, *ORDERED)
    assert code == 0
    assert "without a reward         1 set aside (first: rows.jsonl:2)" in out
    code, _, _ = rl(rows[:1] + rows[2:], "--objective", "grpo", *FAST, *ORDERED, output="left")
    assert code == 0
    for name, value in parameters("left").items():
        torch.testing.assert_close(parameters("out")[name], value, rtol=0, atol=0)
    code, _, err = rl(without, "--objective", "grpo", "--max_failed", 0, output="none")
    assert code != 0
    assert "1 of 12 rollouts without reward, more than max_failed=0 of them. The first: rows.jsonl:2." in err
    assert not Path("none").exists()
