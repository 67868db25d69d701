"""What outputs must match, compiled; and how far one output has come. The only module that knows llguidance."""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paged_backend.errors import GrammarError, InvalidRequestError, MissingExtraError
from paged_backend.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED = 64
_STEP_FUEL = 50_000
"""Work on a single mask, a quarter of the library's own limit: everybody in the batch waits for it."""
_MAX_COMPILE_SECONDS = 20.0
_STACK_SIZES = (512 << 20, 64 << 20)
"""In bytes, the first that the platform has: the library recurses along chains of rules, and overflow ends the process.
Pages that are not reached take no memory."""
_stack_size_lock = threading.Lock()
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON as `json.dumps` writes it, or without its blanks: white space cannot go on for ever."""

Bitmask = npt.NDArray[np.int32]
"""One bit per token, the lowest of each number first: set if the token is allowed."""


class Grammar:
    """A compiled grammar; many outputs follow it at once, each with a matcher of its own."""

    def __init__(self, start: LLMatcher, num_ids: int) -> None:
        self._start = start
        self._num_words = -(-num_ids // 32)

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._num_words)


class GrammarMatcher:
    """Follows one output.

    Derived from the tokens alone: it reads those that it has not read yet, or all of them anew if others took their
    place, so it may be dropped at any time.
    """

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self.num_words = num_words
        """The size of its bitmask."""
        self._matcher = matcher
        self._read: list[int] = []

    def catch_up(self, output_token_ids: list[int]) -> None:
        """Raises GrammarError if the output left the grammar."""
        num_read = len(self._read)
        if output_token_ids[:num_read] != self._read:
            self._matcher.reset()
            num_read = 0
        for token_id in output_token_ids[num_read:]:
            self._matcher.consume_token(token_id)
        self._check()
        self._read = output_token_ids

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def fill(self, bitmask: Bitmask) -> None:
        """Write which tokens may come next; end tokens among them if the output may end here."""
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Makes grammars for one tokenizer, in the callers' threads; the ones used last are kept."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`, or None if the model's is none of these."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[tuple[StructuredOutputsParams, str | None], Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams, reasoning: str | None = None) -> Grammar:
        """Raises InvalidRequestError with the reason if nothing can be generated that matches.

        `reasoning` is a grammar in Lark with a rule of this name, of what comes before that which must match.
        """
        key = params, reasoning
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
                return self._grammars[key]
            vocabulary = self._vocabulary = self._vocabulary or self._load_vocabulary()
        grammar = _on_large_stack(lambda: _compile(params, reasoning, vocabulary))
        with self._lock:
            self._grammars[key] = grammar
            if len(self._grammars) > _MAX_CACHED:
                self._grammars.popitem(last=False)
        return grammar

    def _load_vocabulary(self) -> LLTokenizer:
        """The bytes of every token, which takes about a second."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise MissingExtraError("structured_outputs", "grammar") from None
        if self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer of the tokenizers library (a fast one), which this model has not"
            )
        if not self._eos_token_ids:
            raise InvalidRequestError("structured_outputs needs a model with an end token, and this one has none")
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        num_ids = max(self._vocab_size, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=num_ids, eos_token=self._eos_token_ids)
        except Exception as error:  # whatever the library does not like about a tokenizer
            raise InvalidRequestError(f"structured_outputs cannot work with this tokenizer: {error}") from error


def _on_large_stack(function: Callable[[], Grammar]) -> Grammar:
    """What `function` returns or raises, called in a thread of its own; raises InvalidRequestError if it takes long."""
    future: Future[Grammar] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    _start_on_large_stack(call)
    try:
        return future.result(_MAX_COMPILE_SECONDS)
    except FutureTimeoutError:
        raise InvalidRequestError(
            f"structured_outputs was not compiled within {_MAX_COMPILE_SECONDS:g} s; make it simpler or shorter"
        ) from None


def _start_on_large_stack(function: Callable[[], None]) -> None:
    """The size is the process's for threads yet to start, so it is set for as short as it can be."""
    with _stack_size_lock:
        before = threading.stack_size()
        try:
            for size in _STACK_SIZES:
                try:
                    threading.stack_size(size)
                    return threading.Thread(target=function, name="grammar-compiler", daemon=True).start()
                except (ValueError, RuntimeError):  # more than the platform has, or than may be allocated
                    continue
        finally:
            threading.stack_size(before)
    raise InvalidRequestError("structured_outputs needs a thread with a stack of 64 MiB to compile in; allow for one")


def _compile(params: StructuredOutputsParams, reasoning: str | None, vocabulary: LLTokenizer) -> Grammar:
    """Computes the first mask as well: it tells grammars that match nothing, and fills caches that matchers copy."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _source(params) if reasoning is None else _after(reasoning, _source(params))
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs has no valid {params.kind}: {error}") from None
    limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise InvalidRequestError(f"structured_outputs has a {params.kind} that no output matches")
    if matcher.is_error():
        raise InvalidRequestError(f"structured_outputs has no valid {params.kind}: {matcher.get_error().strip()}")
    return Grammar(matcher, vocabulary.vocab_size)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own format."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    if params.kind in ("json", "json_object"):
        source = _without_additional(params.source) if params.disable_additional_properties else params.source
        return str(LLMatcher.grammar_from_json_schema(source, overrides=_json_options(params)))
    if params.kind == "regex":
        # \d and \w are ASCII, as in schemas: nobody who asks for digits means those of every script.
        return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(params.source, 'dw')}/"))
    if params.kind == "choice":
        literals = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(params.choice or ()))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(literals)}"))
    return grammar_from("grammar", params.source)


def _after(reasoning: str, source: str) -> str:
    """A grammar of the reasoning and what must match, one after the other."""
    parts = json.loads(source)["grammars"] if source.startswith('{"grammars"') else [{"lark_grammar": source}]
    parts[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": f"{reasoning}\nstart: reasoning @answer"}, *parts]})


def _json_options(params: StructuredOutputsParams) -> Any:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return _ONE_LINE if params.whitespace_pattern is None else {"whitespace_pattern": params.whitespace_pattern}


def _without_additional(schema: str) -> str:
    """The schema with `additionalProperties: false` wherever properties are named and nothing is said about others."""

    def close(part: dict[str, Any]) -> dict[str, Any]:
        is_open = isinstance(part.get("properties"), dict) and "additionalProperties" not in part
        return part | {"additionalProperties": False} if is_open else part

    return json.dumps(json.loads(schema, object_hook=close), ensure_ascii=False)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
