"""Arrays of the host as tensors of a device, without the host waiting for the device.

A plain copy from ordinary memory to a GPU waits until everything that was queued before it has run. From pinned memory
it is queued like a kernel, so the host lays out the next micro-batch while the device still computes this one.
"""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array as a tensor of the device, in its own dtype where none is given.

    On CUDA the copy is queued. torch's cache of pinned memory keeps the source until it is done.
    """
    tensor = torch.as_tensor(array, dtype=dtype, device="cpu")  # whatever the default device
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
