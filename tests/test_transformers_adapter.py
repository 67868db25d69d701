"""`model.generate` on the engine gives what transformers' own gives, and leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from helpers import in_threads, is_idle, wait_until
from helpers_models import EOS, make_model
from helpers_transformers import cases, encoded, engine_of, new_ids, on_engine, own_generate, same
from paged_backend import InvalidRequestError
from transformers_paged.fields import FIELDS, By, handed_over

NUM_NEW = 12
FIRST = [12, 116, 244]  # what the tiny Llama begins with, row by row
ENDS = [143, 226, 206]  # what it comes to after 5, 7 and 6 tokens
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 40},
    "no length given": {"max_new_tokens": None},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": FIRST},
    "min_length": {"min_length": 30, "eos_token_id": FIRST},
    "min_new_tokens and own eos": {"min_new_tokens": 9, "suppress_tokens": None},
    "another eos": {"eos_token_id": 226},
    "several eos": {"eos_token_id": ENDS},
    "another pad": {"eos_token_id": ENDS, "pad_token_id": 3},
    "no eos": {"eos_token_id": None, "pad_token_id": 3},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition_penalty below one": {"repetition_penalty": 0.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[12], [116, 253], [244, 106]]},
    "suppress_tokens": {"suppress_tokens": FIRST},
    "begin_suppress_tokens": {"begin_suppress_tokens": FIRST},
    "sequence_bias": {"sequence_bias": [[[12], -10.0], [[116, 253], -5.0]]},
    "forced_bos_token_id": {"forced_bos_token_id": 65},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.8)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "many at once": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "bad_words_ids": [[12], [116]],
    },
    "top_k 1": {"do_sample": True, "top_k": 1},
    "tiny top_p": {"do_sample": True, "top_p": 1e-6},
    "top_p 0": {"do_sample": True, "top_p": 0.0},
    "tiny temperature": {"do_sample": True, "temperature": 1e-5},
    "tiny typical_p": {"do_sample": True, "top_k": 1, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "num_return_sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "max_time": {"max_time": 60.0},
    "use_cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "all beams": {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": ENDS, "pad_token_id": 3},
    "short beams": {"num_beams": 4, "length_penalty": -2.0, "early_stopping": True, "eos_token_id": ENDS},
    "long beams": {"num_beams": 4, "length_penalty": 3.0, "early_stopping": "never", "eos_token_id": ENDS},
    "beams and pad 0": {"num_beams": 2, "num_return_sequences": 2, "eos_token_id": ENDS, "pad_token_id": 0},
    "beams without eos": {"num_beams": 2, "eos_token_id": None},
    "beams and penalties": {"num_beams": 3, "repetition_penalty": 1.4, "min_new_tokens": 8, "eos_token_id": EOS},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [65 + row, 70 + len(ids) % 7]},
}


@pytest.fixture(scope="module")
def llama() -> Iterator[PreTrainedModel]:
    """Enabled; what the engine cannot do is an error."""
    with on_engine(make_model("llama")) as model:
        yield model


@pytest.mark.parametrize(
    "case",
    cases(
        CASES,
        everyday="greedy, min_new_tokens, another pad, no eos, many at once, num_return_sequences, all beams, top_p 0",
    ),
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_generate_equals_transformers_own(llama: PreTrainedModel, case: str) -> None:
    arguments = {"max_new_tokens": NUM_NEW, "do_sample": False} | encoded() | CASES[case]
    right = own_generate(llama, **arguments)
    assert same(llama.generate(**arguments), right)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text", "gpt2", "gpt_neox", "mistral"])
def test_other_architectures_equal_transformers_own(architecture: str) -> None:
    model = make_model(architecture)
    for case in ("greedy", "another eos", "repetition_penalty", "no_repeat_ngram_size"):
        arguments = {"max_new_tokens": NUM_NEW, "do_sample": False} | encoded() | CASES[case]
        right = own_generate(model, **arguments)
        with on_engine(model):
            assert same(model.generate(**arguments), right), case


def test_rows_padded_on_the_right_give_what_each_gives_alone(llama: PreTrainedModel) -> None:
    """Transformers, which warns of such rows, goes on after the padding."""
    inputs = encoded(side="right")
    length = inputs["input_ids"].shape[1]
    for more in ({}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}):
        arguments: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False} | more
        alone = [
            new_ids(own_generate(llama, input_ids=ids[mask != 0][None], **arguments), int(mask.sum()))[0]
            for ids, mask in zip(*inputs.values(), strict=True)
        ]
        output = llama.generate(**inputs, **arguments)
        assert new_ids(output, length) == alone
        assert same(output[:, :length], inputs["input_ids"])


@pytest.mark.slow
def test_ids_alone_and_a_mask_with_holes_are_understood_as_by_transformers(llama: PreTrainedModel) -> None:
    inputs = encoded()
    holes = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    holes["attention_mask"][2, 5:8] = 0
    unmasked = {"inputs": inputs["input_ids"]}
    inferred = {"inputs": torch.where(inputs["attention_mask"] == 0, 3, inputs["input_ids"]), "pad_token_id": 3}
    for arguments in (holes, unmasked, inferred, {"inputs": None, "bos_token_id": 65}):
        right = own_generate(llama, **arguments, max_new_tokens=NUM_NEW, do_sample=False)
        assert same(llama.generate(**arguments, max_new_tokens=NUM_NEW, do_sample=False), right)


@pytest.mark.slow
def test_a_generation_config_and_the_models_own_count(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama)
    model.generation_config.update(repetition_penalty=1.4, max_new_tokens=7, eos_token_id=ENDS)
    given = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=3)
    for arguments in ({}, {"generation_config": given}, {"eos_token_id": 104}):
        right = own_generate(model, **encoded(), **arguments)
        with on_engine(model):
            assert same(model.generate(**encoded(), **arguments), right)


def test_scores_and_logits_are_those_of_transformers(llama: PreTrainedModel) -> None:
    arguments = encoded() | {"max_new_tokens": NUM_NEW, "do_sample": False, "repetition_penalty": 1.3}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": None}
    right = own_generate(llama, **arguments)
    output = llama.generate(**arguments)

    assert type(output) is type(right)
    assert same(output.sequences, right.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(right, name), atol=1e-4, rtol=1e-4)
    transitions = [
        llama.compute_transition_scores(one.sequences, one.scores, normalize_logits=True) for one in (output, right)
    ]
    torch.testing.assert_close(*transitions, atol=1e-4, rtol=1e-4)


def test_what_is_not_asked_for_is_not_returned(llama: PreTrainedModel) -> None:
    output = llama.generate(**encoded(), max_new_tokens=3, return_dict_in_generate=True, eos_token_id=ENDS)
    assert set(output) == {"sequences"}


def test_scores_of_rows_that_have_ended_are_zero(llama: PreTrainedModel) -> None:
    arguments = encoded() | {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": 3}
    output = llama.generate(**arguments, return_dict_in_generate=True, output_scores=True)
    rows = output.sequences[:, arguments["input_ids"].shape[1] :].tolist()
    lengths = [len(row) - row.count(3) for row in rows]
    assert len(set(lengths)) > 1, "some row must end before another"
    assert len(output.scores) == max(lengths)
    for step, scores in enumerate(output.scores):
        assert [bool(row.any()) for row in scores] == [step < length for length in lengths]


def test_samples_follow_torchs_seed(llama: PreTrainedModel) -> None:
    arguments = encoded() | {"max_new_tokens": NUM_NEW, "do_sample": True, "num_return_sequences": 2}

    def sample(seed: int, **more: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return llama.generate(**arguments, **more)

    for more in ({}, {"no_repeat_ngram_size": 2}):
        first = sample(1, **more)
        assert same(sample(1, **more), first)
        assert not torch.equal(sample(2, **more), first)
        assert not torch.equal(first[0], first[1]), "two samples of one prompt"


def test_greedy_calls_leave_torchs_generator_alone(llama: PreTrainedModel) -> None:
    before = torch.get_rng_state()
    llama.generate(**encoded(), max_new_tokens=3, do_sample=False)
    assert same(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"min_p": 0.2}, {"top_p": 0.6}, {"top_p": 0.8, "min_p": 0.1}, {"temperature": 2.5}]
)
def test_samples_are_distributed_as_transformers(llama: PreTrainedModel, more: dict[str, float]) -> None:
    """A token's share in many samples is its probability after transformers' own warpers."""
    arguments: dict[str, Any] = {"input_ids": torch.tensor([[72, 105]]), "max_new_tokens": 1, "do_sample": True} | more
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    right = own_generate(llama, **arguments).scores[0][0].softmax(dim=0)
    torch.manual_seed(0)
    num = 300
    ids = llama.generate(**arguments | {"output_scores": False, "num_return_sequences": num}).sequences[:, -1]
    shares = torch.bincount(ids, minlength=len(right)) / num
    assert not shares[right == 0].any()
    assert (shares - right).abs().max() < 4 * (0.25 / num) ** 0.5


@pytest.mark.parametrize(
    "arguments",
    [{"max_new_tokens": 0}, {"max_new_token": 3}, {"stop_strings": ["a"]}, {"temperature": -1.0, "do_sample": True}],
)
def test_what_is_impossible_or_mistyped_raises_as_in_transformers(
    llama: PreTrainedModel, arguments: dict[str, Any]
) -> None:
    arguments = encoded() | {"max_new_tokens": 3} | arguments
    with pytest.raises(ValueError) as right:
        own_generate(llama, **arguments)
    with pytest.raises(ValueError) as error:
        llama.generate(**arguments)
    assert str(error.value) == str(right.value)


def test_a_refused_row_leaves_nothing_of_its_call_behind(llama: PreTrainedModel) -> None:
    inputs = encoded()
    bad = {**inputs, "input_ids": inputs["input_ids"].clone()}
    bad["input_ids"][2, -1] = 10_000
    with pytest.raises(InvalidRequestError, match="10000"):
        llama.generate(**bad, max_new_tokens=NUM_NEW)
    assert llama.generate(**inputs, max_new_tokens=2, do_sample=False).shape[0] == 3
    wait_until(lambda: is_idle(engine_of(llama).stats()))


@pytest.mark.slow
def test_calls_from_several_threads_share_steps(llama: PreTrainedModel) -> None:
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
    prompts = [encoded([text * 3]) for text in "abcdefgh"]
    right = [own_generate(llama, **prompt, **arguments) for prompt in prompts]
    before = engine_of(llama).stats().num_steps
    outputs = in_threads(*(lambda p=prompt: llama.generate(**p, **arguments) for prompt in prompts))
    assert all(map(same, outputs, right))
    assert engine_of(llama).stats().num_steps - before < 0.7 * 8 * 40


def test_every_field_of_a_generation_config_has_somebody_who_honours_it() -> None:
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names - FIELDS.keys() == set()


@pytest.mark.parametrize("name", [name for name, by in FIELDS.items() if by is By.TRANSFORMERS])
def test_fields_for_transformers_are_handed_over_only_if_they_ask_for_something(name: str) -> None:
    config = GenerationConfig()
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    assert handed_over(config) is None
    setattr(config, name, 0.5)
    assert handed_over(config) == f"{name}=0.5"


def test_a_field_that_nobody_has_heard_of_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FIELDS, "top_h")
    assert handed_over(GenerationConfig(do_sample=True, top_h=0.5)) == "top_h=0.5"
    assert handed_over(GenerationConfig(chat_format="chatml")) is None
