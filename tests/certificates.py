"""A self-signed certificate for localhost, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

MAKE = [
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=localhost",
    "-addext",
    "subjectAltName=DNS:localhost",
]


def make_certificate(directory: Path) -> Path:
    """Return a file with a certificate and its key; skip the test if there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine")
    path, key = directory / "localhost.pem", directory / "localhost.key"
    made = [openssl, *MAKE, "-keyout", str(key), "-out", str(path)]
    subprocess.run(made, check=True, capture_output=True)
    path.write_text(path.read_text() + key.read_text())
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context
