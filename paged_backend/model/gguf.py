"""Models in GGUF files: converted once into a folder, which then loads in a second."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib.util
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paged_backend.errors import ConfigError, MissingExtraError, ModelError
from paged_backend.model.gguf_parts import PLAIN, join, packed_types, parts_of, types_of

logger = logging.getLogger(__name__)

_ABANDONED_AFTER = 24 * 60 * 60  # seconds


def gguf_folder(
    gguf_file: Path, dtype: str, cache_folder: str | os.PathLike[str], *, keep_packed: bool = False
) -> Path:
    """A GGUF file's model as a folder in `dtype` ("bfloat16", ...); converted again whenever the file changes.

    With `keep_packed` its packed weights are repacked for our kernels; `kept_packed.load` loads the folder.
    `gguf_file` may be one of the parts of a model that was split; the others must lie beside it.
    """
    parts = parts_of(gguf_file)
    stats = [part.stat() for part in parts]
    source = " ".join(
        f"{part.resolve()} {stat.st_size} {stat.st_mtime_ns}" for part, stat in zip(parts, stats, strict=True)
    )
    kind = f"{dtype}-packed" if keep_packed else dtype
    name = f"{parts[0].stem}-{kind}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    what = f"the GGUF file {gguf_file.name}"
    return publish_folder(
        Path(cache_folder, "models", name),
        lambda folder: _convert_parts(parts, folder, dtype, what=what, keep_packed=keep_packed),
    )


def publish_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` if it does not exist; nobody ever sees it half filled.

    Of several processes that build it at once, the first to finish wins and the others use its folder.
    """
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished-{secrets.token_hex(8)}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder.parent}: {error}; give another folder with cache_dir=..."
        ) from error
    try:
        _remove_abandoned(folder)
        build(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """What processes left behind that were killed while they were building `folder`."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.unfinished-*"):
        with contextlib.suppress(OSError):  # another process removed it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(path, ignore_errors=True)


def _convert_parts(parts: list[Path], folder: Path, dtype: str, *, what: str, keep_packed: bool) -> None:
    if len(parts) == 1:
        return convert(parts[0], folder, dtype, what=what, extra="gguf", keep_packed=keep_packed)
    _check_packages(what, "gguf")
    whole = folder.with_name(f"{folder.name}.gguf")
    try:
        join(parts, whole)
        convert(whole, folder, dtype, what=what, extra="gguf", keep_packed=keep_packed)
    finally:
        whole.unlink(missing_ok=True)


def _check_packages(what: str, extra: str) -> None:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError(what, extra)


def convert(gguf_file: Path, folder: Path, dtype: str, *, what: str, extra: str, keep_packed: bool = False) -> None:
    """Unpack the weights, or repack them for our kernels, and write them as a checkpoint, with the tokenizer."""
    _check_packages(what, extra)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s into %s; this happens once", gguf_file, folder.parent)
    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        types = packed_types(gguf_file)
        if types and not keep_packed:
            logger.info("its weights (%s) are unpacked to %s, and so take more memory", ", ".join(types), dtype)
        wide = "float32" if keep_packed and types else dtype  # so that nothing is rounded twice
        with _bar_in_terminals():
            model = AutoModelForCausalLM.from_pretrained(
                **where, dtype=wide, quantization_config=GgufConfig(dequantize=True), local_files_only=True
            )
        tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    except ModelError:
        raise
    except Exception as error:  # whatever reading a broken or unknown file raises
        raise ModelError(f"{what} cannot be converted: {error}") from error
    if keep_packed and types:
        _save_packed(gguf_file, model, folder, getattr(torch, dtype))
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _bar_in_terminals() -> Iterator[None]:
    """transformers' reader of GGUF files shows its bar wherever its output goes, and has no setting for that."""
    from transformers import modeling_gguf_pytorch_utils as reader

    shown = getattr(reader, "tqdm", None)
    if shown is None:  # another version, which may follow transformers' own setting
        yield
        return
    reader.tqdm = functools.partial(shown, disable=None)
    try:
        yield
    finally:
        reader.tqdm = shown


def _save_packed(gguf_file: Path, model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Those linear layers are packed whose weights were; what else has two dimensions is in `dtype`."""
    from paged_backend.model import kept_packed

    layers = {name: module for name, module in model.named_modules() if kept_packed.is_packable(module)}
    types = types_of(gguf_file, layers, is_tied=bool(model.config.tie_word_embeddings))
    packed = {}
    for name, kind in types.items():
        if kind not in PLAIN:
            packed[name] = kept_packed.repack(layers[name].weight.float(), bits=4 if kind == "Q4_0" else 8)
            layers[name].weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    kept_packed.save(folder, model, packed)
