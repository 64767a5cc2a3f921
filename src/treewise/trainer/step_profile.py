"""`profile: true`: where the time of steps 3 to 5 of a run goes, written into its folder."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from treewise.engine.profiling import Profile, Recording, mean

FILE, TRACE = "profile.json", "profile_trace.json"
FIRST, LAST = 3, 5  # steps, counted from 1 in each start of a run; the first two measure, probe and allocate
logger = logging.getLogger("treewise")


class StepProfiler(TrainerCallback):
    """Writes `profile.json`, the mean step by part, and `profile_trace.json`, the Chrome trace of the last one.

    On the first rank. A step lasts from its first batch to the optimizer's end; saving is not in it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_begun = 0
        self._recording: Recording | None = None
        self._profiles: list[Profile] = []

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._num_begun += 1
        if state.is_world_process_zero and FIRST <= self._num_begun <= LAST:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recording = Recording(args.device)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        self._profiles.append(recording.stop(self._folder / TRACE if self._num_begun == LAST else None))
        (self._folder / FILE).write_text(json.dumps(asdict(mean(self._profiles)), indent=1) + "\n")

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.is_world_process_zero and not self._profiles:
            logger.warning(f"profile: the run ended before step {FIRST}; nothing was profiled.")
