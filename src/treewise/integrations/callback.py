"""`share_prefixes` as a callback of transformers.Trainer, for trainers that are built by a program of others.

At `on_train_begin` everything that a trainer puts around a model is there: adapters, checkpointing, accelerate's
wrappers. So one line in whatever names callbacks is enough.
"""

import logging
from typing import Any

from transformers import TrainerCallback

from treewise.integrations.sharing import Sharing, share_model

logger = logging.getLogger("treewise")


class SharePrefixes(TrainerCallback):
    """Shares prefixes while a trainer trains, and says at the end what was shared.

    trainer: one whose reference model (`ref_model`) shares, too; a callback is handed the trained model alone.
    settings: of `treewise.share_prefixes`. `sharing` is what that returned of the trained model, from the beginning of
    training on.
    """

    def __init__(self, trainer: Any = None, **settings: Any) -> None:
        self._trainer, self._settings = trainer, settings
        self.sharing: Sharing | None = None
        self._sharings: list[Sharing] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Raises what `treewise.share_prefixes` raises."""
        self._remove()
        models = [model, getattr(self._trainer, "ref_model", None)]
        self._sharings = [share_model(each, **self._settings) for each in models if each is not None]
        self.sharing = self._sharings[0]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The models' forwards are their own again."""
        for each in self._sharings:
            logger.warning("treewise: %s", each)
        self._remove()

    def _remove(self) -> None:
        for each in self._sharings:
            each.remove()
        self._sharings = []
