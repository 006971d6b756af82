"""Counter layers in data-parallel training: every rank makes the same update, from the mean of all ranks' gradients.

A layer's gradient exists for a moment inside backward alone, so that is where it is averaged: an all-reduce of each of
its tiles, whose result has the same bytes on every rank, before the update that then is the same everywhere. No hook of
DistributedDataParallel is needed, nor any Parameter, and a model may be wrapped in it or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memtrain_cl.bridge import host_view


@dataclass(frozen=True)
class Replicas:
    """The ranks that train copies of one layer. group: torch's process group, None for all ranks."""

    group: Any
    size: int
    rank: int

    def mean(self, tensor: torch.Tensor, power: int = 1) -> torch.Tensor:
        """The sum over ranks / size^power, in the memory of `tensor` (float32, contiguous) where that is possible."""
        carried = self._carried(tensor)
        dist.all_reduce(carried, group=self.group)
        carried /= self.size**power
        return carried if carried.device == tensor.device else carried.to(tensor.device)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the group's backend takes it: NCCL wants CUDA's memory, every other one the host's."""
        if tensor.device.type == "cuda" and "nccl" in dist.get_backend(self.group):
            return tensor
        return tensor.cpu()

    def agree(self, numbers: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> int:
        """The seed of the first rank, where all ranks hold a layer of the same numbers and bytes; RuntimeError on all
        ranks where they do not. numbers: "seed", which may differ, and others.
        """
        sums = {name: zlib.crc32(host_view(tensor.cpu().contiguous()).tobytes()) for name, tensor in tensors.items()}
        mine = {**numbers, **sums}
        row = torch.tensor(list(mine.values()), dtype=torch.int64, device="cpu")
        if "nccl" in dist.get_backend(self.group):
            row = row.cuda()
        table = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(table, row, group=self.group)
        columns = dict(zip(mine, torch.stack(table).t().tolist(), strict=True))
        different = [name for name, column in columns.items() if name != "seed" and len(set(column)) > 1]
        if different:
            raise RuntimeError(
                f"expected a counter layer of the same {', '.join(different)} on every rank, got others; load one "
                "state on all ranks, or wrap the model in DistributedDataParallel, which copies the first rank's"
            )
        return int(columns["seed"][0])


def replicas_of(process_group: Any) -> Replicas | None:
    """The ranks of a process group (None: all of them); None where this process trains alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    size = dist.get_world_size(process_group)
    return None if size <= 1 else Replicas(process_group, size, dist.get_rank(process_group))
