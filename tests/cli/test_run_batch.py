"""`paged-backend run-batch`: files in OpenAI's batch format, every line once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import Fakes, failed, run

BATCH: list[tuple[str, str | None]] = [
    (json.dumps({"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}), None),
    ("", "nothing"),
    ("   ", "nothing"),
    ("{broken", "invalid_json"),
    ("[]", "invalid_line"),
    (json.dumps({"url": "/v1/completions", "body": {}}), "missing_custom_id"),
    (json.dumps({"custom_id": "1", "url": "/v1/completions"}), "missing_body"),
    (json.dumps({"custom_id": "2", "method": "GET", "url": "/v1/completions", "body": {}}), "invalid_method"),
    (json.dumps({"custom_id": "3", "url": "/v1/nope", "body": {}}), "invalid_url"),
    (json.dumps({"custom_id": "good", "url": "/v1/completions", "body": {"prompt": "hi"}}), "duplicate_custom_id"),
    (
        json.dumps({"custom_id": "4", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}),
        "invalid_stream",
    ),
    (json.dumps({"custom_id": "5", "url": "/v1/completions", "body": {"prompt": "x", "model": "other"}}), "404"),
    (json.dumps({"custom_id": "6", "url": "/v1/completions", "body": {"prompt": "x" * 5000}}), "400"),
    (json.dumps({"custom_id": "response", "url": "/v1/responses", "body": {"input": "hi"}}), None),
    (json.dumps({"custom_id": "7", "url": "/v1/completions", "body": {"prompt": "x", "nope": 1}}), "400"),
    (
        json.dumps(
            {
                "custom_id": "zwölf",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2},
            },
            ensure_ascii=False,
        ),
        None,
    ),
]


def test_a_batch_answers_every_line_once(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(line for line, _ in BATCH).encode() + b"\r\n\xff\xfe")
    result = run("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    assert "12 lines failed" in failed(result, 3)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    expected = [wrong for _, wrong in BATCH if wrong != "nothing"] + ["invalid_line"]
    assert sorted(map(outcome, records), key=str) == sorted(expected, key=str)
    by_id = {record["custom_id"]: record for record in records if outcome(record) is None}
    assert by_id["good"]["response"]["body"]["choices"][0]["text"] == "abcdefgh"
    assert by_id["response"]["response"]["body"]["output"][0]["content"][0]["text"] == "abcdefgh"
    assert len(by_id["zwölf"]["response"]["body"]["choices"]) == 2
    assert "zwölf" in target.read_text()
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors").read_text().splitlines()]
    assert errors == [record for record in records if outcome(record) is not None]


def test_a_batch_that_is_done_stays_as_it_is(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line for line, _ in BATCH))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    failed(run(*arguments), 3)
    before = target.read_text()
    failed(run(*arguments), 3)
    assert target.read_text() == before


def test_a_batch_goes_on_after_a_half_line(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{line}\n" for line in batch_lines(3)))
    done = json.dumps({"id": "x", "custom_id": "1", "response": {"status_code": 200, "body": {}}, "error": None})
    target.write_text(f'{done}\n{{"id": "y", "custom_id": "2", "resp')
    assert run("run-batch", "-i", str(source), "-o", str(target), "--model", "m").exit_code == 0
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(record["custom_id"] for record in records) == ["0", "1", "2"]
    assert next(record["id"] for record in records if record["custom_id"] == "1") == "x"
    assert not (tmp_path / "out.jsonl.errors").exists()


def test_ids_that_are_no_unicode_are_told_apart(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = ["\ud83d", "\ud83e", "?", "zwölf"]
    requests = [{"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": "hi"}} for custom_id in ids]
    bad = {"custom_id": "\ud83f", "url": "/v1/completions", "body": {"prompt": "x", "nope": 1}}
    source.write_text("".join(json.dumps(request) + "\n" for request in (*requests, bad)))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    for _ in range(2):
        failed(run(*arguments), 3)
        records = [json.loads(line) for line in target.read_text().splitlines()]
        assert sorted(record["custom_id"] for record in records) == sorted([*ids, "\ud83f"])
    assert "zwölf" in target.read_text()
    (error,) = (tmp_path / "out.jsonl.errors").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "\ud83f"


def test_a_batch_is_never_too_much_for_its_own_queue(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": ["a", "b", "c"], "n": 4, "max_tokens": 1}
    requests = [{"custom_id": str(index), "url": "/v1/completions", "body": body} for index in range(5)]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m", "--max-num-queued-reqs", "2")
    assert run(*arguments).exit_code == 0


def test_an_empty_batch_is_done_at_once(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    assert (
        run("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", "m").exit_code
        == 0
    )
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_a_batch_does_not_overwrite_its_input(fakes: Fakes, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(BATCH[0][0])
    assert "is the input too" in failed(run("run-batch", "-i", str(source), "-o", str(source), "--model", "m"))
    assert source.read_text() == BATCH[0][0]


@pytest.mark.slow
def test_a_killed_batch_loses_nothing_and_does_nothing_twice(killed: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{line}\n" for line in batch_lines(200)))
    command = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m", "--max-num-seqs", "4")
    before = killed(target, 20, *command)
    after = target.read_bytes().splitlines()
    assert len(before) < 200 and after[: len(before)] == before
    assert sorted(int(json.loads(line)["custom_id"]) for line in after) == list(range(200))


def batch_lines(number: int) -> list[str]:
    return [
        json.dumps(
            {"custom_id": str(index), "url": "/v1/completions", "body": {"prompt": f"p{index}", "max_tokens": 8}}
        )
        for index in range(number)
    ]


def outcome(record: dict[str, Any]) -> str | None:
    """None for an answer, else the code of the bad line or the status of the refusal."""
    if record["error"] is not None:
        assert record["response"] is None
        return str(record["error"]["code"])
    status = record["response"]["status_code"]
    return None if status == 200 else str(status)
