"""`share_prefixes`: one line that makes a model compute shared prefixes once, in any loop that trains it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from treewise.distributed import ranks
from treewise.distributed.others_shards import OthersShards, shards_of
from treewise.distributed.parts import mesh_of
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError, check_choice
from treewise.integrations.batch_verification import BatchReport, LossOf, verify_batch
from treewise.integrations.batches.late_sum import summed_late
from treewise.integrations.batches.tree_batches import TreeBatches
from treewise.integrations.decoder import DecoderSeam
from treewise.integrations.trl import FusedSeam, has_fused_head
from treewise.nn.wrapped import is_peft, unwrap_model


class Sharing:
    """What `share_prefixes` does to one model: `counts` are its statistics, `remove()` undoes it.

    model: without wrappers and PEFT. shards: of a model that FSDP2 divides over the processes. parallel: DDP around it.
    """

    def __init__(
        self,
        model: Any,
        engine: TreeEngine,
        min_ratio: float,
        *,
        windows: bool,
        shards: OthersShards | None = None,
        parallel: DistributedDataParallel | None = None,
    ) -> None:
        self.model, self.engine, self.shards, self._parallel = model, engine, shards, parallel
        self._batches = TreeBatches(engine, model, min_ratio, windows=windows, shards=shards)
        self.counts = self._batches.counts
        self._decoder = DecoderSeam(model, self._batches, self._take_fused_head)
        self._fused: FusedSeam | None = None
        self.paused = self._decoder.paused
        if self._batches.windows is not None:
            self._batches.windows.paused = self.paused
        self._take_fused_head()

    def _take_fused_head(self) -> None:
        """TRL's trainers may put their head on the model later than this line was called."""
        if self._fused is None and self._batches.together is None and has_fused_head(self.model.forward):
            self._fused = FusedSeam(self.model, self._batches, self.paused)

    @property
    def seams(self) -> tuple[FusedSeam | DecoderSeam, ...]:
        """Where rows become trees, the more special one first."""
        return (self._decoder,) if self._fused is None else (self._fused, self._decoder)

    def __repr__(self) -> str:
        return f"Sharing({self.counts})"

    def __str__(self) -> str:
        windows = self._batches.windows
        lines = [f"Sharing({self.counts})"]
        lines += [f"  at {seam}" for seam in self.seams]
        if self._decoder.head.num_whole > self._decoder.head.num_shared:
            lines.append(
                f"  heads are computed row by row: at this share ratio a step is at most {self._ceiling():.1f} x"
            )
        if (together := self._batches.together) is not None:
            cut = f"{together.num_cut:,} of {self.counts.num_calls:,} calls in several passes"
            lines.append(f"  in lockstep with all processes, over which the model is sharded (FSDP2): {cut}")
        if windows is None:
            lines.append("  calls of one step share nothing with one another (window=None)")
        elif windows.why_off is not None:
            lines.append(f"  calls of one step share nothing with one another: {windows.why_off}")
        else:
            lines.append(f"  calls of one step share with one another: {windows.num_windows:,} steps so far, {windows}")
        return "\n".join(lines)

    def _ceiling(self) -> float:
        """The largest speed-up where each row has its head, by parameters: (D + H) / (D / ratio + H)."""
        of_head = sum(each.numel() for each in self.model.get_output_embeddings().parameters())
        embedding = sum(each.numel() for each in self.model.get_input_embeddings().parameters())
        of_decoder = sum(each.numel() for each in self.model.base_model.parameters()) - embedding
        return (of_decoder + of_head) / (of_decoder / self.counts.share_ratio + of_head)

    def remove(self) -> None:
        """Computes every batch by the model's own forward again."""
        if self._batches.windows is not None:
            self._batches.windows.off()
        for seam in self.seams:
            seam.remove()

    @contextmanager
    def window(self, **settings: Any) -> Iterator[Any]:
        """`TreeEngine.window`: calls inside share what they have in common, and gradients are there at its end.

        For a loop of your own: around all forwards and backwards between two optimizer steps. Loops of accelerate need
        none (`accelerator.backward`). Of several processes `share_prefixes` gets the model with DDP around it, which
        adds gradients up at the end.
        """
        late = nullcontext() if self._parallel is None else summed_late(self._parallel)
        with late, ExitStack() as ending, self.engine.window(**settings) as window:
            yield window
            ending.enter_context(self.paused())

    def verify(self, batch: Mapping[str, Any], *, loss_of: LossOf | None = None) -> BatchReport:
        """Losses and gradients of one batch with trees and without; see `verify_batch`. Of a sharded model all
        processes call it, each with a batch of its own."""
        # Gradients are there after each backward.
        windows, self._batches.windows = self._batches.windows, None
        in_window, self.engine.in_window = self.engine.in_window, None
        try:
            return verify_batch(self, batch, loss_of=loss_of)
        finally:
            self._batches.windows, self.engine.in_window = windows, in_window


def share_model(
    model: nn.Module,
    max_tokens: int | str | None = None,
    *,
    attention: str = "auto",
    min_ratio: float = 1.1,
    window: Literal["auto"] | None = "auto",
) -> Sharing:
    """`treewise.share_prefixes` for a model, which says what the parameters are."""
    check_choice("window", window, ("auto", None))
    argument: object = model
    if not isinstance(argument, nn.Module):
        is_trainer = hasattr(argument, "train_dataset")
        hint = " Give it the trainer's model: share_prefixes(trainer.model)." if is_trainer else ""
        raise ConfigError(f"share_prefixes takes a model, found a {type(argument).__name__}.{hint}")
    outer = unwrap_model(model)
    _refuse_wrappers(model)
    _refuse_rows_of_several_batches(outer)
    # Raises for adapters around the base model that cannot follow a tree. A router loss is asked for call by call.
    TreeEngine(outer, max_tokens, attention, check=False, router_aux_loss=False)
    base: Any = outer.get_base_model() if is_peft(outer) else outer
    engine = TreeEngine(base, max_tokens, attention, router_aux_loss=False)
    shards = shards_of(model, base.base_model)
    parallel = model if isinstance(model, DistributedDataParallel) else None
    return Sharing(base, engine, min_ratio, windows=window is not None, shards=shards, parallel=parallel)


def _refuse_wrappers(model: nn.Module) -> None:
    """Raises for what surrounds a model and does not let a decoder compute rows of another number."""
    for each in model.modules():
        kind = type(each)
        if kind.__module__.startswith("deepspeed.") or "ds_id" in vars(each):
            raise UnsupportedModelError(
                f"{kind.__name__} is DeepSpeed's, whose hooks expect each layer once in each backward; use accelerate "
                "with DDP, or TreeTrainer with fsdp."
            )
        if type(each).forward.__module__.startswith("unsloth"):
            raise UnsupportedModelError(
                f"{kind.__name__} runs unsloth's forward, which bypasses transformers' attention interface and would "
                "ignore a tree's mask. Load the model by transformers."
            )


def _refuse_rows_of_several_batches(model: nn.Module) -> None:
    """Raises where ranks with rows of their own hold parts of a model: accelerate adds their gradients up by DDP, which
    takes whole parameters only."""
    mesh = mesh_of(model)
    if mesh is not None and mesh.tensor.size() < ranks.count():
        raise ConfigError(
            f"the model was loaded with {mesh.sizes} on {ranks.count()} processes. share_prefixes "
            "runs on a mesh where all processes compute one batch: load it with "
            f"DistributedConfig(tp_size={ranks.count()}), or whole on every process, or train it by TreeTrainer."
        )
