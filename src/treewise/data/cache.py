"""Rendered data by content hash: the same bytes, options, tokenizer and code are rendered once.

An entry is one Parquet file (a memory-mapped Arrow file where the rows exceed what is held in memory), never a pickle.
It is written beside its place and moved there, so a killed process leaves nothing half-written; on reading, page
checksums and the content hash are verified, and a damaged entry is rendered again.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treewise.data.io.options import RenderOptions
from treewise.data.io.table import SCHEMA, content_hash
from treewise.data.render.tools import tool_files
from treewise.data.sources import Source
from treewise.errors import DataError

ENTRY_FIELD = b"treewise"
READ_BYTES = 1 << 20


def cache_folder(folder: str | Path | None) -> Path:
    """The folder of the cache: as given, `$TREEWISE_CACHE`, or `~/.cache/treewise`."""
    if folder is not None:
        return Path(folder).expanduser()
    return Path(os.environ.get("TREEWISE_CACHE") or "~/.cache/treewise").expanduser()


MAPPED = ".arrow"  # suffix of entries that are memory-mapped


def cache_key(
    sources: Sequence[Source], options: RenderOptions, tokenizer: Any, allow_partial_tail: bool
) -> str | None:
    """Hash of all that the result depends on: names and content of sources, side files, options, tokenizer, this code.

    None where a source has no identity.
    """
    digest = hashlib.sha256(json.dumps([options.to_json(), allow_partial_tail]).encode())
    _update_with_code(digest)
    digest.update(tokenizer_hash(tokenizer).encode())
    for source in sources:
        if source.data_file is None and source.identity is None:
            return None
        digest.update(f"\n{source.name}\n{source.identity}".encode(errors="surrogateescape"))
        own = [source.data_file] if source.data_file is not None and source.identity is None else []
        for part in [*own, *(tool_files(source.data_file) if source.data_file is not None else [])]:
            digest.update(f"\n{part}\n".encode(errors="surrogateescape"))
            _update_with_file(digest, part)
    if options.chat_template and "{" not in options.chat_template and Path(options.chat_template).is_file():
        _update_with_file(digest, Path(options.chat_template))
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of a tokenizer: its rules, added tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    added = sorted((i, str(t)) for i, t in tokenizer.added_tokens_decoder.items())
    rest = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, added]
    return hashlib.sha256((rules + json.dumps(rest, default=str, sort_keys=True)).encode()).hexdigest()


def write_entry(path: Path, table: pa.Table, facts: dict[str, Any]) -> None:
    """Writes an entry and moves it into place. `facts` are plain JSON values that belong to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".write-", suffix=path.suffix)
    os.close(handle)
    try:
        stored = table.replace_schema_metadata({ENTRY_FIELD: json.dumps(facts).encode()})
        if path.suffix == MAPPED:
            with pa.ipc.new_file(name, stored.schema) as writer:
                writer.write_table(stored)
        else:
            pq.write_table(stored, name, compression="zstd", write_page_checksum=True)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_entry(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """A verified entry, or None where there is none.

    Raises:
        DataError: a damaged entry.
    """
    if not path.is_file():
        return None
    try:
        if path.suffix == MAPPED:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        else:
            table = pq.read_table(path, page_checksum_verification=True, memory_map=False)
        facts = json.loads((table.schema.metadata or {})[ENTRY_FIELD])
        sound = table.schema.equals(SCHEMA) and content_hash(table, facts["names"]) == facts["fingerprint"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged cache entry ({type(error).__name__})") from None
    if not sound:
        raise DataError(f"{path}: damaged cache entry (its content hash differs)")
    return table, facts


def _update_with_file(digest: Any, path: Path) -> None:
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)


def _update_with_code(digest: Any) -> None:
    """The code that reads, renders and checks records stands for its version: exact in a source checkout, too."""
    data = Path(__file__).parent
    for folder in (data, data.parent / "tree"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"\n{path.relative_to(data.parent).as_posix()}\n".encode())
            _update_with_file(digest, path)
