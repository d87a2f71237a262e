"""A Trainer with the engine under Ray Train: a run whose worker is lost goes on by itself from its last good checkpoint.

    python configs/launch/ray_train.py --workers 8 --gpu --storage /shared/run

Put your own model and data in `train_worker`. Ray starts the workers and their process group; the rest is Trainer's.
"""

import argparse
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from hf_zero import ZeroTrainingArguments


def train_worker(said: dict) -> None:
    """What each worker runs, as one rank."""
    sizes = {"vocab_size": 500, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(500, (480, 32))]
    args = ZeroTrainingArguments(
        zero="stage=2,checkpoint.resume=auto",
        output_dir=said["output_dir"],
        max_steps=said["steps"],
        per_device_train_batch_size=4,
        save_steps=5,
        logging_steps=5,
        use_cpu=not said["gpu"],
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=rows).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="outputs/ray", help="a folder that all nodes see")
    options = parser.parse_args()
    storage = Path(options.storage).resolve()
    said = {"output_dir": str(storage / "trainer"), "steps": options.steps, "gpu": options.gpu}
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=said,
        torch_config=TorchConfig(backend="nccl" if options.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=str(storage), name="ray", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
