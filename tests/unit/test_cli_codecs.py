"""The command `codecs`: the list, measurements on files and random data, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpi_gpucomp.cli.codecs import largest_error, random_weights
from mpi_gpucomp.cli.main import main
from mpi_gpucomp.device import Device, dtype_of_name, library

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
QUICK = ["--seconds", "0", "--json"]

LISTED = """\
codec           lossless  types             host         GPU     best for
none            yes       any               yes          no GPU  no encoding
split           yes       f16 bf16 f32 f64  yes          no GPU  floats, especially weights and gradients
mpc:stride=4    yes       f32 f64           yes          no GPU  smooth floats
zfp:rate=8      no        f16 bf16 f32 f64  yes          no GPU  floats, with a fixed compressed size
bound:rel=1e-4  no        f16 bf16 f32 f64  yes          no GPU  floats, with a bounded error
cast:bf16       no        f32               yes          no GPU  floats, rounded to half the size
auto            yes       any               yes          no GPU  any values: the fastest lossless codec per chunk
lz4             yes       any               yes          no GPU  any bytes
snappy          yes       any               yes          no GPU  any bytes
zstd            yes       any               yes          no GPU  any bytes
deflate         yes       any               yes          no GPU  any bytes
gdeflate        yes       any               needs a GPU  no GPU  any bytes
ans             yes       any               needs a GPU  no GPU  any bytes
bitcomp         yes       any               needs a GPU  no GPU  any bytes
cascaded        yes       any               needs a GPU  no GPU  any bytes
"""

BARE = """\
host library: {level}, {path}
GPU: none. device cuda:0: expected CuPy, got 'import of cupy halted; None in sys.modules'. \
Install it: 'pip install mpi_gpucomp[cuda13]' (or cuda12), and an NVIDIA driver.

codec           lossless  types             host           GPU     best for
none            yes       any               yes            no GPU  no encoding
split           yes       f16 bf16 f32 f64  yes            no GPU  floats, especially weights and gradients
mpc:stride=4    yes       f32 f64           yes            no GPU  smooth floats
zfp:rate=8      no        f16 bf16 f32 f64  yes            no GPU  floats, with a fixed compressed size
bound:rel=1e-4  no        f16 bf16 f32 f64  yes            no GPU  floats, with a bounded error
cast:bf16       no        f32               yes            no GPU  floats, rounded to half the size
auto            yes       any               yes            no GPU  any values: the fastest lossless codec per chunk
lz4             yes       any               needs cramjam  no GPU  any bytes
snappy          yes       any               needs cramjam  no GPU  any bytes
zstd            yes       any               needs cramjam  no GPU  any bytes
deflate         yes       any               needs cramjam  no GPU  any bytes
gdeflate        yes       any               needs a GPU    no GPU  any bytes
ans             yes       any               needs a GPU    no GPU  any bytes
bitcomp         yes       any               needs a GPU    no GPU  any bytes
cascaded        yes       any               needs a GPU    no GPU  any bytes

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

class Undecodable(Own):
    name = "undecodable"
    def decode(self, source, nbytes, to, stream):
        return self.failed(to.count, "noise")

class Interrupted(Own):
    name = "interrupted"
    def encode(self, source, to, stream):
        signal.raise_signal(signal.SIGINT)

for codec in (Signless, Idle, Undecodable, Interrupted):
    register(codec.name, codec.from_parameters, "tests")
"""
ODD_CODECS = """
import sys
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.registry import get_codec, register

class Failing(Raw):
    def encode(self, source, to, stream):
        raise ZeroDivisionError("no reason")

register("failing", lambda parameters: Failing(), "tests")
register("invalid", lambda parameters: get_codec("none:no"), "tests")
"""


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=WITHOUT_GPU, **options)


def save(tmp_path: Path, array: Any) -> str:
    path = tmp_path / "values.npy"
    np.save(path, array)
    return str(path)


def measured(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Measure codecs in this process and return the result of each."""
    assert main(["codecs", "--measure", *args, *QUICK]) == 0
    return {found["codec"]: found for found in json.loads(capsys.readouterr().out)["codecs"]}


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the error message of a measurement that is refused."""
    assert main(["codecs", "--measure", *args, *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


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


def test_codecs_runs_without_the_host_library() -> None:
    no_library = "from pathlib import Path\nfrom mpi_gpucomp.device import library\n"
    no_library += "library.library_directory = lambda: Path('nowhere')\n"
    done = python("-c", HIDE + no_library + RUN, "codecs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert listed["host library"].startswith("none. host library: expected a library for ")
    cells = {row["codec"]: row["host"] for row in listed["codecs"]}
    assert (cells["none"], cells["split"]) == ("yes", "needs the host library")
    assert listed["notes"][0].startswith("split on the host, mpc on the host, zfp on the host, ")


def test_user_codecs_are_listed_even_if_they_fail() -> None:
    done = python("-c", ODD_CODECS + RUN, "codecs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    failing = {"codec": "failing", "lossless": "yes", "types": "any", "host": "fails"}
    invalid = {"codec": "invalid", "lossless": "?", "types": "?", "host": "?"}
    assert listed["codecs"][-2] == failing | {"GPU": "no GPU", "best for": "tests"}
    assert listed["codecs"][-1] == invalid | {"GPU": "?", "best for": "tests"}
    assert listed["notes"] == [
        "failing on the host: ZeroDivisionError: no reason",
        "invalid: codec none: expected no parameters, got 'no'. Write none.",
    ]


def test_codecs_on_a_gpu(gpu: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "cuda:0" in listed["GPU"]
    assert {row["GPU"] for row in listed["codecs"][:6]} == {"yes"}
    found = measured(capsys, "--device", "cuda:0", "--codec", "zfp:rate=8", "split")
    assert (found["zfp:rate=8"]["ratio"], found["split"]["wrong"]) == (4.0, "")


def test_a_closed_pipe_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mpi_gpucomp", "codecs"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, timeout=120, env=WITHOUT_GPU, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_measure_without_a_file_prints_a_table() -> None:
    done = python("-m", "mpi_gpucomp", "codecs", "--measure", "--seconds", "0", "--codec", "none", "zfp:rate=8")
    assert (done.returncode, done.stderr) == (0, "")
    about, empty, header, none, zfp = done.stdout.splitlines()
    assert about == "normal(0, 0.02): 1048576 x float32 in chunks of 1048576 bytes on host, 1 thread"
    assert empty == ""
    assert header.split("  ")[0] == "codec"
    assert header.endswith("ratio  encode GB/s  decode GB/s  largest error  relative error  note")
    assert none.split()[:2] == ["none", "1.00"]
    assert none.endswith("  none               -  4 of 4 chunks raw")
    assert zfp.split()[:2] == ["zfp:rate=8", "4.00"]


def test_measure_uses_all_codecs_for_the_element_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
def test_measure_reads_arrays_of_any_float_type_and_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: Any, form: Any
) -> None:
    values = np.random.default_rng(1).normal(size=(5, 8, 25)).astype(dtype)
    path = save(tmp_path, np.asarray(values, order=form))
    found = measured(capsys, path, "--codec", "split", "zfp:rate=8", "--chunk", "1KB")
    assert found["zfp:rate=8"]["ratio"] == pytest.approx(values.itemsize, rel=0.05)
    assert 0 < found["zfp:rate=8"]["largest_error"] < 0.7
    assert found["split"]["chunks"] == -(-values.nbytes // 1024)
    assert (found["split"]["largest_error"], found["split"]["wrong"]) == (0, "")


def test_measure_with_threads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(1 << 18, np.float32))
    found = measured(capsys, path, "--threads", "--codec", "zfp:rate=8")["zfp:rate=8"]
    assert (found["ratio"], found["largest_error"]) == (4, 0)


def test_dtype_reinterprets_uint16_as_bfloat16(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bits = np.full(64, 1.5, ml_dtypes.bfloat16).view(np.uint16)
    found = measured(capsys, save(tmp_path, bits), "--dtype", "bfloat16", "--codec", "zfp:rate=16")
    assert (found["zfp:rate=16"]["unavailable"], found["zfp:rate=16"]["largest_error"]) == ("", 0)


def test_random_weights_have_the_requested_type() -> None:
    bits = random_weights("bfloat16").array
    assert np.array_equal(bits.view(ml_dtypes.bfloat16), _drawn().astype(np.float32).astype(ml_dtypes.bfloat16))
    assert np.array_equal(random_weights("float16").array, _drawn().astype(np.float16))


def _drawn() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, 1 << 21)


def test_measure_counts_raw_chunks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = np.ones((3, 256), np.float32)
    values[1, 7] = np.nan
    found = measured(capsys, save(tmp_path, values), "--chunk", "1024", "--codec", "zfp:rate=8", "none")
    assert (found["zfp:rate=8"]["chunks"], found["zfp:rate=8"]["raw_chunks"]) == (3, 1)
    assert found["zfp:rate=8"]["ratio"] == pytest.approx(3072 / (256 + 1024 + 256))
    assert (found["none"]["raw_chunks"], found["none"]["ratio"]) == (3, 1)


def test_a_codec_without_encoded_chunks_has_no_decode_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = measured(capsys, save(tmp_path, np.full(8, np.nan, np.float32)), "--codec", "zfp:rate=8")["zfp:rate=8"]
    assert (found["ratio"], found["decode_speed"], found["largest_error"]) == (1, None, 0)


def test_measure_names_the_reason_why_a_codec_is_unavailable(tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(100))
    specs = ["lz4", "gdeflate", "cast:bf16"]
    done = python("-c", HIDE + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", *specs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "values.npy: 100 x float64 in chunks of 1048576 bytes on host, 1 thread\n"
        "\n"
        "codec      ratio  encode GB/s  decode GB/s  largest error  relative error  note\n"
        "lz4            -            -            -              -               -  "
        "needs cramjam. Install it with 'pip install mpi_gpucomp[codecs]'.\n"
        "gdeflate       -            -            -              -               -  needs a GPU\n"
        "cast:bf16      -            -            -              -               -  needs elements of type float32. "
        "Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them.\n"
    )


@pytest.mark.parametrize(
    ("codec", "note"),
    [
        ("signless", "WRONG: is not lossless"),
        ("idle", "WRONG: is not lossless"),
        ("undecodable", "WRONG: cannot decode its own output: noise"),
    ],
)
def test_a_defective_codec_is_a_failure(tmp_path: Path, codec: str, note: str) -> None:
    path = save(tmp_path, np.full(8, -0.0, np.float32))
    done = python("-c", OWN_CODECS + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", "none", codec)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].endswith(f"  {note}")


def test_an_interrupt_prints_the_finished_measurements(tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(8, np.float32))
    specs = ["zfp:rate=8", "interrupted", "none"]
    done = python("-c", OWN_CODECS + RUN, "codecs", "--measure", path, "--seconds", "0", "--codec", *specs)
    assert (done.returncode, done.stderr) == (130, "interrupted: 1 of 3 codecs measured\n")
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == ["zfp:rate=8"]


def test_a_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, f"{tmp_path}/none.npy") == (
        f"python -m mpi_gpucomp: file {tmp_path}/none.npy: expected a .npy file, got No such file or directory. "
        "Write one with numpy.save; an array of objects cannot be used.\n"
    )


def test_a_malformed_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    path.write_bytes(b"words")
    assert refused(capsys, str(path)) == (
        f"python -m mpi_gpucomp: file {path}: expected a .npy file, got a file without its header. "
        "Write one with numpy.save; an array of objects cannot be used.\n"
    )
    for content in (b"", b"words", b"\x93NUMPY\x01\x00", Path(save(tmp_path, np.ones(9))).read_bytes()[:-1]):
        path.write_bytes(content)
        message = refused(capsys, str(path))
        assert message.startswith(f"python -m mpi_gpucomp: file {path}: expected a .npy file, got ")
        assert message.endswith(". Write one with numpy.save; an array of objects cannot be used.\n")
        assert message.count("\n") == 1


def test_a_file_of_objects_or_of_several_arrays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.array([None, "a"]))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected a .npy file, "
        "got an array of objects. "
        "Write one with numpy.save; an array of objects cannot be used.\n"
    )
    np.savez(tmp_path / "values.npz", a=np.ones(3))
    assert refused(capsys, f"{tmp_path}/values.npz") == (
        f"python -m mpi_gpucomp: file {tmp_path}/values.npz: expected a .npy file with one array, "
        "got an archive of several. Write one with numpy.save; an array of objects cannot be used.\n"
    )


def test_a_file_with_unsupported_or_no_elements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.array(["2020-01-01"], "M8[D]"))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected elements of type uint8, int8, uint16, int16, uint32, int32, "
        "uint64, int64, float16, bfloat16, float32, float64, bool, complex64, complex128, got datetime64[D]. "
        "Convert the array, or name the element type with --dtype.\n"
    )
    save(tmp_path, np.ones((3, 0)))
    assert refused(capsys, path) == (
        f"python -m mpi_gpucomp: file {path}: expected at least one element, got shape (3, 0). "
        "Choose a file with values.\n"
    )


def test_an_unsuitable_element_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path, np.ones(3))
    assert refused(capsys, path, "--dtype", "bfloat16") == (
        f"python -m mpi_gpucomp: file {path}: expected a type of 8 bytes, like its float64, got bfloat16. "
        "--dtype reinterprets the elements of the file; it does not convert them.\n"
    )
    assert refused(capsys, "--dtype", "int8") == (
        "python -m mpi_gpucomp: option --dtype: expected one of float16, bfloat16, float32, float64 without a "
        "file, got int8. Name a .npy file with values of this type: --measure FILE.\n"
    )


def test_an_unknown_codec_or_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--codec", "splot").endswith(", got 'splot'. Did you mean split?\n")
    assert refused(capsys, "--device", "gpu") == (
        "python -m mpi_gpucomp: device 'gpu': expected host or cuda:N, got 'gpu'. Name the first GPU cuda:0.\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--codec", "split"], "--codec requires --measure"),
        (["--chunk", "1KB"], "--chunk requires --measure"),
        (["--measure", "--chunk", "0"], "expected a size such as 512K or 64MB, got '0'"),
        (["--measure", "--chunk", "1.5TB"], "expected a size such as 512K or 64MB, got '1.5TB'"),
    ],
)
def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["codecs", *args])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")


@pytest.mark.parametrize(("text", "chunks"), [("8", 4), ("32", 1), ("1k", 1), ("1KiB", 1), ("1 MB", 1), ("1g", 1)])
def test_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, chunks: int) -> None:
    path = save(tmp_path, np.ones(8, np.float32))
    assert measured(capsys, path, "--codec", "none", "--chunk", text)["none"]["chunks"] == chunks


def errors(name: str, raw: list[float], decoded: list[float]) -> tuple[float, float]:
    kind = ml_dtypes.bfloat16 if name == "bfloat16" else name
    bits = [np.array(x, kind).view("u2") if name == "bfloat16" else np.array(x, kind) for x in (raw, decoded)]
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
        "split on bfloat16, raw / encoded bytes": 1.45,
        "split on bfloat16 encode / zstd level 1": 1,
        "split on bfloat16 decode / zstd level 1": 1,
        "reduce sum / numpy's in-place add": 0.7,
    }
    codec_speed.main(["--chunk", "65536", "--rounds", "3", "--json"])
    ratio = json.loads(capsys.readouterr().out)[3]
    assert (ratio["measured"] > 1.4, ratio["ours"]) == (True, None)
