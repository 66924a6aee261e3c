"""Optimizers, learning-rate schedules, gradient clipping and EMA over named tensors."""

from .adafactor import Adafactor as Adafactor
from .clipping import clip_by_global_norm as clip_by_global_norm
from .clipping import global_norm as global_norm
from .ema import average_models as average_models
from .ema import init_ema as init_ema
from .ema import update_ema as update_ema
from .ema import with_ema_params as with_ema_params
from .optimizers import AdamW as AdamW
from .optimizers import Lion as Lion
from .optimizers import Momentum as Momentum
from .optimizers import Optimizer as Optimizer
from .schedules import Constant as Constant
from .schedules import Cosine as Cosine
from .schedules import LinearDecay as LinearDecay
from .schedules import LinearWarmup as LinearWarmup
from .schedules import Product as Product
from .schedules import RsqrtDecay as RsqrtDecay
from .schedules import Schedule as Schedule
from .schedules import paper_schedule as paper_schedule
