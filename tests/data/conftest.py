"""Shared by the data tests: small real records, two chat templates over one small tokenizer, and a file writer."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    for path in (FIXTURES / "smollm2").iterdir():
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def qwen3_template() -> str:
    return json.loads((FIXTURES / "qwen3" / "tokenizer_config.json").read_text())["chat_template"]


@pytest.fixture
def write(tmp_path: Path):
    """Writes records (objects, or lines as text) to a JSON Lines file."""

    def write_lines(*records: object, name: str = "data.jsonl") -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write_lines
