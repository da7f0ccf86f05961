"""Pipeline described by options: its model, schedule and device."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import use_backend
from pp_offload._common.checks import near
from pp_offload.cli.arguments import any_error_of, errors_of, wrong
from pp_offload.simulate import DEVICES, Hardware, Modules, PipelineOrder, VirtualBackend
from pp_offload.simulate.schedules import checked_stages, order_of
from pp_offload.simulate.stages import MakeOptimizer

HOW = (
    "expected a function that takes num_stages and length by name and returns a Modules of "
    "pp_offload.simulate; docs/cli.md has one"
)


@dataclass(frozen=True)
class Pipeline:
    """Parts of a pipeline."""

    order: PipelineOrder
    work: Modules
    hardware: Hardware
    title: str
    option: str  # or several, which describe the model and its optimizer, for errors


def pipeline_of(given: Namespace) -> Pipeline:
    """Make the pipeline, which may take long; check other options first."""
    if (given.model is None) == (given.hf is None):
        count = "neither" if given.model is None else "both"
        raise wrong("MODEL", f"found {count} of module:function and --hf, expected one of the two")
    hardware = hardware_of(given.hardware)
    with errors_of("--schedule"):
        num_stages = checked_stages(given.schedule, given.virtual_stages)
        order = order_of(
            given.schedule,
            num_ranks=given.ranks,
            stages_per_rank=num_stages,
            num_microbatches=given.microbatches,
        )
    make = from_function if given.hf is None else from_hugging_face
    work = make(given.model or given.hf, given.ranks * num_stages, given.length)
    if given.groups is not None:
        work.groups = _chosen(given.groups, work.groups)
    names = "groups that the model marks" if work.groups is None else " and ".join(work.groups)
    title = f"{given.model or given.hf} on {given.ranks} virtual {hardware.name}, {given.schedule}"
    title += f", {num_stages} stage{'s' * (num_stages > 1)} each, {given.microbatches} microbatches"
    title += f" of {given.length} tokens; {names} may leave"
    option = "MODEL" if given.hf is None else "--hf"
    if given.optimizer is not None:
        work.optimizer = optimizer_of(given.optimizer)
        title += f"; {given.optimizer} ends a step"
        option += " or --optimizer"
    return Pipeline(order, work, hardware, title, option)


def hardware_of(name: str) -> Hardware:
    """Return a device from the table, or from a file."""
    if Path(name).is_file():
        with errors_of("--hardware", OSError):
            return Hardware.from_file(name)
    try:
        return DEVICES[name]
    except KeyError as failure:
        problem = f"{failure.args[0]}, or a file that pp-offload doctor --measure has written"
        raise wrong("--hardware", problem) from failure


def _chosen(names: str, groups: Any) -> dict[str, Any]:
    if groups is None:
        problem = f"found {names!r}, but the model marks its groups itself; leave it out"
        raise wrong("--groups", problem)
    chosen = [name for name in names.split(",") if name]
    if not chosen or not set(chosen) <= set(groups):
        problem = f"found {names!r}, expected some of {','.join(groups)} with commas"
        raise wrong("--groups", problem)
    return {name: groups[name] for name in chosen}


def from_function(name: str, num_stages: int, length: int) -> Modules:
    """Call a user's function for its model. Errors of the function keep their traceback."""
    function = _imported(name, "MODEL", "such as my_model:stages", HOW)
    try:
        inspect.signature(function).bind(num_stages=1, length=1)
    except TypeError as failure:
        raise wrong("MODEL", f"{name} cannot be called so: {failure}; {HOW}") from failure
    with errors_of("MODEL"):
        work = function(num_stages=num_stages, length=length)
    if not isinstance(work, Modules):
        raise wrong("MODEL", f"{name} returned a {type(work).__name__}, {HOW}")
    if len(work.stages) != num_stages:
        problem = f"{name} returned {len(work.stages)} stages, expected num_stages: {num_stages}"
        raise wrong("MODEL", problem)
    return work


def _imported(name: str, option: str, example: str, how: str) -> Callable[..., Any]:
    """Import ``module:function``, also from a module in the current directory."""
    module_name, _, function_name = name.partition(":")
    module_name = module_name.removeprefix("./").removesuffix(".py")  # as a shell completes it
    if not (module_name and function_name) or module_name.startswith("."):
        raise wrong(option, f"found {name!r}, expected module:function, {example}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        if failure.name is None or not f"{module_name}.".startswith(f"{failure.name}."):
            raise  # the module exists; a module that it imports does not
        problem = f"no module {failure.name!r} here or installed, expected that of module:function"
        raise wrong(option, f"{problem}; go where it is, or set PYTHONPATH") from failure
    finally:
        sys.path.remove(os.getcwd())
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        problem = "is no function" if hasattr(module, function_name) else "is not there"
        raise wrong(option, f"{function_name} of {module_name} {problem}, {how}")
    return function


def optimizer_of(name: str) -> MakeOptimizer:
    """Return a maker of optimizers: a class of ``torch.optim``, or a user's function."""
    option, how = "--optimizer", "a function of a list of parameters that returns an optimizer"
    if ":" in name:
        return _imported(name, option, "such as my_model:optimizer", f"expected {how}")
    classes = {each: kind for each, kind in vars(torch.optim).items() if isinstance(kind, type)}
    names = [each for each, kind in classes.items() if issubclass(kind, torch.optim.Optimizer)]
    if name not in names:
        expected = "expected a class of torch.optim, such as AdamW, or module:function"
        raise wrong(option, f"found {name!r}{near(name, names)}, {expected}")

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        problem = f"{name} cannot be made of the parameters of a rank alone"
        advice = "or module:function, whose function makes one of those parameters that it takes"
        with any_error_of(option, problem, f"expected one that can, {advice}"):
            return classes[name](parameters)

    return make


def from_hugging_face(path: str, num_stages: int, length: int) -> Modules:
    """Make a causal language model of a Transformers config, in stages, without a download."""
    if importlib.util.find_spec("transformers") is None:
        raise wrong("--hf", "transformers is not installed; pip install 'transformers>=5'")
    from pp_offload.simulate.huggingface import groups_of, model_from_config, stages_of

    config = _config_of(path)
    how = (
        "expected the config of a causal language model made like Llama; give another, or stages "
        "of your own with module:function"
    )
    with any_error_of("--hf", f"the model of {path!r} cannot be made", how):
        model = model_from_config(config)
    with errors_of("--hf"):
        stages = stages_of(model, num_stages)
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    problem = f"{type(model).__name__} cannot run in stages without data"
    with any_error_of("--hf", problem, how), use_backend(VirtualBackend(DEVICES["H100"])):
        with torch.no_grad():
            nn.Sequential(*stages)(tokens)

    def loss_fn(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), torch.empty_like(tokens).flatten())

    groups = groups_of(stages[0])
    return Modules(stages, example=tokens, loss_fn=loss_fn, groups=groups, layers="layers.*")


def _config_of(path: str) -> Any:
    from transformers import AutoConfig

    how = (
        "expected a config.json, its directory, or the name of a model that is in the cache; "
        "nothing is downloaded"
    )
    try:
        with any_error_of("--hf", f"found no config of Transformers at {path!r}", how):
            return AutoConfig.from_pretrained(path, local_files_only=True)
    except ArgumentError as failure:
        if os.path.exists(path) or not isinstance(failure.__cause__, OSError):
            raise
        # Transformers would add that it cannot reach a server, but no download was asked for.
        problem = f"found no file or directory {path!r}, and no model of that name in the cache"
        raise wrong("--hf", f"{problem} of Transformers, {how}") from failure
