"""`treewise rl --tasks`: a run from a file and flags, what it prints, resuming, and what is refused."""

import gzip
import json
import shutil

import pytest

from tests.cli.helpers import files_of
from tests.dates import TEMPLATE, set_today
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks import EnvironmentTask, ReasoningGymTask, RowsTask, SumTask

pytestmark = pytest.mark.xdist_group("cli/test_online_run")

REWARD = """
def even(completion_ids, **columns):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]
"""

SAMPLER = """
from treewise.rl.samplers import TransformersSampler

class Counting:
    def __init__(self, model, *, most):
        self.inner, self.most = TransformersSampler(model), most

    def sample(self, requests):
        open("calls", "a").write("call")
        return self.inner.sample(requests)

    def update(self, model):
        self.inner.update(model)

    def close(self):
        self.inner.close()
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_policy().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "n{i}"}}\n' for i in range(10)))

    def call(*flags):
        given = ["--model", model_folder, "--output", "out", "--use_cpu", "true", "--report_to", "none", *flags]
        code = main(["rl", *map(str, given)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


SMALL = [
    *("--tasks", "rows.jsonl", "--reward_functions", "rewards.py:even", "--chat_template", "chatml"),
    *("--iterations", 1, "--trees_per_iteration", 2, "--tokens_per_iteration", 32, "--max_new_tokens", 6),
    *("--eval_items", 1, "--max_tokens", 64, "--branching", "random", "--branching_settings.variations", 3),
]


def test_a_sampler_of_the_user_s_file_samples_what_the_own_one_does(run, tmp_path):
    (tmp_path / "sampling.py").write_text(SAMPLER)
    assert run(*SMALL)[0] == 0
    (tmp_path / "out").rename(tmp_path / "plain")
    code, _, err = run(*SMALL, "--sampler", "sampling.py:Counting", "--sampler_settings.most", 10)
    assert code == 0, err
    assert (tmp_path / "calls").read_text().startswith("call")
    (own, plain) = (next((tmp_path / name).glob("**/model.safetensors")).read_bytes() for name in ("out", "plain"))
    assert own == plain


def test_a_run_prints_a_line_an_iteration_and_holds_what_it_says(run, tmp_path):
    code, out, err = run(*SMALL, "--dry_run")
    assert code == 0, err
    assert "random {'variations': 3}" in out
    assert not (tmp_path / "out").exists()
    code, out, err = run(*SMALL)
    assert code == 0, err
    assert "iteration 0/1: held-out pass@1" in out
    assert "iteration 1/1: reward" in out
    assert (tmp_path / "out" / "rollouts" / "iteration-00001.jsonl").is_file()
    code, _, err = run(*SMALL)
    assert code == 2
    assert "holds a finished run" in err
    assert "--resume with more --iterations" in err
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    (tmp_path / "out" / "trainer_state.json").unlink()
    code, out, err = run(*SMALL, "--resume")  # from nothing: the same run again
    assert code == 0, err


def test_a_run_that_goes_on_on_another_day_keeps_its_date(run, tmp_path, monkeypatch):
    (tmp_path / "date.jinja").write_text(TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": f"n{number}"}]} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["date.jinja" if flag == "chatml" else flag for flag in SMALL if flag not in ("--iterations", 1)]
    flags.insert(flags.index("--eval_items") + 1, 1)
    set_today(monkeypatch, "2026-11-27")
    code, _, err = run(*flags, "--iterations", "1")
    assert code == 0, err
    set_today(monkeypatch, "2026-11-28")
    code, _, err = run(*flags, "--resume", "--iterations", "2")
    assert code == 0, err
    rollouts = (tmp_path / "out" / "rollouts" / "iteration-00002.jsonl").read_text()
    assert "Today is 27 November 2026." in rollouts
    code, _, err = run(*flags, "--resume", "--iterations", "3", "--template_date", "2026-11-28")
    assert code == 2
    assert "template_date='2026-11-27', now '2026-11-28'" in err
    assert "set template_date to 2026-11-27" in err


def test_a_finished_run_that_is_resumed_stays_as_it_is_until_it_gets_more_iterations(run, tmp_path):
    assert run(*SMALL)[0] == 0
    files = files_of(tmp_path / "out")
    code, out, err = run(*SMALL, "--resume")
    assert code == 0, err
    assert out.endswith(
        "out holds a finished run of 1 iteration, and the settings ask for no more: nothing was trained or changed. "
        "To train it further give more --iterations.\n"
    )
    assert files_of(tmp_path / "out") == files
    code, _, err = run(*SMALL, "--resume", "--seed", 5)
    assert code == 2
    assert "made with seed=42, now 5" in err
    longer = [*SMALL]
    longer[longer.index("--iterations") + 1] = 2
    code, out, err = run(*longer, "--resume")
    assert code == 0, err
    assert "iteration 2/2: " in out
    assert files_of(tmp_path / "out") != files


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "sums"], "is not a task"),
        (["--tasks", "sum", "--data", "rows.jsonl"], "both given"),
        (["--tasks", "sum", "--branching", "lrc"], "Did you mean 'lcr'"),
        (["--tasks", "sum", "--objective", "ppo"], "no usual advantages"),
        (["--tasks", "sum", "--advantages_settings.scal", "batch"], "unknown setting 'scal' of advantages='grpo'"),
        (["--tasks", "sum", "--iteration", "3"], "Did you mean 'iterations'"),
        (["--tasks", "sum", "--sampler", "vlm"], "transformers, vllm"),
        (["--tasks", "rows.jsonl"], "no reward function"),
        (["--tasks", "sum", "--max_length", "0"], "max_length=0 must be at least 2"),
        (["--tasks", "sum", "--reward_timeout", "0"], "reward_timeout=0 must be positive"),
        ([*SMALL, "--sampler", "vllm", "--sampler_settings.base_url", ""], "needs sampler_settings.base_url, as in"),
        (["--tasks", "sum", "--reward_functions", "rewards.py:even"], "rewards itself"),
        (
            ["--tasks", "rows.jsonl", "--reward_functions", "rewards.py:even", "--reward_weights", "[1, 2]"],
            "2 reward_w",
        ),
    ],
)
def test_what_is_refused(run, flags, message):
    code, _, err = run(*flags)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("length", "flags", "message"),
    [
        (400, [], "rows/row 0: the prompt has 419 tokens, and prompt and rollout together may have 256"),
        (1, ["--max_length", 1200], "max_length=1200 is beyond the 256 positions of the model"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry_run"]], ids=["run", "dry run"])
def test_what_has_no_room_is_said_before_anything_is_sampled(length, flags, message, more, run, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": [{{"role": "user", "content": "{"n" * length}"}}]}}\n' * 10)
    code, out, err = run(*SMALL, *flags, *more)
    assert code == 2
    assert message in err
    assert "iteration 0" not in out
    assert not (tmp_path / "out").exists()


ROW = '{"prompt": "n", "answer": "1"}\n'
MARKS = "".join(json.dumps({"prompt": f"n\u2028{i}\u0085"}, ensure_ascii=False) + "\n" for i in range(6))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.jsonl", b"\xef\xbb\xbf" + ROW.encode() * 6),
        ("lines.jsonl", MARKS.encode()),
        ("list.json", f"[{','.join([ROW] * 6)}]".encode()),
        ("rows.jsonl.gz", gzip.compress(ROW.encode() * 6, mtime=0)),
        ("crlf.jsonl", ROW.replace("\n", "\r\n").encode() * 6),
    ],
)
def test_files_of_rows_are_read_as_all_records_are(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    task = task_named(str(tmp_path / name), None, ["treewise.rl.tasks:math_reward"])
    assert task.name == name.partition(".")[0]
    assert [task.item("train", i).prompt[0] for i in range(5)] == ["n"] * 5
    assert task.num_items("held_out") == 1
    if name == "lines.jsonl":
        assert task.item("train", 2).prompt == "n\u20282\u0085"


def test_parquet_columns_are_lists(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    messages = [[{"role": "user", "content": "n"}]] * 4
    table = pa.table({"prompt": messages, "numbers": [[1, 2]] * 4, "answer": ["1", None, "1", "1"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    item = task_named(str(tmp_path / "rows.parquet"), None, ["treewise.rl.tasks:math_reward"]).item("train", 1)
    assert item.prompt == ({"role": "user", "content": "n"},)
    assert item.extra == {"numbers": [1, 2], "answer": None}


@pytest.mark.parametrize(
    ("rows", "reward", "message"),
    [
        (b'{"prompt": "na\xefve"}\n', REWARD, "rows.jsonl:1: not UTF-8 at byte 14"),
        (b'{"prompt": 5}\n', REWARD, "rows.jsonl:1: the prompt must be a text"),
        (b'{"prompt": "\\ud800"}\n', REWARD, "rows.jsonl:1: lone surrogate"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", REWARD, "rows.jsonl:1: JSON nested too deeply"),
        (b'{"prompt": "a"}\n{"prompt": "b', REWARD, "rows.jsonl:2: the last line is cut off"),
        (b"\n", REWARD, "rows.jsonl: no rows"),
        (None, "def even(:\n", "rewards.py:1: SyntaxError"),
        (None, "import sys\nsys.exit()\n", "rewards.py:2: SystemExit"),
        (None, "def even(**_):\n    raise KeyError('\x1b[31m')\n", "rewards.py:2: KeyError: '\\x1b[31m'"),
        (None, "def even(completions): ...\n", "rewards.py:1: TypeError"),
        (None, "def even(prompts, **_):\n    return [None] * len(prompts)\n", "rewards.py:1: even returned None"),
        (None, "def even(prompts, **_):\n    return [1e308] * len(prompts)\n", "1e+308, beyond float32"),
    ],
)
def test_rows_and_rewards_that_cannot_be(rows, reward, message, run, tmp_path):
    if rows is not None:
        (tmp_path / "rows.jsonl").write_bytes(rows)
    (tmp_path / "rewards.py").write_text(reward)
    code, out, err = run(*SMALL)
    assert code == 2
    assert message in err
    assert "\x1b" not in out + err
    assert "model saved" not in out


def test_tasks_by_name(tmp_path):
    assert task_named("sum", {"num_terms": 3}) == SumTask(num_terms=3)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    rows = task_named(str(tmp_path / "rows.jsonl"), {"held_out": 0.0}, ["treewise.rl.tasks:math_reward"])
    assert isinstance(rows, RowsTask)
    guess = task_named("treewise.rl.tasks:GuessNumber", {"high": 4, "text_tool": "guess"})
    assert isinstance(guess, EnvironmentTask)
    assert guess.environment().high == 4
    pytest.importorskip("reasoning_gym")
    assert isinstance(task_named("reasoning_gym:chain_sum", {"max_terms": 3}), ReasoningGymTask)
