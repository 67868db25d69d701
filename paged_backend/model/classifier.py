"""Models with a head that says how well a text, or a pair of texts, fits each of some labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paged_backend.engine.request import Request
from paged_backend.model.encoder import pad_id_of, padded
from paged_backend.pooling_params import ClassificationSupport

_HEAD = "ForSequenceClassification"
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}


def is_classifier(config: PreTrainedConfig, model: PreTrainedModel | None = None) -> bool:
    """Whether a checkpoint, or a loaded model, has such a head."""
    kind = type(model).__name__ if model is not None else (config.architectures or [""])[0]
    return kind.endswith(_HEAD)


def classification_support(config: PreTrainedConfig) -> ClassificationSupport:
    """The labels, and what makes scores of the head's numbers: what sentence-transformers wrote, else what the head was
    trained with."""
    labels = config.id2label or {}
    names = tuple(str(labels.get(i, f"LABEL_{i}")) for i in range(config.num_labels))
    written = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    written = written or getattr(config, "sbert_ce_default_activation_function", None)
    if written is not None and (known := _ACTIVATIONS.get(str(written).rpartition(".")[2])) is not None:
        return ClassificationSupport(labels=names, activation=known)
    if config.problem_type == "regression":
        return ClassificationSupport(labels=names, activation="none")
    is_independent = len(names) == 1 or config.problem_type == "multi_label_classification"
    return ClassificationSupport(labels=names, activation="sigmoid" if is_independent else "softmax")


class ClassifierRunner:
    """Runs transformers' own forward on prompts that are padded on the right."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model: Any = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._pad_id = pad_id_of(model, tokenizer)
        self._reads_last_token = type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING and hasattr(model, "score")

    @torch.inference_mode()
    def embed(self, requests: list[Request]) -> list[list[float]]:
        """The number of each label for each request's prompt."""
        device = self._model.device
        input_ids, mask = padded([request.prompt_token_ids for request in requests], self._pad_id, device)
        inputs = {"input_ids": input_ids, "attention_mask": mask}
        if any(request.token_type_ids is not None for request in requests):
            types = [request.token_type_ids or [0] * len(request.prompt_token_ids) for request in requests]
            inputs["token_type_ids"], _ = padded(types, 0, device)
        logits = self._of_last_tokens(inputs, mask) if self._reads_last_token else self._model(**inputs).logits
        values: list[list[float]] = logits.float().tolist()
        return values

    def _of_last_tokens(self, inputs: dict[str, Tensor], mask: Tensor) -> Tensor:
        """Decoders' heads read the last token, which transformers looks for by the id of the padding; but that may
        occur in a prompt."""
        body = getattr(self._model, self._model.base_model_prefix)
        hidden = body(**inputs, use_cache=False).last_hidden_state
        last = mask.sum(dim=1) - 1
        logits: Tensor = self._model.score(hidden[torch.arange(len(last), device=hidden.device), last])
        return logits
