"""Steps on made screenshots of a browser: flat training, its leaves and trees, and seconds of the tower alone.

    python benchmarks/screenshots.py --model qwen2.5-vl-20m --size cpu --against flat merged [--json benchmarks/results]

Flat training is each trajectory alone by the model's own forward, its pixels prepared beforehand.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel

from treewise.bench import SHAPES, SIZES, Settings, Workload, measure_workload, random_model, record, save
from treewise.bench.contestants import twin
from treewise.bench.measure import spread
from treewise.bench.results import row_view
from treewise.bench.settings import AGAINST
from treewise.bench.workloads import FIRST_TOKEN, Fields, text_shape, trained_end
from treewise.nn.device import synchronized_clock
from treewise.nn.model import split_model
from treewise.nn.vision import processed_by, vision_model
from treewise.nn.whole_gradients import zero_gradients
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

_NO_SPECIAL: Fields = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _qwen_vl(
    text: Fields, tower: tuple[int, ...], full: list[int], sections: list[int], **more: int
) -> tuple[str, Fields]:
    """Qwen2.5-VL. tower: width, depth, heads and inner size. The last tokens of the vocabulary mark images."""
    marks = {"vision_start": 4, "vision_end": 3, "video": 2, "image": 1}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": sections}
    sizes = dict(zip(("hidden_size", "depth", "num_heads", "intermediate_size"), tower, strict=True))
    vision = {**sizes, "fullatt_block_indexes": full, "out_hidden_size": text["hidden_size"], **more}
    return "qwen2_5_vl", {
        "text_config": {**text, "rope_parameters": rope, "max_position_embeddings": 131_072, **_NO_SPECIAL},
        "vision_config": vision,
        "tie_word_embeddings": True,
        **_NO_SPECIAL,
        **{f"{name}_token_id": text["vocab_size"] - number for name, number in marks.items()},
    }


_3B: Fields = {**text_shape(2048, 11_008, 36, 16, 2, 128, 151_936), "tie_word_embeddings": True}
_TINY, _SMALL = SHAPES["qwen3-tiny"][1], SHAPES["qwen3-17m"][1]
MODELS = {
    "qwen2.5-vl-tiny": _qwen_vl(_TINY, (32, 2, 2, 48), [1], [4, 2, 2], window_size=56),
    "qwen2.5-vl-20m": _qwen_vl(_SMALL, (192, 6, 6, 576), [2, 5], [8, 12, 12]),
    "qwen2.5-vl-3b": _qwen_vl(_3B, (1280, 32, 16, 3420), [7, 15, 23, 31], [16, 24, 24]),
}
# Arguments of `browser` by size.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "tiny": {"num_tries": 4, "num_turns": 4, "system": 6, "note": 3, "action": 4, "screen": (56, 56)},
    "cpu": {"num_tries": 4, "num_turns": 7, "system": 64, "note": 12, "action": 32, "screen": (252, 168)},
    "full": {"num_tries": 8, "num_turns": 7, "system": 800, "note": 40, "action": 200, "screen": (1288, 728)},
}
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BLOCK = 14  # pixels of one colour in a made screenshot


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """The images of a model of the Qwen-VL families.

    processor: makes its pixel tensors. first_special: text tokens are below. side: pixels of the square that one
    placeholder stands for.
    """

    processor: object
    image_token: int
    first_special: int
    side: int

    def placeholders(self, width: int, height: int) -> np.ndarray:
        """[n] int64, the placeholders of an image whose sides are multiples of `side`."""
        return np.full(width // self.side * (height // self.side), self.image_token, dtype=np.int64)


def image_format(model: PreTrainedModel) -> ImageFormat | None:
    """The format of images of a model of the Qwen-VL families; None of any other."""
    config = model.config
    if config.model_type not in KINDS:
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=side**2,
        max_pixels=2**26,
    )
    special = (getattr(config, f"{name}_token_id", None) for name in ("image", "video", "vision_start", "vision_end"))
    return ImageFormat(processor, config.image_token_id, min(each for each in special if each is not None), side)


def random_png(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A picture of random blocks, as the bytes of a file."""
    from PIL import Image

    small = rng.integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), dtype=np.uint8)
    pixels = np.kron(small, np.ones((BLOCK, BLOCK, 1), dtype=np.uint8))[:height, :width]
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def tower_seconds(model: PreTrainedModel, forest: Forest, processor: object, repetitions: int) -> list[float]:
    """Seconds of one forward and backward of the tower over the distinct images of a forest, after one to warm up."""
    vision = vision_model(split_model(model))
    sources = forest.images.sources
    pixels = [processed_by(processor, "")(each) for each in sources]
    spans = {each.digest: item.token_ids[each.start : each.end] for item in forest.trajectories for each in item.images}
    num_rows = [int((spans[each.digest] == vision.image_token).sum()) for each in sources]
    seconds = []
    for _ in range(repetitions + 1):
        zero_gradients(model)
        started = synchronized_clock(model.device)
        features = vision.encode(pixels, num_rows, [each.name for each in sources])
        if vision.is_trained:
            torch.autograd.backward(features, [torch.ones_like(each) for each in features])
        seconds.append(synchronized_clock(model.device) - started)
    zero_gradients(model)
    return seconds[1:]


# -- the trees --------------------------------------------------------------------------------------------------------


class Tokens:
    """Random tokens, screenshots and choices."""

    def __init__(self, vocabulary: int, images: ImageFormat, seed: int = 0) -> None:
        self.last, self.rng, self.images = min(vocabulary, images.first_special), np.random.default_rng(seed), images

    def __call__(self, count: int) -> np.ndarray:
        """[count] int64, without the tokens that mark images."""
        return self.rng.integers(FIRST_TOKEN, self.last, count)

    def screen(self, width: int, height: int) -> tuple[np.ndarray, bytes]:
        """The placeholders of a new screenshot ([n] int64), and its file."""
        return self.images.placeholders(width, height), random_png(self.rng, width, height)


def browser(
    tokens: Tokens,
    num_tries: int,
    num_turns: int,
    window: int,
    system: int,
    note: int,
    action: int,
    screen: tuple[int, int],
) -> list[Trajectory]:
    """An agent in a browser: each call sees the last `window` screenshots, and trains the action that it answers with.

    Older screenshots become a note of a few tokens, so that the context forks at the first one that is dropped. Each
    further try goes on from a turn of an earlier one, whose page, history and screenshots it shares.
    """
    prompt, dropped, items = tokens(system), tokens(2), []
    tries: list[list[_Turn]] = []
    for index in range(num_tries):
        first = 0 if index == 0 else int(tokens.rng.integers(0, num_turns - 1))
        turns = list(tries[int(tokens.rng.integers(0, index))][: first + 1]) if index else []
        if turns:  # the same page, another action
            turns[-1] = turns[-1]._replace(action=tokens(action))
        while len(turns) < num_turns:
            turns.append(_Turn(tokens(note), *tokens.screen(*screen), tokens(action)))
        items += [_call(prompt, turns[: last + 1], window, dropped) for last in range(first, num_turns)]
        tries.append(turns)
    return items


class _Turn(NamedTuple):
    """Tokens of a turn's text, placeholders of its screenshot, the screenshot's file, tokens of the action."""

    note: np.ndarray
    placeholders: np.ndarray
    shot: bytes
    action: np.ndarray


def _call(prompt: np.ndarray, turns: Sequence[_Turn], window: int, dropped: np.ndarray) -> Trajectory:
    """The last of some turns, with what it saw."""
    parts, spans = [prompt], []
    for index, turn in enumerate(turns):
        parts.append(turn.note)
        if index >= len(turns) - window:
            start = sum(map(len, parts))
            spans.append(ImageSpan(turn.shot, start, start + len(turn.placeholders)))
            parts.append(turn.placeholders)
        else:
            parts.append(dropped)
        parts.append(turn.action)
    return replace(trained_end(np.concatenate(parts[:-1]), parts[-1]), images=tuple(spans))


def seen_facts(model: PreTrainedModel, workload: Workload, repetitions: int, row: dict[str, Any]) -> dict[str, Any]:
    """Images of a workload, the seconds of the tower over the distinct ones, and their share of the step of `tree`."""
    forest = Forest.from_trajectories(workload.trajectories)
    seconds = spread(tower_seconds(twin(model), forest, workload.processor, repetitions))
    tree = row["contestants"].get("tree", {}).get("seconds")
    return {
        "images": len(forest.images.sources),
        "flat_images": sum(len(item.images) for item in forest.trajectories),
        "image_tokens": int((forest.images.end - forest.images.start).sum()),
        "tower_seconds": seconds,
        "tower_share": None if tree is None else seconds["median"] / tree["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-vl-20m")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--against", nargs="*", choices=AGAINST, default=("flat", "merged"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="a file, or a folder for NAME-<hardware>.json")
    parser.add_argument("--name", default="screenshots")
    args = parser.parse_args()
    SHAPES.update(MODELS)
    device = torch.device(args.device)
    model = random_model(args.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    images = image_format(model)
    assert images is not None
    tokens = Tokens(model.get_input_embeddings().weight.shape[0], images)
    items = browser(tokens, window=3, **ARGUMENTS[args.size])
    workload = Workload("screenshots", items, processor=images.processor)
    measured = measure_workload(twin(model), workload, Settings(args.against, repetitions=args.repetitions))
    row = {"model": args.model, **measured, **seen_facts(model, workload, args.repetitions, measured)}
    Console(width=200).print(row_view(row))
    print(
        f"{row['images']} images ({row['flat_images']} flat), their tower alone {row['tower_seconds']['median']:.3f} s"
    )
    if args.json is not None:
        print(save(args.json, record([row], ["python", *sys.argv]), args.name))


if __name__ == "__main__":
    main()
