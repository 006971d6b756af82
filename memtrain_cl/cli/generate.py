"""`memtrain-cl generate`: continue a prompt from an exported model."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer


def generate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="model.safetensors of a training run.", show_default=False)
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    count: Annotated[int, typer.Option("--bytes", help="Bytes to add.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes always the likeliest byte.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="OpenCL device: index or part of its name.", show_default="the best there is")
    ] = None,
) -> None:
    """Continue a prompt with a model that `memtrain-cl train` exported. Needs no torch.

    Writes the prompt and what follows: as raw bytes into a file or pipe, as readable text on a terminal.
    """
    from memtrain_cl.engine import Engine

    start = prompt.encode("utf-8", "surrogateescape")
    _write(_pieces(start, Engine.load(file, device).generate(start, count, temperature, seed)))


def _pieces(start: bytes, continuation: Iterable[int]) -> Iterator[bytes]:
    yield start
    for byte in continuation:
        yield bytes((byte,))


def _write(pieces: Iterable[bytes]) -> None:
    if not sys.stdout.isatty():
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    # A model may write any bytes, also those that command a terminal.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        print(_harmless(decoder.decode(piece)), end="", flush=True)
    print(_harmless(decoder.decode(b"", final=True)))


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
