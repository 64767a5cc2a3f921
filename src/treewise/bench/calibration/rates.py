"""What operations take on a card, read from what was measured there.

A calibration is a table of sizes and seconds. Between two sizes seconds are interpolated, both as logarithms. Its
domain is what was measured: beyond it, or for sizes of a model that was not, the roofline stands in, and who asks is
told. The roofline is the best rate of each kind on the card (of bytes, that of the largest size, which no cache
holds), or its data sheet.

Letters: m, n, k of a product [m, k] x [k, n].
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from treewise.base.own_files import read_own
from treewise.errors import ConfigError

MEASURED, ROOFLINE = "measured", "roofline"
MOVED = ("pointwise", "strided", "reduced")
ATTENTION = ("attention", "attention_backward", "flat_attention", "flat_attention_backward")
FORM = 1  # of the file
# Bytes and FLOPs per second, dense in bfloat16, of the data sheets.
DATA_SHEETS = {
    "A100": (312e12, 2.04e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "B200": (2_250e12, 8e12),
}


class Operation(NamedTuple):
    """One operation, by what its time depends on.

    `product`: how often, m, n, k. `pointwise`, `strided` (what is read lies in another order), `reduced`: bytes that
    are read and written. `copy`: bytes from the host. `attention`, `flat_attention` and their backwards: pairs of all
    query heads, tokens of a mean segment (`attention_size`), size of a head.
    """

    kind: str
    size: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, sizes ascending."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float | None:
        """Seconds of a size; None beyond the largest and below the smallest."""
        if not self.sizes or not self.sizes[0] <= size <= self.sizes[-1]:
            return None
        above = next(index for index, each in enumerate(self.sizes) if each >= size)
        if above == 0:
            return self.seconds[0]
        (low, high), (less, more) = self.sizes[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
        part = math.log(size / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(less) + part * math.log(more))

    def best(self, work_of_one: float) -> float:
        """The most work per second."""
        return max(work_of_one * size / each for size, each in zip(self.sizes, self.seconds, strict=True))


class Estimate(NamedTuple):
    """Seconds, and whether they are `MEASURED` or of the `ROOFLINE`."""

    seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """The most of a card: FLOPs of products, bytes of its memory and from its host, and FLOPs of attention by kind, per
    second."""

    flops: float
    bandwidth: float
    copies: float
    attention: Mapping[str, float]

    def seconds(self, operation: Operation, item_bytes: int) -> float:
        """Of an operation whose numbers have so many bytes; without its launch."""
        if operation.kind == "product":
            times, m, n, k = operation.size
            moved = times * (m * k + k * n + m * n) * item_bytes
            return max(work(operation) / self.flops, moved / self.bandwidth)
        if operation.kind == "copy":
            return operation.size[0] / self.copies
        if operation.kind in ATTENTION:
            return work(operation) / self.attention[operation.kind]
        return operation.size[0] / self.bandwidth


def work(operation: Operation) -> float:
    """FLOPs of a product or of attention, bytes of all else."""
    if operation.kind == "product":
        return 2 * math.prod(operation.size)
    if operation.kind in ATTENTION:
        pairs, _, head_size = operation.size
        return 4 * pairs * head_size * (1 + 1.5 * operation.kind.endswith("backward"))
    return operation.size[0]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on a card, when and with what.

    products: by two of m, n, k and the name of the third, which varies. moved: by kind. attention: by kind, then by the
    tokens of a mean segment, pairs of all heads. copies: bytes from the host. launch_seconds: of the host for a bare
    operation; host_seconds: for one of a step, its Python included. is_queued: the host runs ahead of the device.
    about: card, date, versions, dtype and the domain, for people.
    """

    roofline: Roofline
    item_bytes: int = 2
    products: Mapping[str, Curve] = field(default_factory=dict)
    moved: Mapping[str, Curve] = field(default_factory=dict)
    attention: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    copies: Curve = Curve((), ())
    launch_seconds: float = 0.0
    host_seconds: float = 0.0
    head_size: int | None = None
    is_queued: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, operation: Operation) -> Estimate:
        """What an operation takes on the device."""
        found = self._measured(operation)
        if found is not None:
            return Estimate(found, MEASURED)
        return Estimate(self.roofline.seconds(operation, self.item_bytes) + self.launch_seconds, ROOFLINE)

    def _measured(self, operation: Operation) -> float | None:
        kind, size = operation
        if kind == "product":
            times, *sides = size
            curves = ((self.products.get(product_key(sides, axis)), sides[axis]) for axis in range(3))
            found = next((at for curve, side in curves if curve is not None and (at := curve.at(side))), None)
            return found if times == 1 else None
        if kind == "copy":
            return self.copies.at(size[0])
        if kind in ATTENTION:
            return self._attention(kind, *size)
        return self.moved[kind].at(size[0]) if kind in self.moved else None

    def _attention(self, kind: str, pairs: float, run: float, head_size: float) -> float | None:
        """Between the curves of the next shorter and the next longer segments."""
        curves = self.attention.get(kind, {})
        shorter, longer = ([each for each in curves if each <= run], [each for each in curves if each >= run])
        if not shorter or not longer or head_size != self.head_size:
            return None
        (low, less), (high, more) = ((each, curves[each].at(pairs)) for each in (max(shorter), min(longer)))
        if less is None or more is None:
            return None
        part = 0.0 if low == high else math.log(run / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(less) + part * math.log(more))

    def step(self, operations: Iterable[Operation]) -> "Forecast":
        """A step of these operations, in their order: the host launches one after the other, the device runs one after
        the other, none before it was launched. Where no device is beside the host, both take their time in turn.
        """
        known: dict[Operation, Estimate] = {}
        host = device = 0.0
        kinds: dict[str, float] = {}
        sources = dict.fromkeys((MEASURED, ROOFLINE), 0.0)
        count = 0
        own = self.host_seconds if self.is_queued else max(0.0, self.host_seconds - self.launch_seconds)
        for operation in operations:
            found = known.get(operation)
            if found is None:
                found = known[operation] = self.of(operation)
            host += own
            device = (max(device, host) if self.is_queued else device) + found.seconds
            kinds[operation.kind] = kinds.get(operation.kind, 0.0) + found.seconds
            sources[found.source] += found.seconds
            count += 1
        return Forecast(max(device, host) if self.is_queued else device + host, host, count, kinds, sources)


class Forecast(NamedTuple):
    """Seconds of a step, of its host alone, number of operations, and the device's seconds by kind and by source."""

    seconds: float
    host_seconds: float
    num_operations: int
    by_kind: dict[str, float]
    by_source: dict[str, float]

    @property
    def measured_part(self) -> float:
        """Of the device's seconds, those within the domain."""
        return self.by_source[MEASURED] / max(sum(self.by_source.values()), 1e-30)


def of_data_sheet(name: str, host_seconds: float = 0.0) -> Calibration:
    """Of a card on which nothing was measured: all is the roofline of its data sheet."""
    flops, bandwidth = DATA_SHEETS[name]
    about = {"card": name, "measured": "nothing: its data sheet"}
    roofline = Roofline(flops, bandwidth, bandwidth, dict.fromkeys(ATTENTION, flops))
    return Calibration(roofline, host_seconds=host_seconds, about=about)


def product_key(sides: Sequence[float], varies: int) -> str:
    """Of products whose m, n, k are `sides`, but for the one that varies: `m,2048,1024`."""
    return ",".join("mnk"[index] if index == varies else str(int(each)) for index, each in enumerate(sides))


def best_of(
    products: Mapping[str, Curve],
    moved: Mapping[str, Curve],
    attention: Mapping[str, Mapping[int, Curve]],
    copies: Curve,
    head_size: int,
) -> Roofline:
    """The roofline of what was measured."""
    rates = []
    for key, curve in products.items():
        fixed = math.prod(float(each) for each in key.split(",") if each.isdecimal())
        rates.append(curve.best(2 * fixed))
    flops = {
        kind: max(curve.best(work(Operation(kind, (1, 0, head_size)))) for curve in curves.values())
        for kind, curves in attention.items()
    }
    bandwidth = max(each.sizes[-1] / each.seconds[-1] for each in moved.values())
    return Roofline(max(rates), bandwidth, copies.sizes[-1] / copies.seconds[-1], flops)


# -- files ------------------------------------------------------------------------------------------------------------


def as_json(calibration: Calibration) -> str:
    """The text of its file."""
    plain = asdict(calibration)
    about = plain.pop("about")
    return json.dumps({"calibration": FORM, "about": about, **plain}, indent=1) + "\n"


def load(path: Path) -> Calibration:
    """A calibration that `treewise doctor --gpu --calibrate` or `make gpu` wrote.

    Raises:
        ConfigError: no such file, or one of another form.
    """
    found: Calibration = read_own(path, _read, "write it anew with treewise doctor --calibrate")
    return found


def _read(data: bytes) -> Calibration:
    plain = json.loads(data)
    if plain.pop("calibration") != FORM:
        raise ConfigError("another form")

    def curves(of: Mapping[str, Any]) -> dict[str, Curve]:
        return {key: _curve(each) for key, each in of.items()}

    products, moved = curves(plain.pop("products")), curves(plain.pop("moved"))
    of_kinds = plain.pop("attention").items()
    attention = {kind: {int(run): _curve(each) for run, each in of.items()} for kind, of in of_kinds}
    copies, roofline = _curve(plain.pop("copies")), Roofline(**plain.pop("roofline"))
    return Calibration(roofline, products=products, moved=moved, attention=attention, copies=copies, **plain)


def _curve(plain: Mapping[str, Sequence[float]]) -> Curve:
    return Curve(tuple(plain["sizes"]), tuple(plain["seconds"]))
