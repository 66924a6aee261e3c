"""Training: train steps, micro-batches and the loop, with the optimizers of `weft.optim`."""

from ..optim import Adafactor as Adafactor
from ..optim import AdamW as AdamW
from ..optim import Lion as Lion
from ..optim import Momentum as Momentum
from .diloco import DiLoCo as DiLoCo
from .microbatch import count_rows as count_rows
from .step import TrainStep as TrainStep
from .step import train_step as train_step
