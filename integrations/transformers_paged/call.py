"""The arguments of one `generate` call, understood as transformers understands them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paged_backend import LoRARequest
from transformers_paged.fields import handed_over

_MODEL_INPUTS = ("input_ids", "attention_mask")


class HandedOver(Exception):
    """Only the model's own `generate` can run the call; the text says why. An error only for users who want one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What `generate` was called with."""

    inputs: Tensor | None = None
    generation_config: GenerationConfig | None = None
    logits_processor: Sequence[Any] | None = None
    stopping_criteria: Sequence[Any] | None = None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    synced_gpus: bool | None = None
    assistant_model: Any = None
    streamer: Any = None
    negative_prompt_ids: Tensor | None = None
    negative_prompt_attention_mask: Tensor | None = None
    custom_generate: Any = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def unsupported(self) -> str | None:
        """The first argument that the engine has no answer to."""
        names = ("synced_gpus", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask")
        given = (name for name in (*names, "custom_generate") if getattr(self, name) not in (None, False))
        return next(given, None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is to be generated: one row per returned sequence, prompts in order, each `num_return_sequences` times."""

    config: GenerationConfig
    """Complete, as transformers' own loop would get it."""
    prompts: Tensor
    """[B, L], one row per prompt, as given."""
    mask: Tensor
    """[B, L]: where the prompts' tokens are."""
    criteria: StoppingCriteriaList
    """Those that the engine does not know."""
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pads_finished_rows: bool
    """False: a row that is finished goes on until all are, as transformers does without an end token."""
    logits_processor: Sequence[Any]
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    streamer: Any
    lora_request: LoRARequest | None

    @property
    def num_rows(self) -> int:
        return int(self.prompts.shape[0] * self.config.num_return_sequences)

    @property
    def input_ids(self) -> Tensor:
        """[rows, L]"""
        return self.prompts.repeat_interleave(self.config.num_return_sequences, dim=0)

    @property
    def pad_token_id(self) -> int:
        token = self.config._pad_token_tensor
        return 0 if token is None else int(token)

    def prompt_of(self, row: int) -> int:
        """Which prompt a row belongs to."""
        return row // int(self.config.num_return_sequences)

    def token_ids(self, prompt: int) -> list[int]:
        """A prompt without its padding."""
        token_ids: list[int] = self.prompts[prompt][self.mask[prompt] != 0].tolist()
        return token_ids

    def captures(self, what: str) -> bool:
        """Whether `output_scores` or `output_logits` is wanted."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, what))


def understand(model: PreTrainedModel, arguments: Arguments) -> Call:
    """The same steps as in transformers' `generate`, by its own methods, so that defaults, warnings and errors agree.

    Raises HandedOver for what the engine cannot do, and what transformers raises for what nobody can.
    """
    if unsupported := arguments.unsupported():
        raise HandedOver(f"{unsupported}= is not available on the engine")
    kwargs = {**arguments.kwargs}
    tokenizer = kwargs.pop("tokenizer", None)
    kwargs.pop("trust_remote_code", None)
    lora_request = kwargs.pop("lora_request", None)
    is_default = {
        name: all(value is None for value in (kwargs.get(name), getattr(arguments.generation_config, name, None)))
        and getattr(model.generation_config, name) is None
        for name in ("max_length", "min_length")
    }
    config, model_kwargs = model._prepare_generation_config(arguments.generation_config, **kwargs)
    if field := handed_over(config):
        raise HandedOver(f"{field} is not available on the engine")
    if others := [name for name, value in model_kwargs.items() if value is not None and name not in _MODEL_INPUTS]:
        model._validate_model_kwargs(model_kwargs.copy())
        raise HandedOver(f"{others[0]}= is not available on the engine")
    _check_mode(model, config, arguments.streamer)
    prompts, mask = _prompts(model, config, arguments.inputs, model_kwargs)
    _prepare_length(model, config, prompts, is_default)
    given = StoppingCriteriaList(arguments.stopping_criteria or ())
    criteria = model._get_stopping_criteria(config, given, tokenizer=tokenizer)
    return Call(
        config=config,
        prompts=prompts,
        mask=mask,
        criteria=StoppingCriteriaList(
            one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
        ),
        max_new_tokens=min(one.max_length for one in criteria if type(one) is MaxLengthCriteria) - prompts.shape[1],
        eos_token_ids=_eos_token_ids(criteria),
        pads_finished_rows=any(hasattr(one, "eos_token_id") for one in criteria),
        logits_processor=tuple(arguments.logits_processor or ()),
        prefix_allowed_tokens_fn=arguments.prefix_allowed_tokens_fn,
        streamer=arguments.streamer,
        lora_request=lora_request,
    )


def _check_mode(model: PreTrainedModel, config: GenerationConfig, streamer: Any) -> None:
    model._validate_generation_mode(
        config.get_generation_mode(), config, {} if streamer is None else {"streamer": streamer}
    )


def _prompts(
    model: PreTrainedModel, config: GenerationConfig, inputs: Tensor | None, model_kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L]; sets the special tokens in `config`."""
    prompts, _, model_kwargs = model._prepare_model_inputs(inputs, config.bos_token_id, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    model._prepare_special_tokens(config, mask is not None, device=prompts.device, batch_size=prompts.shape[0])
    if mask is None:
        mask = model._prepare_attention_mask_for_generation(prompts, config, model_kwargs)
    if prompts.dim() != 2 or mask.shape != prompts.shape:
        raise HandedOver(f"the attention mask has shape {list(mask.shape)}, the ids {list(prompts.shape)}")
    if not mask.any(dim=1).all():
        raise HandedOver("a prompt has no tokens")
    return prompts, mask.to(prompts.device)


def _prepare_length(
    model: PreTrainedModel, config: GenerationConfig, prompts: Tensor, is_default: dict[str, bool]
) -> None:
    """Sets the total lengths in `config`."""
    length = prompts.shape[1]
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=is_default["max_length"],
        has_default_min_length=is_default["min_length"],
        model_input_name="input_ids",
        input_ids_length=length,
        inputs_tensor=prompts,
    )
    model._validate_generated_length(config, length, is_default["max_length"])


def _eos_token_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    ids = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    return frozenset(torch.cat([one.flatten() for one in ids]).tolist()) if ids else frozenset()
