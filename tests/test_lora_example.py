"""The example that fine-tunes adapters with Automagic learns, and shows how the learning rate rose."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.acceptance_automagic import plot
from memtrain_cl.device import Device


@pytest.mark.filterwarnings("ignore")
def test_adapters_learn_a_sentence(device: Device, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are an extra")
    from bench.lora import adapted, fine_tune

    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    run = fine_tune(model, 60, 1e-6)
    assert sum(run["losses"][-5:]) < 0.9 * sum(run["losses"][:5])
    assert run["rates"][-1] > 1e-5
    assert all(bool((p == frozen[name]).all()) for name, p in model.named_parameters() if name in frozen)
    assert plot([run], tmp_path / "rates.png", every=1)
    assert (tmp_path / "rates.png").stat().st_size > 1000
