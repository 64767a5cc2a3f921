"""Decoding behind one prompt with images."""

from collections.abc import Sequence

import torch
from torch import nn

from treewise.data.images import decoded
from treewise.errors import DataError
from treewise.nn.model import split_model
from treewise.nn.vision import pixel_inputs, row_arguments, tree_positions, vision_model
from treewise.nn.wrapped import base_model
from treewise.rl.samplers.decoder import CopiedCache
from treewise.rl.samplers.shared_prefix import Prefix, device_of
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory


class SeenPrompt(CopiedCache):
    """One prompt, by the model's own forward; rows go on in text from copies of its cache.

    Parameters:
        processor: the model's. images: of the prompt, in order.
    """

    def __init__(self, model: nn.Module, processor: object, images: Sequence[ImageSpan]) -> None:
        super().__init__(model)
        self.processor, self.images = processor, tuple(images)
        self.skipped = 0  # by how much positions after the prompt are below the number of tokens before

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """See `Decoder`; of one prefix.

        Raises:
            DataError: an image that cannot be read, or of which the model makes another number of tokens.
            UnsupportedModelError: a model whose images are not supported.
        """
        del max_new_tokens
        vision, base = vision_model(split_model(self.model)), base_model(self.model)
        pictures = {image.digest: decoded(image.read(), image.name) for image in self.images}
        ids = torch.tensor(prefixes, device=device_of(self.model))
        is_later = [float(index > 0) for index in range(ids.shape[1])]
        forest = Forest.from_trajectories([Trajectory(prefixes[0], is_later, images=self.images)])
        positions = tree_positions(
            vision.module,
            vision.image_token,
            forest,
            lambda image: pixel_inputs(self.processor, [pictures[image.digest]]),
        )
        given = row_arguments(base, self.processor, [pictures[image.digest] for image in self.images], ids[0])
        if given["pixel_values"].is_floating_point():
            given["pixel_values"] = given["pixel_values"].to(next(base.parameters()).dtype)
        if positions is not None:
            given["position_ids"] = torch.from_numpy(positions)[:, None].to(ids.device)
            self.skipped = len(prefixes[0]) - 1 - int(positions.max())
        try:
            logits = self._forward(ids, 0, **given)
        except ValueError as error:
            raise DataError(f"the images of a prompt of {ids.shape[1]} tokens: {error}") from error
        self.keep([0] * num_rows[0])
        return logits.expand(num_rows[0], -1)

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        return self._forward(token_ids[:, None], self.length - self.skipped)
