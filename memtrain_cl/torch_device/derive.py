"""Forms of operations that follow from what the table holds: ``.out``, in-place, composite, decomposed, foreach."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from memtrain_cl.torch_device.aten.copy import copy_operand, misfit, require_apart, require_castable, resized_out
from memtrain_cl.torch_device.aten.pointwise import Pointwise
from memtrain_cl.torch_device.fallback import host_fallback, run_on_host
from memtrain_cl.torch_device.registry import KINDS, Handler, aten, has_kernel, is_composite, resolve
from memtrain_cl.torch_device.tensor import OpenCLTensor


def _signature(overload: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]


def _functional(packet_name: str, wanted: list[tuple[str, str]]) -> Any:
    packet = getattr(aten, packet_name, None)
    if packet is None:
        return None
    for name in packet.overloads():
        overload = getattr(packet, name)
        if overload._schema.is_mutable or any(a.is_out for a in overload._schema.arguments):
            continue
        if _signature(overload) == wanted:
            return overload
    return None


def _marked(handler: Handler) -> Handler:
    handler.on_device = True  # type: ignore[attr-defined]
    return handler


def _out(func: Any) -> Handler | None:
    """``op.out`` from ``op``: computed, then written into the tensors given; elementwise ones compute there."""
    outs = [a.name for a in func._schema.arguments if a.is_out]
    if not outs:
        return None
    functional = _functional(func._schema.name.removeprefix("aten::"), _signature(func))
    if functional is None:
        return None
    operation = resolve(functional)

    def write_elementwise(*args: Any, out: OpenCLTensor, **kwargs: Any) -> Any:
        return operation.into(out, args, kwargs, resize=True)  # type: ignore[attr-defined]

    def write(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        results = functional(*args, **kwargs)
        for target, result in zip(targets, [results] if len(outs) == 1 else results, strict=True):
            require_castable(result.operand.element, target.operand.element)
            resized_out(target, result.operand)
        return targets[0] if len(targets) == 1 else tuple(targets)

    if isinstance(operation, Pointwise):
        return _marked(write_elementwise)
    return _marked(write) if has_kernel(functional) else write


def _in_place(func: Any) -> Handler | None:
    """``op_`` from ``op``; elementwise ones compute in place."""
    name = func._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.startswith("_foreach") or not func._schema.is_mutable:
        return None
    functional = _functional(name.removesuffix("_"), _signature(func))
    if functional is None or not has_kernel(functional):
        return None
    operation = resolve(functional)

    def change_elementwise(self: OpenCLTensor, *args: Any, **kwargs: Any) -> Any:
        return operation.into(self, (self, *args), kwargs, resize=False)  # type: ignore[attr-defined]

    def change(self: OpenCLTensor, *args: Any, **kwargs: Any) -> OpenCLTensor:
        result = functional(self, *args, **kwargs)
        require_castable(result.operand.element, self.operand.element)
        if result.shape != self.shape:
            raise misfit(self.shape, result.shape)
        require_apart(self.operand)
        copy_operand(result.operand, self.operand)
        return self

    return _marked(change_elementwise if isinstance(operation, Pointwise) else change)


#: Operations whose decomposition in torch._decomp ends in kernels of the device.
DECOMPOSED = frozenset(
    [
        "mse_loss",
        "mse_loss_backward",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "huber_loss",
        "huber_loss_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
        "soft_margin_loss_backward",
        "log_sigmoid_forward",
        "log_sigmoid_backward",
        "glu",
        "glu_backward",
        "hardshrink",
        "softshrink",
        "diag_embed",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "isin",
        "ldexp",
        "linalg_cross",
        "narrow_copy",
        "split_with_sizes_copy",
        "_chunk_cat",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "multi_margin_loss",
        "multilabel_margin_loss_forward",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "reflection_pad1d_backward",
        "reflection_pad2d_backward",
        "reflection_pad3d_backward",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "im2col",
        "col2im",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "logit",
        "logit_backward",
        "xlogy",
        "special_xlog1py",
        "unfold_backward",
        "logaddexp",
        "logaddexp2",
        "heaviside",
        "deg2rad",
        "rad2deg",
        "sinc",
        "special_entr",
        "linspace",
        "rot90",
        "trace",
        "addr",
        "renorm",
        "dist",
        "pixel_shuffle",
        "pixel_unshuffle",
        "std",
        "std_mean",
        "isneginf",
        "isposinf",
        "zeros",
        "ones",
        "full",
        "_weight_norm_interface",
        "rrelu_with_noise_backward",
        "_prelu_kernel",
        "_prelu_kernel_backward",
        "block_diag",
        "channel_shuffle",
        "repeat",
        "expand_copy",
        "permute_copy",
        "view_copy",
        "t_copy",
        "squeeze_copy",
        "unsqueeze_copy",
        "transpose_copy",
        "unbind_copy",
        "alias_copy",
        "diagonal_copy",
        "unfold_copy",
    ]
)


def _decomposed(func: Any) -> Handler | None:
    name = func._schema.name.removeprefix("aten::")
    if name not in DECOMPOSED:
        return None
    from torch._decomp import decomposition_table

    return _marked(decomposition_table[func]) if func in decomposition_table else None


def _composite(func: Any) -> Handler | None:
    """Composite operations that reach the device whole, as they do in inference mode."""
    if not is_composite(func):
        return None

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return func.decompose(*args, **kwargs)

    return _marked(decompose)


def _foreach(func: Any) -> Handler | None:
    """Lists of tensors, one after the other."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith("_foreach_"):
        return None
    in_place = name.endswith("_")
    packet = getattr(aten, name.removeprefix("_foreach_"), None)
    if name.removeprefix("_foreach_") == "norm":
        packet = aten.linalg_vector_norm
    each: Any = packet
    if packet is None and in_place:
        # Of maximum_ and its like there is no form for one tensor.
        functional = getattr(aten, name.removeprefix("_foreach_").removesuffix("_"), None)
        if functional is None:
            return None

        def written(tensor: OpenCLTensor, *args: Any, **kwargs: Any) -> Any:
            return tensor.copy_(functional(tensor, *args, **kwargs))

        each = written
    elif packet is None:
        return None
    scaled = name.rstrip("_").endswith(("addcmul", "addcdiv"))

    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scaled and len(args) > 2:
            # Their factors stand third in a list's call, in a tensor's they have a name.
            factors = args[2].tolist() if isinstance(args[2], torch.Tensor) else args[2]
            args, kwargs = args[:2], {"value": factors}
        results = []
        for position, tensor in enumerate(self):
            own = [a[position] if isinstance(a, (list, tuple)) else a for a in args]
            options = {
                k: v[position] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items() if v is not None
            }
            results.append(each(tensor, *own, **options))
        return None if in_place else results

    return _marked(loop)


def _refused(func: Any) -> Handler | None:
    """What the device cannot hold at all: complex and sparse results come back as TypeErrors from the host's result."""
    name = func._schema.name.removeprefix("aten::")
    if "sparse" not in name and not name.startswith(("_fft", "view_as_complex", "complex")):
        return None

    def refuse(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        if any(isinstance(value, OpenCLTensor) for value in flat):
            raise TypeError(f"the device 'opencl' holds dense real tensors alone; {func} is not for it")
        return run_on_host(func, args, kwargs)

    return refuse


KINDS.extend([_refused, _out, _in_place, _foreach, _decomposed, _composite, host_fallback])
