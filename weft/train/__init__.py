"""Training: optimizers, schedules and checkpoints over named tensors."""

from .adafactor import Adafactor as Adafactor
from .average import averaged as averaged
from .average import init_average as init_average
from .average import update_average as update_average
from .checkpoint import Checkpoints as Checkpoints
from .checkpoint_files import CheckpointError as CheckpointError
from .checkpoint_files import CheckpointWarning as CheckpointWarning
from .clipping import clip_by_global_norm as clip_by_global_norm
from .clipping import global_norm as global_norm
from .diloco import DiLoCo as DiLoCo
from .mean import mean as mean
from .optimizers import AdamW as AdamW
from .optimizers import Lion as Lion
from .optimizers import Momentum as Momentum
from .optimizers import Optimizer as Optimizer
from .rows import count_rows as count_rows
from .schedules import Constant as Constant
from .schedules import Cosine as Cosine
from .schedules import LinearDecay as LinearDecay
from .schedules import LinearWarmup as LinearWarmup
from .schedules import Product as Product
from .schedules import RsqrtDecay as RsqrtDecay
from .schedules import Schedule as Schedule
from .schedules import paper_schedule as paper_schedule
from .step import TrainStep as TrainStep
from .step import train_step as train_step
