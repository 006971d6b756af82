"""The loops that people train with, around CompressedAdam: Hugging Face's Trainer, Accelerate, Lightning.

A plain loop, GradScaler and schedules are in tests/test_compressed_adam_state.py. Kernels run where a device is at
hand; frameworks see host tensors.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl import memory_report
from memtrain_cl.device import Device
from memtrain_cl.optim import CompressedAdam
from tests.adam_cases import same_bits, values

LR = 1e-2
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"compression_method": "int8", "code": "dynamic", "moment_rounding": "stochastic"},
    "auto": {"compression_method": "auto", "min_size_for_g4": 64, "refit_every": 2, "g4_gof_threshold": 0.5},
}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of a regression that a small network learns."""

    def __init__(self) -> None:
        self.x = values(64, 16)
        self.y = self.x[:, :2] * 0.5

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Network(torch.nn.Module):
    """Gives its loss first, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def optimizer_of(model: torch.nn.Module, method: str, **options: Any) -> CompressedAdam:
    return CompressedAdam(CompressedAdam.groups(model), lr=LR, **OPTIONS[method], **options)


@pytest.fixture(autouse=True)
def _warnings_of_others() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the frameworks', of their own parts
        yield


@pytest.mark.parametrize("method", list(OPTIONS))
def test_trainer(device: Device, tmp_path: Path, method: str) -> None:
    """A run that is stopped and resumed by Trainer ends with the bits of one that went through."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def run(folder: Path, steps: int, resume: bool = False, **options: Any) -> tuple[Network, CompressedAdam, Any]:
        model = Network()
        optimizer = optimizer_of(model, method, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=16,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            max_grad_norm=1.0,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, schedule))
        result = trainer.train(resume_from_checkpoint=resume)
        return model, optimizer, result

    model, through, result = run(tmp_path / "through", 8)
    assert result.global_step == 8
    assert model.body(Rows().x).sub(Rows().y).square().mean() < Network()(Rows().x, Rows().y)["loss"]
    run(tmp_path / "half", 4)
    _, resumed, _ = run(tmp_path / "half", 8, resume=True)
    assert same_bits(through, resumed)
    if method == "int8":
        # It takes a norm over all gradients after each backward, clipped or not.
        with pytest.raises(RuntimeError, match="expected no use of a gradient after backward"):
            run(tmp_path / "fused", 8, fused_backward=True)


@pytest.mark.parametrize("method", list(OPTIONS))
def test_accelerate(device: Device, tmp_path: Path, method: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> Any:
        model = Network()
        rows = torch.utils.data.DataLoader(Rows(), batch_size=16)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        return accelerator, *accelerator.prepare(model, optimizer_of(model, method), rows)

    def epochs(parts: Any, count: int) -> None:
        accelerator, model, optimizer, rows = parts
        for _ in range(count):
            for row in rows:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**row)["loss"])
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

    live = prepared()
    epochs(live, 2)
    live[0].save_state(str(tmp_path / "state"))
    resumed = prepared()
    resumed[0].load_state(str(tmp_path / "state"))
    for each in (live, resumed):
        epochs(each, 1)
    assert same_bits(live[2].optimizer, resumed[2].optimizer)
    assert {state["step"] for state in live[2].optimizer.state.values()} == {6}
    assert memory_report(live[1], live[2]).optimizer == memory_report(live[1], live[2].optimizer).optimizer


@pytest.mark.parametrize("method", list(OPTIONS))
def test_lightning(device: Device, tmp_path: Path, method: str) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, row: Any, index: int) -> Any:
            return self.network(**row)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self, method)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def run(epochs: int, checkpoint: Path | None = None) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            gradient_clip_val=1.0,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=16), ckpt_path=checkpoint)
        return trainer

    run(2).save_checkpoint(tmp_path / "half.ckpt")
    through, resumed = run(3), run(3, tmp_path / "half.ckpt")
    assert same_bits(through.optimizers[0], resumed.optimizers[0])
    assert {state["step"] for state in through.optimizers[0].state.values()} == {12}
    assert through.optimizers[0].param_groups[0]["lr"] == LR / 8
