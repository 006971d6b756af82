"""Adam and AdamW whose moments are held in 8 bits, on any device that kernels reach.

    m = beta1*m + (1 - beta1)*g;  v = beta2*v + (1 - beta2)*g^2
    p = p - lr/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps)

with m and sqrt(v) decoded before and encoded after, in one kernel that reads and writes each byte once
(`memtrain_cl.reference.adam` has the rule to the bit). Adam: "Adam: A Method for Stochastic Optimization", Kingma and
Ba 2014; the dynamic code: "8-bit Optimizers via Block-wise Quantization", Dettmers and others 2021.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memtrain_cl.adam_rule import AdamStep, AdamTensor
from memtrain_cl.formats import stream_seed
from memtrain_cl.optim import adam_options as options
from memtrain_cl.optim.adam_state import State, adam_tensor, code_of, decoded, loaded_state, new_state, recode, root
from memtrain_cl.optim.base import BackwardOptimizer, Place, require_gradient
from memtrain_cl.optim.profiles import normal_table, profile_fits


class CompressedAdam(BackwardOptimizer):
    """Adam with compressed moments; `torch.optim.Adam`'s and `AdamW`'s place, on the host, "opencl" and CUDA.

    params, lr, betas, eps, weight_decay, maximize: as torch's; lr may be a tensor. decoupled_weight_decay: AdamW.
    compression_method: how moments are held, of every size of tensor alike ("auto" apart):
        "int8"      a byte a moment and a float32 scale a block of `int8_block_size`: 2 + 8/block bytes a parameter
        "profile"   ("g4") ranks of a byte within blocks of `profile_block_size`, mean and scale a block: about 2.06
        "dense"     float32: 8 bytes; follows torch.optim.Adam within float32's rounding
        "auto"      int8; after the first step, and every `refit_every` steps, a tensor of `min_size_for_g4` elements or
                    more becomes a profile where both its moments fit one (distance at most `g4_gof_threshold`, relative
                    error below 0.3), and int8 again where they do not. Those steps wait for the host, and take about 44
                    bytes an element meanwhile
    code: int8's map, "linear" (code * largest/127) or "dynamic" (`memtrain_cl.code_maps.dynamic_map`), the better one
    where the gradients of a block differ a lot. moment_rounding: "nearest", or "stochastic", with which small moments
    beside large ones decay as they should, in the mean. seed: of all that is rounded stochastically.
    skip: what a gradient that is not finite leaves out, its whole "tensor" or its "block"; it is counted on the device
    (`skipped_updates`). foreach: accepted, without meaning. capturable, differentiable: refused.

    Each of these can stand in a parameter group; ValueError for an unknown option there. `groups(model)` makes groups
    in which embeddings are dense. bfloat16 and float16 weights are updated in float32 and rounded stochastically. A
    step on codes is never longer than dense Adam's longest (`AdamStep.bound`).

    fused_backward: each parameter is stepped as soon as backward has its gradient, which is freed then. `accumulate`
    backward passes make one step, of the sum of their gradients; max_grad_norm clips each tensor's gradient by itself.
    `step()` is called all the same, once an update, before a schedule's, and RuntimeError says where something cannot
    work: closures, GradScaler, several ranks, norms over all gradients.

    CUDA: `memtrain_cl.share(model)` first, or parameters are copied; state is shared by itself. Gradients that torch
    makes anew are copied too, unless kept (``zero_grad(set_to_none=False)``) and shared.

    ops: the backend, `memtrain_cl.ops` or `memtrain_cl.reference`. Raises TypeError for parameters that are not
    float32, bfloat16 or float16, and for gradients of a dtype that is neither their parameter's nor float32;
    RuntimeError for sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compression_method: str = "auto",
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        int8_block_size: int = 2048,
        profile_block_size: int = 256,
        code: str = "linear",
        moment_rounding: str = "nearest",
        refit_every: int = 100,
        min_size_for_g4: int = 4096,
        g4_gof_threshold: float = 0.05,
        skip: str = "tensor",
        seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused_backward: bool = False,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        ops: ModuleType | None = None,
    ) -> None:
        self._prepare(ops, fused_backward, accumulate, max_grad_norm)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "compression_method": compression_method,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "int8_block_size": int8_block_size,
            "profile_block_size": profile_block_size,
            "code": code,
            "moment_rounding": moment_rounding,
            "refit_every": refit_every,
            "min_size_for_g4": min_size_for_g4,
            "g4_gof_threshold": g4_gof_threshold,
            "skip": skip,
            "seed": seed,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, options.checked(defaults))
        self._attach()

    # ---- groups --------------------------------------------------------------------------------------------------

    @staticmethod
    def groups(model: nn.Module, **overrides: Any) -> list[dict[str, Any]]:
        """Two groups of a model's trainable parameters, with their names: embeddings, held dense, and all others.

        A parameter that an embedding shares with another layer is the embedding's. overrides: options of the others.
        A group without parameters is left out.
        """
        kinds = (nn.Embedding, nn.EmbeddingBag)
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        parts = (
            {"params": [pair for pair in named if id(pair[1]) in embedded], "compression_method": "dense"},
            {"params": [pair for pair in named if id(pair[1]) not in embedded], **overrides},
        )
        return [part for part in parts if part["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. ValueError for unknown options and those out of range; TypeError for other dtypes."""
        if not isinstance(param_group, dict):
            raise TypeError(f"expected a parameter group as a dict, got {type(param_group).__name__}")
        super().add_param_group(options.checked(param_group))

    # ---- the step ------------------------------------------------------------------------------------------------

    def _update(self, places: Iterable[Place]) -> None:
        """Step parameters that have gradients. All are looked at before the first is changed."""
        batches: dict[tuple[torch.device, AdamStep], list[AdamTensor]] = defaultdict(list)
        refits: list[tuple[AdamTensor, AdamStep, State, dict[str, Any]]] = []
        states: dict[torch.Tensor, State] = {}
        rules: dict[tuple[int, str, int, int], AdamStep] = {}
        for number, index, parameter in places:
            grad = parameter.grad
            if grad is None or parameter.numel() == 0:
                continue
            require_gradient(parameter, grad)
            group = self.param_groups[number]
            # Not self.state[parameter], which would make an entry.
            state = self.state.get(parameter)
            if not state:
                code = options.first_code(group)
                seed = stream_seed(group["seed"], index + 1)
                state = new_state(parameter, code, options.block_size_of(group, code), seed)
            key = (number, code_of(state), state["block_size"], state["step"] + 1)
            if key not in rules:
                options.require_layout(group, key[1], key[2])
                rules[key] = options.rule_of(group, key[1], key[3])
            tensor, rule = adam_tensor(parameter, grad, state), rules[key]
            if options.chooses(group, parameter.numel(), rule.step):
                refits.append((tensor, rule, state, group))
            else:
                batches[parameter.device, rule].append(tensor)
            states[parameter] = state
        self.state.update(states)
        for (_, rule), tensors in batches.items():
            self._launch(tensors, rule)
        for refit in refits:
            self._step_and_choose(*refit)
        for state in states.values():
            state["step"] += 1

    def _launch(self, tensors: list[AdamTensor], rule: AdamStep) -> None:
        """One step of tensors on one device."""
        table = normal_table(tensors[0].param.device) if rule.code == "profile" else None
        self.ops.adam_step_(tensors, rule, tables=None if table is None else (table, table))

    def _step_and_choose(self, tensor: AdamTensor, rule: AdamStep, state: State, group: Mapping[str, Any]) -> None:
        """A step after which the code is chosen anew: a profile where both moments fit one.

        Judged are the moments before they are encoded, since any that come out of a profile fit one. A dense step of a
        copy of the parameter makes them.
        """
        m, s = decoded(self.ops, state, normal_table(tensor.param.device))
        v, skipped = s * s, torch.zeros_like(tensor.skipped)
        copy = AdamTensor(tensor.param.clone(), tensor.grad, m, v, None, None, skipped, tensor.seed)
        self._launch([copy], replace(rule, code="dense"))
        self._launch([tensor], rule)
        if skipped.tolist()[0]:
            return
        moments = (m, root(v))
        fits = all(
            profile_fits(
                moment,
                block_size=group["profile_block_size"],
                gof_threshold=group["g4_gof_threshold"],
                positive=positive,
                ops=self.ops,
            )
            for moment, positive in zip(moments, (False, True), strict=True)
        )
        code = "profile" if fits else str(group["code"])
        if code != rule.code:
            recode(self.ops, state, code, options.block_size_of(group, code), moments)

    # ---- what it tells ---------------------------------------------------------------------------------------------

    def method_of(self, parameter: torch.Tensor) -> str | None:
        """How a parameter's moments are held: "int8" (the linear code), "int8-dynamic", "profile" or "dense"; None
        before its first step.
        """
        state = self.state.get(parameter)
        if not state:
            return None
        code = code_of(state)
        return {"linear": "int8", "dynamic": "int8-dynamic"}.get(code, code)

    def methods(self) -> dict[str, str | None]:
        """`method_of` every parameter, by its name, or its number where it was given without one."""
        return dict(zip(self._names(), map(self.method_of, self._parameters()), strict=True))

    def skipped_updates(self) -> dict[str, tuple[int, int]]:
        """(how often, at which step last) for each parameter whose update was left out for a gradient that was not
        finite, by name or number. Waits for the device.
        """
        found = {}
        for name, parameter in zip(self._names(), self._parameters(), strict=True):
            state = self.state.get(parameter)
            if state:
                times, last = state["skipped"].tolist()
                if times:
                    found[name] = (times, last)
        return found

    # ---- saving and copying ----------------------------------------------------------------------------------------

    def _load(self, content: dict[str, Any]) -> None:
        """ValueError, and nothing changed, where the state is of another optimizer, of other parameters, or was made
        with another compression_method, code or block size than this optimizer has.
        """
        groups = deepcopy(content["param_groups"])
        options.require_groups(self.param_groups, groups)
        own = dict(zip((i for group in groups for i in group["params"]), self._places(), strict=True))
        names = self._names()
        state: dict[torch.Tensor, State] = defaultdict(dict)
        for key, saved in content["state"].items():
            if key not in own:
                raise ValueError(f"expected state of parameters {sorted(own)}, got one of {key!r}")
            number, index, parameter = own[key]
            codes = options.codes_of(groups[number])
            sizes = {code: options.block_size_of(groups[number], code) for code in codes}
            state[parameter] = loaded_state(f"parameter {names[index]}", parameter, saved, codes, sizes)
        for current, group in zip(self.param_groups, groups, strict=True):
            group["params"] = current["params"]
            if "param_names" in current:
                group.setdefault("param_names", current["param_names"])
        self.__setstate__({"state": state, "param_groups": groups})
