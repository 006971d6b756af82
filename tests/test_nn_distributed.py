"""Data-parallel training over torch.distributed: two processes, other data on each, the same bytes on both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from tests.children import on_path
from tests.distributed_child import SCENARIOS, STEPS
from tests.layer_cases import IN, OUT, assert_same

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
Ends = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ends(_opened: Device, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """What each rank ended with, by scenario; all scenarios are played at once."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": on_path(ROOT)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # no name server is asked where this machine is
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_child", str(rank), str(RANKS), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * RANKS, "\n".join(said)

    def of(scenario: str) -> list[dict[str, Any]]:
        return [torch.load(folder / f"{scenario}-{rank}.pt", weights_only=True) for rank in range(RANKS)]

    return of


def tensors(end: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in end.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in ("left_to_themselves", "different_layers")])
def test_ranks_end_with_the_same_bytes(ends: Ends, name: str) -> None:
    first, second = ends(name)
    assert_same(tensors(first), tensors(second))


@pytest.mark.parametrize("name", ["plain", "wrapped", "wrapped_on_opencl", "options"])
def test_twenty_steps_were_taken(ends: Ends, name: str) -> None:
    (end, _) = ends(name)
    steps = [int(value) for key, value in end.items() if key.endswith("step")]
    assert steps == [STEPS, STEPS]
    assert len({int(value) for key, value in end.items() if key.endswith("seed")}) == 2, "each layer has its own chance"


def test_a_sum_is_averaged_once(ends: Ends) -> None:
    (end, _) = ends("accumulated")
    parts, shapes = zip(*end["averaged"], strict=True)
    assert set(parts) == {3}, "with the last backward alone"
    assert sorted(shapes) == sorted([(OUT, IN), (4, OUT), (OUT, 1), (4, 1)]), "gradients and estimated squares"


@pytest.mark.parametrize("name", ["mean", "resumed"])
def test_the_update_is_that_of_the_mean(ends: Ends, name: str) -> None:
    for end in ends(name):
        assert_same(tensors(end), end["expected"])


def test_a_given_gradient_is_averaged_and_left_alone(ends: Ends) -> None:
    assert [end["untouched"] for end in ends("given")] == [True, True]


def test_a_row_that_is_not_finite_on_one_rank_is_skipped_on_all(ends: Ends) -> None:
    for end in ends("one_rank_not_finite"):
        assert int(end["skipped"]) == 1


def test_copies_average_over_all_ranks(ends: Ends) -> None:
    assert ends("a_group_of_all")[0]["group"]


def test_ranks_that_are_left_to_themselves_differ(ends: Ends) -> None:
    first, second = ends("left_to_themselves")
    assert not torch.equal(first["0.state"], second["0.state"])


def test_different_layers_are_refused_before_anything_changes(ends: Ends) -> None:
    for end in ends("different_layers"):
        assert "expected a counter layer of the same state" in end["error"]
        assert_same(end["before"], end["after"])


def test_what_cannot_be_averaged_is_refused(ends: Ends) -> None:
    for end in ends("impossible"):
        assert "averaging over ranks" in end["error"]
