"""Text to ids and back: one tokenizer, safe for many threads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.messages import Message, normalised
from paged_backend.chat.template_support import TemplateSupport, adapted, support_of
from paged_backend.chat.token_bytes import bytes_of_tokens
from paged_backend.chat.token_length import longest_token
from paged_backend.chat.tool_parsers.hermes import HermesParser
from paged_backend.engine.output_processor import TextDecoder
from paged_backend.errors import InvalidRequestError, blamed_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """What the engine needs of a Hugging Face tokenizer. It never changes the tokenizer it was given.

    Encoding a text adds special tokens as the tokenizer is set to do, but never a second BOS to a text that starts with
    one. A chat is tokenised as its template rendered it, with nothing added.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, *, is_callers: bool = False
    ) -> None:
        """`is_callers`: others may use the tokenizer, so that this one works on a copy."""
        self._given = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if is_callers or (backend is not None and (backend.truncation or backend.padding)):
            # Each call switches truncation and padding on or off, which others' calls may be using.
            tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._support: dict[str, TemplateSupport] = {}
        self._special_ids_in: dict[tuple[str, ...], dict[str, int]] = {}
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos]

    @property
    def hf_tokenizer(self) -> PreTrainedTokenizerBase:
        """The one it was made of."""
        return self._given

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` below it, or None if it has none."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            message = f"a prompt of type {type(text).__name__} must be text or a list of token ids"
            raise InvalidRequestError(message, field="prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, "
                "which is no Unicode text",
                field="prompt",
            ) from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if add_special_tokens and self._adds_bos and token_ids[:2] == [self._tokenizer.bos_token_id] * 2:
            return token_ids[1:]
        return token_ids

    def encode_pair(self, first: str, second: str, limit: int | None) -> tuple[list[int], list[int] | None]:
        """Two texts as one prompt, and which of them each token is of, if the tokenizer tells. The longer one is cut if
        they are more than `limit` tokens together."""
        for field, text in (("text_1", first), ("text_2", second)):
            with blamed_on(field):
                self.encode(text, add_special_tokens=False)  # raises for what is no Unicode
        cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
        encoded = self._tokenizer(first, second, verbose=False, **cut)
        return encoded["input_ids"], encoded.get("token_type_ids")

    def min_num_tokens(self, text: str) -> int:
        """At least so many tokens a text has, known without tokenising it; 0 if nothing is known."""
        return -(-len(text) // self._longest_token) if self._longest_token else 0

    @functools.cached_property
    def _longest_token(self) -> int | None:
        return None if self.backend is None else longest_token(self.backend)

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        call_format: CallFormat = HermesParser.call_format,
    ) -> str:
        """The prompt as text. `continue_final_message` leaves the last message open, for the model to go on with.

        Tools and past calls that the template has no place for are written as text, calls in `call_format`.
        """
        template = self.template_text(chat_template, has_tools=bool(tools))
        if add_generation_prompt and continue_final_message:
            message = "add_generation_prompt and continue_final_message exclude each other; give one"
            raise InvalidRequestError(message, field="continue_final_message")
        conversation: Sequence[Mapping[str, Any]] = normalised(messages)
        if continue_final_message and conversation[-1].get("tool_calls"):
            raise InvalidRequestError(
                "continue_final_message goes on with the text of the last message, and that one ends in tool calls; "
                "leave it out, or add their results",
                field="continue_final_message",
            )
        options = dict(chat_template_kwargs or {})
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in conversation):
            support = self.template_support(template)
            conversation = adapted(conversation, tools, support, call_format)
            if tools and support.tools:
                options["tools"] = [dict(tool) for tool in tools]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=template,
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **options,
            )
        except Exception as error:  # templates are programs: they raise what they like
            message = f"the chat template refused the messages: {error}"
            raise InvalidRequestError(message, field="messages") from error
        assert isinstance(text, str)
        return text

    def template_text(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """The template that renders chats: the one given, the engine's or the tokenizer's, which may have another one
        for chats with tools. Raises InvalidRequestError if there is none."""
        template = chat_template or self._chat_template
        if not (template or self._tokenizer.chat_template):
            raise InvalidRequestError(
                "the model has no chat template; give one with chat_template=..., or send a plain prompt to generate()"
            )
        try:
            return str(self._tokenizer.get_chat_template(template, tools=[{}] if has_tools else None))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def template_support(self, template: str) -> TemplateSupport:
        """What a template has a place for."""
        if template not in self._support:

            def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
                text = self._tokenizer.apply_chat_template(
                    list(messages), tools=tools and list(tools), chat_template=template, tokenize=False
                )
                return str(text)

            self._support[template] = support_of(render)
        return self._support[template]

    def special_ids(self, texts: tuple[str, ...]) -> dict[str, int]:
        """The special tokens that are in some of the texts, with their ids."""
        if texts not in self._special_ids_in:
            special = {self._tokenizer.convert_ids_to_tokens(token_id): token_id for token_id in self._special_ids()}
            found = {str(token): token_id for token, token_id in special.items() if any(token in t for t in texts)}
            self._special_ids_in[texts] = found
        return self._special_ids_in[texts]

    def _special_ids(self) -> frozenset[int]:
        """All that decoding leaves out unless it is told not to."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset({*self._tokenizer.all_special_ids, *(i for i, token in added if token.special)})

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
            return TextDecoder(self.decode, with_special, unspaced, self._special_ids())
        return TextDecoder(
            backend.decode,
            lambda ids: str(backend.decode(ids, skip_special_tokens=False)),
            special_ids=self._special_ids(),
            bytes_of=bytes_of_tokens(backend, self._special_ids()),
        )
