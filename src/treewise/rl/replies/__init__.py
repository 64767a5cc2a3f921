"""What a policy wrote: where its turns end, and what is read of them. For environments and agents alike."""

from treewise.rl.replies.ends import end_ids
from treewise.rl.replies.families import Broken, Found
from treewise.rl.replies.reader import Parts, ReplyReader

__all__ = ["Broken", "Found", "Parts", "ReplyReader", "end_ids"]
