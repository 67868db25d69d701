"""Models whose tokens see what follows them, such as sentence-transformers' encoders: found, loaded and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from paged_backend.engine.request import Request
from paged_backend.errors import ModelError
from paged_backend.model.pooling import finished, pooled
from paged_backend.pooling_params import POOLINGS, EmbeddingSupport

_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is of a kind that is trained with masked tokens, and is no language model."""
    (architecture, *_) = config.architectures or [""]
    return (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING
        and not getattr(config, "is_decoder", False)
        and architecture.endswith(_HEADLESS)
    )


def embedding_support(
    model: PreTrainedModel, source: str | None, options: dict[str, Any], name: str
) -> EmbeddingSupport:
    """What vectors the model gives, by the files that sentence-transformers writes beside it, if it has them."""
    encodes = is_encoder(model.config)
    default_pooling, normalizes = "mean" if encodes else "last", True
    modules = None if source is None else _read(source, "modules.json", options)
    if modules is not None:
        kinds = {module["type"].rpartition(".")[2]: module for module in modules}
        unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
        if unknown:
            raise ModelError(f"model={name!r} has modules that are not available yet: {', '.join(sorted(unknown))}")
        normalizes = "Normalize" in kinds
        if source is not None and "Pooling" in kinds:
            settings = _read(source, f"{kinds['Pooling']['path']}/config.json", options) or {}
            default_pooling = _pooling_of(settings, name)
    return EmbeddingSupport(
        size=int(model.config.get_text_config().hidden_size),
        poolings=POOLINGS if encodes else ("last", "mean"),
        default_pooling=default_pooling,
        default_normalize=normalizes,
    )


def max_seq_length(source: str | None, options: dict[str, Any]) -> int | None:
    """The length that sentence-transformers cuts texts to."""
    settings = None if source is None else _read(source, "sentence_bert_config.json", options)
    return None if settings is None else settings.get("max_seq_length")


class EncoderRunner:
    """Runs transformers' own forward on prompts that are padded on the right."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._pad_id = pad_id_of(model, tokenizer)

    @torch.inference_mode()
    def embed(self, requests: list[Request]) -> list[list[float]]:
        """The vector of each request's prompt."""
        input_ids, mask = padded([request.prompt_token_ids for request in requests], self._pad_id, self._model.device)
        hidden = self._model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        vectors = []
        for row, request in enumerate(requests):
            assert request.pooling is not None
            vectors.append(finished(pooled(hidden[row], mask[row], request.pooling), request.pooling))
        return vectors


def pad_id_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    known = (getattr(tokenizer, "pad_token_id", None), model.config.pad_token_id)
    return next((pad for pad in known if pad is not None), 0)


def padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [S, T] and a mask [S, T] that tells tokens from padding."""
    longest = max(map(len, prompts))
    ids = [prompt + [pad_id] * (longest - len(prompt)) for prompt in prompts]
    mask = [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _pooling_of(settings: dict[str, Any], name: str) -> str:
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if "pooling_mode" in settings:  # as newer versions write it
        known = {"lasttoken": "last"}
        chosen, mode = [], settings["pooling_mode"]
        poolings = [known.get(one, one) for one in ([mode] if isinstance(mode, str) else mode)]
    else:
        poolings = [_POOLING_KEYS.get(key, key.removeprefix("pooling_mode_")) for key in chosen]
    if len(poolings) == 1 and poolings[0] in POOLINGS:
        return poolings[0]
    raise ModelError(
        f"model={name!r} pools by {', '.join(poolings) or 'nothing'}; "
        f"one at a time of {', '.join(POOLINGS)} is available"
    )


def _read(source: str, file: str, options: dict[str, Any]) -> Any:
    """A JSON file of the checkpoint; None if there is none."""
    options = {name: value for name, value in options.items() if name != "trust_remote_code"}
    path = cached_file(
        source,
        file,
        **options,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
