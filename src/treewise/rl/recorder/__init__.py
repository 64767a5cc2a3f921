"""What a policy was shown and what it wrote: ids, ends of turns, what is read of them, how long they may become, and
the rows that train on it. For environments, whose driver is in this process, and for agents, who call over HTTP.
"""
