"""Memory of each process, from public configurations, over meshes and numbers of GPUs: what docs/meshes.md shows.

Predicted from shapes (`treewise.report.report_mesh`), for AdamW on all parameters; nothing is loaded or downloaded.

    python benchmarks/bench_meshes.py
"""

from typing import Any

import torch
from common import save
from transformers import AutoConfig

from treewise.errors import ConfigError
from treewise.report.analysis.mesh_facts import read_mesh, report_mesh

GPU = 80 * 2**30
# Sizes as published with the weights.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
    "Qwen3 30B-A3B": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    }),
    "gpt-oss 120b": ("gpt_oss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "tie_word_embeddings": False,
    }),
}  # fmt: skip
MESHES = [
    *("tp=1", "fsdp=2", "fsdp=4", "fsdp=8", "fsdp=16", "fsdp=32", "fsdp=64", "tp=2", "tp=4", "tp=8", "tp=2,dp=4"),
    *("ep=8,dp=8", "ep=16,dp=16", "ep=32,dp=32", "ep=64,dp=64", "tp=2,ep=8,dp=4", "tp=2,fsdp=4", "ep=8,fsdp=8"),
    *("ep=8,fsdp=16", "ep=8,fsdp=32", "tp=4,ep=8,fsdp=8"),
]


def main() -> None:
    rows: list[dict[str, Any]] = []
    for model, (family, sizes) in MODELS.items():
        config = AutoConfig.for_model(family, **sizes)
        for mesh in MESHES:
            for dtype in (torch.bfloat16, torch.float32):
                try:
                    report = report_mesh(config, read_mesh(mesh), dtype, GPU)
                except ConfigError:  # a family without such a plan
                    continue
                row = {"model": model, "axes": mesh, "dtype": str(dtype).removeprefix("torch."), **report.to_dict()}
                rows.append(row)
                print(
                    model, mesh, row["dtype"], f"{report.bytes_static / 2**30:.1f} GiB", report.max_tokens, flush=True
                )
    print(save("meshes", rows))


if __name__ == "__main__":
    main()
