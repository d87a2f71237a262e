"""Scripts that end otherwise than a training run: `odd_ends.py WAY`."""

import sys

import torch
from sizes import data, tiny_bert


def without_accelerate() -> None:
    print("nothing to train")


def steps_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def prepares_nothing() -> None:
    from accelerate import Accelerator

    Accelerator()
    sys.exit()


def evaluates() -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir="unused", report_to=[])
    print("loss", Trainer(model=tiny_bert(), args=args, eval_dataset=data(8)).evaluate()["eval_loss"])


def fails() -> None:
    raise LookupError("of the script's own")


def ends_with_3() -> None:
    sys.exit(3)


def another_engine() -> None:
    from accelerate import Accelerator

    # The name is enough: the plugin itself needs the engine's package.
    Accelerator(deepspeed_plugin=object())


def fully_sharded() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())


def own_plugin() -> None:
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin

    Accelerator(parallelism_config=ZeroPlugin(stage=int(sys.argv[2])))
    sys.exit(7)


def attached_plugin() -> None:
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin

    ZeroPlugin(stage=int(sys.argv[2])).attach(Accelerator())
    sys.exit(7)


def own_flag() -> None:
    from transformers import HfArgumentParser, Trainer

    from hf_zero import ZeroTrainingArguments

    [args] = HfArgumentParser(ZeroTrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
    Trainer(model=tiny_bert(), args=args, train_dataset=data(8))
    sys.exit(7)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
