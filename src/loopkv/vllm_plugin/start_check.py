"""What ``vllm serve`` would refuse before it loads any weight, asked of vLLM itself: for ``loopkv serve --dry-run``.

A process of its own reads the arguments with vLLM's parser and builds vLLM's config, which runs the plugin's hook: the
caller's process stays free of vLLM, and of what vLLM prints.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkv.errors import LoopKVError, UnsupportedError

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_LONGEST = 400
"""Characters of what vLLM says that are shown."""
NO_DEVICE = "options; not settings together, because vLLM finds no device here"
NO_MODEL = "options; not settings together, because the model is not on this machine"
ALL = "options and settings; not memory, devices or weights, which a start looks at next"


def check_start(arguments: Sequence[str]) -> str:
    """What of ``vllm serve`` with ``arguments`` (model first) was checked, in words; vLLM is imported elsewhere.

    Raises:
        UnsupportedError: what vLLM or the plugin refuses, in one sentence.
    """
    with tempfile.TemporaryDirectory(prefix="loopkv-check-") as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(answer), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if not answer.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise UnsupportedError("vllm serve", got=lines[-1][:_LONGEST] if lines else f"status {done.returncode}")
        said = json.loads(answer.read_text())
    if said["refused"] is not None:
        raise UnsupportedError(said["refused"])
    return str(said["checked"])


def checked_by_vllm(arguments: Sequence[str]) -> str:
    """See ``check_start``; imports vLLM into this process.

    Raises:
        LoopKVError: what the plugin refuses.
        UnsupportedError: what vLLM refuses.
    """
    from vllm.platforms import current_platform

    namespace = _parsed(arguments)
    model = namespace.model_tag or namespace.model
    if not Path(model).is_dir():
        return NO_MODEL
    if not current_platform.device_type:
        return NO_DEVICE
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace.model = model
    try:
        AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except LoopKVError:
        raise
    except Exception as problem:  # vLLM refuses with errors of many kinds
        raise UnsupportedError(f"vllm serve: {_first_words(problem)}") from None
    return ALL


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """As ``vllm serve`` reads them (UnsupportedError)."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    make_parser: Any = FlexibleArgumentParser  # its constructor has no types
    parser = make_parser(prog="vllm")
    options = command.subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            namespace = parser.parse_args(["serve", *arguments])
            command.validate(namespace)
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        text = lines[-1].partition("error: ")[2] or lines[-1] if lines else "arguments"
        raise UnsupportedError(f"vllm serve: {text[:_LONGEST]}", hint=_nearest(text, options)) from None
    except Exception as problem:
        raise UnsupportedError(f"vllm serve: {_first_words(problem)}") from None
    return namespace


def _nearest(text: str, parser: FlexibleArgumentParser) -> str | None:
    """The option of vLLM that a misspelt one comes nearest to."""
    found = re.match(r"unrecognized arguments: (--[^\s=]+)", text)
    known = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(found[1].replace("_", "-"), known, n=1) if found else []
    return f"did you mean {near[0]}?" if near else None


def _first_words(problem: Exception) -> str:
    """What an error of vLLM's or pydantic's says, on one line."""
    errors = getattr(problem, "errors", None)
    try:
        first = errors(include_url=False)[0] if callable(errors) else None
    except Exception:
        first = None
    if first is not None:
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        message = f"{where}: {message}" if where else message
    elif isinstance(problem, OSError) and problem.filename is not None:
        message = f"{problem.filename}, got {problem.strerror}"
    else:
        message = str(problem) or type(problem).__name__
    return " ".join(message.split())[:_LONGEST]


def main(answer: str, arguments: Sequence[str]) -> None:
    """Write to the file ``answer`` what was checked or refused."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    checked, refused = None, None
    try:
        checked = checked_by_vllm(arguments)
    except LoopKVError as error:
        refused = str(error)
    Path(answer).write_text(json.dumps({"checked": checked, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
