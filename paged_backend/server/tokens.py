"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from typing import Any

from paged_backend import LLM, InvalidRequestError
from paged_backend.server.chat import checked_template_kwargs
from paged_backend.server.errors import encode_in_pieces
from paged_backend.server.protocol import DetokenizeRequest, TokenizeRequest
from paged_backend.server.serving import Serving


async def tokenize(serving: Serving, body: TokenizeRequest) -> bytes:
    """As JSON, which a thread writes: a text of a megabyte has hundreds of thousands of tokens."""
    return await serving.prepare(_reply, serving.llm, body)


async def detokenize(serving: Serving, body: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": await serving.prepare(_text, serving.llm, body.tokens)}


def _reply(llm: LLM, body: TokenizeRequest) -> bytes:
    token_ids = _token_ids(llm, body)
    return encode_in_pieces(
        {
            "count": len(token_ids),
            "max_model_len": llm.max_model_len,
            "tokens": token_ids,
            "token_strs": llm.get_tokenizer().convert_ids_to_tokens(token_ids) if body.return_token_strs else None,
        }
    )


def _token_ids(llm: LLM, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return llm.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None
    return llm.encode_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=checked_template_kwargs(llm, body.chat_template_kwargs),
        tools=body.tools,
    )


def _text(llm: LLM, token_ids: list[int]) -> str:
    size = len(llm.get_tokenizer())
    for token_id in token_ids:
        if not 0 <= token_id < size:
            raise InvalidRequestError(
                f"tokens has the token id {token_id}, but the vocabulary holds ids from 0 to {size - 1}", field="tokens"
            )
    return llm.tokenizer.decode(token_ids, skip_special_tokens=False)
