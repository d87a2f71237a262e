"""TRL at stage 3: weights that are pushed to vLLM, losses in chunks, and whole scripts are DDP's.

TRL is no dependency of the tests. `pip install trl` beside them, and these run.
"""

import hashlib
import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow
from launching import own_environment, own_port
from peft import LoraConfig, get_peft_model
from shared_ranks import run_on_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_job import as_launched, history
from training import VOCABULARY
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import hf_zero

pytest.importorskip("trl", reason="TRL is not among the tests' packages")

from accelerate import Accelerator
from datasets import Dataset
from fake_vllm import Engine, stand_in

pytestmark = pytest.mark.timeout(500)

STAGE_3 = {"stage": 3, "bucket_bytes": "20KiB"}
PROMPT, COMPLETION = 4, 6


def policy() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)


ADAPTER = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


# ---- TRL's own walk ----


def begin(rank: int, world_size: int) -> None:
    """Begins a rank of a script of TRL, which uses names that transformers 5.24 has deprecated, and itself one more."""
    as_launched(rank, world_size)
    warnings.filterwarnings("ignore", ".gradient_checkpointing(_enable|_disable)?. is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".loss_type='chunked_nll'. is deprecated", FutureWarning)


def pushes(
    rank: int,
    world_size: int,
    folder: str,
    zero: dict | None,
    mode: str,
    *,
    adapts: bool,
    steps: int,
    slow_s: float = 0.0,
) -> list[str]:
    """Digests of what this rank's engine was given behind each step."""
    from trl.generation.vllm_generation import VLLMGeneration

    begin(rank, world_size)
    made = stand_in(folder)
    Engine.slow_s = slow_s
    accelerator = Accelerator(parallelism_config=zero and hf_zero.ZeroPlugin(zero))
    model = GPT2LMHeadModel.from_pretrained(folder)
    if adapts:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**ADAPTER, init_lora_weights=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    generation = VLLMGeneration(model, accelerator, tokenizer(), mode=mode)
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 12), generator=data)
        accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        generation.sync_weights()
    return made[0].pushes if made else []


def compare_pushes(folder: Path, reference: dict | None, mode: str, *, world_size: int = 2, **kwargs: Any) -> None:
    policy().save_pretrained(folder)
    run = partial(run_on_ranks, pushes, world_size, folder=str(folder), mode=mode, **kwargs)
    ours, theirs = run(zero=STAGE_3), run(zero=reference)
    assert len(set(theirs[0])) == len(theirs[0]) == kwargs["steps"]
    assert ours == theirs


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_each_push_has_ddps_names_and_bytes(mode, adapts, tmp_path):
    compare_pushes(tmp_path, None, mode, adapts=adapts, steps=4)


def test_a_server_may_be_slow(tmp_path):
    compare_pushes(tmp_path, None, "server", adapts=False, steps=1, slow_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize(("world_size", "reference"), [(2, None), (4, {**STAGE_3, "stage": 2})])
def test_each_push_of_two_hundred_steps_is_ddps(world_size, reference, adapts, tmp_path):
    # Among four ranks DDP adds gradients in another order: stage 2, whose pushes are DDP's at two, adds in the same.
    compare_pushes(tmp_path, reference, "server", world_size=world_size, adapts=adapts, steps=200, time_limit_s=450)


# ---- whole scripts ----


def rewards(completion_ids: list | None = None, completions: list | None = None, **_: Any) -> list[float]:
    found = completions if completion_ids is None else completion_ids
    return [float(sum(len(str(token)) * (place + 1) for place, token in enumerate(each)) % 17) for each in found]


def script(
    rank: int, world_size: int, folder: str, zero: dict | None, kind: str, mode: str, adapts: bool
) -> dict[str, Any]:
    """What a script of TRL's documentation does, and its losses, pushes and saved weights."""
    import trl
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    begin(rank, world_size)
    words = tokenizer()
    made = stand_in(folder, tokenize=lambda text: words(text)["input_ids"])
    trainers = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 2, "max_completion_length": COMPLETION}),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {"num_generations": 2, "max_completion_length": COMPLETION}),
        "online dpo": (OnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": COMPLETION, "max_length": 20}),
    }
    trainer_class, config_class, settings = trainers[kind]
    if mode != "generate":
        settings |= {"use_vllm": True, "vllm_mode": mode}
    if mode != "generate" and kind == "grpo":
        settings |= {"vllm_importance_sampling_correction": False}
    arguments = config_class(
        output_dir=f"{folder}/{kind}",
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        # A norm is added in another order than DDP's, and would clip by another last digit.
        max_grad_norm=1000.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    drawn = torch.randint(3, VOCABULARY, (64, PROMPT), generator=torch.Generator().manual_seed(3)).tolist()
    passed = {"peft_config": LoraConfig(**ADAPTER, task_type="CAUSAL_LM")} if adapts else {}
    trainer = trainer_class(
        model=GPT2LMHeadModel.from_pretrained(folder),
        args=arguments,
        reward_funcs=rewards,
        processing_class=words,
        train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{id}" for id in ids)} for ids in drawn]),
        callbacks=[] if zero is None else [hf_zero.ZeroCallback(zero)],
        **passed,
    )
    trainer.train()
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {
        **history(trainer),
        "pushes": made[0].pushes if made else [],
        "state": {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in state.items()},
    }


@pytest.mark.parametrize(
    ("kind", "mode", "adapts"),
    [
        ("grpo", "generate", False),
        ("grpo", "server", False),
        ("grpo", "colocate", True),
        ("rloo", "generate", False),
        ("rloo", "server", True),
        ("online dpo", "generate", False),
        ("online dpo", "colocate", False),
        ("online dpo", "colocate", True),
    ],
)
def test_scripts_run_at_stage_3_as_they_are(kind, mode, adapts, tmp_path):
    policy().save_pretrained(tmp_path)
    run = partial(run_on_ranks, script, folder=str(tmp_path), kind=kind, mode=mode, adapts=adapts)
    for rank, (ours, theirs) in enumerate(zip(run(zero=STAGE_3), run(zero=None))):
        norms = ours.pop("norms"), theirs.pop("norms")
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert all(norms[0]) and len(norms[0]) == 3
        assert ours == theirs
        # A server has a client on rank 0 alone.
        assert len(set(ours["pushes"])) == (3 if mode == "colocate" or (mode == "server" and rank == 0) else 0)


# ---- losses in chunks, and other parts that need less memory in addition to the state ----


def fine_tuned(
    rank: int, world_size: int, folder: str, zero: dict | None, adapts: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """Losses and norms of a script of SFTTrainer's, whose loss reads the weight of the head in chunks, and an evaluation."""
    import trl

    begin(rank, world_size)
    drawn = torch.randint(3, VOCABULARY, (64, 16), generator=torch.Generator().manual_seed(3)).tolist()
    data = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in drawn])
    trainer = trl.SFTTrainer(
        model=GPT2LMHeadModel.from_pretrained(folder),
        args=trl.SFTConfig(
            output_dir=f"{folder}/sft",
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            max_grad_norm=1000.0,
            max_length=16,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            **settings,
        ),
        processing_class=tokenizer(),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        callbacks=[] if zero is None else [hf_zero.ZeroCallback(zero)],
        **({"peft_config": LoraConfig(**ADAPTER, task_type="CAUSAL_LM")} if adapts else {}),
    )
    trainer.train()
    return {**history(trainer), "evaluation": trainer.evaluate()["eval_loss"]}


CHUNKED, RECOMPUTED = {"loss_type": "chunked_nll"}, {"gradient_checkpointing": True}
ELSEWHERE = {"offload": {"optimizer": "nvme", "params": "nvme"}}


@pytest.mark.parametrize(
    ("zero", "adapts", "settings"),
    [
        (STAGE_3, False, {**CHUNKED, "gradient_checkpointing": False}),
        (STAGE_3 | ELSEWHERE, False, {**CHUNKED, **RECOMPUTED}),
        *(slow({**STAGE_3, "stage": stage}, adapts, CHUNKED) for stage in (1, 2, 3) for adapts in (False, True)),
        slow({"stage": 2, "offload": {"optimizer": "cpu"}}, False, CHUNKED),
        slow(STAGE_3 | {"offload": {"optimizer": "cpu", "params": "cpu"}}, False, CHUNKED),
        slow(STAGE_3 | {"offload": {"activations": "cpu"}}, False, CHUNKED),
        slow(STAGE_3, False, {"loss_type": "dft"}),
    ],
)
def test_a_loss_in_chunks_is_ddps(zero, adapts, settings, tmp_path):
    policy().save_pretrained(tmp_path)
    run = partial(run_on_ranks, fine_tuned, folder=str(tmp_path), adapts=adapts, settings=settings)
    if "nvme" in zero.get("offload", {}).values():
        zero = {**zero, "offload": {**zero["offload"], "nvme_path": str(tmp_path)}}
    for ours, theirs in zip(run(zero=zero), run(zero=None)):
        assert ours.pop("norms") == pytest.approx(theirs.pop("norms"), rel=1e-5)
        assert ours == theirs


# ---- long sequences ----

ALST = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  zero_stage: 3
  seq_parallel_communication_data_type: bf16
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
  parallelism_config_sp_attn_implementation: sdpa
"""


@pytest.mark.slow
def test_sft_with_a_yaml_for_deepspeeds_sequences_logs_what_one_rank_does(tmp_path):
    script = Path(__file__).parents[1] / "run/scripts/long_sft.py"
    (tmp_path / "alst.yaml").write_text(ALST)
    start = [sys.executable, "-c", "from hf_zero.cli.app import main; main()"]
    launched = [*start, "run", "--zero", str(tmp_path / "alst.yaml"), "--cpu", "--port", str(own_port())]
    found = []
    for name, command in (("two", launched), ("one", [sys.executable])):
        words = [*command, str(script), str(tmp_path / f"{name}.json"), str(tmp_path / name)]
        done = subprocess.run(words, env=own_environment(tmp_path), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
        assert ("each over 2 ranks" in done.stderr) == (name == "two")
    steps = [[entry for entry in each["history"] if "loss" in entry] for each in found]
    assert len(steps[0]) == len(steps[1]) == 5
    for ours, theirs in zip(*steps):
        for what in ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm"):
            assert ours[what] == pytest.approx(theirs[what], rel=1e-5)
    assert found[0]["evaluated"]["eval_loss"] == pytest.approx(found[1]["evaluated"]["eval_loss"], rel=1e-4)
