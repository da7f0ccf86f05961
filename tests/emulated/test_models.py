"""Models train on the emulated device with the bits of the CPU, however late its kernels are.

Attention is computed by the same kernel on both: PyTorch has none but the plain one for a device
that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.emulated

LATE = {"kernel_us": 200, "h2d_us": 500, "d2h_us": 500, "jitter_us": 200}


class Block(nn.Module):
    """An embedding, attention and an MLP, with norms and dropout."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(11, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = nn.functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in parts), is_causal=True
            )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))
        return nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten())


def trained(device: str, steps: int = 3) -> list[Tensor]:
    """Losses, gradients and weights, from the same seed each time."""
    torch.manual_seed(0)
    model, tokens = Block().to(device), torch.randint(0, 11, (2, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for _ in range(steps):
        loss = model(tokens.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in (*results, *(p.detach() for p in model.parameters()))]


@pytest.mark.parametrize("delays", [{}, LATE], ids=["at once", "late"])
def test_training_has_the_bits_of_the_cpu(emulated: ModuleType, delays: dict[str, int]) -> None:
    emulated.set_delays(**delays)
    at_once = emulated.run_at_once()
    assert same_bits(trained("emulated"), trained("cpu"))
    drained = {k for k, v in emulated.run_at_once().items() if v > at_once.get(k, 0)}
    assert drained == {"aten::native_dropout"}, "all else is queued"


OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "views": lambda x: x.t()[1:].reshape(-1).unfold(0, 2, 1).expand(2, -1, -1) + 1,
    "bytes": lambda x: x.contiguous().view(torch.uint8),
    "in place": lambda x: x.clone().mul_(2).t_().add_(1),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "lists": lambda x: torch.cat([*torch._foreach_mul([x, x], [2.0, 3.0]), *x.chunk(2)]),
    "mask": lambda x: x[x > 0],
    "indices": lambda x: x[torch.tensor([0, 2])].index_add(
        0, torch.tensor([0, 1], device=x.device), x[:2]
    ),
    "sort": lambda x: torch.cat([part.float() for part in (*x.sort(), *x.topk(2))], 1),
    "conjugate": lambda x: (torch.view_as_complex(x).conj() * 2j + 1).conj(),
    "dtypes": lambda x: x.to(torch.bfloat16).double(),
    "equal": lambda x: torch.tensor(torch.equal(x, x.clone()) and not torch.equal(x, x + 1)),
    "random": lambda x: torch.rand(3, device=x.device) + torch.randn_like(x[0, :1]),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_have_the_bits_of_the_cpu(emulated: ModuleType, operator: str) -> None:
    emulated.set_delays(kernel_us=100)
    compute = OPERATORS[operator]
    x = torch.randn(4, 2)
    torch.manual_seed(1)
    expected = compute(x)
    torch.manual_seed(1)
    result = compute(x.to("emulated"))
    assert isinstance(result, Tensor) and isinstance(expected, Tensor)
    assert result.cpu().equal(expected)
    assert result.stride() == expected.stride()
