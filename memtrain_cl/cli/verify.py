"""`memtrain-cl verify`: every kernel of a device against the torch reference."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def verify(
    kernels: Annotated[
        list[str] | None, typer.Argument(help="Names of kernels, or of their files; all of them by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Index of a device, or a part of its platform's or its own name.")
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all", help="Check every device.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Few and tiny shapes, for simulators.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows instead of a table.")] = False,
) -> int:
    """Check kernels against the reference: one row a kernel and device. Exit code 1 when one is not right."""
    from memtrain_cl.device import devices, get_device
    from memtrain_cl.verify import named_kernels, verify_device

    chosen = named_kernels(kernels or [])
    if device is not None and all_devices:
        raise ValueError("expected --device or --all, got both")
    # Without any device the second form raises the error that names the command to install one.
    infos = (devices() if all_devices else []) or [get_device(device).info]
    rows = []
    columns = {
        "kernel": max(len(kernel) for _, kernel in chosen),
        "platform": max(len(info.platform) for info in infos),
        "device": max(len(info.name) for info in infos),
        "ok": 3,
        "max_error": 9,
        "mismatches": 10,
    }
    if not as_json:
        typer.echo("  ".join(name.ljust(width) for name, width in columns.items()).rstrip())
    for info in infos:
        for row in verify_device(info, chosen, small=small):
            rows.append(asdict(row))
            if not as_json:
                cells = {
                    **rows[-1],
                    "ok": "yes" if row.ok else "NO",
                    "max_error": "-" if row.max_error is None else f"{row.max_error:.2g}",
                    "mismatches": "-" if row.mismatches is None else str(row.mismatches),
                }
                line = "  ".join(str(cells[name]).ljust(width) for name, width in columns.items())
                typer.echo(line.rstrip())
                if row.detail:
                    typer.echo(f"    {row.detail.splitlines()[0]}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    return int(not all(row["ok"] for row in rows))
