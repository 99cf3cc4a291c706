"""What documents and comments refer to exists: files, modules, methods, settings, links, and commands with options."""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
import tokenize
from configparser import ConfigParser
from fnmatch import filter as filter_names
from functools import cache
from pathlib import Path

import pytest
from mpi4py import MPI
from simulated_cuda import SETTINGS as SIMULATED

from mpi_gpucomp import Communicator
from mpi_gpucomp.cli.main import COMMANDS, build_parser
from mpi_gpucomp.config import PREFIX, SETTINGS
from mpi_gpucomp.schedule.topology import PRESETS
from osu_bench import command as bench

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("mpi_gpucomp", "osu_bench", "tests", "kernels", "docs", ".ci")
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SOURCES = {".py", ".cpp", ".h", ".cu"}
PACKAGES = tuple(path.name for path in (ROOT / "mpi_gpucomp").iterdir() if (path / "__init__.py").exists())

ELSEWHERE = ("train.py", "program.py", "torch/testing/_internal/distributed/distributed_test.py", "mpi.h", "stdio.h")
"""Files of the reader, of torch and of the system."""

FILE = re.compile(  # one with a name that tells what it is, or a directory within another
    r"(?<![\w/.<-])((?:[\w.*-]+/)*[\w*-]+\.(?:py|cpp|h|cu|md|cfg|txt)|(?:[\w.-]+/){2,})(?!\w)"
)
MODULE = re.compile(r"`(?:mpi_gpucomp\.|(?!torch\.))([a-z_]+(?:\.(?!cpp)[A-Za-z_]\w*)+)`")
COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:mpirun -n \d+ )?(?:(?:python -m )?(gpucomp|osu_bench)|python -m (mpi_gpucomp)) ([a-z].*)"
)


@cache
def project_files() -> tuple[str, ...]:
    """Return the path of every file and directory of the project, from its root, directories with a slash."""
    paths = [path for part in PARTS for path in (ROOT / part).rglob("*") if "__pycache__" not in path.parts]
    names = [f"{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in [*paths, *ROOT.glob("*.*")]]
    return tuple(f"/{name}" for name in names)


def prose_of(path: Path) -> str:
    """Return the text of a document without blocks of code, or the comments and docstrings of a source file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    if path.suffix != ".py":
        return "\n".join(re.findall(r"//[^\n]*", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


def is_project_file(name: str) -> bool:
    """Return True if the path of a file or directory ends with this; an asterisk stands for any name."""
    return bool(filter_names(project_files(), f"*/{name.removeprefix('../')}"))


def missing_files(path: Path) -> list[str]:
    """Return the files that a document or the comments of a source file name, and that do not exist."""
    prose = re.sub(r"\w+://\S+", "", prose_of(path))
    names = [match[1] for match in FILE.finditer(prose)]
    return [name for name in names if name not in ELSEWHERE and not is_project_file(name)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    assert missing_files(document) == []


def test_files_that_comments_name_exist() -> None:
    paths = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.suffix in SOURCES]
    missing = {str(path.relative_to(ROOT)): missing_files(path) for path in paths}
    assert {path: names for path, names in missing.items() if names} == {}


@cache
def names_in(module: Path) -> frozenset[str]:
    """Return what a module, or the package of this directory, defines or imports at its top level."""
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    found: set[str] = {entry.stem for entry in module.iterdir()} if module.is_dir() else set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def is_module_or_member(name: str) -> bool:
    """Return True if the library has a module of this dotted name, or a module with such a member."""
    place = ROOT / "mpi_gpucomp"
    for part in name.split("."):
        if part not in names_in(place):
            return False
        place /= part
        if not place.is_dir() and not place.with_suffix(".py").exists():
            return True
    return True


def test_modules_that_documents_and_comments_name_exist() -> None:
    paths = [*DOCUMENTS, *(path for path in (ROOT / "mpi_gpucomp").rglob("*") if path.suffix in SOURCES)]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in MODULE.findall(prose_of(path))
        if name.split(".")[0] in PACKAGES and not is_module_or_member(name)
    }
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        page = document.parent / path if path else document
        assert page.exists(), target
        headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_methods_and_settings_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    methods = {*dir(Communicator), *dir(MPI.Intracomm)}  # what is not ours is mpi4py's
    assert set(re.findall(r"\bcomm\.(\w+)", text)) - methods == set()
    known = {PREFIX + setting.name for setting in SETTINGS} | {SIMULATED}
    assert set(re.findall(r"MPI_GPUCOMP_\w+", text)) - known == set()


def commands() -> list[object]:
    """Return every command line of the documents: of indented and fenced blocks, and in the text."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        for line in text.splitlines():
            spans = [line] if line.startswith("    ") else [line, *re.findall(r"`([^`]+)`", line)]
            found += [
                pytest.param(match[1] or match[2], match[3], id=f"{document.stem}: {' '.join(match[0].split())}")
                for span in spans
                if (match := COMMAND.fullmatch(span.strip()))
            ]
    return found


class Parsed(BaseException):
    """Raised instead of running a command whose arguments are valid."""


@pytest.mark.parametrize(("program", "text"), commands())
def test_commands_in_documents_are_valid(program: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: object) -> None:
        parse(*arguments)  # type: ignore[call-overload]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    words = shlex.split(re.sub(r"[\[\]]", "", text), comments=True)
    if len(words) == 1:  # a command by its name, without arguments that it may require
        assert words[0] in ({**bench.BENCHMARKS, **bench.COMMANDS} if program == "osu_bench" else library_commands())
        return
    with pytest.raises(Parsed):
        run(program, words)
    if "--" in words:  # before a command to run
        with pytest.raises(Parsed):
            run("osu_bench", words[words.index("osu_bench") + 1 :])


def run(program: str, words: list[str]) -> None:
    """Run a command."""
    if program == "osu_bench":
        bench.main(words)
    else:
        build_parser().parse_args(words)


def library_commands() -> set[str]:
    """Return the names of the commands of `gpucomp`."""
    return {command.name for command in COMMANDS}


def test_every_command_and_preset_is_documented() -> None:
    documents = "\n".join(document.read_text() for document in DOCUMENTS)
    assert [name for name in sorted(library_commands()) if not re.search(rf"gpucomp {name}\b", documents)] == []
    benchmarks, synthesis = ((ROOT / f"docs/{name}.md").read_text() for name in ("BENCHMARKS", "SYNTHESIS"))
    assert [
        name for name in bench.COMMANDS if not re.search(rf"`(osu_bench )?{name}`|osu_bench {name}\b", benchmarks)
    ] == []
    assert [name for name in PRESETS if f"| `{name}` |" not in synthesis] == []


def test_the_map_in_contributing_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [line for line in config["importlinter:contract:layers"]["layers"].splitlines() if not line.startswith("#")]
    layers = {name for line in lines for name in re.split(r"[\s|:]+", line) if name}
    tree = text.partition("## The tree\n\n")[2].partition("\n\n")[0]
    shown = {name for line in tree.splitlines() for name in re.split(r"\s{2,}", line)}
    assert layers - shown == set()
    core = text.partition("## The core\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", core, re.MULTILINE)
    patterns = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    files = [path.name for path in (ROOT / "mpi_gpucomp/core/src").iterdir()]
    matches = {
        pattern: {name for name in files if filter_names([name, Path(name).stem], pattern)} for pattern in patterns
    }
    assert [pattern for pattern, found in matches.items() if not found] == []
    assert set(files) - set().union(*matches.values()) == set()
