"""The training loss of the steps after the last log."""

from transformers import TrainerCallback


class LogLastStep(TrainerCallback):
    """Log after the last step too. The Trainer averages its loss over ranks where it logs; of any steps after the last
    log, `training_loss` would hold the first rank's loss alone."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True
