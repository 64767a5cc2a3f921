"""The clients, with the releases that they pin: what `make clients` installs, and which recipes it runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.hosts.table import TORCH, WITHOUT


@dataclass(frozen=True)
class Client:
    """One environment, without treewise. module: of tests/clients/recipes. recipes: their names, each with the
    optimizer steps that it takes; 0: it samples, and no answer of an untrained model earns a reward.

    asked: requirements. instead: requirements in place of the client's own. shown: packages whose versions are kept.
    """

    module: str
    recipes: Mapping[str, int]
    asked: tuple[str, ...]
    instead: tuple[str, ...] = (TORCH,)
    shown: tuple[str, ...] = ()
    python: str = "3.12"


CLIENTS = {
    # Its pin of zstandard admits no newer SDK.
    "axolotl": Client(
        "axolotl",
        {"sft": 4, "rl": 3},
        asked=("axolotl==0.21.0", "tinker"),
        instead=(TORCH, f"xformers{WITHOUT}"),
        shown=("axolotl",),
    ),
    # The newest pyarrow wants NumPy 2, which ART's extra does not admit.
    "art": Client(
        "art",
        {"chats": 3, "episodes": 3},
        asked=("openpipe-art[tinker]==0.5.23", "pyarrow<23"),
        shown=("openpipe-art",),
    ),
    "cookbook": Client(
        "cookbook",
        {
            "sl_loop": 3,
            "rl_loop": 0,
            "sl_basic": 2,
            "preference.dpo.train": 3,
            "distillation.on_policy_distillation": 4,  # two of its teacher
        },
        asked=("tinker-cookbook[math-rl]==0.6.1",),
        instead=(TORCH, "tml-renderers"),  # its pin has no build for every Linux
        shown=("tinker-cookbook",),
        python="3.11",
    ),
}
