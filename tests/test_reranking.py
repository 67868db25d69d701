"""Scores of pairs, reranking and classification, equal to those of the model's own code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from helpers_models import BOS, EOS, VOCAB_SIZE, make_tokenizer, save_model
from helpers_server import answered, refusal
from paged_backend import LLM, InvalidRequestError, LoRARequest, ModelError, SamplingParams, check_model
from paged_backend.server.app import create_app
from paged_backend.server.models import Models
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings

QUERY = "what is a panda?"
DOCUMENTS = ["hi", "The giant panda is a bear that lives in China.", "a fish", "bears " * 12]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": EOS,
}


def make_classifier(architecture: str, num_labels: int, **config: Any) -> PreTrainedModel:
    if architecture == "roberta":  # where it counts positions from
        config["pad_token_id"] = 1
    settings = AutoConfig.for_model(architecture, **SMALL | config, num_labels=num_labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def pair_tokenizer(*, has_types: bool = True) -> PreTrainedTokenizerFast:
    """<bos> first <eos> second <eos> and, if it `has_types`, which text each token is of."""
    backend = make_tokenizer().backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>",
        pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1",
        special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|eos|>",
        model_input_names=["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
        model_max_length=100,
    )


def logits_of(model: PreTrainedModel, first: str, second: str) -> torch.Tensor:
    inputs = pair_tokenizer()(first, second, return_tensors="pt", truncation="longest_first", max_length=100)
    return model(**inputs).logits[0]


def save(folder: Path, model: PreTrainedModel) -> Path:
    save_model(folder, model=model, tokenizer=False)
    pair_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_classifier("bert", 1)


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(save(tmp_path_factory.mktemp("bert"), model), dtype="float32") as llm:
        yield llm


def test_a_score_is_what_the_head_says_of_both_texts(llm: LLM, model: PreTrainedModel) -> None:
    outputs = llm.score_pairs(QUERY, DOCUMENTS)
    right = [float(torch.sigmoid(logits_of(model, QUERY, text))) for text in DOCUMENTS]
    assert [output.score for output in outputs] == pytest.approx(right, abs=1e-5)
    raw = llm.score_pairs([QUERY] * 4, DOCUMENTS, use_activation=False)
    assert [output.score for output in raw] == pytest.approx(
        [float(logits_of(model, QUERY, text)) for text in DOCUMENTS], abs=1e-5
    )
    assert [output.num_prompt_tokens for output in outputs] == [len(QUERY) + len(text) + 3 for text in DOCUMENTS]


@pytest.mark.slow
def test_scores_are_those_of_sentence_transformers(llm: LLM, model: PreTrainedModel, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(save(tmp_path, model)), device="cpu").predict([(QUERY, text) for text in DOCUMENTS])
    assert [output.score for output in llm.score_pairs(QUERY, DOCUMENTS)] == pytest.approx(theirs.tolist(), abs=1e-5)


def test_documents_come_best_first(llm: LLM) -> None:
    scores = [output.score for output in llm.score_pairs(QUERY, DOCUMENTS)]
    order = sorted(range(4), key=lambda index: -scores[index])
    results = llm.rerank(QUERY, DOCUMENTS, top_n=3)
    assert [result.index for result in results] == order[:3]
    assert [result.document for result in results] == [DOCUMENTS[index] for index in order[:3]]
    assert [result.relevance_score for result in results] == pytest.approx([scores[index] for index in order[:3]])


async def test_there_are_twins_for_event_loops(llm: LLM) -> None:
    assert await llm.arerank(QUERY, DOCUMENTS) == llm.rerank(QUERY, DOCUMENTS)
    assert await llm.ascore_pairs(QUERY, DOCUMENTS) == llm.score_pairs(QUERY, DOCUMENTS)
    assert await llm.aclassify(DOCUMENTS) == llm.classify(DOCUMENTS)


def test_the_longer_text_is_cut_if_that_is_asked_for(llm: LLM, model: PreTrainedModel) -> None:
    long = "a long text " * 20
    with pytest.raises(InvalidRequestError, match="max_model_len=100"):
        llm.score_pairs(QUERY, long)
    (output,) = llm.score_pairs(QUERY, long, truncate_prompt_tokens=-1)
    assert output.num_prompt_tokens == 100
    assert output.score == pytest.approx(float(torch.sigmoid(logits_of(model, QUERY, long))), abs=1e-5)


@pytest.mark.parametrize("architecture", ["roberta", "llama", "qwen2"])
def test_other_encoders_and_decoders_have_heads_too(architecture: str, tmp_path: Path) -> None:
    model = make_classifier(architecture, 1)
    tokenizer = pair_tokenizer(has_types=False)
    save_model(tmp_path, model=model, tokenizer=False)
    tokenizer.save_pretrained(tmp_path)
    with LLM(tmp_path, dtype="float32") as llm:
        scores = [output.score for output in llm.score_pairs(QUERY, DOCUMENTS, use_activation=False)]
    # The last token is one that stands for padding: transformers' own batches would miss it in decoders.
    right = []
    for text in DOCUMENTS:
        ids = tokenizer(QUERY, text, return_tensors="pt")["input_ids"]
        if architecture == "roberta":
            right.append(float(model(ids, attention_mask=torch.ones_like(ids)).logits))
        else:
            right.append(float(model.score(model.model(ids).last_hidden_state[0, -1])))
    assert scores == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_check_says_what_a_classifier_lacks(architecture: str) -> None:
    with pytest.raises(ModelError, match="is a classifier: it has no KV cache"):
        check_model(make_classifier(architecture, 1))


def test_classes_have_probabilities(tmp_path: Path) -> None:
    model = make_classifier("bert", 3, id2label={0: "bad", 1: "fair", 2: "good"})
    with LLM(model, pair_tokenizer()) as llm:
        outputs = llm.classify(DOCUMENTS)
        raw = llm.classify(DOCUMENTS, use_activation=False)
        with pytest.raises(InvalidRequestError, match="3: bad, fair, good; use classify"):
            llm.score_pairs(QUERY, DOCUMENTS)
    for text, output, numbers in zip(DOCUMENTS, outputs, raw, strict=True):
        logits = model(**pair_tokenizer()(text, return_tensors="pt")).logits[0]
        assert numbers.probs == pytest.approx(logits.tolist(), abs=1e-5)
        assert output.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
        assert output.label == ["bad", "fair", "good"][int(logits.argmax())]


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"problem_type": "regression"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        ({}, "sigmoid"),
    ],
)
def test_the_checkpoint_says_what_makes_scores(config: dict[str, Any], shown: str) -> None:
    with LLM(make_classifier("bert", 1, **config), pair_tokenizer()) as llm:
        (score,) = llm.score_pairs(QUERY, DOCUMENTS[0])
        (raw,) = llm.score_pairs(QUERY, DOCUMENTS[0], use_activation=False)
    right = raw.score if shown == "none" else 1 / (1 + math.exp(-raw.score))
    assert score.score == pytest.approx(right)


def test_a_classifier_does_nothing_else(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="is a classifier, which cannot generate text; use score_pairs"):
        llm.generate(QUERY, SamplingParams(max_tokens=2))
    for call in (
        lambda: llm.embed(QUERY),
        lambda: llm.score_pairs(QUERY, []),
        lambda: llm.score_pairs([QUERY], DOCUMENTS),
        lambda: llm.rerank(QUERY, DOCUMENTS, top_n=0),
        lambda: llm.score_pairs(QUERY, DOCUMENTS, lora_request=LoRARequest("a", "b")),
    ):
        with pytest.raises(InvalidRequestError):
            call()


# --- behind the HTTP API ---


async def post(llm: LLM, path: str, **body: Any) -> Any:
    import httpx

    settings = ServerSettings()
    models = Models(settings, [Serving(settings, model="head", llm=llm)])
    transport = httpx.ASGITransport(create_app(models))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(path, json=body)


async def test_the_routes_answer_with_the_heads_scores(llm: LLM) -> None:
    outputs = llm.score_pairs(QUERY, DOCUMENTS)
    reply = answered(await post(llm, "/v1/score", text_1=QUERY, text_2=DOCUMENTS))
    assert [item["score"] for item in reply["data"]] == pytest.approx([output.score for output in outputs], abs=1e-5)
    assert reply["usage"]["prompt_tokens"] == sum(output.num_prompt_tokens for output in outputs)
    best = llm.rerank(QUERY, DOCUMENTS)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
        results = answered(await post(llm, path, query=QUERY, documents=documents, top_n=2))["results"]
        assert [item["index"] for item in results] == [result.index for result in best[:2]]
        assert [item["document"]["text"] for item in results] == [result.document for result in best[:2]]
    raw = answered(await post(llm, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False))
    assert raw["data"][0]["score"] == pytest.approx(math.log(outputs[0].score / (1 - outputs[0].score)), abs=1e-4)
    assert "rerank()" in refusal(await post(llm, "/v1/completions", prompt="a"))["message"]
