"""A model's activations offloaded, but for those of its output head, which backward needs at once.

with get_lora_act_offloading_ctx_manager(model):
    loss = model(**batch).loss
loss.backward()
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch.nn import Module

from pp_offload.activations import NoOpManager, OffloadActivations
from pp_offload.backends import Backend

HEADS = (
    "output.linear",
    "output",
    "lm_head",
    "decoder.output",
    "decoder.lm_head",
    "final_layer_norm",
    "norm",
    "head",
)
"""Where models have their output head, or what comes last; the first that is there is taken."""


def get_act_offloading_ctx_manager(
    model: Module, enable_activation_offloading: bool, *, backend: Backend | None = None
) -> OffloadActivations | NoOpManager:
    """A context for the forward of ``model``.

    Args:
        model: Its parameters and buffers stay on the device, and what its output head saves.
        enable_activation_offloading: False for a context in which nothing is offloaded.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Source: torchtune ``get_act_offloading_ctx_manager``.
    """
    if not enable_activation_offloading:
        return NoOpManager()
    return get_lora_act_offloading_ctx_manager(model, backend=backend)


def get_lora_act_offloading_ctx_manager(
    model: Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
    *,
    head: Module | str | None = None,
    backend: Backend | None = None,
) -> OffloadActivations:
    """A context for the forward of ``model``, which may be wrapped, by PEFT for instance.

    Args:
        model: Its parameters and buffers stay on the device, and what its output head saves.
        use_pin_memory: See :class:`pp_offload.activations.OffloadActivations`.
        use_streams: Likewise.
        min_offload_size: Likewise.
        max_fwd_stash_size: Likewise.
        warn_if_no_head: Warn if no output head is found.
        head: The output head, or its name in the model; found by :data:`HEADS` when None.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Raises:
        ValueError: ``head`` names no module of the model.

    Source: TRL and axolotl ``get_lora_act_offloading_ctx_manager``.
    """
    offload = OffloadActivations(
        use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, backend=backend
    )
    offload.keep_module(model)
    found = _named(model, head) if isinstance(head, str) else head or find_head(model)
    if found is not None:
        leave_out(found)
    elif warn_if_no_head:
        warnings.warn(
            f"no output head found in {type(model).__name__}: none of {', '.join(HEADS)}; what it "
            "saves is offloaded and needed at once; name it with head=, or pass "
            "warn_if_no_head=False",
            stacklevel=2,
        )
    for module in liger_modules(model):
        leave_out(module)
    return offload


def unwrapped(model: Module) -> Module:
    """The model inside ``.module`` wrappers and PEFT's."""
    while True:
        inner = getattr(model, "module", None)
        if not isinstance(inner, Module):
            inner = getattr(getattr(model, "base_model", None), "model", None)
        if not isinstance(inner, Module) or inner is model:
            return model
        model = inner


def find_head(model: Module) -> Module | None:
    """The output head, by its usual names."""
    inner = unwrapped(model)
    for name in HEADS:
        found: object = inner
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, Module):
            return found
    return None


def liger_modules(model: Module) -> Iterator[Module]:
    """Liger's fused modules keep what they need themselves."""
    for name, module in model.named_modules():
        if "liger" in name.lower() or "liger" in type(module).__name__.lower():
            yield module


def leave_out(module: Module) -> None:
    """From now on, what ``module`` saves in its forward stays on the device. Twice is fine."""
    if any(isinstance(hook, _Around) for hook in module._forward_pre_hooks.values()):
        return
    scope = NoOpManager()
    module.register_forward_pre_hook(_Around(scope.__enter__))
    module.register_forward_hook(_Around(scope.__exit__), always_call=True)


class _Around:
    """A forward hook that calls something without arguments, and is known again."""

    def __init__(self, call: object) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        self._call()  # type: ignore[operator]


def _named(model: Module, name: str) -> Module:
    for one in (model, unwrapped(model)):
        if name in dict(one.named_modules()):
            return one.get_submodule(name)
    raise ValueError(
        f"head is {name!r}, but the model has no module of that name; expected one of "
        "model.named_modules()"
    )
