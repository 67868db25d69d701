"""`paged-backend bench`: what is asked, when, and what the numbers say."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import paged_backend
from helpers import WAIT_SECONDS
from helpers_server import ServerUnderTest, make_scripted_llm, make_server
from paged_backend import ConfigError
from paged_backend.cli.app import app
from paged_backend.cli.bench_data import Question, from_file, synthetic
from paged_backend.cli.bench_load import Answer, Pace, Piece, put_load
from paged_backend.cli.bench_report import percentile, rate_over_time, results_of

OPTIONS = ("--num-prompts", "6", "--input-len", "5", "--output-len", "8")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[ServerUnderTest, str]]:
    server = make_server(num_blocks=4096, api_keys=("key",))
    server.sampler.script = [*b"abcdefgh"]
    with server.live() as url:
        yield server, url
    server.serving.close()


@pytest.mark.parametrize("form", ["--chat", "--completions"])
def test_a_server_is_measured(live: tuple[ServerUnderTest, str], tmp_path: Path, form: str) -> None:
    target, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("--base-url", f"{live[1]}/v1/", "--api-key", "key", form, "--request-rate", "200", *OPTIONS)
    result = run(*arguments, "--output-json", str(target), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "Output tokens per second" in result.output and "Time to first token" in result.output
    results = json.loads(target.read_text())
    assert (results["completed"], results["failed"], results["total_output_tokens"]) == (6, 0, 48)
    assert results["total_input_tokens"] > 6 * 5 and results["output_throughput"] > 0
    assert 0 < results["p50_ttft_ms"] <= results["p90_ttft_ms"] <= results["p99_ttft_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_in_this_process_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []

    def make(model: str, tokenizer: str | None, **config: Any) -> Any:
        llm, _, sampler = make_scripted_llm(**config)
        sampler.script = [*b"abcdefgh"]
        made.append((model, config))
        return llm

    monkeypatch.setattr(paged_backend, "LLM", make)
    target = tmp_path / "out.json"
    result = run("m", "--max-num-seqs", "2", "--max-concurrency", "2", "--output-json", str(target), *OPTIONS)
    assert result.exit_code == 0, result.output
    assert made == [("m", {"max_num_seqs": 2})]
    assert json.loads(target.read_text())["total_output_tokens"] == 48


def test_what_fails_is_counted_and_told(live: tuple[ServerUnderTest, str]) -> None:
    long = ("--base-url", live[1], "--api-key", "key", "--num-warmups", "0", "--num-prompts", "2")
    result = run(*long, "--input-len", "3000")
    assert result.exit_code == 1 and "status 400" in result.output and "max_model_len" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "nothing is to be measured"),
        (("--base-url", "http://127.0.0.1:9"), "does not tell which models"),
        (("m", "--base-url", "http://127.0.0.1:9"), "ConnectError"),
        (("m", "--base-url", "http://x", "--block-size", "4"), "--block-size is for a model in this process"),
        (("m", "--request-rate", "0"), "request_rate=0.0 is out of range"),
        (("m", "--max-concurrency", "0"), "max_concurrency=0 is out of range"),
        (("m", "--dataset-path", "/no/such/file"), "/no/such/file"),
        (("m", "--output-json", "/no/such/folder/out.json"), "/no/such/folder"),
        (("m", "--plot", "/no/such/folder/out.png"), "/no/such/folder"),
    ],
)
def test_an_error_is_one_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1 and complaint in result.output
    assert len(result.output.strip().splitlines()) == 1 and "Traceback" not in result.output


def test_a_server_that_wants_a_key_is_told_apart(live: tuple[ServerUnderTest, str]) -> None:
    result = run("--base-url", live[1])
    assert result.exit_code == 1 and "status 401; give its --api-key" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_made_up_prompts_have_the_lengths_asked_for() -> None:
    options: dict[str, Any] = {"input_len": 20, "output_len": 10, "range_ratio": 0.5, "prefix_len": 7}
    questions = synthetic(50, **options, seed=1)
    assert questions == synthetic(50, **options, seed=1) != synthetic(50, **options, seed=2)
    words = [question.prompt.split() for question in questions]
    assert len({tuple(each[:7]) for each in words}) == 1
    assert all(17 <= len(each) <= 37 for each in words) and len(set(map(len, words))) > 3
    assert all(5 <= question.max_tokens <= 15 for question in questions)
    assert len({question.max_tokens for question in questions}) > 3


def write(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def test_conversations_come_from_a_file(tmp_path: Path) -> None:
    entries = [
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x" * 40}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
        {"conversations": [{"from": "gpt", "value": "begins"}, {"from": "human", "value": "no"}]},
        {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "empty"}]},
        {"nothing": 1},
        5,
        {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "y"}]},
    ]
    for content in (entries, "\ufeff" + "\n\n".join(map(json.dumps, entries))):
        path = write(tmp_path / "data.json", content)
        questions = from_file(path, 2, output_len=None, seed=0)
        assert sorted(questions) == [Question("one", 10), Question("three", 1)]
        assert {question.max_tokens for question in from_file(path, 5, output_len=7, seed=0)} == {7}


def test_a_line_of_json_lines_ends_where_a_line_feed_is(tmp_path: Path) -> None:
    entry = {"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "y"}]}
    path = write(tmp_path / "data.jsonl", json.dumps(entry, ensure_ascii=False) + "\n")
    assert from_file(path, 1, output_len=None, seed=0) == [Question("a\u2028b\x85c", 1)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{broken", "is no JSON"), ('["\udcff"]', "is no JSON in UTF-8"), ("[]", "has no conversation")],
)
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_file(write(tmp_path / "data.json", content), 2, output_len=None, seed=0)


class Counting:
    """Answers nobody before so many wait at once, and knows how many do."""

    def __init__(self, crowd: int) -> None:
        self.num_waiting = self.most_waiting = 0
        self._crowd, self._is_crowded = crowd, asyncio.Event()

    async def pieces(self, question: Question) -> AsyncIterator[Piece]:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        if self.num_waiting == self._crowd:
            self._is_crowded.set()
        await asyncio.wait_for(self._is_crowded.wait(), WAIT_SECONDS)
        await asyncio.sleep(0.005)  # in which others would come
        self.num_waiting -= 1
        yield Piece(1, 1)


@pytest.mark.parametrize(("limit", "most"), [(None, 12), (3, 3)])
async def test_no_more_are_asked_at_once_than_allowed(limit: int | None, most: int) -> None:
    target = Counting(most)
    answers = await put_load(target, [Question("x", 1)] * 12, Pace(max_concurrency=limit), 0, lambda answer: None)
    assert target.most_waiting == most and all(answer.error is None for answer in answers)


def test_times_between_questions_have_the_rate_asked_for() -> None:
    for burstiness in (0.5, 1.0, 20.0):
        delays = list(itertools.islice(Pace(request_rate=10, burstiness=burstiness).delays(1), 4000))
        assert sum(delays) / len(delays) == pytest.approx(0.1, rel=0.1)
    assert set(itertools.islice(Pace().delays(1), 5)) == {0.0}


def test_the_numbers_are_those_of_the_times() -> None:
    answers = [
        Answer(0.0, [0.1, 0.2, 0.4], num_prompt_tokens=5, num_output_tokens=3),
        Answer(0.5, [1.0], num_prompt_tokens=5, num_output_tokens=1),
        Answer(0.5, error="no"),
    ]
    results = results_of(answers)
    assert (results["completed"], results["failed"], results["duration"], results["errors"]) == (2, 1, 1.0, ["no"])
    assert (results["output_throughput"], results["total_token_throughput"]) == (4.0, 14.0)
    assert results["mean_ttft_ms"] == pytest.approx(300) and results["p50_e2el_ms"] == pytest.approx(450)
    assert results["mean_itl_ms"] == pytest.approx(150) == results["mean_tpot_ms"]
    assert results_of([])["p99_ttft_ms"] is None
    seconds, rate = rate_over_time(answers, num_bins=2)
    assert (seconds, rate) == ([0.25, 0.75], [6.0, 2.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_where_numpy_has_it(values: list[float], share: float) -> None:
    numpy = pytest.importorskip("numpy")
    assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, share)), abs=1e-6)
