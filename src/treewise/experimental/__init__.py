"""A shelf: what works and is tested, and has not earned its place. Nothing outside imports it; tables name it as text.

| what | what would promote it |
|---|---|
| `kernels/` | a GPU on which `make gpu` finds one right, and faster than `flex` on recorded trees |
| `grow/` | a grown model that reaches the loss of one from scratch in less time, that of both models included |
| `lcr.py` | a language model that reaches a reward with fewer tokens than by `random`, over three seeds |
| `gain/` | tasks on which its check passes without `force`, and which it teaches sooner than `uniform` |
"""
