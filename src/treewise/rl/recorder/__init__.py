"""What a policy was shown and what it wrote: ids, ends of turns, what is read of them, how long they may become. For
environments, whose driver is in this process, and for agents, who call over HTTP.
"""

from treewise.rl.recorder.ends import end_ids
from treewise.rl.recorder.families import Broken, Found
from treewise.rl.recorder.reader import Parts, ReplyReader

__all__ = ["Broken", "Found", "Parts", "ReplyReader", "end_ids"]
