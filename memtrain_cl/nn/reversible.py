"""Reversible blocks: chains whose activations are computed back from their results instead of being kept.

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

A chain is one node of autograd. It keeps its last (y1, y2), whatever its depth, and with `anchor_every=k` also what
goes into every k-th block, so that the rounding of the way back never adds up over more than k blocks. Backward runs F
and G once more. (Gomez et al., The Reversible Residual Network, 2017.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class ReversibleCouplingBlock(nn.Module):
    """(x1, x2) -> (y1, y2) of one shape: y1 = x1 + F(x2), y2 = x2 + G(y1). By itself it is plain torch.

    f, g: modules that give a tensor of their input's shape.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """(y1, y2). ValueError where F or G changes the shape or the type."""
        y1 = x1 + _alike("F", self.f(x2), x1)
        return y1, x2 + _alike("G", self.g(y1), x2)

    def inverse(self, y1: Tensor, y2: Tensor) -> tuple[Tensor, Tensor]:
        """(x1, x2), up to rounding."""
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2), x2


def _alike(name: str, value: Tensor, like: Tensor) -> Tensor:
    # Autocast may have made it narrower than what it is added to.
    if value.shape != like.shape or torch.result_type(value, like) != like.dtype:
        raise ValueError(
            f"expected {name} to give {like.dtype} {list(like.shape)}, got {value.dtype} {list(value.shape)}"
        )
    return value


class ReversibleSequence(nn.Module):
    """A chain of `ReversibleCouplingBlock`s as one node of autograd: (x1, x2) -> (y1, y2).

    Kept until backward are y1 and y2, and with anchor_every=k > 0 the inputs of blocks k, 2k ...: 1 + (blocks-1)//k
    pairs in all. Gradients are those of the plain chain up to the rounding of the way back; counter layers in F and G
    update themselves once. Parameters of a block that is frozen, and buffers, are as ever.

    RuntimeError for what would not be the same in the second run: F or G that draw random numbers (Dropout in
    training), and batch norms in training. A model of F and G in float32 comes back to about 1e-6 a block.
    ValueError for anchor_every below 0, TypeError for other blocks. Under torch.no_grad it is the plain chain.
    """

    def __init__(self, blocks: Iterable[ReversibleCouplingBlock], *, anchor_every: int = 0) -> None:
        super().__init__()
        chain = list(blocks)
        for block in chain:
            if not isinstance(block, ReversibleCouplingBlock):
                raise TypeError(f"expected blocks as ReversibleCouplingBlock, got {type(block).__name__}")
        if isinstance(anchor_every, bool) or not isinstance(anchor_every, int) or anchor_every < 0:
            raise ValueError(f"expected anchor_every as an integer >= 0, got {anchor_every!r}")
        self.blocks = nn.ModuleList(chain)
        self.anchor_every = anchor_every

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """(y1, y2). ValueError unless x1 and x2 are of one shape, type and device."""
        if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.device != x2.device:
            raise ValueError(
                f"expected x1 and x2 alike, got {x1.dtype} {list(x1.shape)} on {x1.device} and "
                f"{x2.dtype} {list(x2.shape)} on {x2.device}"
            )
        if not self.blocks or not torch.is_grad_enabled():
            return _plain(self.blocks, x1, x2)
        for name, module in self.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise RuntimeError(f"expected F and G without batch norms in training, got {name}, which runs twice")
        # Counter layers have no parameters, so that nothing else might ask for the node's backward.
        tap = torch.zeros((), requires_grad=True, device="cpu")
        parameters = [p for p in self.blocks.parameters() if p.requires_grad]
        result = _Reversible.apply(self, tap, x1, x2, *parameters)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", result)


class ReversibleSequential(nn.Module):
    """A `ReversibleSequence` over one tensor, whose halves along `dim` are x1 and x2: [..., 2n] -> [..., 2n].

    ValueError where the size along dim is odd.
    """

    def __init__(self, *blocks: ReversibleCouplingBlock, anchor_every: int = 0, dim: int = -1) -> None:
        super().__init__()
        self.sequence = ReversibleSequence(blocks, anchor_every=anchor_every)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """y of x."""
        if x.shape[self.dim] % 2:
            raise ValueError(f"expected an even size along dimension {self.dim}, got {list(x.shape)}")
        return torch.cat(self.sequence(*x.chunk(2, dim=self.dim)), dim=self.dim)


def _plain(blocks: nn.ModuleList, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    for block in blocks:
        x1, x2 = block(x1, x2)
    return x1, x2


def _random_states(place: torch.device) -> list[Tensor]:
    """What tells whether random numbers were drawn, on the host or on the device."""
    states = [torch.get_rng_state()]
    if place.type != "cpu":
        states.append(getattr(torch, place.type).get_rng_state(place))
    return states


class _Casts:
    """The state of autocast, to be the same in backward."""

    def __init__(self, place: torch.device) -> None:
        self._states: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in dict.fromkeys(("cpu", place.type))
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state in self._states:
                stack.enter_context(torch.autocast(**state))
            yield


class _Reversible(torch.autograd.Function):
    """The chain's node. Its inputs are x1, x2 and the parameters, in the order of `blocks.parameters()`."""

    @staticmethod
    def forward(
        ctx: Any, sequence: ReversibleSequence, tap: Tensor, x1: Tensor, x2: Tensor, *parameters: Tensor
    ) -> Any:
        ctx.sequence, ctx.casts, ctx.places = sequence, _Casts(x1.device), {}
        every = sequence.anchor_every
        anchors: list[Tensor] = []
        before = _random_states(x1.device)
        y1, y2 = x1.detach(), x2.detach()
        for index, block in enumerate(sequence.blocks):
            if every and index and index % every == 0:
                ctx.places[index] = 2 + len(anchors)
                anchors += [y1, y2]
            y1, y2 = block(y1, y2)
        if not all(map(torch.equal, before, _random_states(x1.device))):
            raise RuntimeError(
                "expected F and G without chance, got random numbers drawn in their forward; the second run, in "
                "backward, would draw others (put Dropout outside, or use torch.utils.checkpoint)"
            )
        ctx.parameters, ctx.versions = parameters, [parameter._version for parameter in parameters]
        ctx.save_for_backward(y1, y2, *anchors)
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> Any:
        if [parameter._version for parameter in ctx.parameters] != ctx.versions:
            raise RuntimeError(
                "a parameter of a reversible chain has been changed since this forward, so that the way back would be "
                "another; run the forward again"
            )
        saved = list(ctx.saved_tensors)
        y1, y2 = saved[:2]
        grads: dict[int, Tensor] = {}
        for index in reversed(range(len(ctx.sequence.blocks))):
            with ctx.casts.again():
                y1, y2, grad1, grad2 = _back(ctx.sequence.blocks[index], y1, y2, grad1, grad2, grads)
            if index in ctx.places:
                place = ctx.places[index]
                y1, y2 = saved[place : place + 2]
                saved[place : place + 2] = [None, None]
        return None, None, grad1, grad2, *(grads.get(id(parameter)) for parameter in ctx.parameters)


def _back(
    block: ReversibleCouplingBlock, y1: Tensor, y2: Tensor, grad1: Tensor, grad2: Tensor, grads: dict[int, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A block's (x1, x2) and the gradients of them; those of its parameters are added to `grads`."""
    y1, g, passed = _run(block.g, y1, grad2, grads)
    x2 = y2 - g
    grad1 = grad1 + passed
    x2, f, passed = _run(block.f, x2, grad1, grads)
    return y1 - f, x2, grad1, grad2 + passed


def _run(module: nn.Module, x: Tensor, grad: Tensor, grads: dict[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(x, module(x), the gradient of x), without a graph."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        parameters = [p for p in module.parameters() if p.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * (1 + len(parameters))
        if y.requires_grad:
            found = torch.autograd.grad(y, [leaf, *parameters], grad.to(y.dtype), allow_unused=True)
    for parameter, own in zip(parameters, found[1:], strict=True):
        if own is not None:
            grads[id(parameter)] = grads[id(parameter)] + own if id(parameter) in grads else own
    return leaf.detach(), y.detach(), torch.zeros_like(grad) if found[0] is None else found[0]
