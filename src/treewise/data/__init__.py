"""Data: files, chat templates and records, turned into the trajectories and trees that are trained.

Nothing here depends on models; tokenizers are transformers' own, loaded when a record holds text, and torch is
imported only to open a dump that `torch.save` wrote.
"""

from treewise.data.dataset import (
    SelectedTrees,
    TrainingTree,
    TreeDataset,
    Trees,
    mix,
    split_for_evaluation,
)
from treewise.data.io.options import LoadReport, RenderOptions
from treewise.data.load import load_trees

__all__ = [
    "load_trees",
    "mix",
    "split_for_evaluation",
    "SelectedTrees",
    "Trees",
    "RenderOptions",
    "TreeDataset",
    "TrainingTree",
    "LoadReport",
]
