"""The command line, most of it as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.cli.output import Progress, table
from mpi_gpucomp.cli.sample_data import largest_error, like_weights
from mpi_gpucomp.device import Device, dtype_of_name, library

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
QUICK = ["--seconds", "0", "--json"]

LISTED = """\
codec           lossless  types             host         GPU          good for
none            yes       any               yes          no GPU here  no encoding
split           yes       f16 bf16 f32 f64  yes          no GPU here  floats, especially weights and gradients
mpc:stride=4    yes       f32 f64           yes          no GPU here  smooth floats
zfp:rate=8      no        f16 bf16 f32 f64  yes          no GPU here  floats, with a fixed compressed size
bound:rel=1e-4  no        f16 bf16 f32 f64  yes          no GPU here  floats, with a bounded error
cast:bf16       no        f32               yes          no GPU here  floats, rounded to half the size
auto            yes       any               yes          no GPU here  any values: the fastest lossless codec per chunk
lz4             yes       any               yes          no GPU here  any bytes
snappy          yes       any               yes          no GPU here  any bytes
zstd            yes       any               yes          no GPU here  any bytes
deflate         yes       any               yes          no GPU here  any bytes
gdeflate        yes       any               needs a GPU  no GPU here  any bytes
ans             yes       any               needs a GPU  no GPU here  any bytes
bitcomp         yes       any               needs a GPU  no GPU here  any bytes
cascaded        yes       any               needs a GPU  no GPU here  any bytes
"""

BARE = """\
host library: {level}, {path}
GPU: none. device cuda:0: expected CuPy, got 'import of cupy halted; None in sys.modules'. \
Install it: 'pip install mpi_gpucomp[cuda13]' (or cuda12), and an NVIDIA driver.

codec           lossless  types             host           GPU          good for
none            yes       any               yes            no GPU here  no encoding
split           yes       f16 bf16 f32 f64  yes            no GPU here  floats, especially weights and gradients
mpc:stride=4    yes       f32 f64           yes            no GPU here  smooth floats
zfp:rate=8      no        f16 bf16 f32 f64  yes            no GPU here  floats, with a fixed compressed size
bound:rel=1e-4  no        f16 bf16 f32 f64  yes            no GPU here  floats, with a bounded error
cast:bf16       no        f32               yes            no GPU here  floats, rounded to half the size
auto            yes       any               yes            no GPU here  any values: the fastest lossless codec per chunk
lz4             yes       any               needs cramjam  no GPU here  any bytes
snappy          yes       any               needs cramjam  no GPU here  any bytes
zstd            yes       any               needs cramjam  no GPU here  any bytes
deflate         yes       any               needs cramjam  no GPU here  any bytes
gdeflate        yes       any               needs a GPU    no GPU here  any bytes
ans             yes       any               needs a GPU    no GPU here  any bytes
bitcomp         yes       any               needs a GPU    no GPU here  any bytes
cascaded        yes       any               needs a GPU    no GPU here  any bytes

lz4 on the host, snappy on the host, zstd on the host, deflate on the host: \
Install it with 'pip install mpi_gpucomp[codecs]'.
"""

HIDE = """
import sys
for name in ("cramjam", "cupy", "cupy_backends", "nvidia", "torch", "ml_dtypes"):
    sys.modules[name] = None
"""
RUN = """
from mpi_gpucomp.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
OWN_CODECS = """
import ctypes, signal, sys
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.registry import register

class Own(Raw):
    spec = property(lambda self: self.name)

class Signless(Own):
    name = "signless"
    def decode(self, source, nbytes, to, stream):
        pending = super().decode(source, nbytes, to, stream)
        (ctypes.c_uint32 * 1).from_address(to.address)[0] &= 0x7FFFFFFF
        return pending

class Idle(Own):
    name = "idle"
    def decode(self, source, nbytes, to, stream):
        return self.recorded(stream, nbytes)

class Deaf(Own):
    name = "deaf"
    def decode(self, source, nbytes, to, stream):
        return self.failed(to.count, "noise")

class Interrupted(Own):
    name = "interrupted"
    def encode(self, source, to, stream):
        signal.raise_signal(signal.SIGINT)

for codec in (Signless, Idle, Deaf, Interrupted):
    register(codec.name, codec.from_parameters, "tests")
"""
ODD_CODECS = """
import sys
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.registry import get_codec, register

class Clumsy(Raw):
    def encode(self, source, to, stream):
        raise ZeroDivisionError("dropped it")

register("clumsy", lambda parameters: Clumsy(), "tests")
register("picky", lambda parameters: get_codec("none:no"), "tests")
"""


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=WITHOUT_GPU, **options)


def save(tmp_path: Path, array: Any) -> str:
    path = tmp_path / "values.npy"
    np.save(path, array)
    return str(path)


def measured(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Measure codecs in this process and return what is said of each."""
    assert main(["codecs", "--measure", *args, *QUICK]) == 0
    return {found["codec"]: found for found in json.loads(capsys.readouterr().out)["codecs"]}


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one line that is said instead of a measurement."""
    assert main(["codecs", "--measure", *args, *QUICK]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_table_is_as_wide_as_its_cells() -> None:
    assert table(("a", "number", "b"), [("long", "1", ""), ("", "22", "x")], right=["number"]) == (
        "a     number  b\nlong       1\n          22  x"
    )


def test_progress_is_drawn_on_a_terminal_and_wiped() -> None:
    expected = b"\r\x1b[K[........................] 1 of 2: one\r\x1b[K[############............] 2 of 2: two\r\x1b[K"
    main_end, terminal_end = pty.openpty()
    with open(terminal_end, "w") as terminal, Progress(2, terminal) as progress:
        progress.start("one")
        progress.start("two")
        progress.__exit__(None, None, None)
        drawn = b""
        while len(drawn) < len(expected):  # a terminal hands over what has come so far
            drawn += os.read(main_end, 1000)
    os.close(main_end)
    assert drawn == expected


def test_progress_says_nothing_in_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file, Progress(1, file) as progress:
        progress.start("one")
    assert (tmp_path / "log").read_text() == ""


def test_codecs_lists_every_codec() -> None:
    pytest.importorskip("cramjam")
    done = python("-m", "mpi_gpucomp", "codecs")
    assert (done.returncode, done.stderr) == (0, "")
    head, _, listed = done.stdout.partition("\n\n")
    loaded = library.host_library()
    assert head.startswith(f"host library: {loaded.level}, {loaded.path}\nGPU: none. device cuda:0: expected ")
    assert listed == LISTED


def test_codecs_needs_no_optional_package() -> None:
    done = python("-c", HIDE + RUN, "codecs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == BARE.format(level=library.host_library().level, path=library.host_library().path)


def test_codecs_says_that_the_host_library_is_missing() -> None:
    no_library = "from pathlib import Path\nfrom mpi_gpucomp.device import library\n"
    no_library += "library.library_directory = lambda: Path('nowhere')\n"
    done = python("-c", HIDE + no_library + RUN, "codecs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert listed["host library"].startswith("none. host library: expected a library for ")
    cells = {row["codec"]: row["host"] for row in listed["codecs"]}
    assert (cells["none"], cells["split"]) == ("yes", "needs the host library")
    assert listed["notes"][0].startswith("split on the host, mpc on the host, zfp on the host, ")


def test_codecs_lists_the_users_own_whatever_they_do() -> None:
    done = python("-c", ODD_CODECS + RUN, "codecs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    clumsy = {"codec": "clumsy", "lossless": "yes", "types": "any", "host": "fails"}
    picky = {"codec": "picky", "lossless": "?", "types": "?", "host": "?"}
    assert listed["codecs"][-2] == clumsy | {"GPU": "no GPU here", "good for": "tests"}
    assert listed["codecs"][-1] == picky | {"GPU": "?", "good for": "tests"}
    assert listed["notes"] == [
        "clumsy on the host: ZeroDivisionError: dropped it",
        "picky: codec none: expected no parameters, got 'no'. Write none.",
    ]


def test_codecs_on_a_gpu(gpu: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "cuda:0" in listed["GPU"]
    assert {row["GPU"] for row in listed["codecs"][:6]} == {"yes"}
    found = measured(capsys, "--device", "cuda:0", "--codec", "zfp:rate=8", "split")
    assert (found["zfp:rate=8"]["ratio"], found["split"]["wrong"]) == (4.0, "")


def test_a_reader_who_leaves_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mpi_gpucomp", "codecs"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, timeout=120, env=WITHOUT_GPU, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_measure_needs_no_file_and_prints_a_table() -> None:
    done = python("-m", "mpi_gpucomp", "codecs", "--measure", "--seconds", "0", "--codec", "none", "zfp:rate=8")
    assert (done.returncode, done.stderr) == (0, "")
    about, empty, header, none, zfp = done.stdout.splitlines()
    assert about == "normal(0, 0.02): 1048576 x float32 in chunks of 1048576 bytes on host, 1 thread"
    assert empty == ""
    assert header.split("  ")[0] == "codec"
    assert header.endswith("ratio  in GB/s  out GB/s  largest error  of the range  note")
    assert none.split()[:2] == ["none", "1.00"]
    assert none.endswith("  none             -  4 of 4 chunks raw")
    assert zfp.split()[:2] == ["zfp:rate=8", "4.00"]


def test_measure_tries_all_codecs_that_take_the_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    floats = measured(capsys, save(tmp_path, np.arange(600, dtype=np.float32)))
    assert list(floats)[:8] == [
        "none", "split", "mpc:stride=4", "mpc", "zfp:rate=8", "zfp:rate=16", "bound:rel=0.0001", "cast:bf16",
    ]  # fmt: skip
    assert list(floats)[8:] == ["auto", "lz4", "snappy", "zstd", "deflate", "gdeflate", "ans", "bitcomp", "cascaded"]
    assert not any(found["wrong"] for found in floats.values())
    assert floats["bound:rel=0.0001"]["largest_relative_error"] <= 1e-4
    assert {spec for spec, found in floats.items() if found["unavailable"]} == {
        "gdeflate", "ans", "bitcomp", "cascaded",
    }  # fmt: skip
    assert floats["ans"]["unavailable"] == "needs a GPU"
    integers = measured(capsys, save(tmp_path, np.arange(600)))
    assert list(integers) == ["none", *list(floats)[8:]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.dtype(">f4")])
@pytest.mark.parametrize("form", ["C", "F"])
def test_measure_reads_any_float_and_shape(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: Any, form: Any
) -> None:
    values = np.random.default_rng(1).normal(size=(5, 8, 25)).astype(dtype)
    path = save(tmp_path, np.asarray(values, order=form))
    found = measured(capsys, path, "--codec", "split", "zfp:rate=8", "--chunk", "1KB")
    assert found["zfp:rate=8"]["ratio"] == pytest.approx(values.itemsize, rel=0.05)
    assert 0 < found["zfp:rate=8"]["largest_error"] < 0.7
    assert found["split"]["chunks"] == -(-values.nbytes // 1024)
    assert (found["split"]["largest_error"], found["split"]["wrong"]) == (0, "")


def test_measure_shares_the_work_among_threads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(1 << 18, np.float32))
    found = measured(capsys, path, "--threads", "--codec", "zfp:rate=8")["zfp:rate=8"]
    assert (found["ratio"], found["largest_error"]) == (4, 0)


def test_measure_takes_the_users_word_for_bfloat16(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bits = np.full(64, 1.5, ml_dtypes.bfloat16).view(np.uint16)
    found = measured(capsys, save(tmp_path, bits), "--dtype", "bfloat16", "--codec", "zfp:rate=16")
    assert (found["zfp:rate=16"]["unavailable"], found["zfp:rate=16"]["largest_error"]) == ("", 0)


def test_values_are_drawn_in_the_type_that_is_asked_for() -> None:
    bits = like_weights("bfloat16").array
    assert np.array_equal(bits.view(ml_dtypes.bfloat16), _drawn().astype(np.float32).astype(ml_dtypes.bfloat16))
    assert np.array_equal(like_weights("float16").array, _drawn().astype(np.float16))


def _drawn() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, 1 << 21)


def test_measure_counts_chunks_that_travel_raw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = np.ones((3, 256), np.float32)
    values[1, 7] = np.nan
    found = measured(capsys, save(tmp_path, values), "--chunk", "1024", "--codec", "zfp:rate=8", "none")
    assert (found["zfp:rate=8"]["chunks"], found["zfp:rate=8"]["raw_chunks"]) == (3, 1)
    assert found["zfp:rate=8"]["ratio"] == pytest.approx(3072 / (256 + 1024 + 256))
    assert (found["none"]["raw_chunks"], found["none"]["ratio"]) == (3, 1)


def test_a_codec_that_holds_no_chunk_has_no_speed_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = measured(capsys, save(tmp_path, np.full(8, np.nan, np.float32)), "--codec", "zfp:rate=8")["zfp:rate=8"]
    assert (found["ratio"], found["decode_speed"], found["largest_error"]) == (1, None, 0)


def test_measure_says_why_a_codec_is_left_out(tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(100))
    specs = ["lz4", "gdeflate", "cast:bf16"]
    done = python("-c", HIDE + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", *specs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "values.npy: 100 x float64 in chunks of 1048576 bytes on host, 1 thread\n"
        "\n"
        "codec      ratio  in GB/s  out GB/s  largest error  of the range  note\n"
        "lz4            -        -         -              -             -  "
        "needs cramjam. Install it with 'pip install mpi_gpucomp[codecs]'.\n"
        "gdeflate       -        -         -              -             -  needs a GPU\n"
        "cast:bf16      -        -         -              -             -  needs elements of type float32. "
        "Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them.\n"
    )


@pytest.mark.parametrize(
    ("codec", "note"),
    [
        ("signless", "WRONG: does not give back every bit"),
        ("idle", "WRONG: does not give back every bit"),
        ("deaf", "WRONG: does not decode its own bytes: noise"),
    ],
)
def test_a_lossless_codec_that_loses_a_bit_is_a_failure(tmp_path: Path, codec: str, note: str) -> None:
    path = save(tmp_path, np.full(8, -0.0, np.float32))
    done = python("-c", OWN_CODECS + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", "none", codec)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].endswith(f"  {note}")


def test_interrupting_prints_what_was_measured(tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(8, np.float32))
    specs = ["zfp:rate=8", "interrupted", "none"]
    done = python("-c", OWN_CODECS + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", *specs)
    assert (done.returncode, done.stderr) == (130, "interrupted: 1 of 3 codecs measured\n")
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == ["zfp:rate=8"]


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, f"{tmp_path}/none.npy") == (
        f"python -m mpi_gpucomp: file {tmp_path}/none.npy: expected a .npy file, got No such file or directory. "
        "Write one with numpy.save; an array of objects cannot be used.\n"
    )


def test_a_file_with_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    for content in (b"", b"words", b"\x93NUMPY\x01\x00", Path(save(tmp_path, np.ones(9))).read_bytes()[:-1]):
        path.write_bytes(content)
        said = refused(capsys, str(path))
        assert said.startswith(f"python -m mpi_gpucomp: file {path}: expected a .npy file, got ")
        assert said.endswith(". Write one with numpy.save; an array of objects cannot be used.\n")
        assert said.count("\n") == 1


def test_a_file_of_objects_or_of_several_arrays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.array([None, "a"]))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected a .npy file, "
        "got Object arrays cannot be loaded when allow_pickle=False. "
        "Write one with numpy.save; an array of objects cannot be used.\n"
    )
    np.savez(tmp_path / "values.npz", a=np.ones(3))
    assert refused(capsys, f"{tmp_path}/values.npz") == (
        f"python -m mpi_gpucomp: file {tmp_path}/values.npz: expected a .npy file with one array, "
        "got an archive of several. Write one with numpy.save; an array of objects cannot be used.\n"
    )


def test_a_file_of_unknown_or_no_elements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.array(["2020-01-01"], "M8[D]"))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected elements of type uint8, int8, uint16, int16, uint32, int32, "
        "uint64, int64, float16, bfloat16, float32, float64, bool, complex64, complex128, got datetime64[D]. "
        "Convert the array, or say with --dtype what its elements are.\n"
    )
    save(tmp_path, np.ones((3, 0)))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected at least one element, got shape (3, 0). "
        "Choose a file with values.\n"
    )


def test_a_type_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(3))
    assert refused(capsys, path, "--dtype", "bfloat16") == (
        f"python -m mpi_gpucomp: file {path}: expected a type of 8 bytes, as its float64 has, got bfloat16. "
        "--dtype names the elements as they lie in the file; it converts nothing.\n"
    )
    assert refused(capsys, "--dtype", "int8") == (
        "python -m mpi_gpucomp: option --dtype: expected one of float16, bfloat16, float32, float64 where there is no "
        "file, got int8. Name a .npy file with values of this type: --measure FILE.\n"
    )


def test_a_wrong_codec_or_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--codec", "splot").endswith(", got 'splot'. Did you mean split?\n")
    assert refused(capsys, "--device", "gpu") == (
        "python -m mpi_gpucomp: device 'gpu': expected host or cuda:N, got 'gpu'. Name the first GPU cuda:0.\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--codec", "split"], "--codec goes with --measure"),
        (["--chunk", "1KB"], "--chunk goes with --measure"),
        (["--measure", "--chunk", "0"], "expected bytes such as 65536, 64KB or 1MB (of 1024 KB), got '0'"),
        (["--measure", "--chunk", "1.5MB"], "expected bytes such as 65536, 64KB or 1MB (of 1024 KB), got '1.5MB'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["codecs", *args])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize(("text", "chunks"), [("8", 4), ("32", 1), ("1k", 1), ("1KiB", 1), ("1 MB", 1), ("1g", 1)])
def test_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, chunks: int) -> None:
    path = save(tmp_path, np.ones(8, np.float32))
    assert measured(capsys, path, "--codec", "none", "--chunk", text)["none"]["chunks"] == chunks


def errors(name: str, plain: list[float], decoded: list[float]) -> tuple[float, float]:
    kind = ml_dtypes.bfloat16 if name == "bfloat16" else name
    bits = [np.array(x, kind).view("u2") if name == "bfloat16" else np.array(x, kind) for x in (plain, decoded)]
    dtype = dtype_of_name(name)
    assert dtype is not None
    return largest_error(*bits, dtype)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_largest_error(name: str) -> None:
    assert errors(name, [1, 2, 5], [1, 2.5, 5]) == (0.5, 0.125)
    assert errors(name, [1, NAN, 5, INF], [2, NAN, 5, INF]) == (1, 0.25)
    assert errors(name, [1, NAN, 5], [1, 3, 5]) == (INF, INF)
    assert errors(name, [1, 3, 5], [1, NAN, 5]) == (INF, INF)
    assert errors(name, [INF, 1, 2], [-INF, 1, 2]) == (INF, INF)
    assert errors(name, [3, 3], [3, 4]) == (1, INF)
    assert errors(name, [0.0, 3], [-0.0, 3]) == (0, 0)


def test_figures_of_the_codecs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zfpy")
    pytest.importorskip("zstandard")
    from osu_bench.experiments import codec_speed

    codec_speed.main(["--chunk", "65536", "--rounds", "3"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["#", "figure", "measured", "target", "met", "MB/s", "other", "MB/s"]
    targets = {line[:44].rstrip(): float(line[53:61]) for line in lines}
    assert targets == {
        "zfp:rate=8 encode / zfpy": 6,
        "zfp:rate=8 decode / zfpy": 5,
        "bound:abs=0.0002 encode / our zfp:rate=8": 3,
        "split on bfloat16, plain / encoded bytes": 1.45,
        "split on bfloat16 encode / zstd level 1": 1,
        "split on bfloat16 decode / zstd level 1": 1,
        "reduce sum / numpy's in-place add": 0.7,
    }
    codec_speed.main(["--chunk", "65536", "--rounds", "3", "--json"])
    ratio = json.loads(capsys.readouterr().out)[3]
    assert (ratio["measured"] > 1.4, ratio["ours"]) == (True, None)
