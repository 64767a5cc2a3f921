"""The capability table: which families of transformers follow a tree, and why the others do not.

`tests/capability.py` makes the table by trying every family and stores it beside this module; `make models` does so for
another release of transformers.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

SUPPORTED, REFUSED, UNTRIED = "supported", "refused", "not tried"
FILE = "capabilities.json"


@dataclass(frozen=True, slots=True)
class Capability:
    """One family of transformers.

    family: the `model_type` of its configuration. model: the class that was tried. status: `supported`, `refused`, or
    `not tried` (transformers builds no small model of it from its configuration class alone). reason: why not. layers:
    what its layers are, in words. error: the largest relative difference of the whole gradient from flat training.
    """

    family: str
    status: str
    model: str = ""
    reason: str = ""
    layers: tuple[str, ...] = ()
    error: float | None = None


@dataclass(frozen=True, slots=True)
class CapabilityTable:
    """All families, and the release of transformers that they were tried with."""

    transformers: str
    rows: tuple[Capability, ...]

    @classmethod
    def load(cls, path: Path | None = None) -> "CapabilityTable":
        """The table in a file; without one, that which came with this release of treewise."""
        source = resources.files("treewise.nn") / FILE if path is None else path
        stored = json.loads(source.read_text(encoding="utf-8"))
        rows = (Capability(**{**row, "layers": tuple(row.get("layers", ()))}) for row in stored["rows"])
        return cls(stored["transformers"], tuple(rows))

    def save(self, path: Path) -> None:
        """Writes the table as JSON, one family a line; empty fields are left out."""
        rows = [json.dumps({key: each for key, each in asdict(row).items() if each}) for row in self.rows]
        head = json.dumps(self.transformers)
        path.write_text(f'{{"transformers": {head}, "rows": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")

    def find(self, family: str) -> Capability | None:
        """The row of a `model_type`."""
        return next((row for row in self.rows if row.family == family), None)

    def of_status(self, status: str) -> list[Capability]:
        """The rows of one status, by name."""
        return sorted((row for row in self.rows if row.status == status), key=lambda row: row.family)

    def counts(self) -> Counter[str]:
        """Families by status."""
        return Counter(row.status for row in self.rows)


def as_markdown(table: CapabilityTable) -> str:
    """The table for the documentation."""
    counts = table.counts()
    parts = [
        f"Tried with transformers {table.transformers}: {counts[SUPPORTED]} families supported, {counts[REFUSED]} "
        f"refused, {counts[UNTRIED]} not tried.",
        "### Supported",
        _columns(
            ("family", "model", "layers", "error"),
            [
                (f"`{row.family}`", row.model, ", ".join(row.layers), f"{row.error:.0e}")
                for row in table.of_status(SUPPORTED)
            ],
        ),
        "### Refused",
        _columns(
            ("family", "model", "why"),
            [(f"`{row.family}`", row.model, row.reason) for row in table.of_status(REFUSED)],
        ),
        "### Not tried",
        "transformers builds no small random model of these from their configuration class alone.",
        _columns(("family", "why"), [(f"`{row.family}`", row.reason) for row in table.of_status(UNTRIED)]),
    ]
    return "\n\n".join(parts) + "\n"


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
