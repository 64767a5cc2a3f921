"""Environments of these tests are found by name."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "environments")
