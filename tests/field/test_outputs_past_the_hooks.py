"""F38: outputs that a selective checkpoint keeps do not pass autograd's hooks; they go to the tiers
by a policy of ours, or are counted.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy import same_bits

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.checkpointing import SelectiveOpACParams
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.field("F38")

ADDMM, MM = "ops.aten.addmm.default", "ops.aten.mm.default"
NUM_LAYERS, ROWS, WIDTH = 5, 4, 8
OUTPUT_BYTES = ROWS * WIDTH * 4


def layers() -> nn.ModuleList:
    torch.manual_seed(1)
    make = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(NUM_LAYERS))
    return nn.ModuleList(make)


def run(backend: SimulatedBackend, recompute: Recompute | None) -> tuple[int, list]:
    """Device bytes held between forward and backward, and gradients; the second of two steps."""
    model = layers()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        before = backend.device_bytes
        y = x
        for layer in model:
            y = layer(y) if recompute is None else recompute(layer, y)
        loss = y.sum()
        del y
        held = backend.device_bytes - before - loss.nbytes
        loss.backward()
        del loss
    return held, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("keep_inputs", [True, False])
def test_outputs_are_offloaded_or_counted(keep_inputs: bool) -> None:
    """Held per layer: its input but for the first, which is the caller's; its product if saved."""
    backend = SimulatedBackend("eager")
    inputs = (NUM_LAYERS - 1) * OUTPUT_BYTES if keep_inputs else 0
    with backend.activate():
        _, expected = run(backend, None)
        found = {}
        for where in ("save_ops_keys", "offload_ops_keys"):
            policy = SelectiveOpACParams(**{where: [ADDMM]}).policy()
            stash = ActivationStash("ops", min_offload_size=1, backend=backend)
            recompute = Recompute(stash, policy=policy, offload_inputs=not keep_inputs)
            held, gradients = run(backend, recompute)
            assert same_bits(gradients, expected)
            found[where] = held, recompute.counts
    held, counts = found["save_ops_keys"]
    assert held == inputs + NUM_LAYERS * OUTPUT_BYTES
    assert counts.saved_bytes == 2 * NUM_LAYERS * OUTPUT_BYTES and counts.offloaded_bytes == 0
    held, counts = found["offload_ops_keys"]
    assert held == inputs
    assert counts.offloaded_bytes == 2 * NUM_LAYERS * OUTPUT_BYTES and counts.saved_bytes == 0


def test_what_is_too_small_to_go_is_counted() -> None:
    policy = SelectiveOpACParams(offload_ops_keys=[MM, ADDMM]).policy()
    recompute = Recompute(ActivationStash("ops", min_offload_size=OUTPUT_BYTES + 1), policy=policy)
    run(SimulatedBackend("eager"), recompute)
    assert recompute.counts.offloaded_outputs == 0
    assert recompute.counts.saved_bytes == 2 * NUM_LAYERS * OUTPUT_BYTES
