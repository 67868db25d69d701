"""An engine, put together of its parts for what was loaded; and what callers' threads need beside it."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from paged_backend.backend import Backend, EncoderBackend
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.config import EngineConfig
from paged_backend.engine.encoder_engine import EncoderEngine
from paged_backend.engine.engine import Engine
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.loop import AnyEngine
from paged_backend.engine.output_processor import OutputProcessor
from paged_backend.engine.request_factory import CompileGrammar, Limits, RequestFactory
from paged_backend.engine.scheduler import Scheduler
from paged_backend.engine.speculation import Speculator
from paged_backend.lora import Adapters
from paged_backend.request_builder import RequestBuilder
from paged_backend.sampling.grammar import GrammarCompiler

logger = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What callers' threads must know of an engine."""

    name: str
    limits: Limits
    tokenizer: Tokenizer | None
    default_sampling: dict[str, Any]
    adapters: Adapters | None = None


def assemble(backend: Backend | EncoderBackend, config: EngineConfig) -> tuple[AnyEngine, Facts]:
    if isinstance(backend, EncoderBackend):
        return _assemble_encoder(backend, config)
    traits = backend.traits
    for name, is_wanted in (
        ("prefix caching", config.enable_prefix_caching),
        ("speculation", config.speculation),
        ("swapping", config.swap_space),
    ):
        if is_wanted and traits.keeps_state:
            logger.info("no %s for %s: the KV cache does not hold all that its sequences keep", name, backend.name)
    manager = KVCacheManager(
        backend.runner.num_blocks,
        backend.runner.block_size,
        enable_prefix_caching=config.enable_prefix_caching and not traits.keeps_state,
        reaches=traits.reaches,
        max_step_tokens=config.max_num_batched_tokens,
        num_swap_blocks=0 if traits.keeps_state else backend.num_swap_blocks,
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=min(config.max_num_seqs, traits.max_num_seqs or config.max_num_seqs),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=backend.max_model_len,
        max_adapters=config.max_loras if config.enable_lora else None,
        speculator=Speculator(config.speculation) if config.speculation and not traits.keeps_state else None,
    )
    processor = OutputProcessor(backend.tokenizer.decoder() if backend.tokenizer else None)
    limits = Limits(
        vocab_size=backend.runner.vocab_size,
        max_model_len=backend.max_model_len,
        num_slots=manager.num_slots,
        layout=manager.layout,
        num_blocks=manager.pool.num_blocks,
        max_logprobs=config.max_logprobs,
        eos_token_ids=backend.eos_token_ids,
        embedding=backend.embedding,
    )
    logger.info(
        "%s is ready: %d blocks of %d tokens, so that %d tokens fit in the KV cache",
        *(backend.name, manager.pool.num_blocks, manager.block_size),
        manager.layout.num_tokens(manager.pool.num_blocks, backend.max_model_len),
    )
    engine = Engine(
        *(backend.runner, backend.sampler, scheduler, processor),
        is_asynchronous=_is_asynchronous(backend, config),
        close=backend.close,
    )
    return engine, Facts(backend.name, limits, backend.tokenizer, backend.default_sampling, backend.adapters)


def _is_asynchronous(backend: Backend, config: EngineConfig) -> bool:
    """Whether steps are launched while others run."""
    if config.async_scheduling and not backend.takes_pending_tokens:
        logger.info("no asynchronous scheduling for %s: its steps need to know all tokens", backend.name)
    is_wanted = backend.is_asynchronous if config.async_scheduling is None else config.async_scheduling
    return is_wanted and backend.takes_pending_tokens and config.speculation is None


def request_builder(facts: Facts, config: EngineConfig) -> RequestBuilder:
    """What makes the requests of callers, in their threads."""
    factory = RequestFactory(
        facts.limits,
        encode_word=facts.tokenizer.encode_word if facts.tokenizer else None,
        compile_grammar=_grammar_compiler(facts.limits, facts.tokenizer),
        adapters=facts.adapters,
        seed=config.seed,
    )
    return RequestBuilder(
        *(factory, facts.tokenizer, facts.default_sampling),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _assemble_encoder(backend: EncoderBackend, config: EngineConfig) -> tuple[AnyEngine, Facts]:
    limits = Limits(
        vocab_size=backend.runner.vocab_size,
        max_model_len=backend.max_model_len,
        num_slots=backend.max_model_len,
        max_logprobs=config.max_logprobs,
        eos_token_ids=frozenset(),
        embedding=backend.embedding,
        classification=backend.classification,
        generates=False,
    )
    engine = EncoderEngine(
        backend.runner, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    if backend.classification is not None:
        logger.info("%s is ready: scores for %d labels", backend.name, len(backend.classification.labels))
    elif backend.embedding is not None:
        logger.info("%s is ready: vectors of %d components", backend.name, backend.embedding.size)
    return engine, Facts(backend.name, limits, backend.tokenizer, {})


def _grammar_compiler(limits: Limits, tokenizer: Tokenizer | None) -> CompileGrammar | None:
    if tokenizer is None:
        return None
    return GrammarCompiler(tokenizer.backend, limits.vocab_size, limits.eos_token_ids).compile
