"""Many clients at once, some of which hang up: does the server hold, and how fast is it?

    python benchmarks/load.py --clients 200 --seconds 120

The server runs in a process of its own. Each client streams one chat after the other, of random lengths, and hangs up
in the middle of every tenth. When the time is over, no new chat begins and those that run may finish. Then:

- nothing has failed but what was hung up on, and every block of the KV cache is free;
- the server's memory is flat: in the last quarter of the time at most 3 % above that of the second quarter;
- it is at least 0.9 times as fast as `LLM.chat`, which is then given the same chats, as far as they were read.

The exit code is 1 if one of them is not so. `--peers` measures other servers with the same client.

Systems count memory from its first use on, so that a server would seem to grow for as long as it finds blocks of its KV
cache that nobody has used yet. So all of them are used once before the time begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import signal
import statistics
import sys
import time
import urllib.request
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from engines import ENVIRONMENTS, PEERS, Setup, available_threads
from paged_backend import LLM, SamplingParams
from rounds import start, versions
from servers import HOST, free_port, peer_command, serving
from stream_client import Answer, chat, run
from workloads import Conversation, Workload

SHORTEST, LONGEST = 16, 128
HANG_UP_SHARE = 0.1
MOST_GROWTH = 1.03
LEAST_RATIO = 0.9
_ANSWER_SECONDS = 300.0
_SAMPLE_SECONDS = 0.5
_FILLING_TOKENS = 512


class Chat(NamedTuple):
    conversation: Conversation
    num_tokens: int
    hang_up_after: int | None


def make_chat(number: int, seed: int) -> Chat:
    """The chat of this number, whoever sends it."""
    lengths = random.Random(f"{seed} {number}")
    num_tokens = lengths.randint(SHORTEST, LONGEST)
    hangs_up = lengths.random() < HANG_UP_SHARE
    after = lengths.randint(1, num_tokens // 2) if hangs_up else None
    return Chat(Workload("load", 1).conversations(number)[0], num_tokens, after)


class Load(NamedTuple):
    """What the clients saw."""

    chats: list[Chat]
    answers: list[Answer]
    seconds: float
    memory: list[int]
    """Of the server in bytes, at regular times until no new chat began."""

    @property
    def rate(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    @property
    def memory_by_quarter(self) -> list[float]:
        """Of the time, in bytes."""
        length = max(1, len(self.memory) // 4)
        parts = (self.memory[number * length : (number + 1) * length] for number in range(3))
        return [statistics.mean(part or self.memory) for part in (*parts, self.memory[-length:])]

    @property
    def growth(self) -> float:
        """The memory of the last quarter of the time by that of the second."""
        _, second, _, last = self.memory_by_quarter
        return last / second

    def report(self, name: str) -> str:
        waits = sorted(answer.seconds_to_first for answer in self.answers if answer.seconds_to_first is not None)
        p50, p99 = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.99)) if waits else (0.0, 0.0)
        num_hung_up = sum(answer.hung_up for answer in self.answers)
        return (
            f"{name:19} {self.rate:7.1f} tokens/s, first text after {p50:.2f} s (P50), {p99:.2f} s (P99); "
            f"{len(self.answers)} chats in {self.seconds:.0f} s, {num_hung_up} hung up on, {len(self.errors)} failed"
        )


class Target(NamedTuple):
    """A server, and what it wants to be told so that an answer has as many tokens as asked for, and its usage."""

    process_id: int
    port: int
    model: str
    is_transformers: bool = False

    def body(self, one: Chat) -> dict[str, Any]:
        body = {"model": self.model, "messages": one.conversation, "max_tokens": one.num_tokens, "temperature": 0}
        if self.is_transformers:
            config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": one.num_tokens}
            return {**body, "generation_config": json.dumps(config)}
        return {**body, "ignore_eos": True, "stream_options": {"include_usage": True}}


async def put_load(target: Target, num_clients: int, seconds: float, seed: int) -> Load:
    process = psutil.Process(target.process_id)
    numbers = iter(range(10**9))
    begin = time.perf_counter()
    load = Load([], [], 0.0, [])

    async def client() -> None:
        while time.perf_counter() < begin + seconds:
            one = make_chat(next(numbers), seed)
            answer = await chat(
                HOST, target.port, target.body(one), hang_up_after=one.hang_up_after, timeout=_ANSWER_SECONDS
            )
            load.chats.append(one)
            load.answers.append(answer)

    async def watch() -> None:
        while time.perf_counter() < begin + seconds:
            load.memory.append(process.memory_info().rss)
            await asyncio.sleep(_SAMPLE_SECONDS)

    await asyncio.gather(watch(), *(client() for _ in range(num_clients)))
    return load._replace(seconds=time.perf_counter() - begin)


def stats_of(port: int) -> dict[str, int]:
    """The counters of our server's engine."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/paged/kv_map", timeout=10) as response:
        stats: dict[str, int] = json.load(response)["stats"]
    return stats


def held_blocks(port: int) -> int:
    """Blocks that are still held a moment after the last answer."""
    for _ in range(20):
        stats = stats_of(port)
        if not (held := stats["num_blocks"] - stats["num_free_blocks"]):
            return 0
        time.sleep(0.25)
    return held


def use_every_block(port: int) -> None:
    """Have prompts computed until one takes a block from another: those that nobody has used yet come first."""
    number = 0
    while not stats_of(port)["num_evictions"]:
        number += 1
        body = {"model": "model", "prompt": [number] * _FILLING_TOKENS, "max_tokens": 1}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=_ANSWER_SECONDS).close()


def load_of_ours(arguments: argparse.Namespace) -> tuple[Load, int]:
    port = free_port()
    options = {
        "--port": port,
        "--dtype": arguments.dtype,
        "--max-num-seqs": arguments.clients,
        "--kv-cache-memory": arguments.kv_cache_memory,
        "--served-model-name": "model",
        "--log-level": "warning",
    }
    flags = [str(part) for option in options.items() for part in option]
    command = [sys.executable, "-m", "paged_backend.cli", "serve", arguments.model, *flags]
    with serving(command, port, "/ready") as process_id:
        target = Target(process_id, port, "model")
        run(put_load(target, 4, 1.0, seed=-1))  # a warm-up
        use_every_block(port)
        load = run(put_load(target, arguments.clients, arguments.seconds, arguments.seed))
        return load, held_blocks(port)


def generate_in_process(
    connection: Connection, model: str, dtype: str, max_num_seqs: int, kv_cache_memory: str
) -> None:
    """The process of `LLM.chat`: answers the chats it is sent, and says how many seconds that took."""
    llm = LLM(model, dtype=dtype, max_num_seqs=max_num_seqs, kv_cache_memory=kv_cache_memory)
    warm_up = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.chat(Workload("warm-up", 2, 8).conversations(0), warm_up, use_tqdm=False)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        conversations, nums_tokens = task
        params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in nums_tokens]
        begin = time.perf_counter()
        llm.chat(conversations, params, use_tqdm=False)
        connection.send(time.perf_counter() - begin)


def rate_in_process(arguments: argparse.Namespace, load: Load) -> float:
    """Tokens per second of `LLM.chat` on what the clients got."""
    work = [(one.conversation, answer.num_tokens) for one, answer in zip(load.chats, load.answers, strict=True)]
    work = [(conversation, number) for conversation, number in work if number]
    options = (arguments.model, arguments.dtype, arguments.clients, arguments.kv_cache_memory)
    connection = start(generate_in_process, *options)
    connection.send(tuple(map(list, zip(*work, strict=True))))
    seconds = connection.recv()
    connection.send(None)
    return sum(number for _, number in work) / float(seconds)


def load_of_peer(name: str, arguments: argparse.Namespace) -> Load:
    port = free_port()
    setup = Setup(arguments.model, arguments.environments, available_threads())
    environment = {"OMP_NUM_THREADS": str(setup.threads), "PYTHONPATH": ""}
    with serving(
        peer_command(name, setup, port, arguments.dtype, arguments.clients), port, "/health", environment
    ) as process_id:
        folder = str(setup.source(PEERS["generate"]))
        target = Target(process_id, port, folder, is_transformers=name == "transformers")
        run(put_load(target, 2, 1.0, seed=-1))
        seconds = arguments.peer_seconds or arguments.seconds
        return run(put_load(target, arguments.clients, seconds, arguments.seed))


def complaints(load: Load, num_held: int, rate: float | None) -> list[str]:
    wrong = [f"{len(load.errors)} chats failed, one of them with: {load.errors[0]}"] if load.errors else []
    wrong += [f"{num_held} blocks are still held"] if num_held else []
    wrong += [f"memory grew by {load.growth:.3f}"] if load.growth > MOST_GROWTH else []
    wrong += ["the server is too slow"] if rate is not None and load.rate < LEAST_RATIO * rate else []
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0, help="time in which chats begin (default: 120)")
    parser.add_argument("--kv-cache-memory", default="900MiB", help="(default: 900MiB, room for 250 chats)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-rate", action="store_true", help="do not compare with LLM.chat")
    parser.add_argument("--peers", nargs="*", default=[], choices=("vllm", "transformers"))
    parser.add_argument("--peer-seconds", type=float, help="time in which chats of peers begin (default: as ours)")
    parser.add_argument(
        "--environments",
        type=pathlib.Path,
        default=ENVIRONMENTS,
        help="where peers are installed (default: %(default)s)",
    )
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("terminated"))  # and end the servers
    print(f"{versions()}, {arguments.model} in {arguments.dtype}, {arguments.clients} clients", flush=True)
    load, num_held = load_of_ours(arguments)
    print(load.report("paged-backend serve"), flush=True)
    quarters = ", ".join(f"{memory / 2**20:.1f}" for memory in load.memory_by_quarter)
    print(
        f"memory in the quarters of the time: {quarters} MiB; last by second {load.growth:.4f}; {num_held} blocks held"
    )
    rate = None if arguments.no_rate else rate_in_process(arguments, load)
    if rate is not None:
        print(
            f"LLM.chat            {rate:7.1f} tokens/s on the same; the server is {load.rate / rate:.2f}x", flush=True
        )
    for name in arguments.peers:
        print(load_of_peer(name, arguments).report(f"{name} serve"), flush=True)
    sys.exit("; ".join(complaints(load, num_held, rate)) or 0)


if __name__ == "__main__":
    main()
