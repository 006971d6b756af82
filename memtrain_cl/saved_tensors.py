"""What an autograd Function keeps for its backward, and when."""

from __future__ import annotations

from typing import Any

import torch

#: Rooms of the hooks of a region that runs again: torch's own, and those that measure it and hand on to torch's.
CHECKPOINTS = ("torch.utils.checkpoint", "memtrain_cl.recompute_regions")


def in_checkpoint() -> bool:
    """Whether what is saved now goes to a region of torch.utils.checkpoint (use_reentrant=False)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) in CHECKPOINTS


def in_backward() -> bool:
    """Whether torch's engine is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Keep tensors for backward; called before the Function computes. In a checkpoint's second run they are kept at
    once: what it lacks last ends that run, and so the product, which torch would let come first, is not computed again
    where nobody asks for it.
    """
    if not in_backward() or not in_checkpoint():
        ctx.unpack, ctx.packed = None, ()
        ctx.save_for_backward(*tensors)
    else:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        ctx.unpack = hooks[1]
        ctx.packed = tuple(None if tensor is None else hooks[0](tensor) for tensor in tensors)


def saved(ctx: Any) -> tuple[Any, ...]:
    """What `save` kept, in its order."""
    if ctx.unpack is None:
        kept: tuple[Any, ...] = ctx.saved_tensors
        return kept
    return tuple(None if packed is None else ctx.unpack(packed) for packed in ctx.packed)
