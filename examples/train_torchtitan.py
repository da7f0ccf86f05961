"""Train torchtitan's Llama debug model with torchtitan's trainer, without and with offload.

python examples/train_torchtitan.py                                  # a pipeline of two processes
python examples/train_torchtitan.py --schedule Interleaved1F1B --checkpoint selective
python examples/train_torchtitan.py --ranks 1                        # OffloadAC, without a pipeline
torchrun --nproc-per-node 2 examples/train_torchtitan.py             # the same under torchrun

This runs on a CPU, which torchtitan does not support: names marked CPU below stand in for what
needs a GPU. It needs `pip install 'pp_offload[titan]'`.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import gettempdir
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor

if not find_spec("triton"):  # CPU: kernels of experts need it, Llama does not
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
with patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.trainer import Trainer

from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.integrations.torchtitan import OffloadAC, with_offload

CHECKPOINTS = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
VOCABULARY = 2048
LENGTH = 64


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, choices=(1, 2), default=2, help="of the pipeline; 1 has none")
    add("--steps", type=int, default=3)
    add("--microbatches", type=int, default=4)
    add("--schedule", default="1F1B", help="a schedule by its name in torchtitan")
    add("--checkpoint", choices=CHECKPOINTS, default="none", help="full with --ranks 1")
    add("--compile", action="store_true", help="compile each block, as torchtitan does")
    return parser.parse_args(arguments)


class RandomTokens(BaseDataLoader):
    """The same random tokens in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options."""

    def __init__(self, config: Config, *, local_batch_size: int, **options: Any) -> None:
        self._shape = (local_batch_size, LENGTH + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(VOCABULARY, self._shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """There is no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RecordingTrainer(Trainer):
    """torchtitan's trainer, which keeps the losses."""

    def __init__(self, config: Trainer.Config) -> None:
        self.losses: list[Tensor] = []
        monitor = MagicMock(device_name="cpu")  # CPU: the memory of a GPU is not there to watch
        monitor.get_peak_stats.return_value = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
        with patch.object(metrics, "build_device_memory_monitor", lambda: monitor):
            super().__init__(config)

    def forward_backward_step(self, **inputs: Any) -> Tensor:
        loss = super().forward_backward_step(**inputs)
        self.losses.append(loss.detach())
        return loss

    def pp_forward_backward_step(
        self, *, input_dict_mbs: Any, label_mbs: Any, global_valid_tokens: Tensor
    ) -> Tensor:
        """As torchtitan's, for torch 2.13: ``step`` of its schedules takes whole batches only."""
        tokens = torch.cat([inputs["input"] for inputs in input_dict_mbs])
        losses: list[Tensor] = []
        self.pp_schedule.step(
            *([tokens] if self.pp_has_first_stage else []),
            target=torch.cat(label_mbs) if self.pp_has_last_stage else None,
            losses=losses if self.pp_has_last_stage else None,
            loss_kwargs={"global_valid_tokens": global_valid_tokens},
            return_outputs=False,
        )
        return torch.stack(losses).sum() if losses else torch.tensor(-1.0)


def make_config(options: argparse.Namespace) -> Trainer.Config:
    """torchtitan's configuration of the debug model, but for sizes and what the options say."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # CPU: FlexAttention has no backward there
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    config.dump_folder = gettempdir()
    config.debug.seed = 0
    config.training.seq_len = LENGTH
    config.training.local_batch_size = options.microbatches
    config.training.disable_cuda_graphs = True
    config.parallelism.pipeline_parallel_degree = options.ranks
    config.parallelism.pipeline_parallel_schedule = options.schedule
    config.activation_checkpoint = CHECKPOINTS[options.checkpoint]
    config.compile.enable, config.compile.backend = options.compile, "aot_eager"
    config.compile.components = ["model"]
    return config


def offload_config(options: argparse.Namespace) -> Trainer.Config:
    """The same with offload."""
    config = make_config(options)
    if options.ranks == 1:
        config.activation_checkpoint = OffloadAC.Config()
        return config
    # Whole blocks where each is compiled or in a checkpoint: a group inside of either does nothing.
    is_whole = options.compile or options.checkpoint != "none"
    groups = {"layer": "layers.*"} if is_whole else {"mlp": "layers.*.feed_forward"}
    small = OffloadConfig(min_offloaded_tensor_size=1024)  # so are the tensors of a debug model
    config.model_spec = with_offload(config.model_spec, groups, small)
    return config


def train(config: Trainer.Config, num_steps: int) -> tuple[RecordingTrainer, list[Tensor]]:
    """The trainer after a few steps, and its losses and this rank's parameters."""
    trainer = RecordingTrainer(config)
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, num_steps + 1):
        trainer.step = step
        trainer.train_step(batches)
    trainer.close()
    parameters = [each for part in trainer.model_parts for each in part.parameters()]
    return trainer, trainer.losses + [each.detach().to_local().clone() for each in parameters]


def compare(options: argparse.Namespace) -> tuple[bool, int]:
    """Whether results are the same with offload; and how many bytes it offloaded in all."""
    _, without = train(make_config(options), options.steps)
    trainer, results = train(offload_config(options), options.steps)
    if options.ranks == 1:
        stash = trainer.model_parts[0].layers["0"].recompute.stash  # shared by all blocks
        num_bytes = stash.statistics().bytes_offloaded
    else:
        manager = PipelineOffloadManager.get_instance()
        num_bytes = manager.statistics().bytes_offloaded
        manager.reset()
    return len(results) == len(without) and all(map(torch.equal, results, without)), num_bytes


def work(options: argparse.Namespace) -> NoReturn:
    """One rank."""
    torch.set_num_threads(1)
    logging.getLogger("root").setLevel(logging.ERROR)  # which torchtitan writes to
    dist.init_process_group("gloo")
    result = compare(options)
    table = summary_table() if options.ranks > 1 else ""  # of the last step; every rank calls it
    results: list[Any] = [None] * options.ranks
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        print(table)
        print("offloaded, MiB by rank:", *(f"{num_bytes / 2**20:.1f}" for _, num_bytes in results))
        verdict = "equal bit for bit" if all(same for same, _ in results) else "DIFFERENT"
        print(f"all losses and final parameters: {verdict}", flush=True)
    dist.destroy_process_group()
    # Gloo's threads outlive a model that FSDP2 shards, and may abort the end of an interpreter:
    # pytorch/pytorch#190489.
    os._exit(0 if all(same and num_bytes for same, num_bytes in results) else 1)


def main() -> int:
    """This rank, or one process for each."""
    options = parse_arguments()
    if "RANK" in os.environ:
        work(options)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.call([*launcher, "--nproc-per-node", str(options.ranks), *sys.argv])


if __name__ == "__main__":
    sys.exit(main())
