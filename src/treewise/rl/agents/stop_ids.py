"""Which token ids end a turn."""

from typing import Any

from treewise.rl.tasks.chat_tokens import ChatTokens


def stop_ids_of(tokenizer: Any, chat_template: str | None, model: Any) -> list[int]:
    """Ids that end a turn: the template's, the tokenizer's, and those that the model was published with."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = [] if own is None else own if isinstance(own, list) else [own]
    return list(dict.fromkeys([*ChatTokens(tokenizer, chat_template).end_ids(), *map(int, listed)]))
