"""The third part of `TreeTrainer`: a checkpoint is complete or none, and belongs to this run."""

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from treewise.distributed import ranks
from treewise.distributed.fsdp import whole_state
from treewise.engine.budget import AUTO
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import contents, optimizer_state
from treewise.trainer.checkpoint import store as seals
from treewise.trainer.step import ComputingTrainer

logger = logging.getLogger("treewise")


class KeepingTrainer(ComputingTrainer):
    """Finds, writes and loads checkpoints, whose files `saving` and `states` know."""

    _saved_step: int
    _model_facts: str  # what a checkpoint must fit

    def _find_checkpoint(self, wanted: str | bool) -> str:
        """The path of the checkpoint to resume from: rank 0 reads and judges it for all."""
        found, seal = ranks.on_first_rank(lambda: self._judged_checkpoint(wanted))
        self._resumed_step = int(seal["step"])
        if self.args.max_tokens == AUTO and seal.get("max_tokens"):
            # The same cuts as before, whatever is free now: another budget rounds differently.
            self._resumed_budget, self._engine = int(seal["max_tokens"]), None
        if self._placer is not None and seal.get("costs"):
            self._placer.restore(seal["costs"])
        return found

    def _judged_checkpoint(self, wanted: str | bool) -> tuple[str, dict[str, Any]]:
        if wanted is True:
            found, passed_over = seals.newest(self.args.output_dir)
            for reason in passed_over:
                sys.stderr.write(f"passed over: {reason}\n")
            if found is None:
                because = f" ({passed_over[0]})" if passed_over else ""
                raise CheckpointError(f"{self.args.output_dir}: no complete checkpoint to resume from{because}.")
        else:
            found = Path(str(wanted))
        seal = seals.read_seal(found)
        seals.check_same_run(found, seal, self._run_facts())
        return str(found), seal

    def _run_facts(self) -> dict[str, Any]:
        facts = {"data": self.data_facts.fingerprint, "num_trees": self.data_facts.num_trees}
        return {**facts, "model": self._model_facts, **self.args.order_facts()}

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Written aside, sealed, published; only then are older checkpoints removed."""
        run_dir = Path(self._get_output_dir(trial))
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (run_dir / f"checkpoint-{best}").is_dir()):
            self.state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": self.state.global_step, "max_tokens": self.engine.max_tokens, **self._run_facts()}
        if self._placer is not None:
            self._placer.before_save(self.state.global_step)
            facts |= {"costs": self._placer.state(), "num_ranks": ranks.count()}
        try:
            checkpoint = contents.save(self, run_dir, facts)
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            seals.prune(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model as `from_pretrained` reads it, gathered where it is sharded; the settings as JSON, where
        transformers would pickle them.
        """
        if self._ends is not None and state_dict is None:
            state_dict = whole_state(self.model)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(folder, state_dict=state_dict)
            self._save_beside(folder)

    def _save_beside(self, folder: Path) -> None:
        """Tokenizer and settings."""
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        contents.write_arguments(folder, self.args)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Adapters are loaded as transformers loads them; weights by `saving.load_weights`, which leaves none out."""
        folder = Path(resume_from_checkpoint)
        if hasattr(self.model, "peft_config") and not (folder / contents.SHARDS).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            contents.load_weights(self.model, folder)

    def _load_best_model(self) -> None:
        if self._ends is None:
            super()._load_best_model()
        else:
            contents.load_weights(self.model, Path(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            contents.load_states(self, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer_state.load_random_state(Path(checkpoint), ranks.own())
