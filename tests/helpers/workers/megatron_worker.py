"""One rank of Megatron-Core's GPT model in its own schedules, with ours in the place of its module.

Run by ``compat/test_megatron_core.py``, and after the documentation: an entry in ``sys.modules``
before Megatron is imported, and nothing else. What Megatron asks of ``torch.cuda`` is answered by
the CPU: the names that its GPT model, its layers in plain PyTorch and its schedules use.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pp_offload.compat.megatron
from helpers.ranks import run_cases

sys.modules["megatron.core.pipeline_parallel.fine_grained_activation_offload"] = (
    pp_offload.compat.megatron
)
make_zeros = torch.zeros


def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
    """The schedules count tokens on "cuda", by name."""
    return make_zeros(*size, device="cpu" if device == "cuda" else device, **options)


def get_state(*args: Any, **options: Any) -> Tensor:
    return torch.get_rng_state()


def set_state(state: Tensor, *args: Any, **options: Any) -> None:
    torch.set_rng_state(state)


torch.zeros = zeros
torch.cuda.current_device = lambda: "cpu"  # where new tensors are made, such as a causal mask
torch.cuda.synchronize = lambda *args: None  # after a batch of sends and receives
torch.cuda.manual_seed = torch.manual_seed  # generators of dropout are forked from the device's
torch.cuda.get_rng_state, torch.cuda.set_rng_state = get_state, set_state
warnings.simplefilter("ignore")  # of all that is not installed, and not used here

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import gpt_model  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# Its checkpoints ask for these of Transformer Engine, whether or not it is there.
random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
random.activation_recompute_forward = lambda **options: nullcontext()
random.fp8_autocast = lambda **options: nullcontext()
random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
# It says each time that the CPU's generator has changed, which is the device's here.
logging.getLogger(random.__name__).setLevel(logging.ERROR)

VOCABULARY, LENGTH, WIDTH, NUM_LAYERS = 64, 16, 32, 4
MICROBATCHES, SAMPLES = 4, 2
GROUPS = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


def make_config(virtual: int | None, offload: bool, recompute: bool) -> Any:
    """Dropout is on, so a generator that was used once more or less would show."""
    options: dict[str, Any] = {}
    if offload:
        options = {
            "fine_grained_activation_offloading": True,
            "offload_modules": GROUPS,
            "min_offloaded_tensor_size": 1,
        }
    if recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )


def make_chunks(config: Any, virtual: int | None) -> list[Any]:
    """The model chunks of this rank, with the same weights each time."""
    chunks = []
    for stage in [None] if virtual is None else range(virtual):
        torch.manual_seed(7)
        where = {"ignore_virtual": virtual is None, "vp_stage": stage}
        chunk = gpt_model.GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        chunks.append(chunk)
    return chunks


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)


def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach()}


def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """As a training script of Megatron has it."""
    tokens = next(data)
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model(inputs, positions, mask, labels=labels), loss_of


def train(virtual: int | None, *, offload: bool, recompute: bool) -> list[Tensor]:
    """Three steps with evaluations between them; losses and gradients."""
    chunks = make_chunks(make_config(virtual, offload, recompute), virtual)
    run = partial(
        schedules.get_forward_backward_func(),
        forward_step_func=forward_step,
        model=chunks if virtual else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    seen: list[Tensor] = []
    for step in range(3):
        for is_evaluation in (False, True):
            for chunk in chunks:
                chunk.train(not is_evaluation)
            data = [batches(step) for _ in chunks]
            losses = run(data_iterator=data if virtual else data[0], forward_only=is_evaluation)
            seen += [entry["loss"] for entry in losses]
        for chunk in chunks:
            seen += [p.grad.clone() for p in chunk.parameters() if p.grad is not None]
            chunk.zero_grad()
    return seen


def compare(case: str) -> dict[str, Any]:
    """One schedule, without and with offload."""
    name, _, how = case.partition(":")
    virtual = 2 if name == "interleaved" else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
    )
    ours = pp_offload.compat.megatron
    recompute = how == "recompute"
    if recompute:  # it empties what groups have saved: see docs/megatron.md
        pp_offload.configure(pp_offload.OffloadConfig(max_in_flight_bytes=0))
    without = train(virtual, offload=False, recompute=recompute)
    before = ours.PipelineOffloadManager.get_instance().statistics()
    assert before.bytes_offloaded == 0
    with_offload = train(virtual, offload=True, recompute=recompute)
    manager = ours.PipelineOffloadManager.get_instance()
    after = manager.statistics()
    facts = {
        "equal": len(without) == len(with_offload) and all(map(torch.equal, without, with_offload)),
        "tensors": len(without),
        "offloaded": after.bytes_offloaded,
        "reloaded": after.bytes_reloaded,
        "live": after.live_tensors,
        "in_use": after.host_bytes_in_use,
        "groups": sorted(manager.offload_summary_bytes),
        "is_ours": gpt_model.off_interface is ours.FineGrainedActivationOffloadingInterface,
        "schedule": schedules.get_forward_backward_func().__name__,
    }
    ours.PipelineOffloadManager.reset_instance()
    parallel_state.destroy_model_parallel()
    return facts


if __name__ == "__main__":
    run_cases(compare)
