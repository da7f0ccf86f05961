"""A small stack of layers with engine markers, and steps of it with and without offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from helpers.nets import train
from helpers.sessions import group
from pp_offload.backends import CpuBackend


class AwayBackend(CpuBackend):
    """Threads that copy, for what is taken for an accelerator: a disk tier has to stage."""

    def __init__(self) -> None:
        super().__init__(inline_bytes=0)
        self.is_host = False


class Layer(nn.Module):
    """Attention-like and MLP-like parts, each a group if named in ``groups``."""

    def __init__(self, width: int, groups: Sequence[str]) -> None:
        super().__init__()
        self.groups = groups
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        is_mix, is_mlp = "mix" in self.groups, "mlp" in self.groups
        x = x + group(x, lambda h: torch.tanh(self.mix(h)).sin(), is_mix, "mix")
        return x + group(x, lambda h: self.down(torch.sigmoid(self.up(h))), is_mlp, "mlp")


def make_model(
    layers: int = 3, width: int = 8, groups: Sequence[str] = ("mix", "mlp"), device: str = "cpu"
) -> nn.Sequential:
    """The same weights every time."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(*(Layer(width, groups) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(device)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, with weights that are shared still shared.

    PyTorch sees to that for the devices it knows. On that of a plug-in each use of a parameter
    becomes one of its own, unless it is asked to exchange what is inside.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def batches(num: int, width: int = 8, step: int = 0, length: int = 5) -> list[Tensor]:
    """Inputs of one step, the same every time."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(length, width, generator=generator) for _ in range(num)]


def run_step(
    model: nn.Module, inputs: Sequence[Tensor], *, in_flight: int = 1, offload: bool = True
) -> list[Tensor]:
    """One step in 1F1B order with ``in_flight`` forwards ahead; losses and all gradients."""
    return train(model, inputs, offload, ahead=in_flight)


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def repeated(run: Callable[[], Sequence[Tensor]], *, most: int = 4) -> Sequence[Tensor]:
    """What a plain run comes to, once two in a row agree bit for bit: what to compare with.

    A model of another library may have state that outlives a run (a config that the trainer
    writes to, a cache, a kernel chosen by a measurement).
    """
    results = run()
    for _ in range(most - 1):
        before, results = results, run()
        if same_bits(before, results):
            return results
    raise AssertionError(f"of {most} runs without offload no two in a row are equal bit for bit")


def num_hooks(model: nn.Module) -> int:
    """Around forwards of its modules, and forwards of modules in place of their classes'."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks + sum("forward" in vars(module) for module in model.modules())
