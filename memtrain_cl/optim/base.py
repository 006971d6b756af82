"""What the optimizers of this package share: where parameters stand, steps in backward or after it, copies, loads."""

from __future__ import annotations

import abc
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, overload

import torch

import memtrain_cl.ops
from memtrain_cl.nn.options import at_least, flag
from memtrain_cl.optim.fused_backward import BackwardSteps
from memtrain_cl.sharing import share
from memtrain_cl.sharing.cuda import partner

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
#: A parameter, and where it is: its group's number, and its own over all groups.
Place = tuple[int, int, torch.Tensor]


class BackwardOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose steps are taken by `_update`, in backward if asked for.

    Subclasses call `_prepare` before and `_attach` after torch's constructor, and define `_update`, `_load` and, if
    something is left to do once all parameters have been stepped, `_conclude`.
    """

    #: The constructor's word for steps in backward.
    fused_option: ClassVar[str] = "fused_backward"
    ops: ModuleType
    _backward: BackwardSteps | None
    _backward_options: tuple[int, float | None] | None

    def _prepare(self, ops: ModuleType | None, fused: Any, accumulate: Any, max_grad_norm: Any) -> None:
        self.ops = memtrain_cl.ops if ops is None else ops
        self._backward = None
        self._backward_options = self._checked_backward(fused, accumulate, max_grad_norm)

    def _checked_backward(self, fused: Any, accumulate: Any, max_grad_norm: Any) -> tuple[int, float | None] | None:
        flag(self.fused_option, fused)
        at_least(1)("accumulate", accumulate)
        if max_grad_norm is not None and not (
            isinstance(max_grad_norm, int | float) and 0 < max_grad_norm < float("inf")
        ):
            raise ValueError(f"expected max_grad_norm as a number above 0, or None, got {max_grad_norm!r}")
        if not fused and (accumulate != 1 or max_grad_norm is not None):
            raise ValueError(f"expected accumulate and max_grad_norm with {self.fused_option}=True alone")
        return (accumulate, max_grad_norm) if fused else None

    @abc.abstractmethod
    def _update(self, places: Iterable[Place]) -> None:
        """Step parameters that have gradients. All are looked at before the first is changed."""

    def _conclude(self) -> None:
        """What `step()` does once parameters have been stepped."""

    @abc.abstractmethod
    def _load(self, content: dict[str, Any]) -> None:
        """Take over a state_dict; ValueError, and nothing changed, for one that does not fit."""

    # ---- parameters ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. TypeError for parameters of other dtypes, ValueError for two that lie in the same memory."""
        group = param_group
        if isinstance(group.get("params"), torch.Tensor):
            group["params"] = [group["params"]]
        if "params" in group and not isinstance(group["params"], set):
            group["params"] = list(group["params"])
            given = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
            for parameter in given:
                _require_steppable(parameter)
            _require_memory_of_their_own([*self._parameters(), *given])
        super().add_param_group(group)
        if self._backward is not None:
            number = len(self.param_groups) - 1
            self._backward.attach(place for place in self._places() if place[0] == number)

    def _places(self) -> Iterator[Place]:
        index = 0
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield number, index, parameter
                index += 1

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for _, _, parameter in self._places()]

    def _names(self) -> list[str]:
        """Of each parameter: the one it was given with, or its number."""
        names: list[str] = []
        for group in self.param_groups:
            given = group.get("param_names")
            names += given or [str(len(names) + place) for place in range(len(group["params"]))]
        return names

    # ---- the step ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient; the loss of a closure, which is called first."""
        if self._backward is not None:
            if closure is not None:
                raise RuntimeError(
                    f"expected step() without a closure with {self.fused_option}=True: "
                    "its backward would step parameters that it evaluates again"
                )
            self._backward.finish(self._parameters())
            self._conclude()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(place for place in self._places() if place[2].grad is not None)
        self._conclude()
        return loss

    # ---- steps in backward -----------------------------------------------------------------------------------------

    def _attach(self) -> None:
        if self._backward_options is not None:
            backward = BackwardSteps(
                lambda *place: self._update([place]), *self._backward_options, option=self.fused_option
            )
            backward.attach(self._places())
            self._backward = backward

    def release_backward(self) -> None:
        """End steps in backward: from now on gradients stay, and `step()` takes the steps."""
        if self._backward is not None:
            self._backward.release(self._parameters())
            self._backward = self._backward_options = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; with steps in backward it drops gradients that wait for others of their step."""
        if self._backward is not None:
            self._backward.clear(self._parameters())
        else:
            super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks before it steps.
        if self._backward is not None:
            raise RuntimeError(
                f"expected no GradScaler with {self.fused_option}=True: parameters have been stepped in backward, with "
                f"gradients that are still scaled; train in bfloat16, or with {self.fused_option}=False"
            )
        return False

    # ---- loading and copying ---------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, bit for bit. Types of the state stay, whatever the weights'.

        ValueError, and nothing changed, where the state does not fit this optimizer and its parameters.
        """
        content = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, content)
            content = content if replaced is None else replaced
        self._load(content)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        # A module does not pickle.
        own = {"ops": self.ops.__name__, "_backward_options": self._backward_options, "_backward": None}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "ops" in state
        super().__setstate__({**state, "ops": importlib.import_module(state["ops"])} if copied else state)
        if copied:
            self._attach()


def _require_steppable(parameter: Any) -> None:
    """TypeError for a tensor that is spread over devices, sparse, or of a dtype that steps do not take; torch looks at
    what is no tensor.
    """
    if hasattr(parameter, "device_mesh"):
        raise TypeError(
            "expected parameters that lie on one device whole, got a DTensor, whose shards are not stepped: "
            "train with DistributedDataParallel, or one process a model"
        )
    if not isinstance(parameter, torch.Tensor):
        return
    if parameter.layout is not torch.strided:
        raise TypeError(f"expected dense parameters, got one of layout {parameter.layout}")
    if parameter.dtype not in FLOATING:
        expected = ", ".join(map(str, FLOATING))
        raise TypeError(f"expected parameters of {expected}, got {parameter.dtype} {list(parameter.shape)}")


def _require_memory_of_their_own(parameters: Sequence[Any]) -> None:
    """ValueError where two parameters, not one given twice, hold the same elements: they would be stepped twice, or
    both at once. Of views with gaps, which may lie in each other's, nothing is said.
    """
    lies: dict[tuple[torch.device, int], list[tuple[int, int, torch.Tensor]]] = {}
    for parameter in {id(one): one for one in parameters if isinstance(one, torch.Tensor)}.values():
        if parameter.numel() and parameter.is_contiguous() and not parameter.is_meta:
            try:
                memory = parameter.untyped_storage().data_ptr()
            except RuntimeError:  # of a tensor made of others, which hold its elements
                continue
            first = int(parameter.storage_offset()) * parameter.element_size()
            last = first + parameter.numel() * parameter.element_size()
            if memory:
                lies.setdefault((parameter.device, memory), []).append((first, last, parameter))
    for places in lies.values():
        places.sort(key=lambda place: place[:2])
        for (_, end, one), (begin, _, other) in itertools.pairwise(places):
            if begin < end:
                raise ValueError(
                    f"expected parameters with memory of their own, got {list(one.shape)} and {list(other.shape)} in "
                    "the same; pass one parameter, which its owners share"
                )


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where kernels find it: CUDA's move into shared memory, where there is any."""
    if tensor.device.type == "cuda" and tensor.numel() and partner(tensor.device) is not None:
        share(tensor)
    return tensor


def checked_numbers(where: str, saved: Any, names: Sequence[str]) -> dict[str, int]:
    """The plain numbers of a saved state; ValueError that names what is wrong."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected the state of {where} as a mapping, got {type(saved).__name__}")
    for name in names:
        value = saved.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"expected {name!r} in the state of {where} as an integer >= 0, got {value!r}")
    return {name: int(saved[name]) for name in names}


def copied_tensors(
    where: str,
    param: torch.Tensor,
    saved: Mapping[str, Any],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> dict[str, torch.Tensor]:
    """Copies of a saved state's tensors on the parameter's device, with their own dtypes; ValueError that names what is
    wrong. expected: dtype and shape of each.
    """
    for name, (dtype, shape) in expected.items():
        tensor = saved.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"expected {name!r} of {where} as {dtype} {list(shape)}, got {got}")
    plain = torch.contiguous_format
    return {name: placed(saved[name].detach().to(param.device, copy=True, memory_format=plain)) for name in expected}


def require_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """RuntimeError for a sparse gradient, TypeError for one of a dtype that steps do not take."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"expected dense gradients, got one of layout {grad.layout} for {list(parameter.shape)}; "
            "make embeddings with sparse=False"
        )
    if parameter.dtype not in FLOATING:
        raise TypeError(f"expected parameters of {', '.join(map(str, FLOATING))}, got {parameter.dtype}")
    if grad.dtype not in (parameter.dtype, torch.float32):
        raise TypeError(f"expected a gradient of {parameter.dtype} or torch.float32, got {grad.dtype}")
