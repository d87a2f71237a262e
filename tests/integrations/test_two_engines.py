"""A run that asks for two engines is refused at every door, and one that asked for ours does not train without it in silence."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from shared_ranks import on_ranks
from trainer_job import as_launched, make_trainer
from training import gpt2, gpt2_batch
from transformers import Trainer, TrainingArguments

import hf_zero
from hf_zero import ConfigError, ZeroCallback, ZeroEngine, ZeroPlugin, ZeroTrainingArguments, engine_of
from hf_zero.hooks.weak import engine_attached_to
from hf_zero.integrations.step_watch import watch_for_the_variable

pytestmark = pytest.mark.timeout(180)

SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


@pytest.fixture(autouse=True)
def fresh_state():
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def fsdp() -> dict:
    # accelerate notes the plugin in the environment, for all that follows in the process.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    AcceleratorState._reset_state()
    return {"fsdp_plugin": FullyShardedDataParallelPlugin()}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"fsdp": "full_shard"}, r"`--zero 2` and `--fsdp full_shard`: two engines cannot own one model"),
        ({"fsdp": True}, r"Remove --fsdp to train with hf_zero, or --zero to train with FSDP"),
        ({"deepspeed": "ds_config.json"}, r"`--zero 2` and `--deepspeed ds_config.json`"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "both split the model"),
        ({"parallelism_config": "plugin of stage 3"}, "both split the model"),
    ],
    ids=str,
)
def test_the_flag_beside_another_engine_is_refused(other, says, tmp_path):
    if other.get("parallelism_config") == "plugin of stage 3":
        other = {"parallelism_config": ZeroPlugin(3)}
    with pytest.raises(ConfigError, match=says):
        ZeroTrainingArguments(output_dir=str(tmp_path), zero="2", use_cpu=True, **other)


@pytest.mark.parametrize("variable", SWITCHES)
@pytest.mark.parametrize("make", [ZeroPlugin, ZeroCallback])
def test_a_launch_for_another_engine_is_refused(variable, make):
    os.environ[variable] = "true"
    with pytest.raises(
        ConfigError, match=rf"{variable} is 'true'.*Two engines cannot own one model. Remove that setting"
    ):
        make(2)


def test_accelerates_launch_arguments_for_fsdp_are_seen():
    arguments = ["--use_fsdp", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "script.py"]
    parsed = launch_command_parser().parse_args(arguments)
    parsed.mixed_precision, parsed.dynamo_backend = "no", "no"
    os.environ.update({name: str(value) for name, value in prepare_multi_gpu_env(parsed).items() if "FSDP" in name})
    with pytest.raises(ConfigError, match="FSDP is also requested"):
        ZeroPlugin(2)


def test_accelerates_ways_to_split_a_model_are_refused():
    os.environ.update(ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_TP_SIZE="2")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_TP_SIZE is 2"):
        ZeroPlugin(2)
    os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "1"
    plugin, accelerator = ZeroPlugin(2), Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(ConfigError, match=r"ParallelismConfig\.dp_shard_size is 2"):
        plugin.attach(accelerator)


def test_an_fsdp_plugin_beside_ours_is_refused():
    plugin = ZeroPlugin(2)
    with pytest.raises(ConfigError, match="FSDP is also requested"):
        Accelerator(cpu=True, parallelism_config=plugin, **fsdp())
    accelerator = Accelerator(cpu=True, **fsdp())
    with pytest.raises(ConfigError, match="FSDP is also requested"):
        plugin.attach(accelerator)


@on_ranks(2)
def test_the_callback_beside_the_fsdp_argument_is_refused(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    with pytest.raises(ConfigError, match="FSDP is also requested"):
        make_trainer("callback 2", "gpt2", folder, fsdp="full_shard")


@on_ranks(2)
def test_models_that_are_wrapped_or_sharded_already_are_refused(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), cpu=True)
    sharded = gpt2()
    torch.distributed.fsdp.fully_shard(sharded.transformer.h[0])
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    split = gpt2()
    split.lm_head.weight = torch.nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(4, 4), mesh))
    for model, says in (
        (
            torch.nn.parallel.DistributedDataParallel(gpt2()),
            "the model is of class DistributedDataParallel: DDP averages",
        ),
        (torch.nn.DataParallel(gpt2()), "start one process per GPU"),
        (sharded, r"'transformer\.h\.0' is of class FSDPGPT2Block"),
        (split, r"the parameter '.*weight' is a DTensor"),
    ):
        with pytest.raises(ConfigError, match=says):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.free_memory()


def stepped(accelerator: Accelerator) -> torch.nn.Module:
    """A model after one step with what the accelerator prepares."""
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(**gpt2_batch(torch.Generator(), 2)).loss)
    optimizer.step()
    return model


def test_a_plugin_that_a_second_accelerator_ignores_stops_the_run():
    Accelerator(cpu=True)
    second = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    with pytest.raises(
        ConfigError, match=r"SGD steps, but a ZeroPlugin for stage 2 was not installed.*no plugin.*attach"
    ):
        stepped(second)


def test_a_second_accelerator_with_another_config_stops_the_run():
    Accelerator(cpu=True, parallelism_config=ZeroPlugin(1))
    second = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    with pytest.raises(ConfigError, match=r"ZeroPlugin for stage 2 was not installed.*a plugin for stage 1"):
        stepped(second)


def test_accelerators_with_equal_plugins_each_train_with_the_engine():
    for _ in range(2):
        assert engine_of(stepped(Accelerator(cpu=True, parallelism_config=ZeroPlugin(1)))).config.stage == 1


def test_a_plugin_attached_to_a_second_accelerator_has_its_own_config():
    stepped(Accelerator(cpu=True, parallelism_config=ZeroPlugin(1)))
    assert engine_of(stepped(ZeroPlugin(3).attach(Accelerator(cpu=True)))).config.stage == 3


def test_a_plugin_that_nobody_keeps_does_not_stop_a_plain_run():
    ZeroPlugin(2)
    assert engine_attached_to(stepped(Accelerator(cpu=True))) is None


def test_a_plain_loop_may_train_before_the_plugin_is_used():
    plugin, model = ZeroPlugin(2), torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert engine_of(stepped(Accelerator(cpu=True, parallelism_config=plugin))).config.stage == 2


def test_arguments_made_before_a_plain_accelerator_stop_the_run(tmp_path):
    arguments = ZeroTrainingArguments(output_dir=str(tmp_path), zero="2", use_cpu=True)
    with pytest.raises(ConfigError, match="was not installed"):
        stepped(Accelerator(cpu=True))
    assert arguments.parallelism_config.config.stage == 2


def test_each_trainer_of_a_process_has_the_config_of_its_own_arguments(tmp_path):
    arguments = [ZeroTrainingArguments(output_dir=str(tmp_path), zero=stage, use_cpu=True) for stage in ("1", "3")]
    trainers = [Trainer(model=gpt2(), args=each) for each in arguments]
    assert [trainer.accelerator.zero_config.stage for trainer in trainers] == [1, 3]


@pytest.mark.parametrize("door", ["flag", "callback"])
def test_one_process_that_sees_several_gpus_trains_on_one_by_the_engine(door, tmp_path, caplog):
    kind = ZeroTrainingArguments if door == "flag" else TrainingArguments
    arguments = kind(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
    )
    if door == "flag":
        arguments.parallelism_config = ZeroPlugin(2)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 4
    data = [{name: values[0] for name, values in gpt2_batch(torch.Generator(), 1).items()}] * 8
    callbacks = [] if door == "flag" else [ZeroCallback(2)]
    trainer = Trainer(model=gpt2(), args=arguments, train_dataset=data, callbacks=callbacks)
    assert f"sees 4 GPUs and trains on {arguments.device} only" in caplog.text
    assert "torchrun --nproc-per-node 4" in caplog.text
    trainer.train()
    assert engine_of(trainer).config.stage == 2
    assert trainer.get_total_train_batch_size(arguments) == 2
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 2


def test_an_optimizer_that_is_prepared_without_its_model_does_not_step_alone():
    model, accelerator = gpt2(), ZeroPlugin(2).attach(Accelerator(cpu=True))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**gpt2_batch(torch.Generator(), 2)).loss.backward()
    with pytest.raises(RuntimeError, match="SGD steps without the engine: it was prepared, but the model"):
        optimizer.step()
    optimizer.zero_grad()
    model = accelerator.prepare(model)
    accelerator.backward(model(**gpt2_batch(torch.Generator(), 2)).loss)
    optimizer.step()
    engine_of(model).close()
    model(**gpt2_batch(torch.Generator(), 2)).loss.backward()
    optimizer.step()


def test_two_callbacks_are_refused_by_what_they_disagree_on(tmp_path):
    with pytest.raises(
        ConfigError, match=r"an earlier ZeroCallback, have `stage` 1, and this one 2\. Pass only one of them"
    ):
        make_trainer("callback 1", "gpt2", tmp_path, callbacks=[ZeroCallback(1), ZeroCallback(2)])
    make_trainer("callback 1", "gpt2", tmp_path, callbacks=[ZeroCallback(1)])


PLAIN_STEPS = """
import torch, hf_zero
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
IGNORED = "hf_zero: HF_ZERO_CONFIG is '1', and SGD steps without the engine: nothing is sharded"


@pytest.mark.slow
def test_the_variable_is_not_ignored_in_silence():
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN_STEPS],
        env={**os.environ, "HF_ZERO_CONFIG": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and ran.stderr.count(IGNORED) == 1


@pytest.mark.parametrize("door", ["engine", "plugin", "none"])
def test_the_variable_is_quiet_where_the_engine_steps(door, capsys):
    os.environ["HF_ZERO_CONFIG"] = "1"
    watch_for_the_variable()
    if door == "engine":
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ZeroEngine(model, [optimizer], 1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    else:
        stepped(Accelerator(cpu=True, parallelism_config=ZeroPlugin() if door == "plugin" else None))
    assert capsys.readouterr().err.count(IGNORED) == (1 if door == "none" else 0)


def test_arguments_without_the_flag_are_plain(tmp_path):
    arguments = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert arguments.parallelism_config is None and isinstance(arguments, TrainingArguments)


def test_the_accelerator_class_that_was_taken_out_is_refused_with_what_to_do():
    with pytest.raises(ImportError, match=r"`ZeroAccelerator` was removed.*parallelism_config=ZeroPlugin"):
        from hf_zero import ZeroAccelerator  # noqa: F401
    assert "ZeroAccelerator" not in hf_zero.__all__
