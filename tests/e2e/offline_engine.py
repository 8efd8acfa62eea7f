# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine with our connector in a process of its own, driven by lines of JSON.

As a script it reads one request a line on stdin and answers on stdout, each answer behind :data:`MARK`, as
vLLM prints there too. :class:`OfflineEngine` is the other end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MARK = "@kvcr@"
START_S = 400.0
ANSWER_S = 120.0
COMPONENTS = Path(__file__).parents[2] / "components"


class OfflineEngine:
    """One engine. ``extra`` is the connector's extra config, ``transfer`` overrides the transfer config."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        extra: dict[str, Any],
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **engine: Any,
    ) -> None:
        self._log = log
        settings = {"model": str(model), "extra": extra, "transfer": transfer or {}, "engine": engine}
        inherited = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(COMPONENTS), os.environ.get("PYTHONPATH", "")])),
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **(environment or {})},
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of its first process, which leads the session that the others are in."""
        return self._process.pid

    def wait_ready(self) -> None:
        self._answer(START_S)

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **more: Any) -> list[dict[str, Any]]:
        """Greedy. For each prompt: ``tokens`` and ``cached`` (prompt tokens that were not computed)."""
        return self._ask("generate", prompts=prompts, max_tokens=max_tokens, **more)

    def reset_g1(self, *, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache; with ``connector`` also raise our weights generation."""
        assert self._ask("reset", connector=connector) is True

    def timeline(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Run requests (``prompt``, ``max_tokens``, optional ``params``) together; for each, the seconds from
        the start at which its tokens came out."""
        times: list[list[float]] = self._ask("timeline", requests=requests)
        return times

    def abort_in_flight(self, prompt: list[int], steps: int) -> None:
        """Add a request, do some steps, abort it, and go on until the engine is idle."""
        self._ask("abort", prompt=prompt, steps=steps)

    def close(self) -> None:
        """End the engine and all its processes."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        # Here, as this file is also a script. vLLM's own processes, should one of them not have noticed.
        from tests.e2e.processes import end_session

        end_session(self._process.pid)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> Any:
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if MARK in line:
                    return json.loads(line.split(MARK, 1)[1])
                with self._log.open("a") as log:
                    log.write(line)
        finally:
            watchdog.cancel()
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the engine ended or took longer than {timeout_s:.0f} s; its log ends:\n{tail}")


def _serve(settings: dict[str, Any]) -> None:
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    from vllm import LLM, SamplingParams, TokensPrompt

    transfer = {
        "kv_connector": "KvcrConnector",
        "kv_connector_module_path": "kvcr.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings["extra"],
        **settings["transfer"],
    }
    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        max_model_len=4096,
        seed=0,
        **{"kv_cache_memory_bytes": 64 << 20, **settings["engine"]},
        kv_transfer_config=transfer,
    )
    _reply("ready")
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("verb")
        if verb == "generate":
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                min_tokens=request["max_tokens"],
                detokenize=False,
                extra_args={"kv_transfer_params": request["params"]} if "params" in request else None,
            )
            prompts = [
                TokensPrompt(
                    prompt_token_ids=ids, **({"cache_salt": request["salt"]} if "salt" in request else {})
                )
                for ids in request["prompts"]
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            _reply(
                [
                    {"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens or 0}
                    for o in outputs
                ]
            )
        elif verb == "reset":
            # Blocks of an answer are in use until they are saved.
            until_s = time.monotonic() + 10.0
            while not llm.reset_prefix_cache() and time.monotonic() < until_s:
                time.sleep(0.02)
            _reply(llm.reset_prefix_cache(reset_connector=request["connector"]))
        elif verb == "timeline":
            _reply(_timeline(llm.llm_engine, request["requests"]))
        elif verb == "abort":
            engine = llm.llm_engine
            params = SamplingParams(temperature=0.0, max_tokens=200, min_tokens=200, detokenize=False)
            added = engine.add_request(
                f"abort-{os.urandom(4).hex()}", TokensPrompt(prompt_token_ids=request["prompt"]), params
            )
            for _ in range(request["steps"]):
                engine.step()
            engine.abort_request([added], internal=True)
            while engine.has_unfinished_requests():
                engine.step()
            _reply("aborted")


def _timeline(engine: Any, requests: list[dict[str, Any]]) -> list[list[float]]:
    from vllm import SamplingParams, TokensPrompt

    names = [f"timeline-{number}-{os.urandom(4).hex()}" for number in range(len(requests))]
    times: dict[str, list[float]] = {name: [] for name in names}
    counts = dict.fromkeys(names, 0)
    started_s = time.monotonic()
    for name, request in zip(names, requests, strict=True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            min_tokens=request["max_tokens"],
            detokenize=False,
            extra_args={"kv_transfer_params": request["params"]} if "params" in request else None,
        )
        engine.add_request(name, TokensPrompt(prompt_token_ids=request["prompt"]), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            known = next(name for name in names if output.request_id.startswith(name))
            count = len(output.outputs[0].token_ids)
            times[known] += [time.monotonic() - started_s] * (count - counts[known])
            counts[known] = count
    return [times[name] for name in names]


def _reply(answer: Any) -> None:
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
