"""The smoke suite on each Python and each torch: ``nox -s smoke``.

Most wheels of torch are CUDA builds, of about 3 GB with what they depend on. A session fails where
there is no wheel for its Python.
"""

from __future__ import annotations

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14")

SMOKE = ("tests/test_smoke.py", "tests/common/test_torch_private.py")
"""As in tools/with_torch.py."""


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def smoke(session: nox.Session, torch: str) -> None:
    """Each product and each schedule, bit for bit."""
    session.install("--only-binary", "torch", f"torch=={torch}.*", "numpy", "pytest", "xxhash")
    session.install("--no-deps", ".")
    session.run("python", "-m", "pytest", "-m", "smoke", *SMOKE, *session.posargs)
