"""Shared by the report tests: a real tokenizer, and data with every kind of lost sharing, made by hand."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.report.rows import named_trees, write_rows
from treewise.data import LoadReport
from treewise.report.html.build import DataReport, build_data_report

SMOLLM2 = Path(__file__).parent.parent / "data" / "fixtures" / "smollm2"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    for path in SMOLLM2.iterdir():
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def data_report(tokenizer) -> DataReport:
    return build_data_report(
        named_trees(tokenizer),
        LoadReport(num_files=1, num_records=9),
        sources=["rows.jsonl"],
        tokenizer=tokenizer,
        tokenizer_name="smollm2",
        num_drawn=4,
    )


@pytest.fixture
def rows(tmp_path: Path, tokenizer) -> Path:
    return write_rows(tmp_path / "rows.jsonl", tokenizer)
