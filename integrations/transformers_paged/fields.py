"""Each field of transformers' GenerationConfig, and who does what it says when `generate` runs on the engine."""

from __future__ import annotations

import enum
from typing import Any

from transformers import GenerationConfig


class By(enum.Enum):
    """Who honours a field."""

    ENGINE = enum.auto()
    """The engine, by a parameter of its own, or transformers' logits processor where that would not be the same."""
    PROCESSORS = enum.auto()
    """Transformers' own logits processors, called by the engine for each token."""
    CRITERIA = enum.auto()
    """Transformers' own stopping criteria, as the tokens arrive."""
    BEAMS = enum.auto()
    """The beam search."""
    ADAPTER = enum.auto()
    """This package: rows, padding, what is returned."""
    NOBODY = enum.auto()
    """It changes how transformers computes, but not what."""
    TRANSFORMERS = enum.auto()
    """The model's own `generate`, unless the value asks for nothing."""


_NAMES_BY: dict[By, str] = {
    By.ENGINE: """
        max_length max_new_tokens min_length min_new_tokens eos_token_id
        do_sample temperature top_k top_p min_p repetition_penalty""",
    By.PROCESSORS: """
        sequence_bias encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
        suppress_tokens begin_suppress_tokens top_h typical_p epsilon_cutoff eta_cutoff watermarking_config
        renormalize_logits""",
    By.CRITERIA: "max_time stop_strings",
    By.BEAMS: "num_beams early_stopping length_penalty",
    By.ADAPTER: """
        num_return_sequences return_dict_in_generate output_scores output_logits pad_token_id bos_token_id""",
    By.NOBODY: """
        use_cache max_cache_len prefill_chunk_size compile_config disable_compile continuous_batching_config
        decoder_start_token_id num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
        max_matching_ngram_size assistant_lookbehind target_lookbehind assistant_ensemble_weight
        transformers_version""",
    By.TRANSFORMERS: """
        cache_implementation cache_config output_attentions output_hidden_states token_healing guidance_scale
        is_assistant prompt_lookup_num_tokens assistant_early_exit use_mtp speculation_type low_memory penalty_alpha
        dola_layers diversity_penalty num_beam_groups constraints force_words_ids""",
}
FIELDS: dict[str, By] = {name: by for by, names in _NAMES_BY.items() for name in names.split()}

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic", "paged"),
    "cache_config": ({},),
    "guidance_scale": (1,),
    "num_beam_groups": (1,),
}
"""Besides None, False and 0."""


def handed_over(config: GenerationConfig) -> str | None:
    """The first field, with its value, that only the model's own `generate` can honour."""
    known = vars(GenerationConfig())
    for name, value in vars(config).items():
        # A field that is newer than this table is not ours to ignore; what is no field at all, transformers ignores.
        by = FIELDS.get(name, By.TRANSFORMERS if name in known and not name.startswith("_") else By.NOBODY)
        if by is By.TRANSFORMERS and value and value not in _ASKS_FOR_NOTHING.get(name, ()):
            return f"{name}={value!r}"
    return None
