"""axolotl on trees: `plugins: [treewise.integrations.axolotl.TreewisePlugin]` in its YAML."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from treewise.errors import ConfigError
from treewise.integrations.callback import SharePrefixes

# Settings by which axolotl computes layers itself, past transformers' attention interface or row by row.
_REFUSED = (
    *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "fused_attn_kernel"),
    *("flash_attn_fuse_mlp", "sage_attention", "tiled_mlp", "layer_offloading", "neftune_noise_alpha"),
)
_SEVERAL = ("context_parallel_size", "tensor_parallel_size")


class TreewiseArgs(BaseModel):
    """Settings of `treewise.share_prefixes` in axolotl's YAML."""

    treewise_max_tokens: int | str | None = None
    treewise_min_ratio: float = 1.1


class TreewisePlugin(BasePlugin):
    """Shares prefixes in whatever axolotl trains: SFT, DPO, KTO, ORPO, GRPO."""

    def get_input_args(self) -> str:
        """Where axolotl finds the settings."""
        return "treewise.integrations.axolotl.TreewiseArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises `ConfigError` for settings that trees cannot follow."""
        for name in _REFUSED:
            if cfg.get(name):
                raise ConfigError(f"{name}: axolotl would compute past a tree; set it to false, or take treewise out.")
        for name in _SEVERAL:
            if (cfg.get(name) or 1) > 1:
                raise ConfigError(f"{name}: {cfg[name]} cuts sequences or layers over processes; leave it out.")

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback that shares, while the trainer trains."""
        settings = {"max_tokens": cfg.get("treewise_max_tokens"), "min_ratio": cfg.get("treewise_min_ratio", 1.1)}
        return [SharePrefixes(trainer, **settings)]
