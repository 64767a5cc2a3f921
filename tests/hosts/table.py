"""The hosts, with the releases that they pin: what `make hosts` installs, and which recipes it runs."""

from dataclasses import dataclass

# Any release that treewise admits; hosts ask for none, or for CUDA's kernels beside it.
TORCH = "torch==2.13.0"
VISION = "torchvision==0.28.*"  # of that torch
WITHOUT = "; sys_platform == 'never'"


@dataclass(frozen=True)
class Host:
    """One environment. module: of tests/hosts/recipes. recipes: its functions.

    asked: requirements; none: those of `.venv`. instead: requirements in place of the host's own, wherever these
    stand. shown: packages whose versions are kept. over_padding: recipes whose logged logits are means that count
    padding, which are zeros with the line.
    """

    module: str
    recipes: tuple[str, ...]
    asked: tuple[str, ...] = ()
    instead: tuple[str, ...] = (TORCH,)
    shown: tuple[str, ...] = ()
    over_padding: tuple[str, ...] = ()
    python: str = "3.11"


HOSTS = {
    "transformers": Host("trainer", ("trainer", "accelerate")),
    "trl-1.16": Host("trl", ("sft", "sft_packed", "dpo", "kto", "grpo", "rloo")),
    "axolotl": Host(
        "axolotl",
        ("sft", "sft_packed", "sft_lora", "dpo", "grpo", "refused_neftune"),
        asked=("axolotl==0.21.0",),
        instead=(TORCH, f"xformers{WITHOUT}"),
        shown=("axolotl",),
        python="3.12",
    ),
    # Its GRPO imports msgspec, and does not ask for it.
    "swift": Host("swift", ("sft", "dpo", "grpo"), asked=("ms-swift==4.6.0", "msgspec"), shown=("ms-swift",)),
    # Its DPO needs TRL 0.24, which imports on transformers 5.2 alone of the releases from 5 on.
    "llamafactory": Host(
        "llamafactory",
        ("sft", "sft_packed", "sft_lora", "dpo"),
        asked=("llamafactory==0.9.5", "transformers==5.2.0", "trl==0.24.0"),
        instead=(TORCH, VISION),
        shown=("llamafactory",),
        over_padding=("dpo",),
        python="3.12",
    ),
    "trl-0.24": Host(
        "trl",
        ("sft", "dpo", "kto", "grpo", "rloo"),
        asked=("trl==0.24.0", "transformers==5.2.0"),
        over_padding=("kto",),
    ),
    # Its DPO reads a name that no transformers 5 has.
    "trl-0.20": Host(
        "trl", ("sft", "kto", "grpo"), asked=("trl==0.20.0", "transformers==5.2.0"), over_padding=("kto",)
    ),
    # Its GRPO imports requests, and does not ask for it.
    "trl-1.14": Host("trl", ("sft", "sft_packed", "dpo", "kto", "grpo", "rloo"), asked=("trl==1.14.1", "requests")),
    "unsloth": Host(
        "unsloth_cpu",
        ("sft", "refused_gpu_layers"),
        asked=("unsloth==2026.10.9",),
        instead=(TORCH, VISION, f"xformers{WITHOUT}"),
        shown=("unsloth",),
        python="3.12",
    ),
}
