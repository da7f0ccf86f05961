"""What was changed in place is refused where autograd refuses it: when backward asks for it."""

from __future__ import annotations

import pytest
import torch
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, SavedTensorModifiedError


@pytest.mark.parametrize("is_delayed", [False, True], ids=["at once", "delayed"])
def test_a_changed_tensor_harms_only_who_asks_for_it(
    manager: PipelineOffloadManager, is_delayed: bool
) -> None:
    """Its group is committed, the others of the group leave, and no step fails for its sake."""
    x = torch.linspace(-1, 1, 12).view(3, 4).to(manager.backend.device).requires_grad_()
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    changed, other = x * 2, x * 3
    with off_interface(True, x, "core"):
        unused, used = changed.sin(), other.sin()
        changed.add_(1)
    off_interface.group_commit(used, name="core", delay_offload=is_delayed)
    if is_delayed:
        manager.reset()
    assert manager.statistics().bytes_offloaded == other.nbytes
    (got,) = torch.autograd.grad(used.sum(), x)
    assert same_bits([got], list(torch.autograd.grad((x * 3).sin().sum(), x)))
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(3, 4\).*core"):
        unused.sum().backward()
    manager.reset()
    del unused, used
    torch.ones((), requires_grad=True).backward()  # autograd forgets the backward that failed
    assert_idle(manager)
