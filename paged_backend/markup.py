"""How a chat's outputs are marked up, in a request's terms: ids, and grammars."""

from __future__ import annotations

from paged_backend.chat.chat_builder import PreparedChat
from paged_backend.chat.reasoning import Reasoning, Stage
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.chat.tool_grammar import reasoning_grammar, tool_grammar
from paged_backend.engine.request import NO_MARKUP, Markup, ReasoningMarks
from paged_backend.errors import InvalidRequestError
from paged_backend.sampling_params import SamplingParams
from paged_backend.structured_outputs import StructuredOutputsParams


def markup_of(chat: PreparedChat, tokenizer: Tokenizer) -> Markup:
    form = chat.output_format
    if form.is_plain:
        return Markup(knows_reasoning=form.reasoning is not None)
    special_ids = tokenizer.special_ids(form.markers)
    is_answer = chat.tools is None or not chat.tools.is_constrained
    return Markup(
        output_format=form,
        kept_special_ids=frozenset(special_ids.values()),
        knows_reasoning=form.reasoning is not None,
        reasoning=_marks(form.reasoning, tokenizer, is_answer=chat.tools is None),
        reasoning_grammar=reasoning_grammar(form.reasoning, special_ids, is_answer=is_answer)
        if form.reasoning
        else None,
    )


def reasoning_markup(reasoning: Reasoning | None, tokenizer: Tokenizer) -> Markup:
    """Of a prompt that is no chat: reasoning stays in the text, but may be limited."""
    if reasoning is None:
        return NO_MARKUP
    return Markup(knows_reasoning=True, reasoning=_marks(reasoning, tokenizer, is_answer=True))


def constrained(params: SamplingParams, chat: PreparedChat, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters, with a grammar if the tools ask for one."""
    if chat.tools is None:
        return params
    if not params.detokenize:
        message = "tools need detokenize=True, since calls are read from the text"
        raise InvalidRequestError(message, field="detokenize")
    assert chat.output_format.tool_parser is not None
    call_format = chat.output_format.tool_parser.call_format
    grammar = tool_grammar(chat.tools, call_format, tokenizer.special_ids(chat.output_format.markers))
    if grammar is None:
        return params
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs and tools that must be called, or are strict, exclude each other; give one of them",
            field="structured_outputs",
        )
    return params.replace(structured_outputs=StructuredOutputsParams(grammar=grammar))


def _marks(reasoning: Reasoning | None, tokenizer: Tokenizer, *, is_answer: bool) -> ReasoningMarks | None:
    """`is_answer`: nothing but an answer may follow the reasoning."""
    if reasoning is None or reasoning.stage is Stage.AFTER:
        return None
    return ReasoningMarks(
        start=reasoning.form.start,
        end=reasoning.form.end,
        is_open=reasoning.stage is Stage.INSIDE,
        closing_ids=tuple(tokenizer.encode(reasoning.form.closing(is_answer=is_answer), add_special_tokens=False)),
        decode=tokenizer.decoder().with_special,
    )
