"""One prefill and one decode server of vLLM on two GPUs of a host, one connector after another, in one run.

``python benchmarks/vllm_pd.py [--cases stock-pull,stock-push,pushkv] [--cells 16000:1,16000:2] [--json FILE]`` in
an environment that has vLLM, NIXL and pushkv-vllm; ``--cpu`` runs a small model on CPUs, to try the harness out.

Weights are made up (of a Qwen3-4B's shape), prompts are random token ids, prefix caching is off, so that every
request moves its whole KV. Arrivals are a Poisson process with a fixed seed (``--seed``): all connectors get the
same requests at the same times. *TTFT* is from sending a request to its first token from decode; *prefill* is the
prefill leg's own latency in the same request, and *handoff* is TTFT minus that, request by request. Both legs are
sent at once where the connector pushes, one after the other where it pulls. An answer's words are its tokens: asking
for token ids would have the server say the prompt's too, which takes milliseconds of the first token's. Equal digests
of the answers are equal answers.

With ``--elsewhere SECONDS`` the prefill server has its few prompts in its prefix cache and gets its leg so late.
On one GPU (``--gpus 0,0``) decode's steps then meet other requests' waiting and transfers, and no computing of
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 1024
FULL = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
PREFILL, DECODE = 8100, 8200
CONTROL = {PREFILL: 5600, DECODE: 5700}
UP = 240.0
"""Seconds that a server may take to start."""
WARM = ((256, 4.0), (4096, 4.0), (16000, 4.0))

SHARED = 24 << 30
"""Bytes of the KV cache of each server where both are on one GPU."""

CACHED = 3
"""Prompts that the prefill server has computed before, with ``--elsewhere``."""

Answer = dict[str, Any]


class ServerError(Exception):
    """A server does not start."""


@dataclass(frozen=True)
class Case:
    """A connector and how it is set up. ``push``: both legs may go at once."""

    connector: str
    push: bool
    extra: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.connector == "PushKVConnector"

    def transfer_config(self, role: str, port: int) -> str:
        """``--kv-transfer-config``."""
        extra = {**self.extra, "port": CONTROL[port]} if self.ours else dict(self.extra)
        return json.dumps({"kv_connector": self.connector, "kv_role": role, "engine_id": f"E{port}",
                           "kv_connector_extra_config": extra})  # fmt: skip

    def legs(self, request: str) -> tuple[Answer, Answer]:
        """``kv_transfer_params`` of the prefill and of the decode leg."""
        where = {"remote_host": "127.0.0.1", "remote_port": CONTROL[PREFILL], "remote_engine_id": f"E{PREFILL}"}
        prefill: Answer = {"do_remote_decode": True, "do_remote_prefill": False}
        decode: Answer = {"do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1, **where}
        if self.ours:
            return {**prefill, "transfer_id": request}, {**decode, "transfer_id": request}
        empty = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return {**prefill, **empty}, {**decode, "remote_request_id": f"cmpl-{request}-0", "remote_block_ids": []}


CROSS = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CASES = {
    "stock-pull": Case("NixlConnector", False),
    "stock-push": Case("NixlPushConnector", True),
    "stock-pull-cross": Case("NixlConnector", False, {"enable_cross_layers_blocks": "True"}, CROSS),
    "stock-push-cross": Case("NixlPushConnector", True, {"enable_cross_layers_blocks": "True"}, CROSS),
    "pushkv": Case("PushKVConnector", True),
    "pushkv-cross": Case("PushKVConnector", True, {}, CROSS),
    "pushkv-layer": Case("PushKVConnector", True, {"stream": "layer"}),
    "pushkv-direct": Case("PushKVConnector", True, {"landing": "direct"}),
}


def write_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """A configuration and a tokenizer of words t3, t4, …; vLLM makes the weights up."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{number}": number for number in range(3, VOCABULARY)}
    files = {
        "config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
                   "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
                   "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
                   "attention_bias": False, **shape},
        "generation_config": {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False},
        "tokenizer": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                      "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                      "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                             "unk_token": "<unk>"},
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# The servers


def command(model: Path, port: int, options: argparse.Namespace) -> list[str]:
    """``vllm serve`` for one of the two."""
    made = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m",
            "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--max-num-seqs", "64",
            "--no-enable-log-requests",
            f"--{'' if options.elsewhere and port == PREFILL else 'no-'}enable-prefix-caching"]  # fmt: skip
    if options.cpu:
        return [*made, "--dtype", "float32", "--max-model-len", "8192", "--max-num-batched-tokens", "2048",
                "--block-size", "32", "--num-gpu-blocks-override", "1024"]  # fmt: skip
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    first, second = options.gpus.split(",")
    # On one GPU the two must not measure how much memory is left: each would see the other come.
    share = ["0.4", "--kv-cache-memory-bytes", str(SHARED)] if first == second else ["0.55"]
    return [*made, "--dtype", "bfloat16", "--max-model-len", "20000", "--max-num-batched-tokens", "16384",
            "--compilation-config", json.dumps(graphs), "--gpu-memory-utilization", *share]  # fmt: skip


@contextmanager
def server(
    case: Case, model: Path, port: int, options: argparse.Namespace, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """One server, started; ended with all its processes."""
    role, gpu = ("kv_producer", 0) if port == PREFILL else ("kv_consumer", 1)
    environment = dict(
        os.environ, CUDA_VISIBLE_DEVICES=options.gpus.split(",")[gpu], HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1", VLLM_HOST_IP="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(CONTROL[port]), NIXL_LOG_LEVEL="WARN", VLLM_USE_DEEP_GEMM="0",
        VLLM_USE_FLASHINFER_SAMPLER="0", **case.environment,
    )  # fmt: skip
    arguments = [*command(model, port, options), "--kv-transfer-config", case.transfer_config(role, port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it has started."""
    for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def wait_up(servers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Return when all servers answer. Raises ServerError where one does not start."""
    stop = time.monotonic() + UP
    for port, process in servers.items():
        while not healthy(port):
            if process.poll() is not None:
                raise ServerError(
                    f"the server at port {port} has ended with status {process.returncode}; see its log"
                )
            if time.monotonic() > stop:
                raise ServerError(f"the server at port {port} is not up after {UP} s; see its log")
            time.sleep(0.3)


def healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
    except OSError:
        return False
    return True


# The requests


async def complete(client: Any, port: int, prompt: list[int], tokens: int, request: str, params: Answer) -> Answer:
    """A streamed completion: when its tokens came, or ``error``."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "skip_special_tokens": False, "kv_transfer_params": params}  # fmt: skip
    began, times, answer = time.perf_counter(), [], []
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with client.post(url, json=body, headers={"X-Request-Id": request}) as response:
        if response.status != 200:
            return {"error": f"{response.status} {(await response.text())[:300]}"}
        async for line in response.content:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                if choice.get("text"):
                    answer += choice["text"].split()
                    times.append(time.perf_counter() - began)
    return {"times": times, "tokens": answer} if times else {"error": "no token came"}


async def compute(client: Any, prompt: list[int], request: str, params: Answer, delay: float) -> Answer:
    """The prefill leg, after so many seconds: how long it took with these, and what it answers."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    began = time.perf_counter()
    await asyncio.sleep(delay)
    url = f"http://127.0.0.1:{PREFILL}/v1/completions"
    async with client.post(url, json=body, headers={"X-Request-Id": request}) as response:
        if response.status != 200:
            return {"error": f"{response.status} {(await response.text())[:300]}"}
        told = await response.json()
    return {"params": told.get("kv_transfer_params"), "seconds": time.perf_counter() - began}


async def serve_one(client: Any, case: Case, prompt: list[int], tokens: int, delay: float) -> Answer:
    """One request, both of its legs."""
    request = uuid.uuid4().hex
    ours, theirs = case.legs(request)
    if case.push:
        prefill, decode = await asyncio.gather(
            compute(client, prompt, request, ours, delay), complete(client, DECODE, prompt, tokens, request, theirs)
        )
        waited = 0.0
    else:
        prefill = await compute(client, prompt, request, ours, delay)
        if "error" in prefill:
            return prefill
        waited = prefill["seconds"]
        decode = await complete(client, DECODE, prompt, tokens, request, prefill["params"])
    for leg in (prefill, decode):
        if "error" in leg:
            return leg
    times = [one + waited for one in decode["times"]]
    return {
        "ttft": times[0],
        "prefill": prefill["seconds"],
        "handoff": times[0] - prefill["seconds"],
        "tpot": (times[-1] - times[0]) / max(1, len(decode["tokens"]) - 1),
        "answer": decode["tokens"],
    }


async def load(
    case: Case, length: int, rate: float, requests: int, tokens: int, seed: int = 0, elsewhere: float = 0.0
) -> Answer:
    """One cell: prompts of ``length`` tokens, ``rate`` a second; ``seed`` makes the gaps between arrivals."""
    import aiohttp

    arrivals, at = random.Random(seed), 0.0
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(delay: float, number: int) -> Answer:
            prompt = random.Random(length * 1000 + (number % CACHED if elsewhere else number))
            await asyncio.sleep(delay)
            try:
                numbers = [prompt.randrange(3, VOCABULARY) for _ in range(length)]
                return await serve_one(client, case, numbers, tokens, elsewhere)
            except Exception as error:
                return {"error": repr(error)[:300]}

        running: list[Awaitable[Answer]] = []
        for number in range(requests):
            running.append(asyncio.ensure_future(one(at, number)))
            at += arrivals.expovariate(rate)
        return summary(length, rate, await asyncio.gather(*running))


def summary(length: int, rate: float, seen: list[Answer]) -> Answer:
    """A cell's medians, in milliseconds; the errors, and a digest of the answers."""
    good = [one for one in seen if "error" not in one]
    row: Answer = {"tokens in": length, "rate": rate, "requests": len(seen), "ok": len(good)}
    for name in ("ttft", "prefill", "handoff", "tpot"):
        values = sorted(one[name] * 1e3 for one in good)
        if values:
            row[name] = {"p50": statistics.median(values), "mean": statistics.fmean(values),
                         "p99": values[min(len(values) - 1, int(0.99 * len(values)))]}  # fmt: skip
    answers = repr([one.get("answer") for one in seen]).encode()
    row["answers"] = hashlib.sha256(answers).hexdigest()[:12]
    row["errors"] = [one["error"] for one in seen if "error" in one][:3]
    return row


# All of it


def run_case(name: str, model: Path, options: argparse.Namespace, told: Callable[[Answer], None]) -> None:
    """Start a case's servers and measure all cells."""
    case, began = CASES[name], time.monotonic()
    if options.extra:
        case = Case(case.connector, case.push, {**case.extra, **json.loads(options.extra)}, case.environment)
    logs = Path(options.logs)
    with (
        server(case, model, PREFILL, options, logs / f"{name}-prefill.log") as prefill,
        server(case, model, DECODE, options, logs / f"{name}-decode.log") as decode,
    ):
        wait_up({PREFILL: prefill, DECODE: decode})
        print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
        cells = [(int(length), float(rate)) for length, rate in (one.split(":") for one in options.cells.split(","))]
        longest = max(length for length, _ in cells)
        warm = [(length, WARM[0][1]) for length in sorted({one for one, _ in cells})] if options.elsewhere else WARM
        for length, rate in warm:
            asyncio.run(load(case, min(length, longest), rate, CACHED, 32, elsewhere=options.elsewhere))
        for length, rate in cells:
            row = asyncio.run(
                load(case, length, rate, options.requests, options.tokens, options.seed, options.elsewhere)
            )
            told({"case": name, **row})


def in_words(row: Answer) -> str:
    """A cell as a line."""
    if "tokens in" not in row:
        return f"{row['case']:>17} {row['errors']}"
    known = [name for name in ("ttft", "prefill", "handoff", "tpot") if name in row]
    figures = ", ".join(f"{name} {row[name]['p50']:.1f}" for name in known)
    errors = f" {row['errors']}" if row["errors"] else ""
    return (
        f"{row['case']:>17} {row['tokens in']:>6} tokens, {row['rate']:g}/s: {figures} ms; "
        f"{row['ok']} of {row['requests']}, answers {row['answers']}{errors}"
    )


def draw(rows: list[Answer], folder: Path) -> None:
    """TTFT, handoff and TPOT of each case in each cell, as PNG and SVG."""
    from matplotlib import pyplot

    rows = [row for row in rows if "tokens in" in row]

    folder.mkdir(parents=True, exist_ok=True)
    cells = list(dict.fromkeys((row["tokens in"], row["rate"]) for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    width = 0.8 / len(cases)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for axis, name in zip(axes, ("ttft", "handoff", "tpot"), strict=True):
        for number, case in enumerate(cases):
            kept = [row for row in rows if row["case"] == case and name in row]
            places = [cells.index((row["tokens in"], row["rate"])) + (number + 0.5) * width for row in kept]
            axis.bar(places, [row[name]["p50"] for row in kept], width, label=case)
        axis.set_xticks([index + 0.4 for index in range(len(cells))], [f"{n}\n{rate:g}/s" for n, rate in cells])
        axis.set_title(f"{name}, ms (median)")
    axes[0].legend(fontsize="small")
    for kind in ("png", "svg"):
        figure.savefig(folder / f"vllm_pd.{kind}", bbox_inches="tight")


def main() -> int:
    """Run the cases and print each cell as it is done; 1 where a request failed."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cases", default="stock-pull,stock-push,pushkv", help=f"of {', '.join(CASES)}")
    made.add_argument("--cells", default="1024:8,4096:8,8192:4,16000:1,16000:2", help="tokens:requests a second")
    made.add_argument("--requests", type=int, default=20, help="requests a cell")
    made.add_argument("--tokens", type=int, default=128, help="tokens an answer")
    made.add_argument("--seed", type=int, default=0, help="of the arrivals")
    made.add_argument("--gpus", default="0,1", help="of prefill and of decode; one and the same for both: 0,0")
    made.add_argument(
        "--elsewhere", type=float, default=0.0, help="seconds of a prefill that this machine does not do"
    )
    made.add_argument("--extra", default="", help="further kv_connector_extra_config, as JSON")
    made.add_argument("--cpu", action="store_true", help="a small model on CPUs")
    made.add_argument("--logs", default=tempfile.gettempdir(), help="folder of the servers' logs")
    made.add_argument("--json", type=Path, help="write the rows to this file")
    made.add_argument("--plot", type=Path, help="draw figures into this folder")
    options = made.parse_args()
    rows: list[Answer] = []

    def told(row: Answer) -> None:
        rows.append(row)
        print(in_words(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", SMALL if options.cpu else FULL)
        for name in options.cases.split(","):
            try:
                run_case(name, model, options, told)
            except ServerError as error:
                told({"case": name, "errors": [str(error)]})
    if options.plot:
        draw(rows, options.plot)
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
