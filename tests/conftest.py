"""What every test shares: no network outside loopback, a cache of its own, the repository's root."""

import os
import runpy
import shutil
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUARD = str(ROOT / "tests" / "no_network")
_SCRATCH = Path(tempfile.mkdtemp(prefix="orion-tests-"))
_NETWORK_LOG = _SCRATCH / "network.log"

os.environ["ORION_NETWORK_LOG"] = str(_NETWORK_LOG)
os.environ["HF_HOME"] = str(_SCRATCH / "hf-home")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # datasets would count uses on a server
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [GUARD, str(ROOT), os.environ.get("PYTHONPATH", "")]))
for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
    os.environ.pop(variable, None)

runpy.run_path(str(Path(GUARD) / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def no_network_attempts():
    """Fail the test during which anything, child processes included, tried to leave this machine."""
    _NETWORK_LOG.write_text("", encoding="utf-8")
    yield
    attempts = _NETWORK_LOG.read_text(encoding="utf-8").split()
    assert not attempts, f"the test tried to reach {attempts}"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def scratch_is_removed():
    yield
    shutil.rmtree(_SCRATCH, ignore_errors=True)


@pytest.fixture
def hub():
    """An empty Hub on loopback with one user, ``ada``, who is a member of ``org``."""
    from hub_server import HubServer

    with HubServer() as server:
        yield server
