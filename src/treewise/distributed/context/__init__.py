"""Context parallelism: ranks that follow one another compute a part of the tokens of each micro-batch."""

from treewise.distributed.context.exchange import ContextExchange
from treewise.distributed.context.guest import ContextGroup, ContextWalk, check_context_size, context_group
from treewise.distributed.context.parts import ContextPart, context_part, part_bounds

__all__ = [
    "ContextExchange",
    "ContextGroup",
    "ContextPart",
    "ContextWalk",
    "check_context_size",
    "context_group",
    "context_part",
    "part_bounds",
]
