"""An accelerator made of threads: streams that are really late, on a machine without one.

Importing this does nothing. ``load()`` builds the device (once for each version of its source and
of PyTorch, up to a minute on two cores; after that 0.1 s) and registers it for the rest of the
process.

    emulated = load()
    emulated.set_delays(kernel_us=200)
    with emulated.hold(torch.accelerator.current_stream()) as gate:
        ...                              # queued behind the gate
        gate.release()

What load() changes in a process, and why tests load it in a process of their own:

- ``torch.accelerator.current_accelerator()`` is ``emulated``, so ``default_backend()`` takes it.
- ``pin_memory=True`` gives memory of this device's allocator, which without one is an error.
- A backward that ran before has started autograd's device threads, and none for this device: load()
  raises then. It runs a backward itself, so that these threads are there. There is no way back.
- Random numbers come from the generator of the CPU, so a seed gives the same on both.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

NAME = "emulated"
SOURCES = ("queues.cpp", "memory.cpp", "operators.cpp", "autocast.cpp", "device.cpp")
_HERE = Path(__file__).parent


class EmulatedDeviceError(RuntimeError):
    """The emulated device cannot be built here, or not be loaded any more."""


def load() -> ModuleType:
    """The module ``torch.emulated``; builds and registers the device when called first.

    Raises:
        EmulatedDeviceError: It cannot be built; it says what is missing.
    """
    loaded = sys.modules.get(f"torch.{NAME}")
    return _registered(_built()) if loaded is None else loaded


def _library() -> Path:
    """In a folder named by its sources, so that a checkout never loads what another one built."""
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__} {sys.version}".encode())
    for path in sorted(_HERE.glob("*.cpp")) + sorted(_HERE.glob("*.h")):
        key.update(path.read_bytes())
    folder = f"{NAME}-{os.getuid()}-{key.hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / folder / f"{NAME}_device.so"


def _built() -> Path:
    """The library; processes that want it at once wait for the first of them to build it."""
    library = _library()
    library.parent.mkdir(mode=0o700, exist_ok=True)
    if library.parent.stat().st_uid != os.getuid():
        raise EmulatedDeviceError(f"{library.parent} belongs to somebody else; remove it")
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    # Tools are beside this Python first, for an environment need not be entered.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    in_path = mock.patch.dict(os.environ, PATH=path)
    with in_path, tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        try:
            cpp_extension.load(
                library.stem,
                [str(_HERE / source) for source in SOURCES],
                extra_cflags=["-O1", "-g0"],
                build_directory=scratch,
                is_python_module=False,
                is_standalone=False,
            )
        except (OSError, RuntimeError) as failure:
            raise EmulatedDeviceError(
                f"the emulated device was not built: {failure}; expected a C++17 compiler, ninja, "
                "and the headers of Python and of this PyTorch"
            ) from failure
        os.replace(Path(scratch) / library.name, library)  # whole, or not there


def _registered(library: Path) -> ModuleType:
    """The module around a library, which PyTorch knows from now on."""
    from . import module

    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None and spec.loader is not None
    module.native = native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Threads of the device must not run into an interpreter that is torn down.
    atexit.register(native.synchronize)
    try:  # a process starts autograd's threads once, at its first backward
        torch.zeros((), device=NAME, requires_grad=True).clone().backward()
    except RuntimeError as failure:
        raise EmulatedDeviceError(
            "a backward ran in this process before the device was loaded, so autograd has no "
            "thread for it; load it first, or in a process of its own"
        ) from failure
    return module
