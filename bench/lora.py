"""Adapters of a small language model fine-tuned with Automagic: ``python -m bench.lora``; needs peft and transformers.

The model is a Llama of two layers with first weights, from a configuration alone, so that nothing is downloaded. The
base is frozen; LoRA adapters of its attention learn a sentence by heart. What is printed is the loss, and the learning
rate that votes made of the first one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.acceptance_automagic import plot
from memtrain_cl.optim import Automagic

TEXT = b"The quick brown fox jumps over the lazy dog, and nobody minds the weather. "


def adapted(seed: int = 0) -> Any:
    """The model, of which only adapters learn."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "o_proj"]))


def fine_tune(model: Any, steps: int, lr: float, place: str = "cpu") -> dict[str, Any]:
    """Losses and learning rates of `steps` steps from lr on windows of TEXT."""
    model.to(place)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Automagic(parameters, lr=lr, max_lr=3e-2)
    text = torch.frombuffer(bytearray(TEXT * 4), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(0)
    rates, losses = [], []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 65, (8,), generator=chance).tolist()
        tokens = torch.stack([text[start : start + 64] for start in starts]).to(place)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # steps each adapter, and frees its gradient
        optimizer.step()  # applies the votes
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"start": lr, "val_loss": losses[-1], "rates": rates, "losses": losses}


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description="LoRA adapters trained with Automagic.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-6, help="where the learning rate starts")
    parser.add_argument("--place", default="cpu", help="torch's device, such as opencl")
    parser.add_argument("--plot", type=Path, help="a picture of the learning rate over the steps")
    options = parser.parse_args()
    run = fine_tune(adapted(), options.steps, options.lr, options.place)
    for step in range(0, options.steps, max(1, options.steps // 20)):
        print(f"step {step:5}  loss {run['losses'][step]:.4f}  learning rate {run['rates'][step]:.3e}")
    print(f"after {options.steps} steps: loss {run['val_loss']:.4f}, learning rate {run['rates'][-1]:.3e}")
    if options.plot is not None:
        plot([run], options.plot, every=1)


if __name__ == "__main__":
    main()
