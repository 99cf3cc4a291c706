"""Files of the monitor in a directory that others may write to, and its endpoint with strangers."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from mpi_gpucomp.monitor import exporters, files
from mpi_gpucomp.monitor.exporters import CSV_HEADER, CsvFile, serve, write
from mpi_gpucomp.monitor.trace_buffer import TraceBuffer

SECRET = "precious"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a name that is a link to another file."""
    (tmp_path / "target").write_text(SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    return tmp_path / "link"


def test_a_trace_does_not_follow_a_link_and_is_private(linked: Path) -> None:
    TraceBuffer.make(1024, linked)
    assert (linked.parent / "target").read_text() == SECRET
    assert not linked.is_symlink() and mode(linked) == 0o600


def test_files_that_are_replaced_do_not_follow_links(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "flight.json"
    target.write_text(SECRET)
    for name in (path.name, f"{path.name}.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(target)
    files.replace(path, "text")
    assert (target.read_text(), path.read_text(), mode(path)) == (SECRET, "text", 0o600)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["flight.json", "target"]


def test_metrics_may_be_read_by_their_collector(tmp_path: Path) -> None:
    write(tmp_path / "new" / "metrics.prom", [])
    assert mode(tmp_path / "new" / "metrics.prom") == 0o644
    assert mode(tmp_path / "new") == 0o700


def test_what_is_appended_to_is_a_file_of_this_user(linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        files.append(linked, "text")
    assert linked.read_text() == SECRET
    path = linked.parent / "alarms.log"
    files.append(path, "one\n")
    files.append(path, "two\n")
    assert (path.read_text(), mode(path)) == ("one\ntwo\n", 0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="is not a file of this user"):
        files.append(path, "three\n")
    assert path.read_text() == "one\ntwo\n"
    os.mkfifo(linked.parent / "pipe")
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads it, and we do not wait for that
        files.append(linked.parent / "pipe", "text")


def test_a_csv_file_has_one_header(tmp_path: Path) -> None:
    table = CsvFile(tmp_path / "links.csv")
    for number in (1, 2):
        table.add([[number]])
    assert (tmp_path / "links.csv").read_text().splitlines() == [",".join(CSV_HEADER), "1", "2"]


def test_silent_connections_cost_a_bounded_number_of_threads_and_keep_nobody_out() -> None:
    server = serve("127.0.0.1:0", list)
    host, port = server.server_address[:2]
    before = threading.active_count()
    silent = [socket.create_connection((host, port)) for _ in range(3 * exporters.MAX_CONNECTIONS)]
    try:
        for _ in range(3):
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                assert answer.status == 200
        for one in silent[: exporters.MAX_CONNECTIONS]:
            one.settimeout(60)
            assert one.recv(1) == b""  # closed: later ones took its place
        assert threading.active_count() - before <= exporters.MAX_CONNECTIONS + 1
    finally:
        for one in silent:
            one.close()
        server.shutdown()
        server.server_close()


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "SILENT_SECONDS", 0.05)
    server = serve("127.0.0.1:0", list)
    try:
        with socket.create_connection(server.server_address[:2], timeout=60) as silent:
            assert silent.recv(1) == b""
    finally:
        server.shutdown()
        server.server_close()
