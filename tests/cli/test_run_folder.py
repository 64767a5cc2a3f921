"""What a run's folder says of the run before, and what is said where its files are damaged."""

import argparse
from pathlib import Path

import pytest

from tests.damage import OTHERS, damages
from treewise.cli.config import read_config, with_checksum
from treewise.cli.run_folder import check_folder, opened
from treewise.cli.training_run import training_arguments
from treewise.errors import ConfigError
from treewise.trainer.checkpoint import store

RESOLVED = "resolved_config.yaml"


def config_of(folder, *flags):
    words = ["--model", "m", "--data", "d.jsonl", "--output_dir", str(folder), "--use_cpu", "true"]
    return read_config(None, [*words, *flags], {})


@pytest.fixture
def begin(tmp_path, capsys):
    """Opens the folder of a run as `treewise train` does, and leaves it; what it printed on stderr."""

    def begin(*flags, resume="newest", overwrite=False):
        config = config_of(tmp_path / "run", *flags)
        arguments = training_arguments(config)
        with opened(argparse.Namespace(resume=resume, overwrite=overwrite), config, arguments):
            pass
        return capsys.readouterr().err

    begin(resume=None)
    add_checkpoint(tmp_path / "run", {"data": "f", "step": 1})
    return begin


def add_checkpoint(folder: Path, facts: dict) -> None:
    new = store.new_folder(folder, 1)
    (new / "a.json").write_text("{}")
    store.publish(new, facts)


def test_changed_settings_are_said(begin, tmp_path):
    assert begin() == ""
    assert begin("--max_length", "7") == "changed since this run began: max_length: default -> 7\n"
    assert begin("--max_length", "7") == ""
    assert (tmp_path / "run" / RESOLVED).read_text().startswith("# SHA-256 of all below this line: ")


def test_damaged_settings_are_said_and_written_again(begin, tmp_path):
    begin("--max_length", "7")
    path = tmp_path / "run" / RESOLVED
    sound = path.read_bytes()
    for how in damages(path):
        if path.is_dir():
            with pytest.raises(ConfigError, match=r"resolved_config.yaml is a folder, and a run writes a file"):
                begin("--max_length", "7")
            continue
        changed = path.read_bytes()
        err = begin("--max_length", "7")
        is_header_alone = changed.partition(b"\n")[2] == sound.partition(b"\n")[2] and err == ""
        assert is_header_alone or err.startswith(f"{path}: damaged ("), how
        assert is_header_alone or err.endswith(
            "); which settings have changed since is not known, and the file is written again.\n"
        )
        assert err.count("\n") <= 1
        assert path.read_bytes() == sound, how


@pytest.mark.parametrize("content", [*OTHERS, b"model: m\n", b"model: m\ntasks: sum\n", None])
def test_a_checkpoint_tells_which_kind_of_run_a_folder_holds(content, tmp_path):
    kinds = {"recorded": {"data": "f"}, "online": {"task": "sum"}}
    for name, facts in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        add_checkpoint(folder, {**facts, "step": 1})
        if content is not None:  # else the file is not there
            (folder / RESOLVED).write_bytes(content)
        check_folder(folder, "newest", overwrite=False, is_online=name == "online")
        kind = "a run on recorded data" if name == "recorded" else "an online run"
        with pytest.raises(ConfigError, match=f"holds {kind}"):
            check_folder(folder, "newest", overwrite=False, is_online=name != "online")


def test_a_folder_without_checkpoints_is_of_the_kind_of_its_settings(tmp_path):
    resolved = tmp_path / RESOLVED
    resolved.write_text(with_checksum("model: m\ndata: d\n"))
    with pytest.raises(ConfigError, match="holds a run on recorded data"):
        check_folder(tmp_path, None, overwrite=False, is_online=True)
    resolved.write_text(with_checksum("model: m\ntasks: sum\n"))
    with pytest.raises(ConfigError, match="holds an online run"):
        check_folder(tmp_path, None, overwrite=False, is_online=False)
    resolved.write_bytes(b"")  # of which nothing is known
    for is_online in (True, False):
        check_folder(tmp_path, None, overwrite=False, is_online=is_online)


def test_a_run_that_fails_puts_back_settings_that_are_no_text(tmp_path, begin):
    path = tmp_path / "run" / RESOLVED
    path.write_bytes(b"\xff\xfe")
    config = config_of(tmp_path / "run")
    flags = argparse.Namespace(resume="newest", overwrite=False)
    with pytest.raises(KeyError), opened(flags, config, training_arguments(config)):
        raise KeyError
    assert path.read_bytes() == b"\xff\xfe"


@pytest.mark.parametrize("logged", ["", '{"step": 1, "loss": 2.0}\n'])
def test_a_run_that_fails_takes_its_folder_back_unless_it_has_logged_a_step(tmp_path, logged):
    """As where the disk is full at the first checkpoint, after hours."""
    folder = tmp_path / "run"
    config = config_of(folder)

    def fail() -> None:
        with opened(argparse.Namespace(resume=None, overwrite=False), config, training_arguments(config)):
            (folder / "log.jsonl").write_text(logged)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert folder.exists() == bool(logged)
    assert not logged or (folder / "log.jsonl").read_text() == logged
