"""The private names by which the package uses or replaces parts of torch, transformers and accelerate.

Any release may change these without notice. `tests/repository/test_seams.py` looks up each name in the installed packages, and
fails if the package uses a private name not listed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seam:
    """Private names of one owner.

    Attributes:
        owner: the object with these names, as `package.module:name`.
        names: the names that are read, called, overridden or replaced.
        where: folders or files of hf_zero that use them, without `.py`.
        why: why there is no public way.
        test: the test that fails if the behavior changes.
        since: first release with these names, if an older supported one lacks them.
    """

    owner: str
    names: tuple[str, ...]
    where: tuple[str, ...]
    why: str
    test: str
    since: str = ""


REPLACED_CLASSES: Mapping[str, str] = {
    "hooks/mixins": "Trainer and Accelerator, which call a plugin or a callback when constructed and have no hooks for saving, "
    "resuming and preparing. accelerate's optimizers, which schedulers ask whether a step was skipped. "
    "GradScalers already held by a script or accelerate; "
    "test_accelerate.py::test_objects_whose_class_is_replaced_show_copy_and_pickle_themselves_as_before",
    "stage3/forms": "The same parameters, many in one loop; "
    "test_accelerate.py::test_objects_whose_class_is_replaced_show_copy_and_pickle_themselves_as_before",
    "hooks/guards": "Parameters whose values are sharded or still arriving: reads raise or wait, and no operation can bypass "
    "this. Gradients in an optimizer's groups, whose norm a script may mistake for the whole gradient's; "
    "test_accelerate.py::test_objects_whose_class_is_replaced_show_copy_and_pickle_themselves_as_before",
}
"""Maps a file to the classes it replaces at run time, and why; the test follows the semicolon."""

SEAMS = (
    Seam(
        owner="torch.cuda:",
        names=("_is_in_bad_fork",),
        where=("integrations/environment",),
        why="Detects that a launcher has forked this process after CUDA was initialized; torch reports this only when CUDA is "
        "used.",
        test="test_notebooks.py::test_a_fork_behind_cuda_is_refused_unless_there_is_no_gpu_or_it_trains_on_the_cpu",
    ),
    Seam(
        owner="torch._C:",
        names=("_current_graph_task_id",),
        where=("hooks",),
        why="Detects that a forward is a recomputation inside backward, which steps and checks must ignore.",
        test="test_gradients.py::test_a_layer_used_again_under_reentrant_checkpointing_has_the_sum_of_its_gradients",
    ),
    Seam(
        owner="torch._C:",
        names=(
            "_len_torch_dispatch_stack",
            "_len_torch_function_stack",
            "_pop_torch_function_stack",
            "_push_on_torch_function_stack",
        ),
        where=("hooks",),
        why="Disables a script's modes while the engine works in a hook, because modes count or save the layer's operations.",
        test="test_stage3.py::test_modes_of_a_script_see_the_models_operations_and_none_of_the_engines",
    ),
    Seam(
        owner="torch._C:",
        names=("_storage_Use_Count",),
        where=("optimizer/state_on_host",),
        why="Shows that a script has a view of state in host memory, so a step must not return while the state is copied there.",
        test="test_device_window.py::test_views_of_state_from_before_a_step_have_the_values_after_it",
    ),
    Seam(
        owner="torch:UntypedStorage",
        names=("_cdata",),
        where=("optimizer/state_on_host",),
        why="The address of a storage, for counting its references.",
        test="test_device_window.py::test_views_of_state_from_before_a_step_have_the_values_after_it",
    ),
    Seam(
        owner="torch._C._dynamo:eval_frame",
        names=(
            "get_eval_frame_callback",
            "set_eval_frame",
            "set_code_exec_strategy",
            "_FrameAction",
            "_FrameExecStrategy",
        ),
        where=("hooks",),
        why="Keeps hooks out of compiled graphs, without importing the compiler and without a wrapper around each hook.",
        test="test_compiled.py::test_losses_are_those_of_the_same_way_under_ddp_and_nothing_compiles_again",
    ),
    Seam(
        owner="torch.utils._python_dispatch:",
        names=("_disable_current_modes",),
        where=("hooks",),
        why="Disables a script's dispatch modes, like the function modes above.",
        test="test_stage3.py::test_selective_checkpoints_train_as_under_ddp",
    ),
    Seam(
        owner="torch._C:",
        names=("_will_engine_execute_node",),
        where=("step/backward",),
        why="Distinguishes a backward that will accumulate gradients from `torch.autograd.grad`, before the first gradient "
        "arrives.",
        test="test_skipped_layers.py::test_models_of_transformers_whose_ranks_run_other_layers_train_as_under_ddp",
    ),
    Seam(
        owner="torch.autograd:Variable",
        names=("_execution_engine",),
        where=("step/backward",),
        why="Queues a callback at the end of the whole backward; tensor hooks run at the end of their own part.",
        test="test_gradients.py::test_several_backward_calls_add_up",
    ),
    Seam(
        owner="torch.autograd:profiler",
        names=("_is_profiler_enabled",),
        where=("comm/profiler_ranges", "comm/collective", "comm/transport"),
        why="Names collectives in profiles, at no cost without a profiler.",
        test="test_ledger.py::test_profiles_end_behind_a_step_without_a_crash_and_name_collectives",
    ),
    Seam(
        owner="torch.autograd:",
        names=("_enable_record_function",),
        where=("comm/profiler_ranges",),
        why="Prevents a crash: gloo records the end of a collective in a profile that may already have ended.",
        test="test_ledger.py::test_profiles_end_behind_a_step_without_a_crash_and_name_collectives",
    ),
    Seam(
        owner="torch:Tensor",
        names=("_base",),
        where=("stage3/unsharding", "planner/trace"),
        why="Whether an output, or a gradient, is a view of another tensor.",
        test="test_stage3_faults.py::test_a_layer_that_hides_its_outputs_is_named_and_never_trains_on_wrong_gradients",
    ),
    Seam(
        owner="torch.distributed.checkpoint.state_dict:",
        names=("_get_optim_state_dict", "_load_optim_state_dict"),
        where=("engine/dcp_helpers",),
        why="The public helpers look up state by the model's Parameters in an optimizer's groups, where an engine has shards, "
        "and cannot be extended.",
        test="test_dcp_helpers.py::test_states_are_those_of_ddp_and_each_loads_the_others",
    ),
    Seam(
        owner="torch:Tensor",
        names=("_make_wrapper_subclass", "_version"),
        where=("buckets", "kernels", "offload", "optimizer", "stage3", "step", "integrations/trainer_saves"),
        why="Gradients without memory; version counters, which show writes to parameters and activations.",
        test="test_gradients.py::test_a_step_on_gradients_that_a_step_has_used_is_refused_by_name",
    ),
    Seam(
        owner="torch.ops:aten",
        names=("_to_copy",),
        where=("buckets/sharded_gradient",),
        why="`model.to()` converts a gradient without memory by this operation.",
        test="test_gradients.py::test_a_trained_model_can_be_moved_before_its_gradients_are_zeroed",
    ),
    Seam(
        owner="torch:",
        names=(
            "_foreach_add_",
            "_foreach_copy_",
            "_foreach_mul_",
            "_foreach_norm",
        ),
        where=("arithmetic", "optimizer", "kernels", "stage3"),
        why="One call for a list of tensors; torch's own optimizers depend on these functions.",
        test="test_gradients.py::test_several_backward_calls_add_up",
    ),
    Seam(
        owner="torch:",
        names=("_dynamo",),
        where=("engine/compiled",),
        why="Whether a module has been compiled, and by which backend, without importing the compiler.",
        test="test_compiled.py::test_losses_are_those_of_the_same_way_under_ddp_and_nothing_compiles_again",
    ),
    Seam(
        owner="torch:_C",
        names=("_functorch",),
        where=("stage3/transforms",),
        why="Whether torch.func runs a forward: stage 3's gathers and hooks cannot work on its wrapped tensors.",
        test="test_sharded_reads.py::test_torch_func_gives_the_values_of_a_plain_model_or_is_refused_by_name",
    ),
    Seam(
        owner="torch.utils:_pytree",
        names=("tree_leaves", "tree_map_only"),
        where=("hooks", "buckets/clipped_gradient", "buckets/sharded_gradient"),
        why="Finds tensors inside any containers of models and of torch's operations, like torch itself.",
        test="test_stage3.py::test_outputs_in_dataclasses_and_nested_containers_announce_their_backward",
    ),
    Seam(
        owner="torch.nn:Module",
        names=("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
        where=("planner/trace",),
        why="Removes a script's hooks from the traced copy of a model.",
        test="test_activations_at_start.py::test_the_peak_is_forecast_where_the_data_tells_a_micro_batch",
    ),
    Seam(
        owner="torch.nn:Module",
        names=("_parameters", "_buffers", "_modules"),
        where=("engine", "stage3", "buckets/packed", "integrations/weight_rows"),
        why="Which module holds a parameter, and whether it still does. `_parameters` is a waiting dict until a gather has "
        "ended.",
        test="test_gradients.py",
    ),
    Seam(
        owner="torch.nn:Module",
        names=("_apply", "_load_from_state_dict"),
        where=("stage3/module_methods",),
        why="`.to()`, `.half()` and `load_state_dict` of sharded parameters; both methods are replaced on the modules of "
        "stage 3.",
        test="test_stage3_faults.py::test_moving_and_casting_a_sharded_model_is_refused_unless_it_changes_nothing_and_training_goes_on",
    ),
    Seam(
        owner="torch.nn:Module",
        names=("_save_to_state_dict", "_state_dict_hooks", "_state_dict_pre_hooks", "_non_persistent_buffers_set"),
        where=("integrations/trainer_saves", "integrations/weight_rows", "engine/buffers"),
        why="Whether a module saves its parameters unchanged or computes the saved tensors, and whether buffers are saved.",
        test="test_sharded_checkpoints.py::test_every_so_many_steps_a_whole_checkpoint_is_written_and_kept",
    ),
    Seam(
        owner="torch.nn:Module",
        names=("_compiled_call_impl",),
        where=(
            "engine/compiled",
            "engine/compiled_layers",
        ),
        why="Whether `module.compile()` has been called.",
        test="test_compiled.py::test_losses_are_those_of_the_same_way_under_ddp_and_nothing_compiles_again",
    ),
    Seam(
        owner="torch.optim:Optimizer",
        names=("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        where=("optimizer/own_step", "optimizer/storage", "step/sharded_optimizer"),
        why="Step hooks must not run for partial and trial steps. Other pre-hooks may write to stepped rows, so ours run last.",
        test="test_whole_parameters.py::test_how_far_an_optimizer_looks_is_seen_by_a_trial_that_leaves_it_alone",
    ),
    Seam(
        owner="torch.amp:GradScaler",
        names=("_per_optimizer_states", "_unscale_grads_"),
        where=("engine/loss_scale",),
        why="Replaced for the class, so found_inf covers all ranks and gradients are unscaled on their own devices.",
        test="test_clip_and_scale.py::test_the_scale_is_torchs_for_any_overflows_here_or_elsewhere",
    ),
    Seam(
        owner="torch.distributed.distributed_c10d:",
        names=("_get_default_store",),
        where=("presence/store",),
        why="Background threads exchange messages through the store with which the ranks were launched.",
        test="test_async_save.py",
    ),
    Seam(
        owner="torch.distributed.distributed_c10d:",
        names=("_world",),
        where=("presence/arrivals",),
        why="A rank that exits because of a late rank ends all of its waits, including those in the script's own groups.",
        test="test_late_ranks.py::test_a_hang_in_what_the_script_gathers_by_itself_is_told_likewise",
    ),
    Seam(
        owner="torch.distributed.distributed_c10d:",
        names=("_process_group_name",),
        where=("comm/own_groups",),
        why="A rank creates only its own groups, and `new_group` would name them by the rank's number of groups, which may "
        "differ.",
        test="test_comm.py::test_an_accelerators_gathers_have_urgent_communicators_of_their_own_made_once",
    ),
    Seam(
        owner="torch.distributed:ProcessGroup",
        names=("_get_backend",),
        where=("presence/arrivals", "comm/groups"),
        why="The backends of the script's groups, and the time limit of the default group's backend.",
        test="test_late_ranks.py::test_a_hang_in_what_the_script_gathers_by_itself_is_told_likewise",
    ),
    Seam(
        owner="torch._C._distributed_c10d:Backend.Options",
        names=("_timeout",),
        where=("comm/groups",),
        why="An engine waits for a rank as long as the default group.",
        test="test_arrivals.py::test_ranks_are_waited_for_as_long_as_the_process_group_says_unless_a_setting_does",
    ),
    Seam(
        owner="torch.distributed:ProcessGroupNCCL.Options",
        names=("_timeout",),
        where=("comm/own_groups",),
        why="Without the time limit in its options, `new_group` warns.",
        test="test_comm.py::test_nccl_is_asked_for_a_stream_of_high_priority",
    ),
    Seam(
        owner="torch._subclasses.fake_tensor:",
        names=("FakeTensor", "FakeTensorMode"),
        where=("planner/trace", "planner/fake_operations"),
        why="Runs a forward and a backward of a model without memory.",
        test="test_forecast.py::test_a_trace_leaves_the_model_and_chance_alone",
    ),
    Seam(
        owner="torch._subclasses.fake_tensor:",
        names=("in_kernel_invocation_manager",),
        where=("planner/fake_operations",),
        why="Makes a fake tensor of a known shape, and views of fake tensors, without torch's slow inference in Python.",
        test="test_fake_operations.py::test_each_result_is_the_one_that_torch_infers",
    ),
    Seam(
        owner="torch.utils._python_dispatch:",
        names=("TorchDispatchMode",),
        where=("planner/trace", "optimizer/trial", "optimizer/trial_step"),
        why="Sees each operation: to count saved tensors, to make copies of an optimizer draw the same random numbers, and to "
        "detect collectives in a trial step.",
        test="test_forecast.py::test_a_trace_counts_what_autograd_saves",
    ),
    Seam(
        owner="torch:ops.aten",
        names=("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        where=("planner/trace",),
        why="torch counts the operations of all kinds of attention except this one.",
        test="test_forecast.py::test_checkpointing_saves_less_and_computes_more",
    ),
    Seam(
        owner="lion_pytorch:Lion",
        names=("_init_lr",),
        where=("kernels/bucket_steps",),
        why="The reference learning rate of decoupled weight decay.",
        test="test_kernel_steps.py",
    ),
    Seam(
        owner="torch.nn.parallel:DistributedDataParallel",
        names=("_ddp_params_and_buffers_to_ignore",),
        where=("engine/buffers",),
        why="Parameters and buffers that a script has told DDP to ignore on each rank.",
        test="test_uncommon_loops.py::test_what_ddp_is_told_to_ignore_stays_each_ranks_own",
    ),
    Seam(
        owner="transformers:PreTrainedModel",
        names=(
            "_no_split_modules",
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
            "_load_pretrained_model",
        ),
        where=("buckets", "engine", "integrations/init"),
        why="Which layers are units, which parameters stay float32, and how weights are read.",
        test="test_init.py::test_transformers_still_loads_the_way_init_stands_on",
    ),
    Seam(
        owner="transformers:core_model_loading",
        names=("_materialize_copy",),
        where=("integrations/init",),
        why="Replaced while a model is loaded, so weights stay views of their files.",
        test="test_init.py::test_transformers_still_loads_the_way_init_stands_on",
    ),
    Seam(
        owner="transformers:PretrainedConfig",
        names=("_attn_implementation",),
        where=("integrations/config_model", "sequence/parallel"),
        why="Builds a model on the meta device without checking for installed kernels. No public attribute names a model's "
        "attention kernel.",
        test="test_hostile_folders.py",
    ),
    Seam(
        owner="transformers:TrainingArguments",
        names=("_n_gpu",),
        where=("integrations/trainer",),
        why="Prevents a Trainer with several visible GPUs from copying the model to all of them.",
        test="test_standin_doors.py",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_save_checkpoint", "_save_rng_state", "_save"),
        where=("integrations/trainer", "integrations/trainer_saves", "integrations/trainer_stop"),
        why="A checkpoint's folder is written under a temporary name and renamed when complete.",
        test="test_commit.py",
    ),
    Seam(
        owner="transformers:Trainer",
        names=(
            "_save_optimizer_and_scheduler",
            "_save_scaler",
            "_push_from_checkpoint",
            "_finish_current_push",
            "_get_output_dir",
        ),
        where=("integrations/trainer", "integrations/trainer_saves", "integrations/trainer_stop"),
        why="Saves and pushes call a subclass's methods of these names, like Trainer does.",
        test="test_subclass_methods.py::test_each_method_of_a_subclass_is_called_as_often_as_by_stock_trainer",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_prepare_for_training",),
        where=("integrations/trainer",),
        why="Trainer prepares only the optimizer when it trains or evaluates a compiled model again.",
        test="test_trainer.py::test_a_compiled_model_is_evaluated_first_and_trained_twice",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_init_training_state", "_train_batch_size"),
        where=("integrations/trainer", "integrations/rows_of_a_step"),
        why="A run resumed on a different number of ranks uses different micro-batches, and continues from its data position.",
        test="test_resume.py::test_a_restart_on_fewer_ranks_takes_the_rows_that_come_next_in_steps_of_the_same_size",
    ),
    Seam(
        owner="transformers:Trainer",
        names=(
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_load_scaler",
            "_load_rng_state",
            "_load_callback_state",
            "_load_best_model",
            "_issue_warnings_after_load",
        ),
        where=("integrations/trainer", "integrations/trainer_stop"),
        why="Ranks read their own parts of a checkpoint, and errors name damaged files.",
        test="test_trainer.py::test_resumed_run_continues_bit_for_bit",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_report_to_hp_search",),
        where=("integrations/trainer",),
        why="Only rank 0 has Optuna's study. Stock Trainer prunes a trial on rank 0 only, and the other ranks would wait.",
        test="test_trainer.py::test_a_search_trains_the_trials_of_ddp_in_one_launch",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_maybe_log_save_evaluate", "_evaluate"),
        where=("integrations/trainer",),
        why="A run ended by a signal leaves a due or interrupted evaluation to the resumed run.",
        test="test_preemption.py::test_a_run_that_a_signal_ends_goes_on_bit_for_bit",
    ),
    Seam(
        owner="transformers:Trainer",
        names=("_move_model_to_device", "_finalize_training"),
        where=("integrations/trainer",),
        why="At stage 3 the model moves to the device one layer at a time; after training no communication may be in flight.",
        test="test_standin_device.py::test_a_model_in_host_memory_is_trained_on_the_device_at_stage_3",
    ),
    Seam(
        owner="accelerate:Accelerator",
        names=("_dataloaders", "_models", "_optimizers", "_schedulers", "_save_model_state_pre_hook"),
        where=("integrations", "planner/auto"),
        why="The prepared objects, for `save_state` and for the number of samples per step.",
        test="test_accelerate.py::test_save_state_and_load_state_continue_bit_for_bit",
    ),
    Seam(
        owner="accelerate:Accelerator",
        names=("_is_accelerate_prepared",),
        where=("integrations/accelerator",),
        why="Marks prepared models, regardless of the settings of the Accelerator that prepared them.",
        test="test_trainer.py::test_a_second_trainer_computes_in_the_precision_of_its_own_arguments_and_a_plain_one_has_ddp",
    ),
    Seam(
        owner="accelerate:Accelerator",
        names=("_prepare_ao",),
        where=("integrations/accelerator",),
        why="Converts linear layers to fp8, and by default replaces weights held by the optimizer.",
        test="test_fp8.py::test_losses_in_fp8_are_ddps_with_the_same_recipe",
    ),
    Seam(
        owner="accelerate:Accelerator",
        names=("_prepare_tp",),
        where=("integrations/accelerator",),
        why="Looks up the optimizer's parameters among DTensors, which the engine has replaced.",
        test="test_split_checkpoints.py::test_accelerate_trains_saves_and_resumes",
    ),
    Seam(
        owner="transformers:PreTrainedModel",
        names=("_is_distributed_loading_by_transformers",),
        where=("integrations/trainer",),
        why="Makes Trainer itself average the gradients of a split model and refuse its checkpoints, unless cleared.",
        test="test_split_checkpoints.py::test_trainer_trains_saves_and_resumes",
        since="5.23",
    ),
    Seam(
        owner="accelerate:Accelerator",
        names=("__init__",),
        where=("integrations/unmodified",),
        why="An unmodified script passes no plugin to its Accelerators, so this is replaced while the script runs.",
        test="test_unmodified_scripts.py::test_every_accelerator_of_a_process_has_the_engine",
    ),
    Seam(
        owner="accelerate:ParallelismConfig",
        names=("_validate_accelerator",),
        where=("integrations/plugin",),
        why="The entry point of a plugin: each Accelerator calls this method with itself when constructed.",
        test="test_accelerate.py::test_every_door_has_ddps_losses",
    ),
)
