"""The stand-in of tests/rl/samplers as a program, where there is no vLLM: MODEL PORT, on all addresses."""

import sys

from transformers import AutoModelForCausalLM

from tests.rl.samplers.stand_in import StandIn


class ReachableStandIn(StandIn):
    """Other machines reach it."""

    def server_bind(self) -> None:
        self.server_address = ("0.0.0.0", self.server_address[1])
        super().server_bind()

    def on_v1_models(self, _: object) -> tuple[int, object]:
        return 200, {"data": [{"id": "tiny", "parent": None, "max_model_len": 256}]}

    def on_health(self, _: object) -> tuple[int, object]:
        return 200, ""


if __name__ == "__main__":
    ReachableStandIn(int(sys.argv[2]), AutoModelForCausalLM.from_pretrained(sys.argv[1])).serve_forever()
