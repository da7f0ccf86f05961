"""A model for the commands: its stages on ``meta``, and an optimizer that replicas share.

pp-offload plan my_model:stages --optimizer my_model:sharded --limit 7GiB -o plan.json
"""

from itertools import pairwise

import torch
from torch import nn

from pp_offload.simulate import Modules

WIDTH, NUM_LAYERS = 4096, 16
KIND = {"device": "meta", "dtype": torch.bfloat16}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, **KIND)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, **KIND), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, **KIND)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def stages(num_stages, length):
    cuts = [NUM_LAYERS * index // num_stages for index in range(num_stages + 1)]
    return Modules(
        [nn.Sequential(*(Layer() for _ in range(*part))) for part in pairwise(cuts)],
        example=torch.empty(length, WIDTH, **KIND),  # of a microbatch
        loss_fn=lambda y: y.float().square().mean(),
        groups={"mlp": "*.mlp"},  # what may leave, by module name, as for attach
    )


def sharded(parameters, num_replicas=8):
    """Of 8 replicas that share the optimizer: each has a slice of each parameter."""
    kind = {"dtype": torch.float32, "device": "meta"}
    slices = [nn.Parameter(torch.empty(-(-p.numel() // num_replicas), **kind)) for p in parameters]
    for parameter in slices:
        parameter.grad = torch.empty_like(parameter)  # without it nothing is updated
    return torch.optim.AdamW(slices)
