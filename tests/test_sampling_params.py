"""SamplingParams: what is refused, and what other spellings of the same wish become."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from paged_backend.engine.request import Request
from paged_backend.errors import InvalidRequestError
from paged_backend.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("n", 0, "from 1 to 16384"),
    ("n", 10**6, "from 1 to 16384"),
    ("n", 1.0, "integer"),
    ("n", True, "integer"),
    ("temperature", -1, "[0, 2]"),
    ("temperature", 2.01, "[0, 2]"),
    ("temperature", 1e9, "[0, 2]"),
    ("temperature", math.nan, "[0, 2]"),
    ("temperature", math.inf, "[0, 2]"),
    ("temperature", "1", "[0, 2]"),
    ("temperature", None, "[0, 2]"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", math.nan, "(0, 1]"),
    ("top_k", -2, "≥ 0"),
    ("top_k", 0.5, "≥ 0"),
    ("top_k", -1.0, "≥ 0"),
    ("top_k", "5", "≥ 0"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("presence_penalty", 2.5, "[-2, 2]"),
    ("presence_penalty", math.nan, "[-2, 2]"),
    ("frequency_penalty", -2.5, "[-2, 2]"),
    ("repetition_penalty", 0, "(0, inf)"),
    ("repetition_penalty", -1.0, "(0, inf)"),
    ("repetition_penalty", math.inf, "(0, inf)"),
    ("seed", 2**64, "from -9223372036854775808 to 18446744073709551615"),
    ("seed", -(2**63) - 1, "from -9223372036854775808"),
    ("seed", "7", "integer"),
    ("seed", 0.5, "integer"),
    ("max_tokens", -1, "≥ 0"),
    ("max_tokens", "5", "≥ 0"),
    ("min_tokens", -1, "from 0 to 16"),
    ("min_tokens", 17, "from 0 to 16"),
    ("logprobs", -2, "≥ -1"),
    ("logprobs", True, "≥ -1"),
    ("prompt_logprobs", -2, "≥ -1"),
    ("stream_interval", 0, "≥ 1"),
    ("include_stop_str_in_output", 1, "True or False"),
    ("ignore_eos", "yes", "True or False"),
    ("detokenize", None, "True or False"),
    ("skip_special_tokens", 0, "True or False"),
    ("spaces_between_special_tokens", 0, "True or False"),
    ("stop", "", "not empty"),
    ("stop", ["x", ""], "not empty"),
    ("stop", [1], "strings"),
    ("stop", 7, "list"),
    ("bad_words", [""], "not empty"),
    ("bad_words", "word", "list"),
    ("stop_token_ids", [-1], "token ids ≥ 0"),
    ("stop_token_ids", [True], "token ids ≥ 0"),
    ("stop_token_ids", ["3"], "token ids ≥ 0"),
    ("stop_token_ids", "3", "list"),
    ("allowed_token_ids", [], "at least one id"),
    ("allowed_token_ids", [-1], "token ids ≥ 0"),
    ("logprob_token_ids", list(range(129)), "at most 128 ids"),
    ("logprob_token_ids", [1.5], "token ids ≥ 0"),
    ("logit_bias", {"abc": 1}, "token ids to numbers"),
    ("logit_bias", {5: "much"}, "token ids to numbers"),
    ("logit_bias", {"5": 1000}, "[-100, 100]"),
    ("logit_bias", {5: math.nan}, "[-100, 100]"),
    ("logit_bias", {-5: 1}, "token ids to numbers"),
    ("logit_bias", [5], "map token ids"),
    ("output_kind", "delta", "RequestOutputKind"),
    ("repetition_detection", 3, "RepetitionDetection"),
]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("repetition_detection", {"max_pattern_size": 3}, {"max_pattern_size": 0}),
        ("structured_outputs", {"regex": "a"}, {"regex": "a", "choice": ["b"]}),
    ],
)
def test_settings_of_their_own_may_be_mappings(field: str, good: Any, bad: Any) -> None:
    params = SamplingParams(**{field: good})
    assert all(getattr(getattr(params, field), name) == value for name, value in good.items())
    for wrong in (bad, {**good, "nope": 1}):
        with pytest.raises(InvalidRequestError) as error:
            SamplingParams(**{field: wrong})
        assert error.value.field == field


@pytest.mark.parametrize(("field", "value", "limit"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_field_value_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value) and error.value.field == field
    assert limit in str(error.value)
    shown = next(iter(value.items()))[1] if isinstance(value, dict) else value
    assert repr(shown) in str(error.value) or repr((shown,)) in str(error.value) or isinstance(value, list)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 16384),
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 1e-8),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-9),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("logprobs", -1),
        ("logprobs", 0),
        ("output_kind", RequestOutputKind.DELTA),
        ("extra_args", {"anything": 1}),
    ],
)
def test_the_ends_of_each_range_are_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(max_tokens=16).replace(**{field: value}), field) == value


def test_min_tokens_may_be_anything_up_to_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


@pytest.mark.parametrize(("field", "limit"), [("stop", (64, 1024)), ("bad_words", (4096, 65536))])
def test_the_strings_to_look_for_are_limited_in_number_and_length(field: str, limit: tuple[int, int]) -> None:
    max_strings, max_characters = limit
    for accepted in (["ab"] * max_strings, ["x" * max_characters]):
        assert getattr(SamplingParams(**{field: accepted}), field) == tuple(accepted)
    for refused in (["ab"] * (max_strings + 1), ["x" * max_characters, "y"]):
        given = f"{field} has {len(refused)} strings of {sum(map(len, refused))} characters"
        with pytest.raises(InvalidRequestError, match=f"{given}.* limit is {max_strings} .*{max_characters}"):
            SamplingParams(**{field: refused})


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop=.*detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topp", "top_p"),
        ("stop_token_id", "stop_token_ids"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{wrong!r}.*did you mean '{meant}'"):
        SamplingParams(**{wrong: 1})


def test_an_argument_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(InvalidRequestError, match=r"known arguments: .*temperature"):
        SamplingParams(qqqq=1)


def test_errors_are_value_errors_for_callers_that_know_only_those() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("stop", None, ()),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", [1, 2], (1, 2)),
        ("bad_words", ["x"], ("x",)),
        ("bad_words", None, ()),
        ("allowed_token_ids", [3, 1], (3, 1)),
        ("allowed_token_ids", None, None),
        ("logprob_token_ids", [3], (3,)),
        ("seed", -1, None),
        ("top_k", -1, 0),
        ("top_k", None, 0),
        ("logit_bias", {"17": 1, 3: -100}, {17: 1.0, 3: -100.0}),
        ("logit_bias", {}, {}),
        ("temperature", 0.001, 0.01),
        ("temperature", 1e-5, 0.01),
    ],
)
def test_spellings_of_the_same_wish_become_one(field: str, given: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{field: given}), field) == kept
    assert SamplingParams(**{field: given}) == SamplingParams(**{field: kept})


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_hardly_any_temperature_is_greedy_and_switches_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.3)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_filters_of_a_greedy_request_are_still_checked() -> None:
    with pytest.raises(InvalidRequestError, match="top_p=7"):
        SamplingParams(temperature=0, top_p=7)


def test_lists_given_may_change_later_without_effect() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 3.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_params_compare_by_value() -> None:
    assert SamplingParams(stop="a", seed=1) == SamplingParams(stop=["a"], seed=1)
    assert SamplingParams(seed=1) != SamplingParams(seed=2)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_params_can_be_copied_and_pickled(duplicate: Any) -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=["a"],
        logit_bias={1: 2},
        repetition_detection=RepetitionDetection(max_pattern_size=4),
        output_kind=RequestOutputKind.DELTA,
    )
    assert duplicate(params) == params


def test_replace_gives_a_checked_copy() -> None:
    params = SamplingParams(temperature=0.5, stop="a", top_k=3)
    changed = params.replace(temperature=0.7, stop=None)
    assert (changed.temperature, changed.stop, changed.top_k) == (0.7, (), 3)
    assert (params.temperature, params.stop) == (0.5, ("a",))
    with pytest.raises(InvalidRequestError, match="top_p=3"):
        params.replace(top_p=3)
    with pytest.raises(InvalidRequestError, match="did you mean 'top_p'"):
        params.replace(topp=1)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 0}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_counts": 3}, "min_count"),
    ],
)
def test_repetition_detection_is_checked_too(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        RepetitionDetection(**values)


def test_a_sample_that_has_not_forked_yet_has_no_output_tokens() -> None:
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(n=2), max_tokens=16, seed=0)
    assert [sequence.num_output_tokens for sequence in request.sequences] == [0, 0]
