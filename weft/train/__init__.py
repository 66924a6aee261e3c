"""Training: train steps, gradient accumulation and the training loop."""

from .diloco import DiLoCo as DiLoCo
from .microbatch import count_rows as count_rows
from .step import TrainStep as TrainStep
from .step import train_step as train_step
