"""The device that a flag names."""

import torch

from treewise.errors import ConfigError


def chosen_device(name: str | None) -> torch.device:
    """The device of `--device`; without a name the first GPU where there is one, else the CPU.

    Raises:
        ConfigError: no name of a device, a kind that treewise does not run on, or one that this machine lacks.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device is {name!r}, which is not a device; give cpu, cuda, cuda:1, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}; treewise runs on cpu and cuda.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ConfigError(f"--device is {name!r}, and torch {torch.__version__} finds no GPU here.")
        if (device.index or 0) >= count:
            raise ConfigError(f"--device is {name!r}, and there are {count} GPUs here, numbered from 0.")
    return device
