"""LoRA adapters as PEFT writes them: `adapter_config.json` and the weights beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from paged_backend.errors import InvalidRequestError
from paged_backend.model.tensor_files import problem_of

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_DEFAULT_ALPHA = 8
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# What changes the mathematics, and is none of ours. Each is off if it is absent, None, False or empty.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
# These begin with changed weights of the model itself, which the checkpoint does not have.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """What an adapter adds to the output of one module: `x @ shrink.T @ expand.T * scale`."""

    shrink: Tensor
    """[rank, in]"""
    expand: Tensor
    """[out, rank]"""
    scale: float

    @property
    def rank(self) -> int:
        return self.shrink.shape[0]


def fingerprint(folder: Path) -> tuple[Any, ...]:
    """Changes when the checkpoint does. Raises InvalidRequestError if there is none."""
    try:
        stats = [path.stat() for path in (folder / CONFIG, weights_file(folder))]
    except (OSError, ValueError) as error:  # ValueError: of what is no path
        raise InvalidRequestError(
            f"lora_path={str(folder)!r} holds no PEFT checkpoint: {error}; it must have {CONFIG} and {_WEIGHTS[0]}"
        ) from None
    return (str(folder.resolve()), *((stat.st_mtime_ns, stat.st_size) for stat in stats))


def weights_file(folder: Path) -> Path:
    return next((folder / name for name in _WEIGHTS if (folder / name).is_file()), folder / _WEIGHTS[0])


def read(folder: Path) -> dict[str, LowRank]:
    """By module, as they are in the file. Raises InvalidRequestError for what is broken
    or not supported."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = _tensors(weights_file(folder))
    except Exception as error:  # whatever broken files, or pickles with more than tensors, raise
        raise InvalidRequestError(f"the LoRA adapter in {str(folder)!r} cannot be read: {problem_of(error)}") from error
    _check_config(config, folder)
    return _low_ranks(tensors, config, folder)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Read and not mapped, since the file may change while they are in use."""
    if path.suffix == ".bin":
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    return safetensors.torch.load(path.read_bytes())


def _check_config(config: Any, folder: Path) -> None:
    if not isinstance(config, dict) or str(config.get("peft_type")).upper() != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise InvalidRequestError(f"the adapter in {str(folder)!r} is of type {kind!r}; only 'LORA' can be served")
    reasons = [name for name in _UNSUPPORTED if config.get(name)]
    reasons += [f"bias={config['bias']!r}"] if config.get("bias") not in (None, "none") else []
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        reasons.append(f"init_lora_weights={start!r} (convert it to a plain LoRA, as PEFT's documentation shows)")
    if reasons:
        raise InvalidRequestError(
            f"the LoRA adapter in {str(folder)!r} uses what cannot be served beside other requests: "
            f"{', '.join(reasons)}; merge it into the model instead, with PEFT's merge_and_unload()"
        )


def _low_ranks(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> dict[str, LowRank]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise InvalidRequestError(
                f"the LoRA adapter in {str(folder)!r} has weights that cannot be served: {key!r}; only those of linear "
                "layers can be (target_modules without embeddings and convolutions)"
            )
        sides.setdefault(match["module"].removeprefix(_PREFIX), {})[match["side"]] = tensor
    if not sides:
        raise InvalidRequestError(f"the LoRA adapter in {str(folder)!r} has no weights")
    return {module: _low_rank(module, pair, config, folder) for module, pair in sides.items()}


def _low_rank(module: str, pair: dict[str, Tensor], config: dict[str, Any], folder: Path) -> LowRank:
    if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
        raise InvalidRequestError(f"the LoRA adapter in {str(folder)!r} has half of the weights of {module}, or others")
    rank = pair["A"].shape[0]
    alpha = float(_of_module(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", _DEFAULT_ALPHA)))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(pair["A"], pair["B"], scale)


def _of_module(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first entry whose key, a regular expression, is the module's name or its end after a dot, as in PEFT."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)
