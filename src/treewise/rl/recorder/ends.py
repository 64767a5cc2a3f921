"""Which token ids end a turn: one rule for every sampler, in this process or on a server, for tasks, agents, `record`,
evaluations and `serve`.
"""

from typing import Any

from treewise.data.render.piece_tokenizer import joined
from treewise.data.render.template import Template


def end_ids(template: Template | None, generation_config: Any) -> tuple[int, ...]:
    """Ids that end a turn: the template's end-of-turn token, the tokenizer's end of text, and those that the model was
    published with, of which there may be several (`eos_token_id`: GLM-4.5's `<|user|>` and `<|observation|>`, GPT-OSS's
    `<|call|>`, Llama 3.1's `<|eom_id|>`).

    template: None for a model without a tokenizer. generation_config: None where that of the model is not known.
    """
    found: list[int] = []
    if template is not None:
        of_template = joined(template.encoder.encode([template.end_token])[0]).tolist()
        own = template.tokenizer.eos_token_id
        found = [*(of_template if len(of_template) == 1 else []), *([] if own is None else [own])]
    listed = getattr(generation_config, "eos_token_id", None)
    of_model = [] if listed is None else listed if isinstance(listed, list | tuple) else [listed]
    return tuple(dict.fromkeys([*found, *map(int, of_model)]))
