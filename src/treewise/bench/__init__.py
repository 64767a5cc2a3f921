"""`treewise bench`: treewise against flat training and tree rows, paired in one process."""

from treewise.bench.contestants import Settings
from treewise.bench.measure import REFERENCES, measure_workload, run
from treewise.bench.results import hardware, load, record, save
from treewise.bench.workloads import KINDS, SHAPES, SIZES, Workload, make, random_model

__all__ = [
    "KINDS",
    "REFERENCES",
    "SHAPES",
    "SIZES",
    "Settings",
    "Workload",
    "hardware",
    "load",
    "make",
    "measure_workload",
    "random_model",
    "record",
    "run",
    "save",
]
