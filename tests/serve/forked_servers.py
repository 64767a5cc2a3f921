"""A process that has imported everything, and forks a server at each line that it reads: `python forked_servers.py
FOLDER PORT SETTINGS`, the last as JSON. It prints the server's process id; the caller kills it."""

import json
import os
import sys

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # a fork keeps no threads

import torch  # noqa: E402
import uvicorn  # noqa: E402

from treewise.serve.app import make_app  # noqa: E402
from treewise.serve.settings import ServeSettings  # noqa: E402
from treewise.testing.families import tiny_model  # noqa: E402


def main(folder: str, port: int, chosen: str) -> None:
    torch.set_num_threads(1)
    more = {"max_tokens": "24", "snapshot_every": 3, **json.loads(chosen)}
    settings = ServeSettings(model="tiny", folder=folder, port=port, **more)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            app = make_app(settings, tiny_model("llama"))
            uvicorn.run(app, port=port, log_level="critical", ws="none")
            os._exit(0)
        print(pid, flush=True)  # noqa: T201
        os.waitpid(pid, 0)
        print("ended", flush=True)  # noqa: T201


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
