"""`generate(num_beams=...)` by the engine's beam search, which follows transformers' rules."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend import LLM, BeamSearchParams, InvalidRequestError
from transformers_paged.call import Call, HandedOver
from transformers_paged.rows import in_vocabulary, native_params


def beam_search_params(model: PreTrainedModel, call: Call) -> BeamSearchParams:
    """Raises HandedOver for what only transformers' own beam search can do."""
    config = call.config
    for name in ("do_sample", "return_dict_in_generate"):
        if getattr(config, name):
            raise HandedOver(f"{name}=True with num_beams={config.num_beams} is not available on the engine")
    if call.criteria:
        raise HandedOver(f"{type(call.criteria[0]).__name__} with num_beams is not available on the engine")
    if (params := native_params(model, call)) is None:
        raise HandedOver("logits processors with num_beams are not available on the engine")
    try:
        return BeamSearchParams(
            beam_width=config.num_beams,
            n=config.num_return_sequences,
            max_tokens=call.max_new_tokens,
            length_penalty=1.0 if config.length_penalty is None else float(config.length_penalty),
            early_stopping=config.early_stopping or False,
            ignore_eos=True,
            stop_token_ids=in_vocabulary(model, call.eos_token_ids),
            detokenize=False,
            **params,
        )
    except InvalidRequestError as error:
        raise HandedOver(str(error)) from error


def search(llm: LLM, call: Call, params: BeamSearchParams) -> Tensor:
    """Ids [rows, L + T]"""
    prompts = [{"prompt_token_ids": call.token_ids(prompt)} for prompt in range(call.prompts.shape[0])]
    outputs = llm.beam_search(prompts, params, use_tqdm=False, lora_request=call.lora_request)
    beams = [beam.token_ids for output in outputs for beam in output.outputs]
    if len(beams) < call.num_rows:
        raise HandedOver("the constraints leave fewer outputs than num_return_sequences")
    num_new = max(map(len, beams))
    padded = [ids + [_fill(call)] * (num_new - len(ids)) for ids in beams]
    return torch.cat([call.input_ids.long(), torch.tensor(padded, device=call.prompts.device)], dim=1)


def _fill(call: Call) -> int:
    """What transformers' beam search puts behind an end token: a pad token of 0 counts as none there."""
    eos = call.config._eos_token_tensor
    return -1 if eos is None else call.pad_token_id or int(eos[0])
