"""A real ``vllm serve`` with a plan, asked through the ``openai`` client and stopped again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopkv.errors import LoopKVError

STARTUP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **(environment or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
    try:
        _wait(process, url, log)
        yield Server(url, model)
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LoopKVError(
                "vllm serve", got=f"exit status {process.returncode}: {_last_line(log)}", hint=f"see {log}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise LoopKVError("vllm serve", got=f"no answer in {STARTUP_TIMEOUT_S:.0f} s", hint=f"see {log}")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error" in line]
    return (telling or lines or ["no output"])[-1][-300:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server's process group (its engine is a child), and kill what is left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
