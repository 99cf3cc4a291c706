"""One vocabulary, that of MPI, NCCL and UCX: words that may not come back, and class names that are used once.

`python tests/unit/test_words.py` counts what is left of each word in each part of the project.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("mpi_gpucomp", "osu_bench", "tests", "kernels", "docs", ".ci")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "setup.cfg", "setup.py")
SUFFIXES = {".py", ".md", ".cu", ".h", ".cpp", ".cfg", ".html", ".js", ".css", ""}

PHRASES = {
    r"MPI's own": "native MPI, the MPI library's",
    r"crank\w*": "progress driver, poll",
    r"letters?(?!-spacing)": "control message, envelope",
    r"says? whether": "return True if",
    r"st(?:ands?|ood|anding) still": "is stalled, idles",
    r"plainly": "raw, without a codec",
    r"go(?:es|ing)? straight": "is passed through to the MPI library",
    r"sent on while": "relayed",
    r"in pieces": "segmented",
    r"under way": "in flight, in progress",
    r"errands?": "p2p operation",
    r"of its own accord": "by itself",
    r"in the mind": "in simulation",
    r"as (?:it|they) came": "unchanged, still encoded",
    r"for people": "human-readable",
    r"(?:takes?|taken?|took) (?:the ways )?in turns": "alternate, rotate through",
    r"knows? no(?:thing)? (?:before|what|whether)": "a plain statement",
    r"who(?:ever)? (?:waits for|asks|looks) (?:it|now)": "the waiting rank, the reader",
    r"one likes": "as needed",
    r"mends?": "fix",
    r"is pressed": "is under CPU pressure",
    r"is through(?! (?:a|the|its) )": "has completed",
    r"so many (?:bytes|elements|ranks|seconds|times|calls|chunks|workers)": "a number: n bytes, count",
    r"so much": "an amount",
    r"lies? on (?:a |the |this )?(?:device|GPU|host)": "is on the device",
    r"(?:some|no|every)body (?:has|can|is|asks|looks|waits|else)": "a rank, a thread, a caller",
    r"left to MPI": "passed through",
    r"can be used on": "remains usable",
}
"""Phrases of a private dialect, and what to say instead."""

NAMES = {
    "Better": "TunedComm",
    "Caller": "Dispatcher",
    "Chooser": "Policy",
    "Choice": "Plan",
    "Crank": "ProgressDriver",
    "Detour": "HostStaging",
    "EVER": "ttl",
    "FORMS": "PARSERS",
    "Firsts": "EnvelopeChannel",
    "Gathered": "Peers",
    "Goal": "CollectiveSpec",
    "Inquiry": "DeadlockProbe",
    "KEPT": "KEEP_RATIO",
    "LetterFirsts": "RailEnvelopes",
    "MPI_GPUCOMP_PIECE": "MPI_GPUCOMP_SEGMENT_BYTES",
    "Meeting": "AgreementCheck",
    "Nothing": "Raw",
    "PlainRequest": "PassthroughRequest",
    "Placed": "NodeLayout",
    "Planned": "Plan",
    "Roll": "CallRegistry",
    "Sentry": "AnomalyDetector",
    "Stalls": "StallDetector",
    "Station": "ProcessMonitor",
    "Straight": "Passthrough",
    "StreamError": "DecodeError",
    "Verdict": "Diagnosis",
    "Watch": "DeadlockDetector",
    "alike": "replicate",
    "heard": "received, error",
    "kin": "derived_comms",
    "lasting": "ttl",
    "lands_at_start": "output_at_start",
    "root_too": "update_root",
    "said": "signature, output, text",
    "settle": "autotune",
    "straight": "passthrough",
    "stuck_outside": "on_mpi_hang",
    "suited": "default_algorithm",
    "told": "replies, completion_callback",
    "unasked": "probe_any",
    "urge": "send_urgent",
    "welcome": "on_handshake_done",
    "wind_down": "drain",
    "_comes_plain": "receives_raw",
    "_hold": "barrier_on",
    "_plain": "_native",
    "_wrecks": "_leaked",
}
"""Identifiers that are gone, and what they are called now."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    r"letters?(?!-spacing)": ("mpi_gpucomp/", "docs/"),
    "FORMS": ("mpi_gpucomp/_", "tests/"),
}
"""Where a phrase or a name is checked, if it has another meaning elsewhere."""

EXEMPT: tuple[str, ...] = ("osu_bench/experiments/training/data.py",)
"""A file whose text is data: a change of its words would change the losses that were measured with it."""

SAME_CLASS_NAME: dict[str, str] = {}
"""Class names that the library defines more than once, each with the reason; at most ten."""


class Use(NamedTuple):
    """A word where it should not be."""

    path: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: say {self.instead!r}"


@cache
def texts() -> dict[str, str]:
    """Read every source file and document of the project, this file aside."""
    paths = [ROOT / name for name in DOCUMENTS]
    for part in PARTS:
        paths += sorted(path for path in (ROOT / part).rglob("*") if path.is_file() and path.suffix in SUFFIXES)
    found = {}
    for path in paths:
        if path == Path(__file__).resolve() or "__pycache__" in path.parts or not path.exists():
            continue
        found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8", errors="replace")
    return found


def phrase_uses(pattern: str) -> list[Use]:
    """Find a phrase as whole words; a line break, also in a comment, counts as a space."""
    space = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:#|//|\*)?[ \t]*)"
    expression = re.compile(rf"\b(?:{pattern})\b".replace(" ", space), re.IGNORECASE)
    found = []
    for path, text in texts().items():
        if path.startswith(ONLY_IN.get(pattern, "")):
            for match in expression.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(Use(path, line, " ".join(match[0].split()), PHRASES[pattern]))
    return found


def name_uses(name: str) -> list[Use]:
    """Find an identifier where code binds or uses it, not in prose."""
    found = []
    for path, text in texts().items():
        if path.endswith(".py") and name in text and path.startswith(ONLY_IN.get(name, "")):
            lines = {line for found, line in identifiers(path) if found == name}
            found += [Use(path, line, name, NAMES[name]) for line in sorted(lines)]
    return found


@cache
def identifiers(path: str) -> frozenset[tuple[str, int]]:
    """Return the names in a Python file with their lines."""
    found = set()
    for node in ast.walk(ast.parse(texts()[path])):
        names: list[str | None] = []
        match node:
            case ast.Name():
                names = [node.id]
            case ast.Attribute():
                names = [node.attr]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.arg() | ast.keyword():
                names = [node.arg]
            case ast.alias():
                names = [node.name, node.asname]
        found |= {(name, getattr(node, "lineno", 0)) for name in names if name}
    return frozenset(found)


@cache
def class_definitions() -> dict[str, list[str]]:
    """Return where the library defines each class; private ones count too, nested ones as well."""
    found = defaultdict(list)
    for path, text in texts().items():
        if path.startswith("mpi_gpucomp/") and path.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path}:{node.lineno}")
    return found


def check_none(found: list[Use]) -> None:
    wrong = [use for use in found if not use.path.startswith(EXEMPT)]
    assert not wrong, "\n" + "\n".join(map(str, wrong))


@pytest.mark.parametrize("pattern", PHRASES)
def test_a_phrase_does_not_come_back(pattern: str) -> None:
    check_none(phrase_uses(pattern))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_does_not_come_back(name: str) -> None:
    check_none(name_uses(name))


def test_a_class_name_is_used_once() -> None:
    twice = {name: places for name, places in class_definitions().items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SAME_CLASS_NAME} == {}
    assert set(SAME_CLASS_NAME) <= set(twice)
    assert len(SAME_CLASS_NAME) <= 10


@pytest.mark.parametrize("package", ["engine", "transport", "codec", "device", "schedule"])
def test_the_monitor_is_not_imported(package: str) -> None:
    importing = []
    for path, text in texts().items():
        if path.startswith(f"mpi_gpucomp/{package}/") and path.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if any(f"{module}.".startswith("mpi_gpucomp.monitor.") for module in modules):
                    importing.append(f"{path}:{node.lineno}")
    assert importing == []


def area(path: str) -> str:
    """Return the part of the project that a path belongs to."""
    first, *rest = path.split("/")
    return f"{first}/{rest[0]}" if len(rest) > 1 else path if first in DOCUMENTS else first


def main() -> None:
    """Print what is left of each word by area, and the uses in the areas that are named."""
    found = [use for pattern in PHRASES for use in phrase_uses(pattern)]
    found += [use for name in NAMES for use in name_uses(name)]
    chosen = tuple(sys.argv[1:])
    if chosen:
        print(*sorted(use for use in found if use.path.startswith(chosen)), sep="\n")
        return
    for place, count in sorted(Counter(area(use.path) for use in found).items()):
        words = Counter(use.word.lower() for use in found if area(use.path) == place)
        print(f"{count:5} {place}: {', '.join(f'{word} {many}' for word, many in words.most_common(8))}")
    twice = {name: places for name, places in class_definitions().items() if len(places) > 1}
    print(f"{len(twice)} class names defined more than once:")
    for name, places in sorted(twice.items()):
        print(f"  {name}: {', '.join(places)}")


if __name__ == "__main__":
    main()
