"""A reward of ms-swift's GRPO, by `--external_plugins`."""

from typing import Any

from swift.rewards import ORM, orms

from tests.hosts.material import reward


class Digits(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return reward(completions)


orms["digits"] = Digits
