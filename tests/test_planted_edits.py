"""The tool that plants faults plants them, and says so where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from planted.edits import EDITS, DoesNotApplyError, Edit, edited, install
from planted.seam import SEAM

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, RaceError, use_backend
from pp_offload.testing import SimulatedBackend

ROOT = Path(__file__).parents[1]

SOURCE = """
class Box:
    def is_new(self, version):
        if version != 1:
            raise ValueError(version)
        return version != 2
"""


def of(old: str, new: str, function: str = "Box.is_new") -> Edit:
    return Edit("box_with_a_fault", function, old, new, "wrong")


@pytest.mark.parametrize(
    "edit", [of("version != 1", "False"), of("raise ValueError(version)", "pass")]
)
def test_an_edit_is_made_at_the_import(
    edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "box_with_a_fault.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install(edit)
    box = sys.modules.pop("box_with_a_fault").Box()
    assert box.is_new(5) is True
    assert box.is_new(2) is False


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (of("version", "1"), "3 times"),
        (of("version == 1", "False"), "0 times"),
        (of("version != 1", "False", "Box.is_old"), "has no Box.is_old"),
    ],
)
def test_an_edit_that_does_not_apply_says_so(edit: Edit, says: str) -> None:
    with pytest.raises(DoesNotApplyError, match=says):
        edited(edit, SOURCE)


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_applies(name: str) -> None:
    edit = EDITS[name]
    edited(edit, (ROOT / f"{edit.module.replace('.', '/')}.py").read_text())


def test_every_fault_says_what_goes_wrong_and_where_it_is_caught() -> None:
    for fault in [*SEAM.values(), *EDITS.values()]:
        assert fault.why and all((ROOT / test).exists() for test in fault.tests)


def test_a_fault_of_a_device_is_an_error() -> None:
    backend = SimulatedBackend("late")
    SEAM["d2h ignores compute"].plant(backend)
    with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)):
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.ones(4, 4, requires_grad=True)
        with off_interface(True, x, "part"):
            y = (x * 2).sin()
        with pytest.raises(RaceError):
            off_interface.group_commit(y, name="part")
