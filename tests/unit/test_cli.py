"""The command line as a whole: help of every command, shared options, the program's name, tables and progress."""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.cli.command import (
    SHARED,
    Command,
    Progress,
    find_collective,
    format_size,
    parse_count,
    parse_seconds,
    parse_size,
    table,
)
from mpi_gpucomp.cli.main import COMMANDS, build_parser, main

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--size", "--chunk")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command."""
    actions = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    return dict(actions[0].choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_every_command_has_an_example_that_parses(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out.strip()
    launcher = f"mpirun -n {command.mpirun} " if command.mpirun else ""
    assert shown.endswith(f"example:\n  {launcher}python -m mpi_gpucomp {command.name} {command.example}".rstrip())
    build_parser().parse_args([command.name, *command.example.split()])


def test_every_argument_has_a_help_text() -> None:
    silent = [
        (name, action.dest) for name, parser in parsers().items() for action in parser._actions if not action.help
    ]
    assert silent == []


def test_shared_options_are_spelled_and_read_alike() -> None:
    """Two commands with an option of one name give it the same flags, type and metavar."""
    seen: dict[str, set[tuple[object, ...]]] = {}
    for parser in parsers().values():
        for action in parser._actions:
            if action.dest not in ("help", "directory"):
                form = tuple(action.option_strings), action.type, action.metavar
                seen.setdefault(action.dest, set()).add(form)
    assert {name: forms for name, forms in seen.items() if len(forms) > 1} == {}
    used = {flag for parser in parsers().values() for action in parser._actions for flag in action.option_strings}
    assert set(SHARED) <= used


def test_commands_about_one_collective_take_it_as_an_argument() -> None:
    with_root = {name: parser for name, parser in parsers().items() if "--root" in parser._option_string_actions}
    assert set(with_root) >= {"algorithms", "simulate", "synthesize"}
    for parser in with_root.values():
        positional = [action.metavar for action in parser._actions if not action.option_strings]
        assert positional == ["COLLECTIVE"]
    assert not any("--collective" in parser._option_string_actions for parser in parsers().values())


def test_sizes_are_read_alike() -> None:
    found = [
        action for parser in parsers().values() for action in parser._actions if set(SIZES) & set(action.option_strings)
    ]
    assert len(found) >= 4 and all(action.type is parse_size for action in found)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("512K", 1 << 19), ("1.5MB", 3 << 19), ("1GiB", 1 << 30), (" 2 kb", 2048)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1TB", "1e6"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^expected a size such as 512K or 64MB, got '{text}'$"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "four", "²"])
def test_invalid_numbers_of_ranks(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^expected a whole number of at least 1, got '{text}'$"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "soon"])
def test_invalid_numbers_of_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^expected a number of seconds, 0 or more, got '{text}'$"):
        parse_seconds(text)


def test_counts_and_seconds() -> None:
    assert (parse_count("8"), parse_seconds("0"), parse_seconds("1.5")) == (8, 0.0, 1.5)


@pytest.mark.parametrize("name", ["broadcast", "bcast", "Bcast", "BCAST"])
def test_collectives_have_the_names_of_mpi_too(name: str) -> None:
    assert find_collective(name) == "broadcast"


@pytest.mark.parametrize(
    ("program", "prog"),
    [("/usr/bin/gpucomp", "gpucomp"), ("/x/mpi_gpucomp/__main__.py", "python -m mpi_gpucomp")],
)
def test_the_program_has_the_name_that_it_was_started_by(
    program: str, prog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert main(["simulate", "bcast", "--topology", "dgx9"]) == 2
    assert capsys.readouterr().err.startswith(f"{prog}: topology: expected one of ")
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert f"  {prog} simulate " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [("dcotor", "doctor"), ("explain bcast --codex split", "--codec"), ("synthesize bcast --mixd", "--mixed")],
)
def test_an_unknown_command_or_option_is_an_error_with_a_suggestion(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f". Did you mean {meant}?\n")


def test_the_version() -> None:
    command = [sys.executable, "-m", "mpi_gpucomp", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("mpi_gpucomp 0.")


def test_columns_are_as_wide_as_their_cells() -> None:
    assert table(("a", "number", "b"), [("long", "1", ""), ("", "22", "x")], right=["number"]) == (
        "a     number  b\nlong       1\n          22  x"
    )


def test_progress_is_drawn_on_a_terminal_and_erased() -> None:
    expected = b"\r\x1b[K[........................] 1 of 2: one\r\x1b[K[############............] 2 of 2: two\r\x1b[K"
    main_end, terminal_end = pty.openpty()
    with open(terminal_end, "w") as terminal, Progress(2, terminal) as progress:
        progress.start("one")
        progress.start("two")
        progress.__exit__(None, None, None)
        drawn = b""
        while len(drawn) < len(expected):  # a read returns what has arrived so far
            drawn += os.read(main_end, 1000)
    os.close(main_end)
    assert drawn == expected


def test_progress_is_not_drawn_to_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file, Progress(1, file) as progress:
        progress.start("one")
    assert (tmp_path / "log").read_text() == ""
