"""A head that is more than one weight (most adapters of PEFT, quantised layers, hooks): its own forward on each chunk.

Letters: R projected rows, E edges, M model width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treewise.nn.lm_head import Bounds, padded


@dataclass(frozen=True, slots=True)
class ModuleHead:
    """As `Head`, for a layer whose forward is more than a product with one weight: adapters, quantised layers, hooks.

    module: projects rows ([R, M] to [R, V]); its gradients come by autograd. num_tokens: V.
    """

    module: nn.Module
    num_tokens: int
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def num_local_tokens(self) -> int:
        """Logits of a row on this rank: V."""
        return self.num_tokens

    @property
    def gradients(self) -> None:
        """Autograd accumulates: such a head trains few parameters, if any."""
        return None

    def collecting(self) -> "ModuleHead":
        """The head itself: autograd accumulates its gradients."""
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., V] in float32 or wider, from hidden rows [.., M]."""
        raw = self.module(hidden.to(getattr(self.module, "weight", hidden).dtype))
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32)) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def edge_values(
        self, hidden: torch.Tensor, edge_row: torch.Tensor, target: torch.Tensor, bounds: list[Bounds], *, entropy: bool
    ) -> dict[str, torch.Tensor]:
        """See `AnyHead`; each chunk is computed again in the backward."""

        def values(rows: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.logits(padded(rows))[: len(rows)]
            lse = torch.logsumexp(logits, dim=1)
            found = lse - (torch.exp(logits - lse[:, None]) * logits).sum(1) if entropy else lse
            return logits[row, token] - lse[row], found[row]

        chunks = [
            checkpoint(
                values, hidden[start:end], edge_row[low:high] - start, target[low:high],
                use_reentrant=False, preserve_rng_state=False,
            )
            for (start, end), (low, high) in bounds
        ]  # fmt: skip
        log_probs, entropies = (torch.cat(each) for each in zip(*chunks, strict=True))
        return {"log_probs": log_probs} | ({"entropy": entropies} if entropy else {})
