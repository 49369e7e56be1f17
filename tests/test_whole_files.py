"""A file that is replaced is never seen in halves."""

import os
import signal
import subprocess
import sys

import pytest

from dspark_jax.whole_files import replacing


@pytest.mark.parametrize("mode, old, new", [("w", "älter", "neu\n"), ("wb", b"\x00old", b"new")])
def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path, mode, old, new):
    path = tmp_path / "a.b.json"
    read, write = (path.read_bytes, path.write_bytes) if "b" in mode else (path.read_text, path.write_text)
    for before in (None, old):
        if before is not None:
            write(before)
        with replacing(path, mode) as file:
            file.write(new)
            file.flush()
            assert (read() if path.exists() else None) == before
        assert read() == new
        assert os.listdir(tmp_path) == [path.name]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path, "w") as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    program = ("import os, signal, sys\nfrom dspark_jax.whole_files import replacing\n"
               "with replacing(sys.argv[1], 'w') as file:\n    file.write('half')\n    file.flush()\n"
               "    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
