"""Which model a simulation is of: what a function returns, or a config of Hugging Face.

work = from_function("my_model:stages", num_stages=4, length=4096)
work = from_hugging_face("llama/config.json", num_stages=4, length=4096)
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import use_backend
from pp_offload._common.checks import near, said
from pp_offload.cli.wrong import told, wrong
from pp_offload.simulate import DEVICES, Modules, VirtualBackend
from pp_offload.simulate.stages import MakeOptimizer

HF = "--hf"

HOW = (
    "expected a function that takes num_stages and length by name and returns a Modules of "
    "pp_offload.simulate; docs/cli.md has one"
)


def from_function(name: str, *, num_stages: int, length: int) -> Modules:
    """What the function returns.

    Args:
        name: ``module:function``; the module is looked for here, too.
        num_stages, length: What the function is given.

    Raises:
        typer.BadParameter: There is none, or it returns something else. What fails inside it keeps
            its traceback.
    """
    function = imported(name, "MODEL", "such as my_model:stages", HOW)
    with told("MODEL"):
        _check_takes(function, name)
    with told("MODEL"):
        work = function(num_stages=num_stages, length=length)
    if not isinstance(work, Modules):
        raise wrong("MODEL", f"{name} returned a {type(work).__name__}, {HOW}")
    if len(work.stages) != num_stages:
        raise wrong(
            "MODEL",
            f"{name} returned {len(work.stages)} stages, expected num_stages: {num_stages}",
        )
    return work


def imported(name: str, option: str, example: str, how: str) -> Callable[..., Any]:
    """The function of ``module:function``; the module is looked for here, too.

    Raises:
        typer.BadParameter: There is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise wrong(option, f"found {name!r}, expected module:function, {example}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        if failure.name is None or not f"{module_name}.".startswith(f"{failure.name}."):
            raise  # the module is there; something that it imports is not
        said = f"no module {failure.name!r} here or installed, expected that of module:function; "
        raise wrong(option, said + "go where it is, or set PYTHONPATH") from failure
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "is no function" if hasattr(module, function_name) else "is not there"
        raise wrong(option, f"{function_name} of {module_name} {found}, {how}")
    return cast(Callable[..., Any], function)


def optimizer_of(name: str) -> MakeOptimizer:
    """What makes an optimizer.

    Args:
        name: Of a class of ``torch.optim``, which gets no options, or ``module:function``.

    Raises:
        typer.BadParameter: There is none.
    """
    option = "--optimizer"
    how = "expected a function of a list of parameters that returns a torch.optim.Optimizer"
    if ":" in name:
        return partial(_returned, imported(name, option, "such as my_model:optimizer", how), name)
    kind = getattr(torch.optim, name, None)
    if not _is_optimizer(kind):
        known = [one for one, value in vars(torch.optim).items() if _is_optimizer(value)]
        raise wrong(
            option,
            f"found {name!r}{near(name, known)}, expected a class of torch.optim, such as AdamW, "
            "or module:function",
        )
    return partial(_made, kind)


def _is_optimizer(value: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _returned(
    function: MakeOptimizer, name: str, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """What a user's function makes. What fails inside it keeps its traceback."""
    found = function(parameters)
    if not isinstance(found, torch.optim.Optimizer):
        raise wrong(
            "--optimizer",
            f"{name} returned {said(found)}, expected a torch.optim.Optimizer of these parameters",
        )
    return found


def _made(
    kind: type[torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """One of PyTorch's, which may not take all parameters there are."""
    try:
        return kind(parameters)  # type: ignore[call-arg]  # its others have defaults
    except Exception as failure:
        raise wrong(
            "--optimizer",
            f"{kind.__name__} cannot be made of the parameters of a rank alone "
            f"({type(failure).__name__}: {_first_line(failure)}); expected one that can, or "
            "module:function, whose function makes one of those parameters that it takes",
        ) from failure


def _check_takes(function: object, name: str) -> None:
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
        signature.bind(num_stages=1, length=1)
    except TypeError as failure:
        raise ValueError(f"{name} cannot be called so: {failure}; {HOW}") from failure


def from_hugging_face(config: str, *, num_stages: int, length: int) -> Modules:
    """A causal language model from its config, in stages. Nothing is downloaded.

    Args:
        config: A ``config.json``, its directory, or the name of a model that was loaded before.
        num_stages: Its layers are spread over them.
        length: Tokens of a microbatch.

    Raises:
        typer.BadParameter: There is no such config, or the model cannot be cut so.
    """
    if importlib.util.find_spec("transformers") is None:
        raise wrong(HF, "transformers is not installed; pip install 'transformers>=5'")
    from transformers import AutoConfig

    from pp_offload.simulate.huggingface import groups_of, model_from_config, stages_of

    try:
        found = AutoConfig.from_pretrained(config, local_files_only=True)
    except Exception as failure:  # of what a file may have, Transformers raises many kinds
        expected = (
            "expected a config.json, its directory, or the name of a model that is in the cache; "
            "nothing is downloaded"
        )
        if isinstance(failure, OSError) and not os.path.exists(config):
            # Transformers goes on to say that it cannot reach a server, which nobody wants.
            missing = f"found no file or directory {config!r}, and no model of that name in the "
            raise wrong(HF, f"{missing}cache of Transformers, {expected}") from failure
        raise wrong(
            HF,
            f"found no config of Transformers at {config!r}, {expected} "
            f"({type(failure).__name__}: {_first_line(failure)})",
        ) from failure
    with _of_transformers(f"the model of {config!r} cannot be made"):
        model = model_from_config(found)
    with told(HF):
        stages = stages_of(model, num_stages)
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    with _of_transformers(f"{type(model).__name__} cannot run in stages without data"):
        _run_once(stages, tokens)

    def loss_fn(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), torch.empty_like(tokens).flatten())

    return Modules(
        stages,
        example=tokens,
        loss_fn=loss_fn,
        groups=groups_of(stages[0]),
        layers="layers.*",
    )


@contextmanager
def _of_transformers(said: str) -> Iterator[None]:
    """Whatever is raised inside is said, for no code of the user has raised it."""
    try:
        yield
    except Exception as failure:
        raise wrong(
            HF,
            f"{said} ({type(failure).__name__}: {_first_line(failure)}); expected the config "
            "of a causal language model made like Llama; give another, or stages of your own with "
            "module:function",
        ) from failure


def _run_once(stages: Sequence[nn.Module], tokens: Tensor) -> None:
    """A forward of all stages, whatever the device."""
    with use_backend(VirtualBackend(DEVICES["H100"])), torch.no_grad():
        x = tokens
        for stage in stages:
            x = stage(x)


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def with_groups(work: Modules, names: str | None) -> Modules:
    """The same, of which only these groups leave.

    Args:
        work: Of one of the functions above; its groups are chosen from.
        names: With commas between them; None for all.

    Raises:
        typer.BadParameter: There is no such group.
    """
    if names is None:
        return work
    if work.groups is None:
        raise wrong(
            "--groups", f"found {names!r}, but the model marks its groups itself; leave it out"
        )
    wanted = [name for name in names.split(",") if name]
    missing = [name for name in wanted if name not in work.groups]
    if missing or not wanted:
        raise wrong(
            "--groups", f"found {names!r}, expected some of {','.join(work.groups)} with commas"
        )
    work.groups = {name: work.groups[name] for name in wanted}
    return work
