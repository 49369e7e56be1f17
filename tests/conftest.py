"""What all tests share: eight devices made of one CPU, compiled programs, and one loaded SmolLM2."""

import os
import tempfile

import pytest

# Read by jax when it starts its backend, so before anything imports it. A number of devices that the user chose stays.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Programs that tests start compile what another test has compiled already: this cache saves them a third of their time.
# It lasts as long as the session, so that nothing stale and nothing from another machine is ever read.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="dspark_jax_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Compiled programs are forgotten with the module that made them. Each is several mappings of memory, of which Linux gives
    a process 65,530: the whole suite in one process has more, and XLA ends a process that gets none."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2():
    """The SmolLM2-135M-Instruct target, loaded once. Tests that use it are marked `target`."""
    import dspark_jax as ds

    return ds.load_target("smollm2-135m-instruct")
