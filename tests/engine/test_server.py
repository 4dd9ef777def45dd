"""`loopkv serve` as a user starts it (compiled, several processes), asked by the `openai` client."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from loopkv.reference import model_folder, task_items

pytestmark = pytest.mark.engine

START_SECONDS = 400
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def server(engines, plan_files, tmp_path_factory):
    """Base URL of a running server, and its log."""
    engines.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [str(Path(sys.executable).with_name("loopkv")), "serve", str(model_folder())]
    command += ["--plan", plan_files["memory-tau"], "--dtype", "float32", "--max-model-len", "1280"]
    command += ["--max-num-seqs", "4", "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING")
    }
    # vLLM kills its workers when it ends, and leaves sockets.
    scratch = tempfile.TemporaryDirectory(prefix="loopkv-server-")
    environment["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # as always
    environment |= {"TMPDIR": scratch.name, **ENVIRONMENT}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url, log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        scratch.cleanup()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def needles(count: int):
    items = [item for item in task_items() if item["task"].startswith("needle") and len(item["prompt"]) < 6000]
    return items[:count]


def test_a_streamed_chat_completion_finds_the_needle(server):
    import openai

    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    for item in needles(3):
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": item["prompt"]}],
            temperature=0,
            max_tokens=16,
            stop="\n",
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, usage = [], None
        for chunk in stream:
            usage = chunk.usage or usage
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert sum(bool(piece) for piece in pieces) >= 3, "not streamed"
        assert "".join(pieces).strip() == item["answer"].strip()
        assert usage.prompt_tokens > 319


def test_completions_with_logprobs_and_several_samples(server):
    import openai

    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    answer = client.completions.create(
        model="tiny", prompt=needles(1)[0]["prompt"], max_tokens=8, logprobs=3, n=2, temperature=0.5
    )
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.token_logprobs) <= 8 for choice in answer.choices)


def test_structured_outputs_keep_to_their_form(server):
    """A grammar masks the logits of rows beside free ones; the choice is the one the model finds likelier."""
    import openai

    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    item = needles(1)[0]
    answer = item["answer"].strip()
    for constraint in ({"choice": ["never", answer]}, {"regex": r"[0-9a-z ]{3,12}"}):
        reply = client.completions.create(
            model="tiny",
            prompt=item["prompt"],
            max_tokens=16,
            temperature=0,
            extra_body={"structured_outputs": constraint},
        )
        text = reply.choices[0].text
        assert text == answer if "choice" in constraint else re.fullmatch(constraint["regex"], text)


def test_a_prompt_that_cannot_fit_is_rejected_with_the_number_that_would(server):
    import openai

    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    for prompt, tokens in (([5] * 1281, 1), ([5] * 1279, 2)):
        with pytest.raises(openai.BadRequestError, match="1280"):
            client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens)
    reply = client.completions.create(model="tiny", prompt=[5] * 1279, max_tokens=1)
    assert reply.usage.completion_tokens == 1


def test_the_log_and_the_metrics_say_what_is_served(server, plans):
    url, log = server
    text = log.read_text()
    lines = [line for line in text.splitlines() if "LoopKV plan 'memory-tau'" in line]
    assert len(lines) == 1, "one start-up line"
    plan = plans["memory-tau"]
    assert plan.sha256[:12] in lines[0] and "V precision tau 10" in lines[0]
    assert (
        f"stores {plan.footprint_at(4).stored_bytes:,} and reads {plan.footprint_at(4).read_bytes:,} bytes" in lines[0]
    )
    assert "prefill exact, at most 256 tokens of a request a step" in lines[0]
    assert "requests resident at once" in lines[0]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        metrics = dict(
            line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line.startswith("loopkv_")
        )
    labels = '{engine="0",rank="0"}'
    assert float(metrics[f"loopkv_pages_coded_total{labels}"]) > 0
    assert float(metrics[f"loopkv_clamped_values_total{labels}"]) == 0
    assert 0 < float(metrics['loopkv_hot_share{engine="0"}']) < 1
    assert float(metrics[f"loopkv_history_pages{labels}"]) == 0, "nothing runs"
    assert any(plan.sha256 in name for name in metrics)
    deadline = time.monotonic() + 30  # vLLM writes its line every ten seconds
    while "history pages in use:" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    (line, *_) = [line for line in log.read_text().splitlines() if "history pages in use:" in line]
    figures = r"history pages in use: \d+, pages coded: [1-9]\d*, hot share: [\d.]+%, clamped values: 0"
    assert re.search(f"LoopKV plan memory-tau, {figures}", line)


def test_a_bad_plan_stops_the_command_with_one_sentence(tmp_path):
    command = [str(Path(sys.executable).with_name("loopkv")), "serve", str(model_folder())]
    done = subprocess.run([*command, "--plan", str(tmp_path / "none.json")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("loopkv: error: plan ") and done.stderr.count("\n") == 1
