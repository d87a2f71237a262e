"""Typical mistakes of a beginner, as one table: what is typed, and the words that name the fault and the remedy."""

import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from launching import run_forked
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_zero.cli.app import app

COMMAND = "hf-zero "


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake, and the words that its output must have.

    Attributes:
        typed: a command line, or the lines of a script after `SCRIPT`.
        named: a regular expression for the words that name the fault.
        remedy: a regular expression for the words that name the remedy.
        ranks: the number of ranks of a script.
    """

    typed: str
    named: str
    remedy: str
    ranks: int = 2

    @property
    def is_command(self) -> bool:
        return self.typed.startswith(COMMAND)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a mistake, its exit status, and the seconds until the end."""

    said: str
    status: int
    seconds: float

    def faults(self, mistake: Mistake, *, within_s: float) -> list[str]:
        """Returns the objections of a grader."""
        words = " ".join(re.sub(r"[│╭╰╮╯─]", " ", self.said).split())
        found = [f"does not say {each!r}" for each in (mistake.named, mistake.remedy) if not re.search(each, words)]
        if self.status == 0:
            found.append("ends with status 0")
        if self.seconds > within_s:
            found.append(f"ends after {self.seconds:.0f} s")
        if mistake.is_command and "Traceback" in self.said:
            found.append("shows a traceback")
        told = re.findall(r"^((?:\[rank\d\]: )?)\S*Error: (hf_zero.*)", self.said, flags=re.MULTILINE)
        # A cause that is quoted in its error is the same message.
        messages = [rank for rank, text in told if not any(text in other != text for _, other in told)]
        if len(messages) > len(set(messages)):
            found.append("has several messages of one rank")
        return found


def prepare(folder: Path) -> None:
    """Makes the files that the mistakes name."""
    files = {
        "train.py": "print('trained')\n",
        "train.ipynb": "{}",
        "ds_config.json": json.dumps({"zero_optimization": {"stage": 2}}),
        "tab.yaml": "stage: 3\ncomm:\n\ttimeout_s: 60\n",
        "list.yaml": "- stage: 2\n",
        "capital.yaml": "Stage: 2\n",
        "deepspeed.yaml": "zero_optimization:\n  stage: 2\n",
        "fsdp.json": json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"], "reshard_after_forward": True}),
        "stage5.json": json.dumps({"zero_optimization": {"stage": 5}}),
        "half.json": '{"zero_optimization": {"stage": 2}',
        "empty.json": "{}",
        "null.yaml": "stage: 2\ncomm:\n",
        "twice.yaml": "stage: 2\nstage: 3\n",
        "columns.yaml": "stage: 2\n  comm:\n    late_s: 60\n",
        "equals.yaml": "stage = 2\n",
        "nested.yaml": "zero:\n  stage: 2\n",
        "arguments.yaml": "stage: 2\nper_device_train_batch_size: 8\n",
        "train.sh": "python train.py\n",
        "out/checkpoint-2/trainer_state.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
    GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(folder / "model")


def answer(mistake: Mistake, folder: Path) -> Answer:
    """Makes the mistake in a prepared folder."""
    begun_s = time.monotonic()
    if mistake.is_command:
        here = Path.cwd()
        os.chdir(folder)
        try:
            # A command that starts ranks would replace this process.
            with mock.patch("os.execve", side_effect=SystemExit(0)):
                ended = CliRunner().invoke(app, shlex.split(mistake.typed)[1:], prog_name="hf-zero")
        finally:
            os.chdir(here)
        is_told = ended.exception is None or isinstance(ended.exception, SystemExit)
        said = ended.output if is_told else f"{ended.output}Traceback: {ended.exception!r}"
        return Answer(said=said, status=ended.exit_code, seconds=time.monotonic() - begun_s)
    script = folder / "script.py"
    script.write_text(SCRIPT + mistake.typed)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    if mistake.typed.startswith("# without ACCELERATE_USE_CPU"):
        environment.pop("ACCELERATE_USE_CPU")
    done = run_forked(script, environment=environment, processes=mistake.ranks, folder=folder)
    return Answer(said=done.stdout + done.stderr, status=done.returncode, seconds=time.monotonic() - begun_s)


SCRIPT = """
import copy, os, torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import hf_zero
from hf_zero import ZeroCallback, ZeroConfig, ZeroEngine, ZeroPlugin, engine_of, gathered

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
batch = torch.ones(4, 8)

def prepared(stage=2, **settings):
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=stage, **settings))
    return accelerator, *accelerator.prepare(net, adam)

def gpt2(**sizes):
    sizes = dict(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2) | sizes
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

def trainer(*callbacks, output_dir="out", model=None, **arguments):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (32, 16))]
    said = dict(max_steps=2, save_steps=1, report_to="none", disable_tqdm=True) | arguments
    return Trainer(model=model or gpt2(), args=TrainingArguments(output_dir, **said), train_dataset=rows,
                   callbacks=list(callbacks))

def saved():
    made = trainer(ZeroCallback(2), output_dir="run")
    made.train()
    dist.barrier()
    return made.is_world_process_zero()

def backward(accelerator, model):
    accelerator.backward(model(batch).square().mean())

"""
"""The beginning of each script."""


def _run(zero: str, named: str, remedy: str) -> Mistake:
    return Mistake(typed=f"hf-zero run --zero {zero} train.py", named=named, remedy=remedy)


def _command(words: str, named: str, remedy: str) -> Mistake:
    return Mistake(typed=COMMAND + words, named=named, remedy=remedy)


def _script(lines: str, named: str, remedy: str, *, ranks: int = 2) -> Mistake:
    return Mistake(typed=lines, named=named, remedy=remedy, ranks=ranks)


MISTAKES: dict[str, Mistake] = {
    # Settings
    "stage 4": _run("4", "`stage` is 4", "allowed: 0, 1, 2, 3, auto"),
    "a stage in words": _run("two", "'two'", "For stage 2, write 2"),
    "stage2": _run("stage2", "'stage2'", "For stage 2, write 2"),
    "a colon in place of =": _run("stage:2", "'stage:2'", "settings such as stage=2"),
    "semicolons": _run("'stage=2;comm.late_s=60'", "stage=2;comm.late_s=60", "separated by commas"),
    "a space after a comma": _run("stage=2, comm.late_s=60", "'comm.late_s=60'", "one word, with commas and no spaces"),
    "a missing YAML file": _run("zero.yaml", "no file 'zero.yaml'", "that folder holds .*capital.yaml"),
    "DeepSpeed's JSON file": _run("ds_config.json", "is a config of DeepSpeed", "`stage=2`"),
    "DeepSpeed's keys in YAML": _run("deepspeed.yaml", "is a config of DeepSpeed", "hf-zero migrate"),
    "a tab in YAML": _run("tab.yaml", r"tab.yaml is not valid YAML, line 3", "Indent with spaces"),
    "a capital letter in a key": _run("capital.yaml", "unknown key `Stage`", "most similar known key is `stage`"),
    "a list in YAML": _run("list.yaml", "holds list", "a mapping such as `stage: 2`"),
    "a typo in a setting": _run("stage=2,buckt_bytes=16MiB", "`buckt_bytes`", "`bucket_bytes`"),
    "bf16 for a dtype": _run("stage=2,param_dtype=bf16", "`param_dtype` is 'bf16'", "bfloat16"),
    "offload to the GPU": _run("stage=3,offload.params=gpu", "`offload.params` is 'gpu'", "none, cpu, nvme"),
    "offload without a part": _run("stage=2,offload=cpu", "`offload` is 'cpu'", r"offload\.optimizer="),
    "nvme without a path": _run("stage=2,offload.optimizer=nvme", "optimizer: nvme", "needs `offload.nvme_path`"),
    "bytes in words": _run("stage=2,bucket_bytes=lots", "`bucket_bytes` is 'lots'", "16MiB"),
    "no bytes": _run("stage=2,bucket_bytes=0", "`bucket_bytes` is 0", "above 0"),
    "a setting of stage 3 at stage 2": _run("stage=2,prefetch_units=2", "`prefetch_units`", "Set `stage: 3`"),
    "moments without a unit": _run("stage=2,moments=8", "`moments` is 8", "32bit, 8bit"),
    "a removed setting": _run("stage=2,comm.gradients=int4", "`comm.gradients: int4` was removed", "Use int8"),
    "minutes with a unit": _run("checkpoint.every_minutes=10m", "every_minutes` is '10m'", "a number of minutes"),
    "a time with a colon": _run("stage=2,checkpoint.budget=3:40", "`checkpoint.budget` is '3:40'", "3h40m"),
    "another word for stop": _run("stage=2,nonfinite=raise", "`nonfinite` is 'raise'", "stop, skip, ignore"),
    "resume: true": _run("stage=2,checkpoint.resume=true", "`checkpoint.resume` is True", "asked, auto"),
    "the learning rate": _run("stage=2,learning_rate=1e-4", "`learning_rate`", "in the training arguments"),
    "the batch": _run("stage=2,train_batch_size=8", "`train_batch_size`", "in the training arguments"),
    "a negative stage": _run("-1", "`stage` is -1", "allowed: 0, 1, 2, 3, auto"),
    "half a stage": _run("2.5", r"'2\.5'", r"a stage \(0, 1, 2, 3, auto\)"),
    "no stage in words": _run("none", "'none'", "For stage 0, write 0"),
    "FSDP's word for a stage": _run("full_shard", "'full_shard'", "For stage 3, write 3"),
    "a negative time": _run("stage=2,comm.late_s=-5", "`comm.late_s` is -5", "a number of seconds from"),
    "disk for nvme": _run("stage=2,offload.optimizer=disk", "`offload.optimizer` is 'disk'", "none, cpu, nvme"),
    "DeepSpeed's key": _run("stage=2,offload_optimizer=cpu", "`offload_optimizer`", r"here it is `offload\.optimizer`"),
    "DeepSpeed's overlap": _run("stage=2,overlap_comm=true", "`overlap_comm`", "always overlaps, so remove it"),
    "gradient accumulation": _run(
        "stage=2,gradient_accumulation_steps=4", "`gradient_accumulation_steps`", "in the training arguments"
    ),
    "fp16 as a setting": _run("stage=2,fp16=true", "`fp16`", "in the training arguments"),
    "a folder without {step}": _run("checkpoint.on_signal=runs/x", "on_signal` is 'runs/x'", r"a folder with \{step\}"),
    "FSDP's JSON file": _run("fsdp.json", "it is FSDP's", "here it is `unit_modules`"),
    "another suffix": _run("capital.yml", r"no file 'capital\.yml'", r"folder holds capital\.yaml"),
    "a section without settings": _run("null.yaml", "`comm` is None", "a mapping of .*late_s"),
    "a key twice in YAML": _run("twice.yaml", r"twice\.yaml is not valid YAML, line 2", "'stage' appears twice"),
    "different columns in YAML": _run(
        "columns.yaml", r"columns\.yaml is not valid YAML, line 2", "Indent all settings"
    ),
    "= in YAML": _run("equals.yaml", r"equals\.yaml holds str", "a mapping such as `stage: 2`"),
    "a section named zero": _run("nested.yaml", "unknown key `zero`", "belong at the top level"),
    "training arguments in YAML": _run("arguments.yaml", "`per_device_train_batch_size`", "in the training arguments"),
    "a YAML file of bytes": _run("binary.yaml", r"binary\.yaml is not text", "Pass a YAML file such as"),
    "a setting twice": _run("stage=2,stage=3", "`stage` is set twice", "Set it once"),
    # hf-zero run
    "run without a config": _command("run train.py", "no config was given", "`--zero 2 script.py"),
    "a config after the script": _command("run train.py --zero 2", "no config was given", "before the script"),
    "run without a script": _command("run --zero 2", "Missing argument 'script'", "Try 'hf-zero run --help'"),
    "a script with a typo": _command("run --zero 2 trian.py", "no script 'trian.py'", r"'train\.py'"),
    "a script without .py": _command("run --zero 2 train", "no script 'train'", r"'train\.py'"),
    "python before the script": _command("run --zero 2 python train.py", "no script 'python'", "Remove `python`"),
    "a notebook": _command("run --zero 2 train.ipynb", "is a notebook", r"hf_zero\.launch"),
    "a folder": _command("run --zero 2 out", "'out' is a folder", "path of a Python file"),
    "-m before a file": _command("run --zero 2 -m train.py", "no module 'train.py'", "Omit -m before a file"),
    "-m before a missing module": _command(
        "run --zero 2 -m no_such_pkg.x", "no module 'no_such_pkg.x'", "`import` finds"
    ),
    "--stage": _command("run --stage 2 train.py", "No such option: --stage", "--zero"),
    "--zero2": _command("run --zero2 train.py", "No such option: --zero2", r"Possible options: --zero\)"),
    "--nproc_per_node": _command("run --zero 2 --nproc_per_node 4 train.py", "--nproc-per-node", "--num-processes"),
    "--gpus": _command("run --zero 2 --gpus 4 train.py", "No such option: --gpus", r"options: --num-processes\)"),
    "--bf16": _command("run --zero 2 --bf16 train.py", "No such option: --bf16", "--mixed-precision"),
    "--master_port": _command("run --zero 2 --master_port 29500 x.py", "--master-port", r"options: --port\)"),
    "--config_file": _command("run --zero 2 --config_file x.yaml x.py", "--config-file", r"options: --zero\)"),
    "-n": _command("run --zero 2 -n 2 train.py", "No such option: -n", r"options: --num-processes\)"),
    "--deepspeed": _command("run --zero 2 --deepspeed ds_config.json x.py", "--deepspeed", "hf-zero migrate"),
    "--fsdp": _command("run --zero 2 --fsdp full_shard train.py", "No such option: --fsdp", "remove the option"),
    "--num_machines": _command(
        "run --zero 2 --num_machines 2 train.py", "--num-machines", r"-m hf_zero\.run .*torchrun"
    ),
    "--nnodes of parity": _command("parity --zero 2 --nnodes 2 train.py", "--nnodes", r"-m hf_zero\.run .*torchrun"),
    "torchrun before the script": _command(
        "run --zero 2 torchrun train.py", "no script 'torchrun'", "Remove `torchrun`"
    ),
    "accelerate before the script": _command(
        "run --zero 2 accelerate launch train.py", "no script 'accelerate'", "Remove `accelerate`"
    ),
    "a shell script": _command("run --zero 2 train.sh", r"'train\.sh' is not a Python file", "Replace `python`"),
    "a config for a script": _command("run --zero 2 tab.yaml", r"'tab\.yaml' is not a Python file", "as `--zero FILE`"),
    "--zero before the command": _command(
        "--zero 2 train.py", "No such option: --zero", "hf-zero run --zero 2 train.py"
    ),
    "no ranks": _command("run --zero 2 --num-processes 0 train.py", "--num-processes is 0", "at least 1"),
    "ranks in words": _command("run --zero 2 --num-processes two x.py", "'--num-processes'", "valid integer"),
    "a port that is too large": _command("run --zero 2 --port 99999 train.py", "'--port'", "65535"),
    "an unknown precision": _command(
        "run --zero 2 --mixed-precision fp32 x.py", "'fp32' is not", "'no', 'bf16', 'fp16'"
    ),
    "sequences over 3 of 2 ranks": _command("run --cpu --zero 2 --sp 3 train.py", "--sp is 3", "divides the 2 ranks"),
    # Other commands
    "a command with a typo": _command("plna model", "No such command 'plna'", "'plan'"),
    "accelerate's command": _command("launch --zero 2 train.py", "No such command 'launch'", "Use `hf-zero run`"),
    "another word for run": _command("train --zero 2 train.py", "No such command 'train'", "Use `hf-zero run`"),
    "plan of one stage": _command("plan model --stage 2", "No such option: --stage", "shows all stages"),
    "GPUs in words": _command("plan model --gpus eight", "'--gpus'", "a valid integer"),
    "negative memory": _command("plan model --gpu-memory -24GB", "'-24GB'", "bytes above 0"),
    "an address for a name": _command(
        "plan https://huggingface.co/bert-base-uncased", "https://huggingface.co/bert", r"a name of the Hub|OWNER/MODEL"
    ),
    "inspect a script": _command("inspect train.py", "train.py is a file", "pass the folder"),
    "half a JSON file": _command("migrate half.json", r"half\.json is not valid JSON", "line 1 column"),
    "a stage that no engine has": _command("migrate stage5.json", "`stage` is 5", "Correct that file"),
    "a JSON file of no engine": _command(
        "migrate empty.json", "has no key of DeepSpeed's", "reads a DeepSpeed JSON file"
    ),
    "report of a missing folder": _command("report nowhere", "nowhere", "there is no folder nowhere"),
    "parity of a typo": _command("parity --zero 2 trian.py", r"no script 'trian\.py'", r"nearest one is 'train\.py'"),
    "plan of nothing": _command("plan", "Missing argument 'model'", "Try 'hf-zero plan --help'"),
    "a name of the Hub with a typo": _command("plan bert-base-uncaesd", "bert-base-uncaesd", "HF_HUB_OFFLINE|folder"),
    "a folder with a typo": _command("plan ./modle", r"\./modle is neither a local folder", "OWNER/MODEL"),
    "plan of a script": _command("plan train.py", "config of train.py cannot be read", "not a valid JSON file"),
    "plan of an output folder": _command("plan out", "out has no config.json", "folder of a model"),
    "plan of the folder above": _command("plan .", r"\. has no config.json", "Pass model, which has one"),
    "no GPUs": _command("plan model --gpus 0", "`gpus` is 0", "from 1"),
    "memory without a unit": _command("plan model --gpu-memory 24", "`gpu_memory` is '24'", "24GB"),
    "a space before the unit": _command(
        "plan model --gpu-memory 24 GB", r"extra argument\(s\) \(GB\)", "Try 'hf-zero plan"
    ),
    "rows without tokens": _command("plan model --seq 0", "`seq` is 0", "from 1"),
    "no rows": _command("plan model --batch 0", "`batch` is 0", "from 1"),
    "bfloat16 for bf16": _command("plan model --mixed-precision bfloat16", "'bfloat16' is not", "'bf16'"),
    "bf16 for bfloat16": _command("plan model --dtype bf16", "'bf16' is not one of", "'bfloat16'"),
    "verify a missing folder": _command("verify nowhere", "nowhere", "there is no folder nowhere"),
    "verify an output folder": _command(
        "verify out", "holds no model.safetensors", "pass the newest, out/checkpoint-2"
    ),
    "verify half a checkpoint": _command("verify out/checkpoint-2", "out/checkpoint-2", "no model.safetensors"),
    "verify a file": _command("verify train.py", "train.py is a file", "pass the folder"),
    "inspect an output folder": _command(
        "inspect out", "holds no model.safetensors", "pass the newest, out/checkpoint-2"
    ),
    "consolidate without a target": _command("consolidate out", "Missing argument 'out'", "--help"),
    "consolidate to fp16": _command("consolidate model whole --dtype fp16", "'fp16' is not", "'float16'"),
    "push a missing folder": _command("push nowhere my-model", "no folder nowhere", "no folder nowhere"),
    "a repository with a space": _command(
        "push model 'my model'", "'my model' is not a valid repository name", "me/my-model"
    ),
    "a repository with two slashes": _command(
        "push model a/b/c", "'a/b/c' is not a valid repository name", "me/my-model"
    ),
    "push without a token": _command("push model my-model", "no token", "Run `hf auth login`"),
    "migrate a missing file": _command("migrate nowhere.json", "nowhere.json cannot be read", "No such file"),
    "migrate a script": _command("migrate train.py", "train.py holds", "DeepSpeed's JSON"),
    "convert a missing folder": _command("convert nowhere whole", "no folder nowhere", "no folder nowhere"),
    "convert a model": _command("convert model whole", "model is not a checkpoint of DeepSpeed", "global_step"),
    "report of nothing": _command("report out", "trainer_state.json has no log_history", "no run to report"),
    "parity without a config": _command("parity train.py", "no config was given", "`--zero 2 script.py"),
    "doctor of no ranks": _command("doctor --processes 0", "'--processes'", "greater than or equal to 2"),
    "a rendezvous at no address": _command(
        "rendezvous --host nowhere.invalid --port 29411", "nowhere.invalid", "Pass another --port, or the --host"
    ),
    # Objects in Python
    "the plugin's class": _script(
        "Accelerator(parallelism_config=ZeroPlugin)", "is the class", r"ZeroPlugin\(stage=2\)"
    ),
    "a config for a plugin": _script(
        "Accelerator(parallelism_config=ZeroConfig(stage=2))", "is a ZeroConfig", r"ZeroPlugin\(config\)", ranks=1
    ),
    "a callback for a plugin": _script(
        "Accelerator(parallelism_config=ZeroCallback(2))", "is a ZeroCallback", r"ZeroPlugin\(stage=2\)", ranks=1
    ),
    "a plugin for a callback": _script(
        "trainer(ZeroPlugin(2))", r"ZeroPlugin\(stage=2\) is in", "ZeroCallback", ranks=1
    ),
    "a plugin with a typo": _script("ZeroPlugin(stge=2)", "`stge`", "`stage`", ranks=1),
    "parameters for a model": _script("ZeroEngine(net.parameters(), [adam], 2)", "generator", "a model", ranks=1),
    "an optimizer's class": _script(
        "ZeroEngine(net, [torch.optim.AdamW], 2)", "the class AdamW", r"AdamW\(\.\.\.\)", ranks=1
    ),
    "stage auto for an engine": _script(
        "ZeroEngine(net, [adam], 'auto')", "`stage: auto`", "Pass ZeroEngine a stage", ranks=1
    ),
    "a name for a parameter": _script(
        "prepared(3)\nwith gathered('0.weight'): pass", r"gathered got '0\.weight'", "It takes a module", ranks=1
    ),
    "launch with a call": _script("hf_zero.launch(print())", "launch got None", r"launch\(train", ranks=1),
    "launch with a number": _script("hf_zero.launch(print, 3)", "args 3", "takes a tuple", ranks=1),
    "a folder for an Accelerator": _script(
        "hf_zero.last_good_state('out')",
        "last_good_state got out",
        r"last_good_state\(accelerator, folder\)",
        ranks=1,
    ),
    "attach to a model": _script(
        "ZeroPlugin(2).attach(net)", "attach got Sequential", r"attach\(accelerator\)", ranks=1
    ),
    "no rows in a micro-batch": _script(
        "hf_zero.same_global_batch(96, rows=0, world_size=2)", "0 in a micro-batch", "at least 1", ranks=1
    ),
    "frozen parameters only": _script(
        "net.requires_grad_(False)\nprepared()", "no parameter of the model requires", "Set requires_grad before"
    ),
    "a launch in a rank": _script(
        "os.environ.update(RANK='0', WORLD_SIZE='2')\nhf_zero.launch(print, num_processes=2, zero=2)",
        "is already rank 0 of 2",
        "with `python`",
        ranks=1,
    ),
    "launch of a script": _script(
        "hf_zero.launch('train.py', zero=2)", r"launch got 'train\.py'", r"launch\(train", ranks=1
    ),
    "launch of no ranks": _script(
        "hf_zero.launch(print, num_processes=0)", "num-processes is 0", "at least 1", ranks=1
    ),
    "a callback of a missing file": _script(
        "ZeroCallback('zero.yaml')", r"no file 'zero\.yaml'", "that folder holds", ranks=1
    ),
    "a stage in words for a callback": _script(
        "ZeroCallback(stage='stage 2')", "`stage` is 'stage 2'", "allowed: 0, 1, 2, 3, auto", ranks=1
    ),
    "half a stage for a plugin": _script("ZeroPlugin(2.0)", r"is 2\.0", "a stage number, a YAML path", ranks=1),
    "an optimizer for a model": _script(
        "prepared(3)\nwith hf_zero.unsharded(adam): pass", "unsharded got AdamW", "It takes a module", ranks=1
    ),
    "DeepSpeed's loop": _script(
        "a, m, o = prepared()\nengine_of(m).backward(m(batch).sum())",
        "no attribute 'backward'",
        r"loss\.backward\(\)",
        ranks=1,
    ),
    "engine_of before prepare": _script("engine_of(net)", "no engine on", r"call prepare\(model, optimizer\)", ranks=1),
    # Two engines
    "FSDP next to the plugin": _script(
        "from accelerate import FullyShardedDataParallelPlugin\n"
        "Accelerator(parallelism_config=ZeroPlugin(2), fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(net, adam)",
        "FSDP is also requested",
        "Remove that setting",
    ),
    "fsdp next to the callback": _script(
        "trainer(ZeroCallback(2), fsdp='full_shard').train()", "FSDP is also requested", "Remove that setting"
    ),
    "DDP around the model": _script(
        "a = Accelerator(parallelism_config=ZeroPlugin(2))\na.prepare(nn.parallel.DistributedDataParallel(net), adam)",
        "of class DistributedDataParallel",
        "the plain model",
    ),
    "fully_shard before prepare": _script(
        "from torch.distributed.fsdp import fully_shard\na = Accelerator(parallelism_config=ZeroPlugin(2))\nfully_shard(net)\n"
        "a.prepare(net, torch.optim.AdamW(net.parameters()))",
        r"FSDP \(`fully_shard`\) shards it",
        "before anything wraps it",
    ),
    "two stages for one Trainer": _script(
        "trainer(ZeroCallback(2), ZeroCallback(3)).train()", "have `stage` 2, and this one 3", "Pass only one of them"
    ),
    # Ranks
    "torchrun on a CPU": _script(
        "# without ACCELERATE_USE_CPU\nprepared()", "2 processes were requested", "On a CPU, .*ACCELERATE_USE_CPU=true"
    ),
    "no process group": _script("ZeroEngine(net, [adam], 2)", "has no process group", r"init_process_group\(\)"),
    "a second Accelerator": _script(
        "Accelerator()\na, m, o = prepared()\nbackward(a, m)\no.step()", "was not installed", r"plugin\.attach"
    ),
    "a model without its optimizer": _script(
        "a = Accelerator(parallelism_config=ZeroPlugin(2))\nbackward(a, a.prepare(net))",
        "prepared without its optimizer",
        r"accelerator\.prepare\(model, optimizer\)",
    ),
    "attach after prepare": _script(
        "a = Accelerator()\na.prepare(net, adam)\nZeroPlugin(2).attach(a)",
        "was called after",
        "attach first, then prepare",
    ),
    "reading p.grad after the step": _script(
        "a, m, o = prepared()\nbackward(a, m)\no.step()\nnet[0].weight.grad.norm()",
        r"gradient of '0\.weight'",
        r"between the last backward and optimizer\.step\(\)",
    ),
    "an optimizer of another model": _script(
        "Accelerator(parallelism_config=ZeroPlugin(2)).prepare(nn.Linear(8, 4), adam)",
        "holds none of the parameters",
        "Build it from the prepared model",
    ),
    "an optimizer that was not prepared": _script(
        "a, m, o = prepared()\nbackward(a, m)\ntorch.optim.AdamW(m.parameters()).step()",
        "this AdamW was not prepared",
        "step the one that prepare returns",
    ),
    "other sizes on another rank": _script(
        "net = nn.Linear(8, 4 + int(os.environ['RANK']))\nadam = torch.optim.AdamW(net.parameters())\nprepared()",
        r"shape \(4, 8\), .* on rank 0, shape \(5, 8\)",
        "the same way on every rank",
    ),
    "torch's clip after the step": _script(
        "a, m, o = prepared()\nbackward(a, m)\no.step()\nnn.utils.clip_grad_norm_(m.parameters(), 1.0)",
        r"gradient of '0\.weight' is sharded",
        r"accelerator\.clip_grad_norm_",
    ),
    "no zero_grad": _script(
        "a, m, o = prepared()\nfor _ in range(2):\n    backward(a, m)\n    o.step()",
        "needed for a second step",
        r"optimizer\.zero_grad\(\)",
    ),
    "a NaN": _script(
        "a, m, o = prepared()\na.backward(m(batch * float('nan')).sum())\no.step()",
        "gradient norm is nan",
        "Lower the learning rate",
    ),
    "half after prepare": _script(
        "a, m, o = prepared()\nnet.half()\nbackward(a, m)",
        r"'0\.weight' is torch\.float16",
        "Cast before accelerator.prepare",
    ),
    "reading a parameter at stage 3": _script(
        "a, m, o = prepared(3)\nnet[0].weight.norm()",
        r"needs the values of '0\.weight'",
        r"with hf_zero\.gathered\(model\)",
    ),
    "state_dict on one rank, then a barrier": _script(
        "a, m, o = prepared(3)\nif a.is_main_process: m.state_dict()\na.wait_for_everyone()",
        r"only some ranks reached state_dict\(\)",
        "call it on every rank",
    ),
    "save_state on one rank, then a barrier": _script(
        "a, m, o = prepared()\nif a.is_main_process: a.save_state('state')\na.wait_for_everyone()",
        "only some ranks reached accelerator.save_state",
        "call it on every rank",
    ),
    "gathered on one rank, then a barrier": _script(
        "a, m, o = prepared(3)\nif a.is_main_process:\n    with gathered(m): pass\na.wait_for_everyone()",
        "only some ranks reached hf_zero.gathered",
        "call it on every rank",
    ),
    "a forward on one rank, then a barrier": _script(
        "a, m, o = prepared(3)\nif a.is_main_process: m(batch)\na.wait_for_everyone()",
        "barrier",
        "is_main_process|larger `comm.late_s`",
    ),
    "an edit without writeback": _script(
        "a, m, o = prepared(3)\nwith gathered(m), torch.no_grad(): net[0].weight.zero_()",
        "the edit is lost",
        "writeback=True",
    ),
    "pickling at stage 3": _script(
        "a, m, o = prepared(3)\ntorch.save(m, 'm.pt')", "cannot be pickled", "save_pretrained"
    ),
    "stages that differ": _script(
        "prepared(1 + int(os.environ['RANK']))", "the setting `stage`: 1 on rank 0", "the same way"
    ),
    "a model without values": _script(
        "with torch.device('meta'): net = nn.Linear(8, 4)\nadam = torch.optim.AdamW(net.parameters())\nprepared()",
        "on the meta device",
        "from_pretrained",
    ),
    "resume from a missing folder": _script(
        "trainer(ZeroCallback(2)).train('out/checkpoint-7')", "no folder out/checkpoint-7", "Checkpoints in 'out'"
    ),
    "resume without a checkpoint": _script(
        "trainer(ZeroCallback(2), output_dir='new').train(True)",
        "No valid checkpoint found",
        "Omit resume_from_checkpoint",
    ),
    "half a checkpoint": _script(
        "if saved(): os.remove('run/checkpoint-2/zero/rank-00001-of-00002.safetensors')\ndist.barrier()\n"
        "trainer(ZeroCallback(2), output_dir='run').train('run/checkpoint-2')",
        r"rank-00001-of-00002\.safetensors is missing",
        "checkpoint-1",
    ),
    "another optimizer": _script(
        "saved()\ntrainer(ZeroCallback(2), output_dir='run', optim='sgd').train('run/checkpoint-2')",
        "optimizer AdamW, and this run has SGD",
        "Resume with the same optimizer",
    ),
    "another model": _script(
        "saved()\ntrainer(ZeroCallback(2), output_dir='run', model=gpt2(n_embd=32)).train('run/checkpoint-2')",
        "do not fit this run's GPT2LMHeadModel",
        "checkpoint|model",
    ),
    "load_state of a missing folder": _script(
        "a, m, o = prepared()\na.load_state('nowhere')", "no folder nowhere", r"accelerator\.save_state wrote"
    ),
    "a missing folder for files": _script(
        "prepared(offload={'optimizer': 'nvme', 'nvme_path': 'no/such'})",
        "'no/such', which is not a folder",
        "Create it",
    ),
    "layers of another model": _script("prepared(3, unit_modules=['BertLayer'])", "BertLayer", "Its classes: Linear"),
    "groups of 3 of 2 ranks": _script(
        "prepared(comm={'shard_group_size': 3})", "shard_group_size` is 3", "allowed: 2, auto"
    ),
}
"""A name for each mistake → the mistake."""
