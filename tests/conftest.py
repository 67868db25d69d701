"""What every test needs before it imports anything: no network, interpreted GPU kernels, quiet tokenizers, a Hypothesis
profile."""

from __future__ import annotations

import os
import shutil
import subprocess

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"  # no GPU: read once, when Triton is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns about every fork
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a worker for every core

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no complaint about slow generation: both depend on what else the machine is doing.
_ALWAYS = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# New examples on each everyday run; on CI more of them, the same ones for every change.
settings.register_profile("everyday", _ALWAYS, max_examples=50)
settings.register_profile("ci", _ALWAYS, max_examples=150, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "everyday")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    paths = (str(folder / "certificate.pem"), str(folder / "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return paths
