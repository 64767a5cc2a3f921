"""What the command says before a server waits for clients."""

from tests.needs import OF_PLACES, packages
from treewise.base.progress import listeners
from treewise.cli.main import main

pytestmark = packages(*OF_PLACES["serve"])


def test_what_it_loads_is_told_until_requests_are_taken(tmp_path, monkeypatch):
    """A large model takes minutes; whoever waits for clients is quiet."""
    from treewise.serve import app

    told = []
    monkeypatch.setattr(app, "make_app", lambda settings: told.append(("loading", len(listeners))))
    monkeypatch.setattr(app, "serve_on", lambda *_, **__: told.append(("serving", len(listeners))))
    assert main(["serve", "--model", "tiny", "--folder", str(tmp_path / "served"), "--port", "0"]) == 0
    assert told == [("loading", 1), ("serving", 0)]


def test_a_folder_that_cannot_be_used_is_named_by_its_own_setting(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["serve", "--model", "tiny", "--folder", str(tmp_path / "file" / "served"), "--port", "0"]) == 2
    assert f"error: folder {tmp_path}/file/served cannot be written (Not a directory)" in capsys.readouterr().err
