"""Files that are there as a whole or not at all, even after a kill in the middle of writing."""

import contextlib
import os
import pathlib


@contextlib.contextmanager
def replacing(path, mode="wb"):
    """A file open for writing ("wb", or "w": UTF-8) that takes the place of ``path`` where the block ends without an exception.

    It lies beside ``path``, under its name and ".tmp", so that taking the place is one step of the file system.
    """
    path = pathlib.Path(path)
    scratch = path.with_name(path.name + ".tmp")
    try:
        with open(scratch, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
