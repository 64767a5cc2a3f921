"""Any agent, as it is: an endpoint of the usual protocols that records tokens, and the trees of what was recorded.

asked, wire       what a call asks for; a protocol a module: of OpenAI (three), Anthropic and Google
writing, replies  messages to token ids behind ids that stay verbatim; sampled ids to what is given out
recording, forks  what an episode's calls saw and sampled, each token once; why a call did not go on where another ended
batching          requests of all episodes to one sampler
episodes, endpoint   keys and their episodes; the server
running, host     runs an agent: processes of its own, and a reward, or why there is none
record            `treewise record`

Nothing outside of this folder imports it at its top: without it, everything else works.
"""
