"""Replaces vLLM in TRL: engines load pushed weights into their own model, generate with it, and record the pushes."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PACKED = 5
"""Number of tensors that a client collects before it sends them together."""


class Engine:
    """The common part of a server and a colocated engine.

    Attributes:
        pushes: digests of names and bytes, one per push.
        slow_s: delay of each of the first tensors of a push, in seconds.
    """

    slow_s = 0.0

    def __init__(self, folder: str):
        self.pushes: list[str] = []
        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._places = self._model.state_dict()
        self._came = hashlib.sha256()
        self._count = 0

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, values in weights:
            if self._count < 3:
                time.sleep(self.slow_s)
            self._count += 1
            self._came.update(name.encode())
            self._came.update(values.detach().contiguous().view(-1).view(torch.uint8).numpy())
            self._places[name].copy_(values.detach())

    def end_push(self) -> None:
        self.pushes.append(self._came.hexdigest())
        self._came, self._count = hashlib.sha256(), 0

    def complete(self, prompt: list[int], first: int, count: int, most: int) -> list[list[int]]:
        """Makes completions which depend only on the weights and on the completions' numbers."""
        ids = torch.tensor([prompt] * count)
        for _ in range(most):
            with torch.no_grad():
                order = self._model(input_ids=ids).logits[:, -1, 3:].argsort(descending=True)
            chosen = torch.stack([row[number % 7] for number, row in enumerate(order, first)]) + 3
            ids = torch.cat([ids, chosen[:, None]], 1)
        return ids[:, len(prompt) :].tolist()


class Client(Engine):
    """Replaces `VLLMClient`, on rank 0 only."""

    def __init__(self, folder: str, base_url: str, group_port: int, connection_timeout: float):
        super().__init__(folder)

    def init_communicator(self, device: torch.device) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        packed: list[tuple[str, torch.Tensor]] = []
        for (name, dtype, shape), (came, values) in zip(metadata, named, strict=True):
            assert (name, dtype, shape) == (came, str(values.dtype).removeprefix("torch."), list(values.shape))
            packed.append((came, values))
            if len(packed) == PACKED:
                self.take(packed)
                packed = []
        self.take(packed)

    def reset_prefix_cache(self) -> None:
        self.end_push()

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        completions = [
            ids for number, prompt in enumerate(prompts) for ids in self.complete(prompt, number * n, n, max_tokens)
        ]
        logprobs = [[[0.0] for _ in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


class Colocated(Engine):
    """Replaces `LLM`, on every rank."""

    def __init__(self, folder: str, tokenize: Callable[[str], list[int]] | None = None, **_: Any):
        super().__init__(folder)
        self._tokenize = tokenize
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.take))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), model_config=SimpleNamespace(max_model_len=32)
        )

    def reset_prefix_cache(self) -> None:
        self.end_push()

    def generate(self, prompts: list[Any], sampling_params: SimpleNamespace, use_tqdm: bool) -> list[SimpleNamespace]:
        found = []
        for number, prompt in enumerate(prompts):
            ids = self._tokenize(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
            outputs = [
                SimpleNamespace(
                    token_ids=each, logprobs=[{token: SimpleNamespace(rank=1, logprob=0.0)} for token in each]
                )
                for each in self.complete(
                    ids, number * sampling_params.n, sampling_params.n, sampling_params.max_tokens
                )
            ]
            found.append(SimpleNamespace(prompt_token_ids=ids, outputs=outputs))
        return found


def stand_in(folder: str, tokenize: Callable[[str], list[int]] | None = None) -> list[Engine]:
    """Makes TRL use these engines; returns the list of engines made from now on."""
    made: list[Engine] = []

    def making(kind: type[Engine], **fixed: Any) -> Callable[..., Engine]:
        def make(*_: Any, **kwargs: Any) -> Engine:
            kwargs.pop("model", None)
            made.append(kind(folder, **fixed, **kwargs))
            return made[-1]

        return make

    for name in ("trl.generation.vllm_generation", "trl.experimental.online_dpo.online_dpo_trainer"):
        module: Any = import_module(name)
        module.is_vllm_available = lambda *_, **__: True
        module.VLLMClient = making(Client)
        module.LLM = making(Colocated, tokenize=tokenize)
        module.SamplingParams = SimpleNamespace
    return made
