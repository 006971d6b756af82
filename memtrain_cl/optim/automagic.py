"""Automagic: updates of one length, whose learning rate is voted up and down by the signs of gradients.

    v = beta2*v + (1 - beta2)*g^2;   u = g / (sqrt(v)/sqrt(1 - beta2^t) + eps)
    u = clamp(u / max(1, rms(u)/clip_threshold), +-clip_threshold);   p = p - lr*(u + weight_decay*p)
    lr = clamp(lr * exp(signal), min_lr, max_lr), once a step and group

An element whose last `polarity_history` signs of g agree votes for a longer step, one whose signs turn every time for
a shorter one, each with the weight |u|; signal is the sum of the votes over the sum of the weights, of all parameters
of the group. (`memtrain_cl.reference.automagic` has the rule to the bit.) sqrt(v) is held in 8 bits, in rows rotated
by a Hadamard matrix, and a sign in one bit: 2 bytes an element in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar, cast

import torch

from memtrain_cl.automagic_rule import STREAM_SUM, AutomagicTensor
from memtrain_cl.formats import step_seed, stream_seed
from memtrain_cl.optim.automagic_group import CHECKS, RateGroup, bounds_of, middle_rate, rule_of
from memtrain_cl.optim.automagic_state import State, automagic_tensor, loaded_state, new_state
from memtrain_cl.optim.base import BackwardOptimizer, Place, require_gradient
from memtrain_cl.optim.group_options import checked, require_same_groups
from memtrain_cl.optim.quantized import is_quantized, requantize_, widened
from memtrain_cl.optim.rounded_sums import RoundedSums


class Automagic(BackwardOptimizer):
    """An optimizer that finds its learning rate by itself, on the host, "opencl" and CUDA.

    lr: where the learning rate starts; one for each parameter group. min_lr, max_lr: its bounds. betas: (0, beta2); a
    first moment is refused. eps, clip_threshold, weight_decay (decoupled): see above. polarity_history: signs that an
    element remembers, taken into 2..64. seed: of all that is rounded stochastically. Each of these can stand in a
    parameter group; ValueError for an unknown option there.

    The learning rate lives on the device, and nothing waits for it in a step. ``param_groups[i]["lr"]`` is the one in
    use, fetched when somebody looks; what a user or a schedule writes there becomes the group's at the next step, from
    where votes go on. (A schedule that writes every step overrules the votes.)

    fused: each parameter is stepped as soon as backward has its gradient, which is freed then; `step()` applies the
    votes. `accumulate` backward passes make one step, of the sum of their gradients; max_grad_norm clips each tensor's
    gradient by itself. RuntimeError says where something cannot work: a second backward before `step()`, closures,
    GradScaler, several ranks, norms over all gradients. fused=False: `step()` steps, torch's clipping works as ever.
    In both, gradients of 16 bits are added up with stochastic rounding.

    Elements of a gradient that are not finite, or beyond 2^63, count as 0 and are counted (`skipped_elements`).
    bfloat16 and float16 weights are updated in float32 and rounded stochastically; so are weights of optimum-quanto
    (QBytesTensor), which get fresh scales.

    A state_dict is loaded by the places of parameters: moments, signs and learning rates come from it, every option
    stays as constructed. Signs of another polarity_history start afresh; learning rates that differ within a group
    become their geometric median.

    CUDA: `memtrain_cl.share(model)` first, or parameters are copied; state is shared by itself.

    ops: the backend, `memtrain_cl.ops` or `memtrain_cl.reference`. Raises TypeError for parameters that are not
    float32, bfloat16 or float16, and for gradients of a dtype that is neither their parameter's nor float32;
    RuntimeError for sparse gradients; ValueError for a group whose parameters are on several devices.
    """

    fused_option: ClassVar[str] = "fused"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-6,
        min_lr: float = 1e-30,
        max_lr: float = 1e3,
        betas: tuple[float, float] = (0.0, 0.999),
        eps: float = 1e-8,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        polarity_history: int = 8,
        fused: bool = True,
        *,
        seed: int = 0,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        ops: ModuleType | None = None,
    ) -> None:
        self._prepare(ops, fused, accumulate, max_grad_norm)
        self._sums: RoundedSums | None = None
        defaults = {
            "lr": lr,
            "min_lr": min_lr,
            "max_lr": max_lr,
            "betas": betas,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
            "polarity_history": polarity_history,
            "seed": seed,
        }
        bounds_of(defaults)
        super().__init__(params, checked(defaults, CHECKS))
        self._attach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. ValueError for unknown options and those out of range; TypeError for other dtypes."""
        if not isinstance(param_group, dict):
            raise TypeError(f"expected a parameter group as a dict, got {type(param_group).__name__}")
        group = RateGroup(checked(param_group, CHECKS))
        bounds_of({**self.defaults, **group})
        super().add_param_group(group)
        if self._sums is not None:
            number = len(self.param_groups) - 1
            self._sums.attach(place for place in self._places() if place[0] == number)

    def _group(self, number: int) -> RateGroup:
        return cast(RateGroup, self.param_groups[number])

    # ---- the step ------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        #: Parameters that have been stepped since the votes were applied, and their groups.
        self._stepped: set[torch.Tensor] = set()
        self._moving: set[int] = set()
        super()._attach()
        self._sums = None
        if self._backward_options is None or self._backward_options[0] > 1:
            self._sums = RoundedSums(self.ops, self._seed_of_sum)
            self._sums.attach(self._places())

    def release_backward(self) -> None:
        """End steps in backward: from now on gradients stay, and `step()` takes them. Waiting votes are applied."""
        self._conclude()
        super().release_backward()
        if self._sums is None:
            self._sums = RoundedSums(self.ops, self._seed_of_sum)
            self._sums.attach(self._places())

    def _seed_of(self, number: int, index: int) -> int:
        return stream_seed(self.param_groups[number]["seed"], index + 1)

    def _seed_of_sum(self, number: int, index: int, parameter: torch.Tensor, times: int) -> int:
        state = self.state.get(parameter)
        step = state["step"] if state else 0
        return stream_seed(step_seed(self._seed_of(number, index), step + 1, STREAM_SUM), times)

    def _update(self, places: Iterable[Place]) -> None:
        """Step parameters that have gradients. All are looked at before the first is changed."""
        batches: dict[int, list[AutomagicTensor]] = defaultdict(list)
        states: dict[torch.Tensor, State] = {}
        quantized: list[tuple[torch.Tensor, AutomagicTensor]] = []
        begins = [0]
        for group in self.param_groups:
            begins.append(begins[-1] + len(group["params"]))
        for number, index, parameter in places:
            grad = parameter.grad
            if grad is None or parameter.numel() == 0:
                continue
            require_gradient(parameter, grad)
            if parameter in self._stepped:
                raise RuntimeError(
                    "expected step() after the backward of each update with fused=True, got a second gradient of a "
                    f"parameter {list(parameter.shape)} before it; several backward passes make one step with "
                    "accumulate=, or with fused=False"
                )
            group = self._group(number)
            # Not self.state[parameter], which would make an entry.
            state = self.state.get(parameter)
            if not state:
                state = new_state(parameter, group["polarity_history"], self._seed_of(number, index))
            weights = widened(parameter)
            if is_quantized(parameter):
                grad = grad.to(torch.float32)
            tensor = automagic_tensor(weights, grad, state, rule_of(group, state), index - begins[number])
            if is_quantized(parameter):
                quantized.append((parameter, tensor))
            batches[number].append(tensor)
            states[parameter] = state
        for number, tensors in batches.items():
            self._require_group(number, tensors[0].param.device)
        self.state.update(states)
        for number, tensors in batches.items():
            group = self._group(number)
            rate, tally = group.ready(tensors[0].param.device)
            self.ops.automagic_step_(tensors, rate, tally)
            self._moving.add(number)
            for parameter in group["params"]:
                if parameter in states:
                    states[parameter]["lr"] = rate
        for parameter, tensor in quantized:
            requantize_(parameter, tensor.param, step_seed(tensor.seed, tensor.rule.step, STREAM_SUM))
        for parameter, state in states.items():
            state["step"] += 1
            state["entered"] += 1
            self._stepped.add(parameter)

    def _require_group(self, number: int, device: torch.device) -> None:
        """ValueError unless a group's learning rate is in its range, and its parameters are on one device."""
        group = self._group(number)
        if group.written:
            CHECKS["lr"]("lr", group["lr"])
        bounds_of(group)
        places = {parameter.device for parameter in group["params"]}
        if places != {device}:
            raise ValueError(f"expected a group's parameters on one device, got {', '.join(sorted(map(str, places)))}")

    def _conclude(self) -> None:
        """Apply the votes of the parameters that have been stepped."""
        for number in sorted(self._moving):
            group = self._group(number)
            self.ops.automagic_rate_(group.rate, group.tally, *bounds_of(group))
            group.moved()
        self._moving.clear()
        self._stepped.clear()
        if self._sums is not None:
            self._sums.forget()

    # ---- what it tells ---------------------------------------------------------------------------------------------

    def get_learning_rates(self) -> list[float]:
        """The learning rate in use, of each group. Waits for the device."""
        return [float(group["lr"]) for group in self.param_groups]

    def get_avg_learning_rate(self) -> float:
        """Their mean, weighted by the groups' numbers of elements. Waits for the device."""
        sizes = [sum(parameter.numel() for parameter in group["params"]) for group in self.param_groups]
        total = sum(rate * size for rate, size in zip(self.get_learning_rates(), sizes, strict=True))
        return float(total / max(sum(sizes), 1))

    def skipped_elements(self) -> dict[str, int]:
        """How many elements of gradients were not finite and counted as 0, by the parameter's name or number, for
        those that had any. Waits for the device.
        """
        found = {}
        for name, parameter in zip(self._names(), self._parameters(), strict=True):
            state = self.state.get(parameter)
            if state and (times := int(state["skipped"].item())):
                found[name] = times
        return found

    def method_of(self, parameter: torch.Tensor) -> str | None:
        """How a parameter's sqrt(v) is held: "rotated int8", "int8" (rows too odd to rotate) or "dense" (v itself, of
        fewer than two dimensions); None before its first step.
        """
        state = self.state.get(parameter)
        if not state:
            return None
        return "dense" if "scale" not in state else "rotated int8" if state["rot"] > 1 else "int8"

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _load(self, content: dict[str, Any]) -> None:
        groups = content["param_groups"]
        require_same_groups(self.param_groups, groups)
        own = dict(zip((i for group in groups for i in group["params"]), self._places(), strict=True))
        names = self._names()
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        rates: dict[int, list[float]] = defaultdict(list)
        for key, saved in content["state"].items():
            if key not in own:
                raise ValueError(f"expected state of parameters {sorted(own)}, got one of {key!r}")
            number, index, parameter = own[key]
            history = self.param_groups[number]["polarity_history"]
            state[parameter], lr = loaded_state(f"parameter {names[index]}", parameter, saved, history)
            rates[number].append(lr)
        found = []
        for number, group in enumerate(groups):
            if "lr" not in group:
                raise ValueError(f"expected the state of an Automagic, got a group without lr: {sorted(group)}")
            found.append(CHECKS["lr"]("lr", middle_rate(rates[number]) if rates[number] else group["lr"]))
        self.state = state
        for number, (saved, lr) in enumerate(zip(groups, found, strict=True)):
            current = self._group(number)
            current["lr"] = lr
            if "initial_lr" in saved:
                current.setdefault("initial_lr", saved["initial_lr"])
            held = [parameter for parameter in current["params"] if parameter in state]
            for parameter in held:
                state[parameter]["lr"] = current.ready(parameter.device)[0]
