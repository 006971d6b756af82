"""A counter layer's products and its step: the gradient, summed and averaged as the layer asks, then one update.

Most layers take one call of the backend for the whole backward. Where the gradient of the weight has to be seen,
because it is added to others or averaged over ranks, it is made tile by tile and each tile passes these stations:

    product of grad_out and x  ->  + the sum of earlier backwards  ->  mean over ranks  ->  update of the tile's rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memtrain_cl.formats import (
    STREAM_GRAD_INPUT,
    STREAM_GRAD_OUTPUT,
    STREAM_INPUT,
    STREAM_SAVED_INPUT,
    stream_seed,
)
from memtrain_cl.nn.averaging import Replicas
from memtrain_cl.nn.uses import Use

if TYPE_CHECKING:
    from memtrain_cl.nn.counter import CompactCounterLinear

#: The streams from which the uses of a layer in one step, and the ranks that train it, draw their seeds; the first use
#: on the first rank has the step's own.
_FIRST_USE = 16
#: Elements of a gradient's tile where the whole is kept elsewhere, unless tile_rows says otherwise.
_TILE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Backward:
    """What one backward brings. x [M, in] and grad_out [M, out] float32; low_bits: x is a copy in few bits."""

    x: torch.Tensor
    grad_out: torch.Tensor
    use: Use
    low_bits: bool


def use_seed(layer: CompactCounterLinear, index: int) -> int:
    """The seed from which a use's streams follow: by the step, the use's number in it, and the rank."""
    replicas = layer.replicas()
    number = index if replicas is None else index * replicas.size + replicas.rank
    seed = layer.step_seed()
    return seed if number == 0 else stream_seed(seed, _FIRST_USE + number)


def product(layer: CompactCounterLinear, x: torch.Tensor) -> torch.Tensor:
    """y float32 [M, out] of x float32 [M, in]."""
    forward = layer.ops.counter_forward_int8 if layer.forward_compute == "int8" else layer.ops.counter_forward
    y: torch.Tensor = forward(
        x,
        layer.resident_buffer("state"),
        layer.resident_buffer("scale"),
        C=layer.C,
        packed=layer.packed,
        cache=layer.cache_buffer(),
    )
    return y


def input_gradient(layer: CompactCounterLinear, grad_out: torch.Tensor, use: Use) -> torch.Tensor:
    """grad_x float32 [M, in] of grad_out float32 [M, out]."""
    options: dict[str, Any] = {"C": layer.C, "packed": layer.packed, "cache": layer.cache_buffer()}
    weight = (layer.resident_buffer("state"), layer.resident_buffer("scale"), layer.in_features)
    if layer.forward_compute == "int8":
        seed = stream_seed(use_seed(layer, use.index), STREAM_GRAD_INPUT)
        grad_x: torch.Tensor = layer.ops.counter_grad_input_int8(grad_out, *weight, seed=seed, **options)
    else:
        grad_x = layer.ops.counter_grad_input(grad_out, *weight, **options)
    return grad_x


def _weight_gradient(layer: CompactCounterLinear, given: Backward) -> Callable[[int, int], torch.Tensor]:
    """What makes rows row .. row+count of grad_out^T @ x, float32, of (row, count)."""
    if layer.update_compute != "int8":
        return lambda row, count: layer.ops.grad_weight(given.grad_out, given.x, row, count)
    seed = use_seed(layer, given.use.index)
    seed_grad = stream_seed(seed, STREAM_GRAD_OUTPUT)
    seed_input = stream_seed(seed, STREAM_SAVED_INPUT if given.low_bits else STREAM_INPUT)
    # Once for all tiles.
    grad_codes = layer.ops.quantize_int8(given.grad_out, dim=0, seed=seed_grad, transposed=True)
    x_codes = layer.ops.quantize_int8(given.x, dim=0, seed=seed_input, transposed=True)
    return lambda row, count: layer.ops.grad_weight_of_codes(*grad_codes, *x_codes, row, count)


def _patched(layer: CompactCounterLinear) -> torch.Tensor | None:
    """The cache, where the update writes what it changes in it."""
    return layer.cache_buffer() if layer.cache_patch == "flip" else None


@contextmanager
def _clocked(layer: CompactCounterLinear) -> Iterator[torch.Tensor | None]:
    """An update's place in the decimation: its clock (None without), advanced before and observed after."""
    clock, counts = layer.clock_buffer(), layer.resident_buffer("counts")
    if clock is not None:
        layer.ops.advance_clock_(clock, counts)
    yield clock
    if clock is not None:
        layer.ops.observe_clock_(clock, counts, layer.out_features * layer.in_features)


def _tile_rows(layer: CompactCounterLinear) -> int:
    return layer.tile_rows or max(1, _TILE_ELEMENTS // layer.in_features)


def backward(layer: CompactCounterLinear, given: Backward, needs_grad_input: bool) -> torch.Tensor | None:
    """A training backward: grad_x by the old weight (None when not needed), then the update or its postponement."""
    kept, replicas = layer._sum, layer.replicas()
    layer.require_possible()
    last = not layer.reuse or all(other is given.use for other in layer._uses.pending())
    fires = last and kept.rounds + 1 >= layer.accumulate
    alone = fires and not kept.held and replicas is None and layer.update_compute == "fp" and given.x.numel() > 0
    from_io = alone and _forms_gradient(layer, given.x)
    if alone and not from_io and layer.forward_compute == "fp":
        grad_x = _backward_at_once(layer, given, needs_grad_input)
        layer._updated()
        return grad_x

    grad_x = input_gradient(layer, given.grad_out, given.use) if needs_grad_input else None
    if from_io:
        _update_from_io(layer, given)
        return grad_x
    if fires:
        _finish(layer, given, replicas)
        return grad_x
    if given.x.numel():
        shape = (layer.out_features, layer.in_features)
        made = _weight_gradient(layer, given)
        for row, count in _tiles(layer.out_features, _tile_rows(layer)):
            kept.keep(made(row, count), row, shape)
        kept.finish(_squares(layer, given))
    kept.rounds += last
    kept.open = not last
    kept.next_index = max(kept.next_index, given.use.index + 1)
    return grad_x


def _backward_at_once(layer: CompactCounterLinear, given: Backward, needs_grad_input: bool) -> torch.Tensor | None:
    """Both products and the update in one call of the backend."""
    patched = _patched(layer)
    grad_x = None
    if needs_grad_input and layer.cache_mode != "none" and patched is None:
        grad_x = input_gradient(layer, given.grad_out, given.use)
        needs_grad_input = False
    made: torch.Tensor | None = layer.ops.counter_backward_(
        given.x,
        given.grad_out,
        layer.resident_buffer("state"),
        layer.resident_buffer("scale"),
        layer._moments(),
        layer.resident_buffer("counts"),
        layer.rule(),
        seed=layer.step_seed(),
        needs_grad_input=needs_grad_input,
        tile_rows=layer.tile_rows,
        s_base=layer._lazy_base(),
        clock=layer.clock_buffer(),
        cache=patched,
    )
    return made if grad_x is None else grad_x


def _forms_gradient(layer: CompactCounterLinear, x: torch.Tensor) -> bool:
    """Whether the update's kernel forms the gradient: as the layer says, or where that saves memory."""
    if layer.update_from_io is not None:
        return layer.update_from_io
    wants: bool = layer.ops.wants_from_io(x, layer.out_features, layer.tile_rows)
    return wants


def _update_from_io(layer: CompactCounterLinear, given: Backward) -> None:
    """The update by a kernel that forms the gradient itself."""
    with _clocked(layer) as clock:
        layer.ops.counter_update_from_io_(
            layer.resident_buffer("state"),
            layer.resident_buffer("scale"),
            layer._moments(),
            given.x,
            given.grad_out,
            layer.resident_buffer("counts"),
            layer.rule(),
            seed=layer.step_seed(),
            g_sq=_squares(layer, given),
            s_base=layer._lazy_base(),
            clock=clock,
            cache=_patched(layer),
        )
    layer._updated()


def _squares(layer: CompactCounterLinear, given: Backward) -> torch.Tensor | None:
    """The estimated mean squares [out, 1] of the gradient's rows, for rms_mode "proxy"."""
    wanted = layer.rule().rms_mode == "proxy"
    squares: torch.Tensor | None = layer.ops.proxy_moments(given.grad_out, given.x) if wanted else None
    return squares


def _finish(layer: CompactCounterLinear, given: Backward, replicas: Replicas | None) -> None:
    """The update that follows the last of the backwards."""
    kept = layer._sum
    if not given.x.numel():
        finish_sum(layer, replicas)
        return
    squares = _squares(layer, given)
    if kept.held and squares is not None and kept.squares is not None:
        squares = squares + kept.squares

    made = _weight_gradient(layer, given)

    def gradient(row: int, count: int) -> torch.Tensor:
        tile = made(row, count)
        return tile.add_(kept.rows(row, count)) if kept.held else tile

    rows = _tile_rows(layer) if kept.held else layer.tile_rows or layer.out_features
    update(layer, gradient, squares, replicas, rows)


def finish_sum(layer: CompactCounterLinear, replicas: Replicas | None) -> None:
    """The update from the sum alone. Nothing changes but the step where there were no tokens at all, on any rank."""
    kept = layer._sum
    if kept.held:
        # The mean over ranks is taken in place, and the sum is done with.
        update(layer, kept.rows, kept.squares, replicas, _tile_rows(layer))
    elif replicas is None:
        layer._updated()
    else:

        def zeros(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros((rows, columns), dtype=torch.float32, device=layer.resident_buffer("state").device)

        squares = zeros(layer.out_features, 1) if layer.rule().rms_mode == "proxy" else None
        rows = layer.tile_rows or layer.out_features
        update(layer, lambda _, count: zeros(count, layer.in_features), squares, replicas, rows)


def update(
    layer: CompactCounterLinear,
    gradient: Callable[[int, int], torch.Tensor],
    squares: torch.Tensor | None,
    replicas: Replicas | None,
    rows: int,
) -> None:
    """One update from a gradient that comes in tiles of `rows` rows: gradient(row, count) float32 [count, in].

    squares: the estimated mean squares [out, 1] of rms_mode "proxy".
    """
    if replicas is not None:
        layer._agree(replicas)
        # Of independent gradients the squares of the mean are the sum of the squares over the ranks' number squared.
        squares = None if squares is None else replicas.mean(squares.clone(), power=2)
    rule, seed, patched = layer.rule(), layer.step_seed(), _patched(layer)
    with _clocked(layer) as clock:
        for row, count in _tiles(layer.out_features, rows):
            tile = gradient(row, count)
            layer.ops.counter_update_(
                layer.resident_buffer("state"),
                layer.resident_buffer("scale"),
                layer._moments(),
                tile if replicas is None else replicas.mean(tile),
                layer.resident_buffer("counts"),
                rule,
                seed=seed,
                row_offset=row,
                g_sq=squares,
                s_base=layer._lazy_base(),
                clock=clock,
                cache=patched,
            )
    layer._updated()
    if replicas is not None:
        # DistributedDataParallel broadcasts the first rank's buffers, as their memory on the host has them.
        layer._refresh()


def _tiles(rows: int, each: int) -> list[tuple[int, int]]:
    """(first row, rows) of tiles that cover `rows` rows."""
    return [(row, min(each, rows - row)) for row in range(0, rows, each)]
