"""The help of every command of osu_bench: an example, and a text for every argument."""

from __future__ import annotations

import argparse

import pytest

from osu_bench import command
from osu_bench.arguments import CommandParser


class Parsed(BaseException):
    """Raised in place of parsing, so that no command runs."""


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command and of every action of `cluster`."""
    found: dict[str, argparse.ArgumentParser] = {}

    def parse_args(parser: CommandParser, *_: object) -> None:
        found[parser.prog] = parser
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandParser, "parse_args", parse_args)
        for name in (*command.BENCHMARKS, *command.COMMANDS):
            with pytest.raises(Parsed):
                command.main([name])
    for action in found["osu_bench cluster"]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {parser.prog: parser for parser in action.choices.values()}
    return found


def test_all_commands_are_covered(parsers: dict[str, argparse.ArgumentParser]) -> None:
    assert set(parsers) >= {f"osu_bench {name}" for name in (*command.BENCHMARKS, *command.COMMANDS)}
    assert "osu_bench cluster up" in parsers


def test_every_help_ends_with_an_example_of_the_command(parsers: dict[str, argparse.ArgumentParser]) -> None:
    for prog, parser in parsers.items():
        head, *lines = (parser.epilog or "").splitlines()
        assert head == "example:", prog
        assert lines and all(prog in line for line in lines), prog


@pytest.mark.parametrize(
    ("words", "meant"),
    [("bcats", "bcast"), ("bcast --codex split", "--codec"), ("cluster up --rats 1gbit", "--rate")],
)
def test_an_unknown_command_or_option_is_an_error_with_a_suggestion(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(words.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f". Did you mean {meant}?\n")


def test_every_argument_has_a_help_text(parsers: dict[str, argparse.ArgumentParser]) -> None:
    silent = {
        (prog, action.dest)
        for prog, parser in parsers.items()
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    }
    assert silent == set()
