"""`paged-backend chat`: a conversation in the terminal."""

from __future__ import annotations

import pytest

from helpers_cli import Fakes, run


def test_chat_remembers_until_it_is_reset(fakes: Fakes) -> None:
    lines = ["hi", "/help", "/reset", "/nope", "", "again", "/system be brief", "/exit", "never"]
    result = run("chat", "m", "--system", "be kind", text="\n".join(lines) + "\n")
    assert result.exit_code == 0
    assert result.output.count("abcdefgh") == 2 and "tokens/s" in result.output
    assert "/nope is not known" in result.output and "never" not in result.output


def test_chat_ends_with_its_input(fakes: Fakes) -> None:
    assert run("chat", "m", text="hi\n").exit_code == 0


@pytest.mark.parametrize("model", ["m", "[/m]"])
def test_chat_shows_what_looks_like_markup(fakes: Fakes, model: str) -> None:
    fakes.template = "{{ raise_exception('no [/INST] here') }}"
    result = run("chat", model, text="hi\n")
    assert result.exit_code == 0 and "no [/INST] here" in result.output
