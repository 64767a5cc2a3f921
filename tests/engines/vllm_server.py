"""Starts and kills a real vLLM, on a CPU, in the environment that `make engines` makes."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SECONDS_TO_START = 540
# `vllm serve` looks for the metadata of a package `vllm`, which the CPU build is not called.
COMMAND = (
    *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "8", "--max-model-len", "256"),
    *("--max-logprobs", "-1", "--enable-lora", "--max-lora-rank", "8"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class VllmServer:
    """A server of a folder's model. `start` and `kill` may follow one another; the port stays."""

    def __init__(self, model: Path, logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.model, self.log = model, logs / f"vllm-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; `wait` says when it answers."""
        words = [str(PYTHON), *COMMAND, "--model", str(self.model), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        assert self.process is not None
        for _ in range(SECONDS_TO_START):
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                if httpx.get(f"{self.url}/models", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(1)
        raise RuntimeError(f"vLLM did not start within {SECONDS_TO_START} s:\n{self.log.read_text()[-3000:]}")

    def num_answered(self) -> float:
        """Completions since its start."""
        lines = httpx.get(f"{self.url.removesuffix('/v1')}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))

    def kill(self) -> None:
        """Ends it and its engine at once, as `kill -9` of all of them does."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
