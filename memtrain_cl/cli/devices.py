"""`memtrain-cl devices` and `memtrain-cl doctor`: what there is to compute on, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from memtrain_cl.cli.diagnosis import Report
    from memtrain_cl.device import DeviceInfo

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def devices(as_json: AsJson = False) -> None:
    """List the OpenCL devices. A star marks the one that is used when none is named."""
    from memtrain_cl.device import choose
    from memtrain_cl.device import devices as list_devices
    from memtrain_cl.errors import UnsupportedDevice

    infos = list_devices()
    chosen, fault = None, None
    try:
        chosen, why = choose()
    except UnsupportedDevice as error:
        fault = error
    if as_json:
        typer.echo(json.dumps([{**asdict(info), "chosen": info is chosen} for info in infos], indent=2))
    elif infos:
        _print_devices(infos, chosen)
    if fault is not None:
        raise fault
    if chosen is not None and not as_json:
        typer.echo(f"* {chosen.name} is used when none is named: {why}.")


def _print_devices(infos: list[DeviceInfo], chosen: DeviceInfo | None) -> None:
    from rich.text import Text

    from memtrain_cl.cli.tables import console, table
    from memtrain_cl.export.hostile import printable

    grid = table(
        "", "name", "type", "platform", "version", "offers", "same as", "memory", "shared", "work-group", left=7
    )
    for info in infos:
        offers = ("fp16", "fp64", "subgroups", "integer_dot")
        cells = (
            f"{info.index}{'*' if info is chosen else ''}",
            info.name,
            info.type,
            info.platform,
            " ".join(info.platform_version.partition(",")[0].split()),  # PoCL goes on with its build's options
            " ".join(offer for offer in offers if getattr(info, offer)) or "-",
            "-" if info.same_hardware_as is None else str(info.same_hardware_as),
            f"{info.global_mem_bytes / 2**30:.1f} GiB",
            "yes" if info.unified_memory else "no",
            str(info.max_work_group_size),
        )
        grid.add_row(*(Text(printable(cell)) for cell in cells))
    console().print(grid)


def doctor(as_json: AsJson = False) -> None:
    """Examine the installation: packages, drivers, devices, their arithmetic. Exit code 2 when no device can be used.

    Each problem comes with the command that mends it. The output is what a bug report needs.
    """
    from memtrain_cl.cli.diagnosis import examine
    from memtrain_cl.errors import UnsupportedDevice

    report = examine()
    if as_json:
        typer.echo(json.dumps({**asdict(report), "usable": report.fault is None}, indent=2))
    else:
        _print_report(report)
    if report.fault is not None:
        raise UnsupportedDevice(report.fault)


def _print_report(report: Report) -> None:
    from memtrain_cl.export.hostile import printable

    installed = [f"{name} {version}" for name, version in report.packages.items() if version]
    missing = [name for name, version in report.packages.items() if not version]
    lines = [
        ("memtrain_cl", f"{report.memtrain_cl} on Python {report.python} ({report.executable})"),
        ("system", report.system),
        ("packages", ", ".join(installed)),
        ("not installed", ", ".join(missing) or "-"),
        ("environment", ", ".join(f"{name}={value}" for name, value in report.environment.items()) or "-"),
        ("kernels", report.kernels or "missing"),
        *(("cache", folder) for folder in report.cache),
        ("Intel runtime", report.intel_runtime or "-"),
    ]
    for entry in report.platforms:
        count = f"{entry['devices']} device{'' if entry['devices'] == 1 else 's'}"
        lines.append(("platform", f"{entry['name']}, {entry['version']}: {count}"))
    for entry in report.devices:
        verdict = entry["verdict"] or "exact arithmetic"
        lines.append((f"device {entry['index']}", f"{entry['name']} ({entry['platform']}): {verdict}"))
    if report.chosen is not None:
        lines.append(("chosen", f"device {report.chosen}: {report.why}"))
    for problem in report.problems:
        lines += [("problem", problem.what), ("  mend it with", problem.mend)]
    if not report.problems:
        lines.append(("problems", "none"))
    for name, text in lines:
        typer.echo(f"{name.ljust(15)} {printable(text)}")
