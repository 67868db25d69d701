"""Text to ids and back: one tokenizer, safe for many threads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.chat.messages import Message, normalised
from paged_backend.engine.output_processor import TextDecoder
from paged_backend.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """What the engine needs of a Hugging Face tokenizer. It never changes the tokenizer it was given.

    Encoding a text adds special tokens as the tokenizer is set to do, but never a second BOS to a text that starts with
    one. A chat is tokenised as its template rendered it, with nothing added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and (backend.truncation or backend.padding):
            # Each call would switch these off, and another thread's call may be using them.
            tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos]

    @property
    def hf_tokenizer(self) -> PreTrainedTokenizerBase:
        """The one it was made of."""
        return self._tokenizer

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` below it, or None if it has none."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(f"a prompt of type {type(text).__name__} must be text or a list of token ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, "
                "which is no Unicode text"
            ) from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if add_special_tokens and self._adds_bos and token_ids[:2] == [self._tokenizer.bos_token_id] * 2:
            return token_ids[1:]
        return token_ids

    @property
    def num_final_special_tokens(self) -> int:
        """How many tokens `encode` puts after a text."""
        special = set(self._tokenizer.all_special_ids)
        token_ids = self.encode("a")
        return next((i for i, token_id in enumerate(reversed(token_ids)) if token_id not in special), len(token_ids))

    def encode_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The spellings of a word in ids: at the start of a text, and after a space."""
        spellings = (self.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip()))
        return tuple(dict.fromkeys(map(tuple, spellings)))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `continue_final_message` leaves the last message open, for the model to go on with."""
        template = chat_template or self._chat_template
        if not (template or self._tokenizer.chat_template):
            raise InvalidRequestError(
                "the model has no chat template; give one with chat_template=..., or send a plain prompt to generate()"
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError("add_generation_prompt and continue_final_message exclude each other; give one")
        conversation = normalised(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=template,
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        assert isinstance(text, str)
        return text

    def encode_chat(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special_tokens=False)

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

    def decoder(self) -> TextDecoder:
        """The ways to decode, without the tokenizer's own overhead where it has a fast backend."""
        backend = self.backend
        if backend is None:
            with_special = functools.partial(self.decode, skip_special_tokens=False)
            unspaced = functools.partial(with_special, spaces_between_special_tokens=False)
            return TextDecoder(self.decode, with_special, unspaced)
        return TextDecoder(backend.decode, lambda ids: str(backend.decode(ids, skip_special_tokens=False)))
