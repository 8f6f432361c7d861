"""train_cpu.py ARGUMENTS: speculators' own training, on a machine without a GPU.

It puts its model on device 0 and synchronises an accelerator; here the device is the CPU and there is nothing to
synchronise. All else is its own. Runs in the environment of install.sh.
"""

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

prepare = trainer.Trainer.setup_trainer


def prepare_on_cpu(self):
    prepare(self)
    self.local_rank = self.device_type = "cpu"


if __name__ == "__main__":
    trainer.Trainer.setup_trainer = prepare_on_cpu
    torch.accelerator.synchronize = lambda: None
    main(TrainConfig.resolve())
