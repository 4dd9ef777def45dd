"""A real ``vllm serve`` with a plan, asked through the ``openai`` client and stopped again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopkv.vllm_plugin.server import running_server

CPU_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Settings of a small run on vLLM's CPU engine; variables that are set already win."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: its text, and the tokens of prompt and answer."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class Server:
    """A running server; made by ``serve``."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: str | None = None) -> list[Answer]:
        """Greedy completions through the OpenAI API."""
        from openai import OpenAI

        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)
        answers = []
        for prompt in prompts:
            reply = client.completions.create(
                model=self.model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, stop=stop
            )
            assert reply.usage is not None
            answers.append(Answer(reply.choices[0].text, reply.usage.prompt_tokens, reply.usage.completion_tokens))
        return answers


@contextlib.contextmanager
def serve(
    command: Sequence[str], model: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start ``command`` (a ``vllm serve`` line without a port), wait until it answers, and stop it on exit.

    Args:
        command: the command line.
        model: name under which the server knows the model.
        log: file for the server's output.
        environment: variables added to this process's.

    Raises:
        LoopKVError: the server ended or did not answer in time; the end of its log is part of the message.
    """
    with running_server(command, log, environment) as url:
        yield Server(url, model)
