"""The capability table: which families of transformers follow a tree, and why the others do not.

`tests/capability.py` trains a tiny model of every family and stores the table beside this module; `make models` does so
for another release of transformers.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from treewise.base.own_files import CHECKSUM, read_own
from treewise.errors import pip_install
from treewise.nn.platform.releases import calls_by_name, is_before

SUPPORTED, REFUSED, UNTRIED = "supported", "refused", "not tried"
FILE = "capabilities.json"


@dataclass(frozen=True, slots=True)
class Capability:
    """One family of transformers.

    family: the `model_type` of its configuration. model: the class that was tried. status: `supported`, `refused`, or
    `not tried` (transformers builds no small model of it from its configuration class alone). reason: why not. layers:
    what its layers are, in words. error: the largest relative difference of the whole gradient from flat training.
    image_error: the same with images, of the tower's gradient alone, too; None where images are refused, for
    image_reason (empty for families of text).
    """

    family: str
    status: str
    model: str = ""
    reason: str = ""
    layers: tuple[str, ...] = ()
    error: float | None = None
    image_error: float | None = None
    image_reason: str = ""


@dataclass(frozen=True, slots=True)
class CapabilityTable:
    """All families, and the release of transformers that they were tried with."""

    transformers: str
    rows: tuple[Capability, ...]

    @classmethod
    def load(cls, path: Path | None = None) -> "CapabilityTable":
        """The table in a file; without one, the table of this release of treewise.

        Raises:
            ConfigError: the file cannot be read, or is not what was saved.
        """
        if path is not None:
            return read_own(path, cls._read, "write it again (make models)")
        with resources.as_file(resources.files("treewise.nn") / FILE) as own:
            return read_own(own, cls._read, "install treewise again")

    def save(self, path: Path) -> None:
        """Writes `text` to a file, which `load` reads."""
        path.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The table as JSON, one family a line; empty fields are left out."""
        rows = [json.dumps({key: each for key, each in asdict(row).items() if each}) for row in self.rows]
        lines = ",\n".join(rows)
        head = {"transformers": self.transformers, CHECKSUM: hashlib.sha256(lines.encode()).hexdigest()}
        return f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'

    @classmethod
    def _read(cls, data: bytes) -> "CapabilityTable":
        stored = json.loads(data)
        rows = (Capability(**{**row, "layers": tuple(row.get("layers", ()))}) for row in stored["rows"])
        table = cls(stored["transformers"], tuple(rows))
        if table.text().encode() != data:
            raise ValueError("its checksum differs")
        return table

    def find(self, family: str) -> Capability | None:
        """The row of a `model_type`."""
        return next((row for row in self.rows if row.family == family), None)

    def of_status(self, status: str) -> list[Capability]:
        """The rows of one status, by name."""
        return sorted((row for row in self.rows if row.status == status), key=lambda row: row.family)

    def with_images(self) -> tuple[str, ...]:
        """The families whose images are computed exactly, by name."""
        return tuple(sorted(row.family for row in self.rows if row.image_error is not None))

    def counts(self) -> Counter[str]:
        """Families by status."""
        return Counter(row.status for row in self.rows)


@cache
def own_table() -> CapabilityTable:
    """The table of this release of treewise, read once."""
    return CapabilityTable.load()


def later_release(family: str, *, is_recurrent: bool) -> str:
    """A sentence on a family whose layers are refused here, and follow a tree with a later transformers; else empty."""
    table = own_table()
    row = table.find(family)
    if row is None or row.status != SUPPORTED or not is_before(table.transformers):
        return ""
    release = ".".join(table.transformers.split(".")[:2]) if calls_by_name() or not is_recurrent else "5.15"
    return f" {family} follows a tree with transformers {release}: {pip_install(f'transformers>={release}')}."
