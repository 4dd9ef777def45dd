"""Options of ``vllm serve`` that documents and help texts show exist in the vLLM that is installed."""

from __future__ import annotations

import harness  # noqa: F401 - sets the environment before vLLM is imported
import pytest
import typer
from support.documents_text import shell_commands, user_documents
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from loopkv.cli.app import app

pytestmark = pytest.mark.engine


def shown() -> list[list[str]]:
    """What follows ``vllm serve`` or, of ``loopkv serve``, its own options."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    texts = [path.read_text() for path in user_documents()] + [f"```sh\n{serve.epilog.removeprefix('Example: ')}\n```"]
    found = []
    for words in (words for text in texts for words in shell_commands(text)):
        if words[:2] == ["vllm", "serve"]:
            found.append(words[2:])
        elif words[:2] == ["loopkv", "serve"]:
            found.append(serve.make_context("serve", words[2:]).args)
        elif words[:3] == ["loopkv", "bench", "slo"]:
            found.append([w.partition("=")[2] for w in words if w.startswith("--server-arg=")])
    return found


def test_options_of_vllm_in_documents_exist():
    parser = make_arg_parser(FlexibleArgumentParser())
    known = {name for action in parser._actions for name in action.option_strings}
    given = {word.partition("=")[0].partition(".")[0] for line in shown() for word in line if word.startswith("--")}
    assert {"--additional-config", "--max-model-len", "--enforce-eager", "--no-enable-prefix-caching"} <= given
    assert given <= known, f"vllm serve has no {sorted(given - known)}"
